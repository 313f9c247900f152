"""One random tiny model in every layout: the same weights and outputs after loading, bit for bit."""

from pathlib import Path

import pytest
import torch
from transformers import RadioConfig as TransformersConfig
from transformers import RadioModel as TransformersModel

from checkpoints import (
    LANGUAGE,
    LAYOUTS,
    SPECTRAL,
    args_of,
    dino_model,
    gelu_model,
    native,
    reference,
    remote_config,
    spectral,
    state_of,
    torch_hub,
    write_folder,
    write_inner,
    write_pth,
)
from helpers import rel_error
from loading import raw_pairs
from radio_triton import RadioConfig, RadioModel
from radio_triton.checkpoint import open_weights
from tiny import pixels


@torch.no_grad()
def assert_same(got: RadioModel, want: RadioModel, limit: float = 0) -> None:
    """The same parameters and statistics, and the same outputs on a square, a wide and a mixed input."""
    theirs = dict(want.state_dict())
    assert got.state_dict().keys() == theirs.keys()
    for name, tensor in got.state_dict().items():
        assert tensor.dtype == theirs[name].dtype, name
        if limit == 0:
            assert torch.equal(tensor, theirs[name]), name
    p = want.config.patch_size
    for size in ((8 * p, 8 * p), (3 * p, 5 * p)):
        x = pixels(2, 3, *size)
        for mine, other in zip(got(x), want(x), strict=True):
            assert torch.equal(mine, other) if limit == 0 else rel_error(mine, other) < limit


@pytest.fixture(scope="module")
def model() -> RadioModel:
    return gelu_model()


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name: str, model: RadioModel, tmp_path: Path) -> None:
    write, layout = LAYOUTS[name]
    loaded = RadioModel.from_pretrained(write(model, tmp_path))
    assert_same(loaded, model)
    assert loaded.config == model.config
    assert loaded.load_report.layout == layout
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_streamed(name: str, model: RadioModel, tmp_path: Path) -> None:
    write, layout = LAYOUTS[name]
    pairs = raw_pairs(write(model, tmp_path))
    fresh = RadioModel(model.config).eval()
    names = fresh.load_weights(iter(pairs))
    assert_same(fresh, model)
    assert fresh.load_report.layout == layout
    assert {*names, *fresh.load_report.defaulted} == set(model.state_dict())
    # the order of the tensors does not matter
    backwards = RadioModel(model.config).eval()
    backwards.load_weights(reversed(pairs))
    assert_same(backwards, model)


@pytest.mark.parametrize("name", SPECTRAL)
def test_spectral(name: str, model: RadioModel, tmp_path: Path) -> None:
    path = SPECTRAL[name](model, tmp_path)
    assert_same(RadioModel.from_pretrained(path), model, 1e-6)
    fresh = RadioModel(model.config).eval()
    fresh.load_weights(iter(raw_pairs(path)))
    assert_same(fresh, model, 1e-6)


def test_spectral_of_gated_mlp(tmp_path: Path) -> None:
    model = dino_model()
    state = spectral(torch_hub(state_of(model)))
    state = {name.replace("base_model.", "base_model.inner."): tensor for name, tensor in state.items()}
    path = write_pth(tmp_path, state, args_of(model.config, spectral_reparam={"eps": 1e-6}))
    assert_same(RadioModel.from_pretrained(path), model, 1e-6)


def test_spectral_keeps_half_precision(model: RadioModel, tmp_path: Path) -> None:
    state = {
        k: v.bfloat16() if "blocks" in k and v.ndim == 2 else v for k, v in torch_hub(state_of(model)).items()
    }
    path = write_pth(
        tmp_path, spectral(state), args_of(model.config, spectral_reparam=True, dtype=torch.bfloat16)
    )
    loaded = RadioModel.from_pretrained(path)
    assert loaded.dtype == torch.bfloat16
    for name, tensor in loaded.named_parameters():
        want = model.get_parameter(name).bfloat16()
        # the factor that undoes doubling is 1/2 up to rounding: at most the last bit moves
        torch.testing.assert_close(tensor, want, rtol=2**-7, atol=0)


