"""The model against files made by running the public reference and the vLLM module on random weights
(fp32)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers import rel_error
from radio_triton import RadioModel, RadioOutput

DATA = Path(__file__).parent / "data"
LIMIT = 1e-4
LEGACY = {
    "legacy-vit": ["64x64", "64x96", "96x32", "128x128", "160x144"],
    "legacy-layerscale": ["64x96"],
    "legacy-mlpnorm": ["64x96"],
}
# heads of a DINOv2 trunk of a width that was never released: nothing in the file shows them
TORCH_HUB = {"torchhub-ema": {}, "torchhub-spectral": {}, "torchhub-swiglu14": {"num_attention_heads": 4}}
VLLM = ["vllm-qknorm", "vllm-dummyheads", "vllm-noncpe", "vllm-plain-t4"]


def case(name: str) -> tuple[RadioModel, dict[str, Tensor], dict[str, Any]]:
    facts = json.loads((DATA / name / "case.json").read_text())
    model = RadioModel.from_pretrained(DATA / name, num_dummy_heads=facts.get("num_dummy_heads", 0))
    if "inputs" in facts:
        model.make_preprocessor_external()
    return model, load_file(DATA / name / "io.safetensors"), facts


def check(output: RadioOutput, io: dict[str, Tensor], name: str, summary: str = "summary") -> None:
    assert rel_error(output.summary, io[f"{name}.{summary}"]) < LIMIT
    assert rel_error(output.features, io[f"{name}.features"]) < LIMIT


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, sizes in LEGACY.items() for size in sizes])
def test_remote_code_class(name: str, size: str) -> None:
    model, io, _ = case(name)
    check(model(io[f"{size}.pixel_values"]), io, size)


def test_remote_code_sizes_in_one_packed_call() -> None:
    model, io, _ = case("legacy-vit")
    sizes = LEGACY["legacy-vit"]
    outputs = model.encode([io[f"{size}.pixel_values"][0] for size in sizes])
    for size, output in zip(sizes, outputs, strict=True):
        assert rel_error(output.summary, io[f"{size}.summary"][0]) < LIMIT
        assert rel_error(output.features, io[f"{size}.features"][0]) < LIMIT


def hub_case(name: str, **options: int) -> tuple[RadioModel, dict[str, Tensor]]:
    model = RadioModel.from_pretrained(DATA / name / "checkpoint.pth.tar", **options)
    return model, load_file(DATA / name / "io.safetensors")


@pytest.mark.parametrize("name", TORCH_HUB)
def test_torch_hub_loader(name: str) -> None:
    model, io = hub_case(name, **TORCH_HUB[name])
    output = model(io["pixel_values"])
    assert rel_error(output.summary, io["summary"]) < LIMIT
    assert rel_error(output.features, io["features"]) < LIMIT
    packed = model.encode(list(io["pixel_values"]))
    assert rel_error(torch.stack([item.features for item in packed]), io["features"]) < LIMIT


def test_torch_hub_feature_normalizer() -> None:
    """It is loaded unasked, as it changes the features; heads that nobody asked for are left aside."""
    model, io = hub_case("torchhub-adaptors")
    check_plain(model(io["pixel_values"]), io)
    assert {"feature_normalizer.mean", "feature_normalizer.tx"} <= set(model.load_report.loaded)
    assert model.load_report.reasons == {"part of adaptor clip": 20, "part of adaptor sam": 28}


def check_plain(output: RadioOutput, io: dict[str, Tensor]) -> None:
    assert rel_error(output.summary, io["summary"]) < LIMIT
    assert rel_error(output.features, io["features"]) < LIMIT


def test_torch_hub_trunk_beside_an_intermediate_normalizer() -> None:
    model, io = hub_case("torchhub-intermediates")
    check_plain(model(io["pixel_values"]), io)
    assert not model.load_report.ignored
    names = {
        name.rpartition(".")[2] for name in model.load_report.loaded if "intermediate_normalizer." in name
    }
    assert names == {"alphas", "means", "rotation"}


def test_torch_hub_vitdet_trunk_loads() -> None:
    model, _ = hub_case("torchhub-vitdet")
    assert len(model.encoder.layer) == 8
    assert not model.load_report.ignored


@pytest.mark.parametrize("name", VLLM)
def test_vllm_dense(name: str) -> None:
    model, io, _ = case(name)
    check(model(io["dense.pixel_values"]), io, "dense")


@pytest.mark.parametrize("name", VLLM)
def test_vllm_packed(name: str) -> None:
    model, io, facts = case(name)
    output = model(io["packed.patches"], imgs_sizes=facts["imgs_sizes"])
    check(output, io, "packed", "summary_per_image")


@pytest.mark.parametrize("name", VLLM)
def test_vllm_video(name: str) -> None:
    model, io, facts = case(name)
    assert facts["video"]
    for count in facts["video"]:
        check(model(io[f"video{count}.pixel_values"], num_frames=count), io, f"video{count}")


@pytest.mark.parametrize("name", VLLM)
def test_vllm_images_and_videos_in_one_packed_call(name: str) -> None:
    """No engine offers this; each item must still be the reference's."""
    model, io, facts = case(name)
    images, videos = (
        list(io["dense.pixel_values"]),
        [io[f"video{count}.pixel_values"] for count in facts["video"]],
    )
    outputs = model.encode([*videos, *images])
    for count, output in zip(facts["video"], outputs, strict=False):
        check(output, io, f"video{count}")
    for i, output in enumerate(outputs[len(videos) :]):
        assert rel_error(output.features, io["dense.features"][i]) < LIMIT
        assert rel_error(output.summary, io["dense.summary"][i]) < LIMIT


def test_dummy_heads_are_zero_rows_and_columns() -> None:
    model, _, _ = case("vllm-dummyheads")
    plain = RadioModel.from_pretrained(DATA / "vllm-dummyheads")
    width, wide = plain.config.attention_width, model.config.attention_width
    assert wide == width + 2 * plain.config.head_dim
    for mine, theirs in zip(model.encoder.layer, plain.encoder.layer, strict=True):
        qkv = mine.attention.qkv.weight.unflatten(0, (3, wide))
        assert torch.equal(qkv[:, :width].flatten(0, 1), theirs.attention.qkv.weight)
        assert not qkv[:, width:].any()
        assert not mine.attention.qkv.bias.unflatten(0, (3, wide))[:, width:].any()
        assert not mine.attention.proj.weight[:, width:].any()
