"""Saved and converted checkpoints: what Transformers and we read back, in every form, and what a failure
leaves.
"""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers import RadioModel as TransformersModel

from radio_triton import RadioConfig, RadioModel
from radio_triton.checkpoint import save
from radio_triton.checkpoint.card import Licence, find_licence
from radio_triton.checkpoint.forms import cannot_hold, form_config, form_tensors, mlp_ratio
from radio_triton.checkpoint.keys import Slot, find_layout
from radio_triton.presets import get_preset
from saving import contents, model_of, run, saved, tokens
from tiny import VARIANTS, pixels, tiny_config, tiny_model

ROOT = Path(__file__).resolve().parent.parent
# what Transformers can hold
HELD = {
    "plain": {},
    "scaled": VARIANTS["scaled"],
    "swiglu": {"use_swiglu_ffn": True, "intermediate_size": 40},
    "video": {"video_temporal_patch_size": 2},
    "no qkv bias, odd mlp": {"qkv_bias": False, "intermediate_size": 61},
    "one channel": {"num_channels": 1, "norm_mean": (0.3,), "norm_std": (0.2,)},
    "summary in an order of its own": {"summary_idxs": (2, 0, 0)},
    "no summary": {"summary_idxs": ()},
    "whole summary": {"summary_idxs": None, "num_registers": 0},
    "initial scale without a scale": {"layerscale_value": 1e-5},
    "dummy heads": {"num_dummy_heads": 2, "video_temporal_patch_size": 2},
}


