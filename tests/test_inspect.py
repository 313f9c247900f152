"""`radio-triton inspect` as a user runs it: what it says of good files, of files that are refused, and of no
files.
"""

import json
import math
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from radio_triton import RadioConfig, RadioModel
from radio_triton.checkpoint.convert import convert
from radio_triton.checkpoint.files import Weights
from radio_triton.checkpoint.forms import FORMS, form_config, form_tensors
from radio_triton.checkpoint.inspection import compare
from radio_triton.cli import main
from radio_triton.presets import get_preset
from tiny import VARIANTS, tiny_model

ROOT = Path(__file__).resolve().parent.parent
LEGACY = ROOT / "tests" / "data" / "legacy-layerscale"


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, ["inspect", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def facts(*arguments: object, code: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def lines(*arguments: object, code: int = 0) -> dict[str, str]:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    return {line[2:14].strip(): line[15:] for line in result.stdout.splitlines()[1:]}


def edited(tmp_path: Path, source: Path = LEGACY, **changes: torch.Tensor | None) -> Path:
    """A copy of a checkpoint with some keys replaced, added or (None) left out."""
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = {**load_file(source / "model.safetensors"), **changes}
    save_file({k: x for k, x in tensors.items() if x is not None}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["scaled", "corners"])
def test_every_form_is_described_alike(name: str, form: str, tmp_path: Path) -> None:
    model = tiny_model(**VARIANTS[name])
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model"
    if name == "scaled":
        path = tmp_path / "out"
        convert(tmp_path / "model", path, form)
    found = facts(path)
    layout = form if name == "scaled" else "fused"
    assert found["layout"] == {"native": "native", "legacy": "remote-code", "fused": "fused"}[layout]
    assert found["refused"] is None and found["ignored"] == {}
    for field in ("hidden_size", "intermediate_size", "layer_scale", "patch_bias", "num_registers"):
        assert found["config"][field] == getattr(model.config, field), field
    assert found["summary_width"] == model.config.summary_size * model.config.hidden_size
    assert sum(found["parameters"].values()) == sum(x.numel() for x in model.parameters())
    assert found["parameters"]["position table"] == model.embeddings.position_embedding.numel()
    assert set(found["dtypes"]) == {"float32"} and found["loads_as"] == "float32"
    assert found["bytes"] == (path / "model.safetensors").stat().st_size


def test_what_a_reader_sees() -> None:
    told = lines(LEGACY)
    assert told["layout"].startswith("remote-code, model.safetensors (")
    assert told["architecture"] == "2 blocks of width 64, 4 heads of 16, MLP 256 (GELU), patch 16, LayerScale"
    assert told["tokens"] == "3 class, 7 register"
    assert told["summary"] == "class tokens 0, 1: 128 values"
    assert told["positions"] == "8 x 8 table, for 128 x 128 pixels, resized for other sizes"
    assert told["adaptors"] == told["normalizers"] == "none in the file"
    assert told["licence"] == "not stated"
    assert told["says it is"] == "c-radio_v4-h (config.json)"
    assert told["looks like"].startswith("no released version; nearest is ")
    assert "hidden_size 64 instead of " in told["looks like"]
    assert told["refused"] == "no: from_pretrained loads it"


def torch_hub(path: Path) -> Path:
    """The legacy golden file as training wrote it, with heads, a normalizer and a prefix of DDP."""
    tensors = load_file(LEGACY / "model.safetensors")
    state = {}
    for key, x in tensors.items():
        name = key.removeprefix("radio_model.")
        if name != "summary_idxs":
            state[
                f"module.{name.replace('model.', 'base_model.', 1) if name.startswith('model.') else name}"
            ] = x
    state["module._heads.clip.fc1.weight"] = torch.zeros(3, 64)
    state["module._heads.1.fc1.weight"] = torch.zeros(2, 64)
    state |= {
        "module._feature_normalizer.mean": torch.zeros(64),
        "module._feature_normalizer.tx": torch.eye(64),
    }
    args = Namespace(**json.loads((LEGACY / "config.json").read_text())["args"])
    torch.save({"arch": "x", "epoch": 3, "state_dict": state, "args": args}, path)
    return path


def test_a_torch_hub_file_with_heads(tmp_path: Path) -> None:
    found = facts(torch_hub(tmp_path / "radio.pth.tar"))
    assert found["layout"] == "torch.hub"
    assert found["adaptors"] == ["clip", "dino_v2"]
    assert found["normalizers"] == ["feature normalizer"]
    assert found["parameters"]["adaptor clip"] == 192 and found["parameters"]["adaptor dino_v2"] == 128
    assert found["parameters"]["feature normalizer"] == 64 + 64 * 64
    assert found["config"]["num_registers"] == 7


def fake_release(folder: Path, name: str, form: str = "legacy") -> Path:
    """A checkpoint of a released version's true size whose tensors take no room on the disk."""
    config = RadioConfig.preset(name)
    folder.mkdir()
    written = form_config(form, config, torch.bfloat16)
    (folder / "config.json").write_text(json.dumps({**written, "version": name}))
    state = {}
    for key, x in RadioModel(config.replace(num_hidden_layers=1), dtype=torch.bfloat16).state_dict().items():
        for i in range(config.num_hidden_layers if ".layer.0." in key else 1):
            state[key.replace(".layer.0.", f".layer.{i}.")] = x
    header, end, small = {}, 0, {}
    for key, x in form_tensors(form, state.items(), written):
        size = x.numel() * x.element_size()
        kind = {torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16"}[x.dtype]
        header[key] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [end, end + size]}
        small |= {end: x.numpy().tobytes()} if x.numel() < 10 else {}
        end += size
    head = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)
        for offset, content in small.items():
            file.seek(8 + len(head) + offset)
            file.write(content)
    return folder


@pytest.mark.parametrize(
    ("name", "alike", "parameters"),
    [
        ("c-radio_v4-so400m", ["c-radio_v4-so400m"], 431_237_232),
        ("radio_v2.5-b", ["radio_v2.5-b", "C-RADIOv2-B"], 98_233_344),
    ],
)
def test_a_released_version_is_recognised_and_not_read(
    name: str, alike: list[str], parameters: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    original = Weights.read
    monkeypatch.setattr(Weights, "read", lambda self, key: read.append(key) or original(self, key))
    found = facts(fake_release(tmp_path / "model", name))
    assert list(found["likeness"]["matches"]) == alike and found["likeness"]["stated"] == name
    total = sum(found["parameters"].values())
    assert total == parameters
    assert found["bytes"] > 2 * total and found["dtypes"] == {"bfloat16": found["dtypes"]["bfloat16"]}
    assert all("summary_idxs" in key or "norm_" in key for key in read)


@pytest.mark.parametrize("name", RadioConfig.presets())
def test_a_version_is_like_itself(name: str) -> None:
    preset = get_preset(name)
    guess = {
        "num_cls_tokens": 5, "num_registers": 6, "summary_idxs": (0, 4), "intermediate_size": 6144,
        "mlp_norm": True, "scaled_layer_norm": False, "use_swiglu_ffn": False, "layer_scale": True,
        "norm_mean": (0.5,) * 3, "norm_std": (0.2,) * 3,
    }  # fmt: skip
    config = RadioConfig.preset(name, **{field: guess[field] for field in preset.unknown})
    assert compare(config).matches[name] == list(preset.unknown)
    other = compare(config.replace(patch_size=7), {"version": 3})
    assert not other.matches and other.stated == "3"
    assert other.differs["patch_size"] == [7, get_preset(other.nearest).fields["patch_size"]]


def test_the_licence_is_what_the_folder_says(tmp_path: Path) -> None:
    folder = edited(tmp_path)
    assert facts(folder)["licence"] is None
    (folder / "LICENSE.txt").write_text("NVIDIA terms\n")
    assert lines(folder)["licence"] == "other (NVIDIA terms, LICENSE.txt) (from LICENSE.txt)"
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    assert facts(folder)["licence"] == {"license": "mit", "where": "README.md", "text": "mit"}


def test_a_hub_id_in_the_cache_with_its_licence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository, commit = tmp_path / "models--some--radio", "0" * 40
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    edited(snapshot)
    (snapshot / "README.md").write_text("---\nlicense: other\nlicense_name: some-terms\n---\n")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    told = lines("some/radio", "--local-files-only")
    assert told["licence"] == "other (some-terms) (from README.md)"
    assert told["refused"].startswith("no: ")
    result = run("some/other", "--local-files-only")
    assert result.exit_code == 2 and "cannot read some/other: " in result.stderr


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"radio_model.model.blocks.1.attn.extra.weight": torch.zeros(2)}, "blocks.1.attn.extra.weight"),
        ({"radio_model.model.blocks.1.mlp.fc1.bias": None}, "blocks.1.mlp.fc1.bias|layer.1.mlp.fc1.bias"),
        ({"radio_model.model.blocks.1.mlp.fc1.bias": torch.zeros(7)}, "fc1.bias"),
        ({"radio_model.model.blocks.0.attn.q_norm.weight": torch.zeros(16)}, "LayerNorm of each head"),
        ({"radio_model.model.patch_generator.embedder.weight": None}, "no RADIO tower"),
    ],
)
def test_what_would_be_refused_says_why(
    changes: dict[str, torch.Tensor | None], reason: str, tmp_path: Path
) -> None:
    folder = edited(tmp_path, **changes)
    told = lines(folder, code=1)
    assert any(part in told["refused"] for part in reason.split("|")), told["refused"]
    assert facts(folder, code=1)["refused"] == told["refused"]
    assert "float32" in told["dtype"]
    # loading agrees
    with pytest.raises(ValueError) as error:
        RadioModel.from_pretrained(folder)
    assert any(part in str(error.value) for part in reason.split("|"))


