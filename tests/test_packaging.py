"""What a user installs works: outside the repository, from the built files alone, and without triton."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
JUNK = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "out", "*.egg-info")
# as a user's shell: no path that lends a module, no interpreted kernels
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "TRITON"))}


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=CLEAN, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and, built from it, the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    source = shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=JUNK)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source, cwd=folder)
    return folder


def python_with_wheel(dist: Path, folder: Path) -> Path:
    """The python of a fresh environment that has the wheel and sees the packages of this one."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=dist)
    python = folder / "bin" / "python"
    wheel = next(dist.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet"]
    run(*pip, wheel, cwd=dist)
    # a folder named in a .pth comes after the environment's own; an editable install in it is not followed
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=dist)
    Path(own, "seen.pth").write_text("\n".join(map(sysconfig.get_path, ("purelib", "platlib"))))
    return python


@pytest.mark.slow
def test_sdist_and_wheel_hold_everything(dist: Path) -> None:
    kernels = {path.name for path in (ROOT / "kernels").glob("*.py")} | {"README.md"}
    samples = {path.name for path in (ROOT / "radio_triton" / "samples").glob("*.jpg")}
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        wheel = archive.namelist()
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        sdist = archive.getnames()
    inside = {name.split("/", 1)[1] for name in sdist if "/" in name}
    for names in (set(wheel), inside):
        assert {f"radio_triton/kernels/{name}" for name in kernels} <= names
        assert {f"radio_triton/samples/{name}" for name in samples} <= names
        assert "radio_triton/py.typed" in names
    assert {"tests/conftest.py", *(f"kernels/{name}" for name in kernels)} <= inside
    assert not [name for name in wheel if not name.startswith(("radio_triton/", "radio_triton-"))]


@pytest.mark.slow
def test_wheel_runs_the_demo_outside_the_repository(dist: Path, tmp_path: Path) -> None:
    python = python_with_wheel(dist, tmp_path / "env")
    code = "import radio_triton, torch; print(radio_triton.__file__); print(torch.__file__)"
    package, seen = run(python, "-c", code, cwd=tmp_path).splitlines()
    assert Path(package).is_relative_to(tmp_path / "env")
    assert seen == torch.__file__
    run(python.with_name("radio-triton"), "demo", "--out", tmp_path / "out", cwd=tmp_path)
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000
    assert list((tmp_path / "out").rglob("*.safetensors"))


WITHOUT_TRITON = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
sys.meta_path.insert(0, Absent())
import torch
from radio_triton.demo_model import demo_model
torch.set_num_threads(1)
summary, features = demo_model()(torch.load(sys.argv[1], weights_only=True))
assert "triton" not in sys.modules
torch.save((summary, features), sys.argv[2])
"""


def test_encodes_without_triton(tmp_path: Path) -> None:
    from radio_triton.demo_model import demo_model

    x, out = torch.rand(2, 3, 48, 32), tmp_path / "out.pt"
    torch.save(x, tmp_path / "x.pt")
    run(sys.executable, "-c", WITHOUT_TRITON, tmp_path / "x.pt", out, cwd=ROOT)
    summary, features = torch.load(out, weights_only=True)
    want = demo_model()(x)
    torch.testing.assert_close(summary, want.summary, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(features, want.features, rtol=1e-5, atol=1e-5)