@pytest.mark.parametrize("name", HELD)
@torch.no_grad()
def test_transformers_reads_what_is_saved(name: str, tmp_path: Path) -> None:
    model = model_of(**HELD[name])
    sentence = model.save_pretrained(tmp_path / "model")
    assert sentence.startswith("Transformers' RadioModel.from_pretrained reads")
    theirs, info = TransformersModel.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    # without LayerScale they set ones by themselves
    assert all("layer_scale" in key and not model.config.layer_scale for key in info["missing_keys"])
    theirs.eval()
    x = pixels(2, model.config.num_channels, 12, 20)
    got, want = theirs(x), model(x)
    assert (got.last_hidden_state - want.last_hidden_state).abs().max() <= 1e-6 * want.features.abs().max()
    assert got.summary.shape == want.summary.shape
    torch.testing.assert_close(got.summary, want.summary, rtol=1e-5, atol=1e-5)
    if model.config.video_projection:
        model.make_preprocessor_external(), theirs.make_preprocessor_external()
        x = pixels(2, 6, 12, 20)
        torch.testing.assert_close(theirs(x).features, model(x).features, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", {**HELD, **VARIANTS})
def test_we_read_what_is_saved(name: str, tmp_path: Path) -> None:
    model = model_of(**{**HELD, **VARIANTS}[name])
    model.save_pretrained(tmp_path / "model")
    dummies = {"num_dummy_heads": model.config.num_dummy_heads}
    loaded = RadioModel.from_pretrained(tmp_path / "model", **dummies)
    assert torch.equal(tokens(loaded), tokens(model))
    assert loaded.summary_positions == model.summary_positions
    assert list((tmp_path).iterdir()) == [tmp_path / "model"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_dtype_is_kept_and_the_statistics_stay_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    model = model_of(dtype)
    model.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == str(dtype)[6:]
    file = load_file(tmp_path / "model" / "model.safetensors")
    assert {x.dtype for name, x in file.items() if "norm_mean" in name} == {torch.float32}
    loaded = RadioModel.from_pretrained(tmp_path / "model")
    assert loaded.dtype == dtype and torch.equal(tokens(loaded), tokens(model))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"qk_normalization": True, "mlp_norm": True}, "QK-norm and a LayerNorm in the MLP"),
        ({"final_norm": True}, "a final norm"),
        ({"patch_bias": True}, "a bias in the patch projection"),
        ({"position_grid": (4, 6)}, "a position table that is not square"),
        ({"cpe": False}, "positions that are cropped, not resized"),
        ({"pos_align_corners": True}, "positions resized with align_corners"),
        ({"use_swiglu_ffn": True, "intermediate_size": 42}, "intermediate_size=42"),
        (
            {"video_temporal_patch_size": 2, "video_projection": False},
            "tubelets without a projection of their own",
        ),
    ],
)
def test_what_transformers_cannot_hold_is_named(
    fields: dict[str, object], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        sentence = model_of(**fields).save_pretrained(tmp_path / "model")
    assert sentence.startswith(f"Transformers' RadioModel cannot hold {words}. ")
    assert sentence in caplog.text
    assert sentence in (tmp_path / "model" / "README.md").read_text()
    # nothing that Transformers would take for its own and run wrongly
    with pytest.raises(ValueError, match="radio_triton"):
        AutoConfig.from_pretrained(tmp_path / "model")
    result = run("convert", tmp_path / "model", tmp_path / "out", "--to", "native")
    assert result.exit_code == 1 and f"cannot hold {words}: the fused form" in result.stderr
    assert not (tmp_path / "out").exists()


def test_dummy_heads_that_are_not_zero_are_kept(tmp_path: Path) -> None:
    model = tiny_model(num_dummy_heads=2)
    assert "dummy heads that are not zero" in model.save_pretrained(tmp_path / "model")
    assert torch.equal(tokens(RadioModel.from_pretrained(tmp_path / "model")), tokens(model))


@pytest.mark.parametrize("name", RadioConfig.presets())
def test_every_released_version_has_a_legacy_and_a_fused_form(name: str) -> None:
    preset = get_preset(name)
    guess = {"num_cls_tokens": 3, "num_registers": 7, "summary_idxs": (0, 1), "intermediate_size": 6144}
    flags = {"mlp_norm": False, "scaled_layer_norm": False, "use_swiglu_ffn": False, "layer_scale": True}
    stats = {"norm_mean": (0.5,) * 3, "norm_std": (0.2,) * 3}
    config = RadioConfig.preset(name, **{f: ({**guess, **flags, **stats})[f] for f in preset.unknown})
    assert RadioConfig.from_hf(form_config("fused", config, torch.float32)) == config
    legacy = form_config("legacy", config, torch.bfloat16)
    assert cannot_hold(config, legacy) == []
    shallow = config.replace(num_hidden_layers=2)
    state = RadioModel(shallow, device="meta").state_dict()
    named = dict(form_tensors("legacy", state.items(), legacy))
    assert len(named) == len(state)
    layout = find_layout(named)
    assert [layout.locate(key) for key in named] == [Slot(key) for key in state]
    assert all(key.startswith("radio_model.model.inner.") for key in named if "blocks" in key) == (
        name == "radio_v2.5-g"
    )


@given(st.integers(1, 8192), st.integers(1, 40000))
def test_mlp_ratio_gives_the_width_back(width: int, hidden: int) -> None:
    assert int(width * mlp_ratio(width, hidden)) == hidden


def card(folder: Path, *lines: str) -> None:
    (folder / "README.md").write_text("\n".join(["---", *lines, "---", "# theirs", ""]))


def test_the_card_names_the_licence_that_is_known_and_invents_none(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    text = (tmp_path / "a" / "README.md").read_text()
    assert 'license: "unknown"' in text and "Not known: neither whoever saved" in text
    assert find_licence(tmp_path / "a") is None
    model = RadioModel.from_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b", license="apache-2.0")
    assert 'license: "apache-2.0"' in (tmp_path / "b" / "README.md").read_text()
    with safe_open(tmp_path / "b" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "license": "apache-2.0"}


def test_the_licence_of_the_source_goes_with_the_weights(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    card(tmp_path / "a", "license: other  # theirs", "license_name: some-terms", "license_link: LICENSE")
    (tmp_path / "a" / "LICENSE").write_text("\n  Some terms\nof use\n")
    RadioModel.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    licence = find_licence(tmp_path / "b")
    assert licence is not None and str(licence) == "other (some-terms, LICENSE)"
    assert "Some terms" in (tmp_path / "b" / "LICENSE").read_text()
    (tmp_path / "b" / "README.md").unlink()
    in_file = find_licence(tmp_path / "b", {"license": "mit"})
    assert in_file is not None and (in_file.id, in_file.where) == ("mit", "metadata of the safetensors file")
    by_file = find_licence(tmp_path / "b")
    assert by_file == Licence("other", "Some terms", "LICENSE", "LICENSE", tmp_path / "b" / "LICENSE")
    # a README.md beside a file that is no model's folder may be anyone's
    (tmp_path / "b" / "config.json").unlink()
    card(tmp_path / "b", "license: mit")
    assert find_licence(tmp_path / "b" / "model.safetensors") is None


def test_saving_again_replaces_our_files_and_keeps_others(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    (folder / "notes.txt").write_text("mine")
    other = model_of(num_hidden_layers=1)
    other.save_pretrained(folder, license="mit")
    assert torch.equal(tokens(RadioModel.from_pretrained(folder)), tokens(other))
    assert (folder / "notes.txt").read_text() == "mine"
    assert 'license: "mit"' in (folder / "README.md").read_text()
    card(folder, "license: other")
    other.save_pretrained(folder)
    assert "# theirs" in (folder / "README.md").read_text()
    assert sorted(contents(tmp_path)) == [
        f"model/{n}" for n in ("README.md", "config.json", "model.safetensors", "notes.txt")
    ]


@pytest.mark.parametrize("where", ["save_file", "write_card", "second replace"])
def test_a_failed_save_leaves_what_was_there(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "model")
    before, calls = contents(tmp_path), iter(range(100))
    replace = os.replace

    def fail(*args: object, **options: object) -> None:
        if where != "second replace":
            raise OSError("the disk is full")
        # three files move away, then the first of the new comes
        if next(calls) == 4:
            raise OSError("the disk is full")
        replace(*args)

    monkeypatch.setattr(*((os, "replace") if where == "second replace" else (save, where)), fail)
    with pytest.raises(OSError, match="the disk is full"):
        model_of(num_hidden_layers=1).save_pretrained(folder)
    assert contents(tmp_path) == before
    if where != "second replace":
        with pytest.raises(OSError, match="the disk is full"):
            model_of().save_pretrained(tmp_path / "new")
        assert contents(tmp_path) == before


def test_what_save_refuses(tmp_path: Path) -> None:
    model = model_of()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file: a model is saved into a folder"):
        model.save_pretrained(tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model-00001-of-00002.safetensors").write_text("")
    with pytest.raises(ValueError, match=r"holds other weights \(model-00001"):
        model.save_pretrained(tmp_path / "full")
    with pytest.raises(ValueError, match="on the meta device and has no weights"):
        RadioModel(tiny_config(), device="meta").save_pretrained(tmp_path / "meta")
    model.encoder.layer[0].mlp.fc1.lora = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"not those of its config .*lora.*: merge adapters"):
        model.save_pretrained(tmp_path / "lora")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "full"]