def test_a_lone_file_that_leaves_something_open_is_refused_but_described(tmp_path: Path) -> None:
    path = tmp_path / "lone.safetensors"
    path.write_bytes((LEGACY / "model.safetensors").read_bytes())
    told = lines(path, code=1)
    assert "num_attention_heads" in told["refused"]
    assert told["layout"].startswith("remote-code, lone.safetensors")
    assert "blocks" in told["parameters"] and "not recognised" not in told["parameters"]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/tmp/radio_triton_was_here",)


@pytest.mark.parametrize("kind", ["missing", "empty folder", "truncated", "garbage", "pickle"])
def test_what_cannot_be_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    if kind == "truncated":
        path.write_bytes((LEGACY / "model.safetensors").read_bytes()[:-1000])
    elif kind == "garbage":
        path.write_bytes(bytes(range(256)) * 8)
    elif kind == "empty folder":
        path = tmp_path
    elif kind == "pickle":
        path = tmp_path / "a.pth.tar"
        torch.save({"state_dict": {"x": torch.zeros(1)}, "args": Evil()}, path)
    result = run(path)
    assert result.exit_code == 2 and not result.stdout
    assert result.stderr.startswith(f"cannot read {path}: ") and "Traceback" not in result.stderr
    assert facts(path, code=2)["error"]
    assert not Path("/tmp/radio_triton_was_here").exists()


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_help_loads_no_torch(command: str) -> None:
    code = (
        "import sys; from radio_triton.cli import main; main([sys.argv[1], '-h'], standalone_mode=False);"
        "print({'torch', 'numpy', 'safetensors', 'huggingface_hub'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code, command], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("Usage") and done.stdout.splitlines()[-1] == "set()", done.stderr


def test_nearest_is_finite_for_the_built_in_model() -> None:
    likeness = compare(RadioConfig(hidden_size=64, num_attention_heads=1, patch_size=8, num_hidden_layers=7))
    assert likeness.nearest and math.inf > len(likeness.differs) > 0