def test_inner_trunk(tmp_path: Path) -> None:
    model = dino_model()
    path = write_inner(model, tmp_path)
    loaded = RadioModel.from_pretrained(path)
    assert_same(loaded, model)
    assert loaded.config == model.config
    assert set(loaded.load_report.ignored) == {
        "base_model.inner.mask_token",
        "base_model.input_conditioner.norm_mean",
        "base_model.input_conditioner.norm_std",
    }
    fresh = RadioModel(model.config).eval()
    fresh.load_weights(iter(raw_pairs(path)))
    assert_same(fresh, model)


@pytest.mark.parametrize("layout", ["remote", "fused"])
def test_video_embedder(layout: str, tmp_path: Path) -> None:
    model = gelu_model(video_temporal_patch_size=2)
    path = LAYOUTS[layout][0](model, tmp_path)
    loaded = RadioModel.from_pretrained(path)
    assert_same(loaded, model)
    clip = pixels(3, 3, 16, 24)
    with torch.no_grad():
        assert torch.equal(loaded(clip, num_frames=3).features, model(clip, num_frames=3).features)


def test_video_length_comes_from_the_shapes(tmp_path: Path) -> None:
    model = gelu_model(video_temporal_patch_size=4)
    state = reference(state_of(model), "radio_model.model.", "radio_model.")
    config = remote_config(model.config)
    del config["args"]["video_temporal_patch_size"]
    assert RadioModel.from_pretrained(write_folder(tmp_path, state, config)).config == model.config


@pytest.mark.parametrize(
    "variant", [{"mlp_norm": True, "layer_scale": False}, {"final_norm": True}, {"patch_bias": True}]
)
def test_the_file_decides_what_its_keys_show(variant: dict[str, bool], tmp_path: Path) -> None:
    """The config says nothing of these, or the opposite."""
    model = gelu_model(**variant)
    state = reference(state_of(model), "radio_model.model.", "radio_model.")
    loaded = RadioModel.from_pretrained(write_folder(tmp_path, state, remote_config(model.config)))
    assert_same(loaded, model)


