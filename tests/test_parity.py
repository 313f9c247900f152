"""`python -m bench.parity` on files made here: which oracle it uses, what it prints, and when it says no."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import parity
from checkpoints import LAYOUTS, SPECTRAL, dino_model, gelu_model, write_inner
from radio_triton import RadioModel

ROOT = Path(__file__).resolve().parent.parent
SIZES = ["--size", "32x32", "--size", "12x28", "--size", "40x16"]
# the code of a repository: our own model, with the summary scaled
REMOTE = """
import torch
from transformers import PretrainedConfig


class Config(PretrainedConfig):
    model_type = "radio-like"


class Model(torch.nn.Module):
    @classmethod
    def register_for_auto_class(cls, auto_class):
        pass

    @classmethod
    def from_pretrained(cls, source, **options):
        from radio_triton import RadioModel
        model = cls()
        model.inner = RadioModel.from_pretrained(source)
        return model

    def forward(self, x):
        assert x.shape[0] == 1, "one image at a time"
        out = self.inner(x)
        return out.summary * SCALE, out.features
"""


def remote_code(folder: Path, scale: float) -> Path:
    """A repository with code beside its weights."""
    LAYOUTS["remote"][0](gelu_model(), folder)
    (folder / "code_of_theirs.py").write_text(REMOTE.replace("SCALE", str(scale)))
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "code_of_theirs.Config", "AutoModel": "code_of_theirs.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


WRITERS = {
    name: LAYOUTS[name][0] for name in ("hub", "remote", "remote-in-vlm", "native", "fused", "sharded-vlm")
}
WRITERS |= {"spectral": SPECTRAL["spectral"]}


@pytest.mark.parametrize("name", WRITERS)
def test_against_transformers(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = WRITERS[name](gelu_model(), tmp_path / "model")
    assert parity.main([str(source), *SIZES, "--json", str(tmp_path / "out.json")]) == 0
    said = capsys.readouterr()
    assert "radio_triton against Transformers' RadioModel, 3 images, cpu" in said.out
    assert "not against nvidia: it runs Python code" in said.err
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(r["call"], r["dtype"], r["output"]) for r in rows] == [
        (call, dtype, output)
        for dtype in ("fp32", "bf16")
        for call in ("dense", "packed")
        for output in ("summary", "features", "all")
    ]
    # two codes, so never the same bits, and LayerScale is not lost on the way
    assert all(0 < row["difference"] < (1e-5 if row["dtype"] == "fp32" else 2e-2) for row in rows)


@pytest.mark.parametrize("broken", ["features", "summary", "packed"])
def test_a_difference_is_found(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = WRITERS["remote"](gelu_model(), tmp_path)
    output = RadioModel._output

    def wrong(self: RadioModel, stream: torch.Tensor, packing: object, form: str, fmt: str) -> object:
        if form == "dense" or broken == "packed":
            stream = stream.clone()
            stream[0 if broken == "summary" else -1] *= 1.01
        return output(self, stream, packing, form, fmt)

    monkeypatch.setattr(RadioModel, "_output", wrong)
    assert parity.main([str(source), *SIZES, "--dtype", "fp32"]) == 1
    wrong_rows = {
        tuple(line.split()[:3:2]) for line in capsys.readouterr().out.splitlines() if "DISAGREES" in line
    }
    call, part = ("packed", "features") if broken == "packed" else ("dense", broken)
    assert (call, part) in wrong_rows and (call, "all") in wrong_rows
    assert ("packed", "all") not in wrong_rows or broken == "packed"


@pytest.mark.parametrize("scale", [1.0, 1.001])
def test_against_the_code_of_a_repository(
    scale: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = remote_code(tmp_path / "model", scale)
    found = parity.main([str(source), *SIZES, "--dtype", "fp32", "--dtype", "fp16", "--trust-remote-code"])
    out = capsys.readouterr().out
    assert f"against the remote code of {source}" in out
    assert found == (scale != 1) and ("DISAGREES" in out) == (scale != 1)
    rows = [line.split() for line in out.splitlines() if "summary" in line and "fp32" in line]
    assert [float(row[3]) for row in rows] == pytest.approx([1 - 1 / scale] * 2, rel=0.01, abs=1e-6)


def test_code_of_a_repository_is_not_run_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = remote_code(tmp_path / "model", 1)
    (source / "code_of_theirs.py").write_text("raise SystemExit('it ran')")
    assert parity.main([str(source), *SIZES, "--dtype", "fp32"]) == 0
    assert "against Transformers' RadioModel" in capsys.readouterr().out
    assert parity.main([str(source), "--oracle", "nvidia"]) == 2
    assert "allow it with --trust-remote-code" in capsys.readouterr().err


def test_what_no_oracle_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_inner(dino_model(), tmp_path)
    assert parity.main([str(source), "--oracle", "transformers"]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert f"cannot compare {source}: nothing to compare with (transformers: it cannot hold " in said.err
    assert "a final norm" in said.err


def test_without_a_network() -> None:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "bench.parity", "nvidia/No-Such-RADIO"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("cannot compare nvidia/No-Such-RADIO: ")
    assert "pass" in done.stderr and "path" in done.stderr and "Traceback" not in done.stderr
