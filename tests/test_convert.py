"""Converted checkpoints: every form into every form, the proof of equal outputs, what a failure leaves."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from radio_triton import RadioModel
from radio_triton.checkpoint import CheckpointError, convert, save
from radio_triton.checkpoint.convert import convert as run_convert
from radio_triton.checkpoint.forms import FORMS, form_tensors
from saving import contents, model_of, run, saved, tokens

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield saved(tmp_path_factory.mktemp("source") / "model", layer_scale=True, video_temporal_patch_size=2)


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_every_form_converts_into_every_form(first: str, second: str, source: Path, tmp_path: Path) -> None:
    run_convert(source, tmp_path / "first", first)
    run_convert(tmp_path / "first", tmp_path / "second", second)
    want, got = (RadioModel.from_pretrained(path) for path in (source, tmp_path / "second"))
    assert torch.equal(tokens(got), tokens(want))
    key = {
        "native": "attention.q_proj",
        "legacy": "radio_model.model.blocks.0.ls1.grandma",
        "fused": "attention.qkv",
    }
    assert any(key[second] in name for name in load_file(tmp_path / "second" / "model.safetensors"))


def test_remote_code_teachers_stay(tmp_path: Path) -> None:
    source = ROOT / "tests" / "data" / "legacy-layerscale"
    run_convert(source, tmp_path / "out", "legacy", dtype=torch.bfloat16, fold_layer_scale=True)
    before, after = (json.loads((p / "config.json").read_text())["args"] for p in (source, tmp_path / "out"))
    assert after["teachers"] == before["teachers"] and after["register_multiple"] == 10
    assert after["dtype"] == "bfloat16"
    config = RadioModel.from_pretrained(tmp_path / "out").config
    assert not config.layer_scale and config.num_prefix_tokens == 10


@pytest.mark.parametrize("form", FORMS)
def test_scaled_norms_are_scaled_once(form: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "tests" / "data" / "legacy-layerscale", source)
    config = json.loads((source / "config.json").read_text())
    plain = tokens(RadioModel.from_pretrained(source))
    config["args"]["model_kwargs"]["scaled_ln"] = True
    (source / "config.json").write_text(json.dumps(config))
    run_convert(source, tmp_path / "out", form)
    got = tokens(RadioModel.from_pretrained(tmp_path / "out"))
    assert torch.equal(got, tokens(RadioModel.from_pretrained(source)))
    assert not torch.allclose(got, plain, rtol=1e-2)


@pytest.mark.parametrize("fields", [{}, {"use_swiglu_ffn": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fold_layer_scale(fields: dict[str, object], dtype: torch.dtype, tmp_path: Path) -> None:
    model = model_of(layer_scale=True, **fields)
    model.save_pretrained(tmp_path / "model")
    said = run_convert(tmp_path / "model", tmp_path / "out", "fused", dtype=dtype, fold_layer_scale=True)
    loaded = RadioModel.from_pretrained(tmp_path / "out")
    assert not loaded.config.layer_scale and loaded.dtype == dtype
    layer, folded = model.encoder.layer[1], loaded.encoder.layer[1]
    last = "down_proj" if fields else "fc2"
    for name in ("weight", "bias"):
        scale = layer.layer_scale1.lambda1
        want = getattr(layer.attention.proj, name) * (scale[:, None] if name == "weight" else scale)
        assert torch.equal(getattr(folded.attention.proj, name), want.to(dtype))
        scale = layer.layer_scale2.lambda1
        want = getattr(layer.mlp.get_submodule(last), name) * (scale[:, None] if name == "weight" else scale)
        assert torch.equal(getattr(folded.mlp.get_submodule(last), name), want.to(dtype))
    limit = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    assert (tokens(loaded) - tokens(model)).norm() <= limit * tokens(model).norm()
    assert f"{limit:.0e} is allowed in {str(dtype)[6:]}" in " ".join(said)


def test_convert_command(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ("convert", source, out, "--to", "legacy", "--dtype", "bfloat16", "--license", "mit")
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert "every parameter is equal" in result.output and "remote-code class" in result.output
    want = RadioModel.from_pretrained(source, dtype=torch.bfloat16)
    assert torch.equal(tokens(RadioModel.from_pretrained(out)), tokens(want))
    before = contents(tmp_path)
    result = run(*command)
    assert result.exit_code == 1 and "exists: pass" in result.stderr and "--force" in result.stderr
    assert contents(tmp_path) == before
    result = run("convert", source, out, "--to", "fused", "--force", "--fold-layer-scale")
    assert result.exit_code == 0 and not RadioModel.from_pretrained(out).config.layer_scale
    assert run("convert", source, out, "--to", "gguf").exit_code == 2


def test_what_is_not_the_towers_is_left_out_and_said(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "tests" / "data" / "legacy-vit", source)
    heads = {
        f"radio_model.adaptors.clip.head_mlp.{name}": torch.zeros(2) for name in ("fc1.bias", "fc2.bias")
    }
    save_file(load_file(source / "model.safetensors") | heads, source / "model.safetensors")
    said = run_convert(source, tmp_path / "out", "native")
    assert said[-1] == "Keys left out: 2 part of adaptor clip."
    want, got = (RadioModel.from_pretrained(path) for path in (source, tmp_path / "out"))
    assert torch.equal(tokens(got), tokens(want))


def test_a_wrong_conversion_is_caught_and_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(*args: object) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in form_tensors(*args):
            yield re.sub("[qk](?=_proj)", lambda match: "qk"[match[0] == "q"], name), tensor

    monkeypatch.setattr(save, "form_tensors", swapped)
    with pytest.raises(
        CheckpointError, match=r"parameters read back differently, such as encoder.layer.0.attention"
    ):
        run_convert(source, tmp_path / "out", "native")
    assert not contents(tmp_path)
    monkeypatch.undo()
    # a fold that forgets the bias
    monkeypatch.setattr(
        convert, "fold", lambda model: model.encoder.layer[0].attention.proj.bias.data.zero_()
    )
    with pytest.raises(
        CheckpointError, match=r"outputs differ by 0\.\d+ of their norm, where 1e-05 is allowed"
    ):
        run_convert(source, tmp_path / "out", "fused", fold_layer_scale=True)
    assert not contents(tmp_path)


def test_what_convert_cannot_read_leaves_nothing(source: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((source / "config.json").read_bytes())
    whole = (source / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[:-100])
    result = run("convert", broken, tmp_path / "out", "--to", "fused")
    assert result.exit_code == 1 and "safetensors" in result.stderr
    tensors = load_file(source / "model.safetensors")
    tensors["embeddings.cls_register_token"][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"1 tensors hold NaN or infinity as torch.float32: embeddings.cls"
    ):
        run_convert(broken, tmp_path / "out", "fused")
    for name in ("embeddings.cls_register_token", "encoder.layer.0.attention.o_proj.bias"):
        tensors[name].fill_(6e4)
    tensors["encoder.layer.0.layer_scale1.lambda1"].fill_(1)
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"in torch.float16 the model makes NaN or Inf of random pixels"
    ):
        run_convert(broken, tmp_path / "out", "fused", dtype=torch.float16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


@pytest.mark.parametrize("blow", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_conversion_leaves_no_result(blow: signal.Signals, source: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys; from radio_triton.checkpoint import convert; from radio_triton.cli import main;"
        f"convert.prove = lambda *args: os.kill(os.getpid(), {int(blow)}); main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "convert", str(source), str(tmp_path / "out"), "--to", "fused"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert not (tmp_path / "out").exists()
    if blow is signal.SIGTERM:
        assert not list(tmp_path.iterdir())