@pytest.mark.parametrize("layout", ["remote", "hub", "fused", "native"])
def test_half_precision_file(layout: str, tmp_path: Path) -> None:
    """Rounded once; the statistics stay what they were, though the file rounded them too."""
    model = gelu_model(
        norm_mean=(0.48145466, 0.4578275, 0.40821073), norm_std=(0.26862954, 0.26130258, 0.27577711)
    )
    state = {name: t.bfloat16() if t.is_floating_point() else t for name, t in state_of(model).items()}
    args = args_of(model.config, dtype=None)
    if layout == "hub":
        path = write_pth(tmp_path, torch_hub(state), args)
    elif layout == "remote":
        named = reference(state, "radio_model.model.", "radio_model.")
        path = write_folder(tmp_path, named, remote_config(model.config, dtype=None))
    else:
        path = LAYOUTS[layout][0](model, tmp_path)
        write_folder(tmp_path, native(state) if layout == "native" else state, None)
    loaded = RadioModel.from_pretrained(path)
    assert_same(loaded, gelu_model(**model.config.to_dict()).to(torch.bfloat16))
    assert loaded.input_conditioner.norm_mean.dtype == torch.float32
    wide = RadioModel.from_pretrained(path, dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(
        wide.embeddings.position_embedding, model.embeddings.position_embedding.bfloat16().float()
    )


def test_dtype_rule(model: RadioModel, tmp_path: Path) -> None:
    state = torch_hub(state_of(model))
    stated = write_pth(tmp_path / "stated", state, args_of(model.config, dtype=torch.bfloat16))
    silent = write_pth(
        tmp_path / "silent", {k: v.half() for k, v in state.items()}, args_of(model.config, dtype=None)
    )
    assert RadioModel.from_pretrained(stated).dtype == torch.bfloat16
    assert RadioModel.from_pretrained(stated, dtype=torch.float64).dtype == torch.float64
    assert RadioModel.from_pretrained(silent).dtype == torch.float16


def test_scaled_layer_norm_is_folded_into_the_weights(tmp_path: Path) -> None:
    """LN(x) / sqrt(i + 1) in block i is LN with weight and bias divided by it."""
    model = gelu_model(num_hidden_layers=3)
    state = torch_hub(state_of(model))
    args = args_of(model.config)
    args["model_kwargs"]["scaled_ln"] = True
    want = gelu_model(num_hidden_layers=3)
    with torch.no_grad():
        for i, layer in enumerate(want.encoder.layer):
            for norm in (layer.norm1, layer.norm2):
                norm.weight /= (i + 1) ** 0.5
                norm.bias /= (i + 1) ** 0.5
    loaded = RadioModel.from_pretrained(write_pth(tmp_path, state, args))
    assert_same(loaded, want)
    # our own names hold folded weights, which are not folded again
    fresh = RadioModel(loaded.config).eval()
    fresh.load_weights(loaded.state_dict().items())
    assert_same(fresh, want)
    fresh.load_weights(iter(state.items()))
    assert_same(fresh, want)


@pytest.mark.parametrize("count", [1, 2])
def test_first_blocks(count: int, model: RadioModel, tmp_path: Path) -> None:
    path = LAYOUTS["remote"][0](model, tmp_path)
    loaded = RadioModel.from_pretrained(path, num_hidden_layers=count)
    assert len(loaded.encoder.layer) == count
    late = [key for key, why in loaded.load_report.ignored.items() if "block" in why]
    assert len(late) == 14 * (2 - count)
    assert all(".blocks.1." in key for key in late)
    x = pixels(1, 3, 16, 16)
    tokens = []
    model.encoder.layer[count - 1].register_forward_hook(lambda _m, _i, out: tokens.append(out[0].clone()))
    with torch.no_grad():
        model(x)
        assert torch.equal(loaded(x).last_hidden_state.flatten(0, 1), tokens[0])
    fresh = RadioModel(model.config.replace(num_hidden_layers=count)).eval()
    fresh.load_weights(iter(raw_pairs(path)))
    assert_same(fresh, loaded)


@pytest.mark.parametrize("scale", [1.0, 0.5])
@torch.no_grad()
def test_what_transformers_saves(scale: float, tmp_path: Path) -> None:
    """Its save_pretrained writes the reference's names, LayerScale apart."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size", "num_registers")
    small = {name: getattr(gelu_model().config, name) for name in names}
    config = TransformersConfig(**small, mlp_ratio=2.0, max_img_size=32, layerscale_value=scale)
    theirs = TransformersModel(config).eval()
    for parameter in theirs.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    theirs.save_pretrained(tmp_path)
    ours = RadioModel.from_pretrained(tmp_path)
    assert "layer_scale1.lambda1" in " ".join(open_weights(tmp_path).shapes)
    fresh = RadioModel(ours.config).eval()
    fresh.load_weights(iter(theirs.state_dict().items()))
    assert_same(fresh, ours)
    x = pixels(2, 3, 12, 20)
    assert rel_error(ours(x).last_hidden_state, theirs(x).last_hidden_state) < 1e-5


def test_report_of_a_tower_in_a_vlm(model: RadioModel, tmp_path: Path) -> None:
    report = RadioModel.from_pretrained(LAYOUTS["sharded-vlm"][0](model, tmp_path)).load_report
    assert set(report.ignored) == set(LANGUAGE)
    assert set(report.ignored.values()) == {"outside the tower"}
    assert set(report.loaded) == set(model.state_dict())
    assert f"{len(LANGUAGE)} keys ignored ({len(LANGUAGE)} outside the tower)" in str(report)


def test_report_of_heads_beside_the_trunk(model: RadioModel, tmp_path: Path) -> None:
    report = RadioModel.from_pretrained(LAYOUTS["hub-heads"][0](model, tmp_path)).load_report
    assert report.ignored == {
        "_heads.0.fc1.weight": "part of adaptor clip",
        "_feature_projections.0.final.0.weight": "part of adaptor clip",
        "_heads.sam.fc1.weight": "part of adaptor sam",
    }
    assert report.defaulted == ("summary_idxs",)


def test_folded_layer_scale_must_be_said(model: RadioModel) -> None:
    """vLLM PR #39767: a file without LayerScale into a model whose LayerScale holds something else."""
    pairs = {k: v for k, v in state_of(model).items() if ".layer_scale" not in k}
    other = gelu_model()
    with pytest.raises(
        ValueError, match=r"4 missing: encoder.layer.0.layer_scale1.lambda1.*layer_scale_folded=True"
    ):
        other.load_weights(iter(pairs.items()))
    names = other.load_weights(iter(pairs.items()), layer_scale_folded=True)
    assert not any("layer_scale" in name for name in names)
    assert sum("layer_scale" in name for name in other.load_report.defaulted) == 4
    assert all(bool((layer.layer_scale1.lambda1 == 1).all()) for layer in other.encoder.layer)
    plain = RadioModel(model.config.replace(layer_scale=False)).eval()
    plain.load_weights(iter(pairs.items()))
    x = pixels(1, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(other(x).features, plain(x).features)
    some = {k: v for k, v in state_of(model).items() if "0.layer_scale" not in k}
    with pytest.raises(ValueError, match="2 missing"):
        other.load_weights(iter(some.items()), layer_scale_folded=True)


def test_state_dict_of_transformers_without_layer_scale(model: RadioModel) -> None:
    """Transformers keeps ones where a model has no LayerScale; anything else there is an error."""
    plain = RadioModel(model.config.replace(layer_scale=False)).eval()
    ones = {k: torch.ones_like(v) if ".layer_scale" in k else v for k, v in state_of(model).items()}
    plain.load_weights(iter(native(ones).items()))
    assert set(plain.load_report.ignored.values()) == {"a LayerScale of ones is the identity"}
    with pytest.raises(ValueError, match="4 unknown"):
        plain.load_weights(iter(native(state_of(model)).items()))


def test_bare_file_without_config(model: RadioModel, tmp_path: Path) -> None:
    """Shapes and the saved summary say the rest; the heads of an unusual width, the caller."""
    folder = write_folder(tmp_path, reference(state_of(model), "radio_model.model.", "radio_model."), None)
    with pytest.raises(
        ValueError, match="width 32 does not show its number of heads: pass num_attention_heads"
    ):
        RadioModel.from_pretrained(folder)
    loaded = RadioModel.from_pretrained(folder, num_attention_heads=2)
    # 0 and 1 are summary tokens, so at least two of five are class tokens
    assert (loaded.config.num_cls_tokens, loaded.config.num_registers) == (2, 3)
    assert loaded.config.summary_idxs == (0, 1)
    assert_same(RadioModel.from_pretrained(folder, num_attention_heads=2, num_cls_tokens=3), model)


def test_bare_file_without_summary(model: RadioModel, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, torch_hub(state_of(model)), None)
    file = folder / "model.safetensors"
    with pytest.raises(ValueError, match="which of the 5 prefix tokens make the summary: pass summary_idxs="):
        RadioModel.from_pretrained(file, num_attention_heads=2)
    with pytest.raises(ValueError, match="how many of the 5 they are, num_cls_tokens="):
        RadioModel.from_pretrained(file, num_attention_heads=2, summary_idxs=None)
    loaded = RadioModel.from_pretrained(file, num_attention_heads=2, summary_idxs=(0, 1), num_registers=2)
    assert_same(loaded, model)
    assert loaded.config == model.config


@pytest.mark.parametrize(
    ("width", "heads"), [(768, 12), (1024, 16), (1152, 16), (1280, 16), (1536, 24), (1664, 16)]
)
def test_heads_of_released_widths(width: int, heads: int, tmp_path: Path) -> None:
    sizes = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
    }
    small = RadioModel(RadioConfig(**sizes, patch_size=2, position_grid=2, layer_scale=False))
    folder = write_folder(tmp_path, torch_hub(state_of(small)) | {"summary_idxs": torch.tensor([0, 1])}, None)
    assert RadioModel.from_pretrained(folder).config.num_attention_heads == heads
