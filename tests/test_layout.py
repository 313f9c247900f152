"""Where things live, who may import whom, and what an import costs."""

import ast
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
import yaml

import radio_triton

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, KERNELS = ROOT / "radio_triton", ROOT / "kernels"
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if KERNELS not in path.resolve().parents
}
SOURCES = {**MODULES, **{f"kernels.{path.stem}": path for path in sorted(KERNELS.glob("*.py"))}}
NAMES = sorted(SOURCES)

# a module may import those of earlier rows; what is not named here stands beside `model` or after it
ROWS = [{"config", "hf_config", "packing", "presets"}, {"kernels"}, {"ops"}, {"layers"}, {"model"}]
BASE = {"torch", "einops", "numpy", "safetensors", "huggingface_hub"}
EXTRAS = {"click", "tqdm", "PIL", "torchcodec", "av"}


def imports(name: str, top_level_only: bool = False) -> set[str]:
    """What a file imports, as absolute dotted names: "torch.nn", "radio_triton.kernels._common"."""
    tree = ast.parse(SOURCES[name].read_text())
    package = f"radio_triton.{name}".split(".")[:-1]
    found = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            # `from radio_triton import ops` names a module, `from torch import Tensor` does not
            found |= {f"{module}.{a.name}" for a in node.names} if module == "radio_triton" else {module}
    return found


def ours(name: str, **options: bool) -> set[str]:
    """The modules of this package that a file imports, with all of `kernels` as one."""
    found = {i.split(".")[1] for i in imports(name, **options) if i.startswith("radio_triton.")}
    return found - {name.split(".")[0]}


def run(code: str, cwd: Path = ROOT, **env: str) -> str:
    """What a fresh interpreter prints; `cwd` comes first on its path, as under `python -m pytest`."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_kernels_is_a_plain_folder_behind_a_tracked_link() -> None:
    assert KERNELS.is_dir()
    assert not (KERNELS / "__init__.py").exists()
    if not (ROOT / ".git").exists():
        pytest.skip("an unpacked sdist holds a copy instead of the link")
    assert os.readlink(PACKAGE / "kernels") == "../kernels"
    staged = subprocess.check_output(["git", "ls-files", "-s", "radio_triton/kernels"], cwd=ROOT, text=True)
    assert staged.startswith("120000 "), "radio_triton/kernels is not tracked as a symlink"


def test_hugging_face_kernels_is_not_shadowed(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("name = 'the real one'")
    assert run("import kernels; print(kernels.name)", PYTHONPATH=str(tmp_path)) == "the real one"


@pytest.mark.parametrize("name", NAMES)
def test_imports_only_what_is_declared(name: str) -> None:
    allowed = BASE | EXTRAS | {"radio_triton"}
    if name.split(".")[0] == "integrations":
        allowed |= {"transformers", "timm", "torchvision"}
    elif name.startswith("kernels."):
        # the folder can be published alone
        allowed = {"torch", "radio_triton", *(["triton"] if name == "kernels._common" else [])}
        absolute = re.findall(r"^\s*(?:import|from) (?:radio_triton|\.\.).*", SOURCES[name].read_text(), re.M)
        assert not absolute, "kernel files import each other relatively"
    elif name in ROWS[0]:
        allowed = {"torch", "radio_triton"}
    assert {i.split(".")[0] for i in imports(name)} <= allowed | sys.stdlib_module_names


@pytest.mark.parametrize("name", NAMES)
def test_import_direction(name: str) -> None:
    used = ours(name)
    assert "cli" not in used
    assert "kernels" not in used or name == "ops", "only ops imports kernels"
    row = next((i for i, row in enumerate(ROWS) if name.split(".")[0] in row), None)
    if row is not None:
        above = set().union(*ROWS[row + 1 :])
        assert not used & above, f"{name} may not import {sorted(used & above)}"
    if name in ROWS[0]:
        assert used <= ROWS[0]


def test_no_import_cycles() -> None:
    graph = {name: ours(name, top_level_only=True) for name in MODULES if name != "__init__"}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", NAMES)
def test_files_and_functions_stay_short(name: str) -> None:
    text = SOURCES[name].read_text()
    assert text.count("\n") <= 350
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            docstring = node.body[0] if ast.get_docstring(node) else None
            documented = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
            lines = node.end_lineno - node.lineno + 1 - documented
            assert lines <= 40, f"{node.name} takes {lines} lines without its docstring"


REPOS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
BANS = [hook for repo in REPOS for hook in repo["hooks"] if hook.get("language") == "pygrep"]


@pytest.mark.parametrize("ban", BANS, ids=[ban["id"] for ban in BANS])
def test_says_nothing_that_is_banned(ban: dict[str, str]) -> None:
    folders = ["kernels", "radio_triton", "bench", "examples", "tests"]
    paths = [p.relative_to(ROOT) for folder in folders for p in (ROOT / folder).rglob("*.py")]
    read = [path for path in paths if re.search(ban["files"], path.as_posix())]
    assert read
    hits = [
        f"{path}:{number}"
        for path in read
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
        if re.search(ban["entry"], line)
    ]
    assert not hits


def test_every_public_name_resolves() -> None:
    assert all(getattr(radio_triton, name) is not None for name in radio_triton.__all__)
    assert set(radio_triton.__all__) <= set(dir(radio_triton))
    with pytest.raises(AttributeError, match="no attribute 'RadioMadel'"):
        _ = radio_triton.RadioMadel


HEAVY = {"torch", "triton", "numpy", "huggingface_hub", "PIL", "click", "tqdm"}
BY_TORCH = {"torch", "triton", "numpy", "tqdm"}


def test_import_is_lazy() -> None:
    assert run(f"import sys, radio_triton; print({HEAVY} & {{*sys.modules}})") == "set()"
    code = f"import sys; from radio_triton import RadioModel; print({{*sys.modules}} & {HEAVY} - {BY_TORCH})"
    assert run(code) == "set()"


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; from radio_triton.cli import main; main(['--help'], standalone_mode=False);"
        "print({'torch', 'numpy', 'PIL'} & {*sys.modules})"
    )
    assert run(code).splitlines()[-1] == "set()"


def test_unwritten_memory_is_poisoned() -> None:
    def called_from(path: Path, expression: str) -> torch.Tensor:
        return eval(compile(expression, str(path), "eval"), {"torch": torch, "x": torch.zeros(3)})

    for path in (KERNELS / "a.py", PACKAGE / "kernels" / "a.py", PACKAGE / "a.py"):
        for expression in ("torch.empty(3)", "torch.empty_like(x)", "x.new_empty(3)"):
            assert called_from(path, expression).isnan().all(), expression
        assert (called_from(path, "torch.empty(3, dtype=torch.int32)") == 2**31 - 1).all()
