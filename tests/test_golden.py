"""The model against files made by running the public reference and the vLLM module on random weights (fp32)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import rel_error
from safetensors.torch import load_file
from torch import Tensor

from radio_triton import RadioModel, RadioOutput

DATA = Path(__file__).parent / "data"
LIMIT = 1e-4
LEGACY = {
    "legacy-vit": ["64x64", "64x96", "96x32", "128x128", "160x144"],
    "legacy-layerscale": ["64x96"],
    "legacy-mlpnorm": ["64x96"],
}
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
    images, videos = list(io["dense.pixel_values"]), [io[f"video{count}.pixel_values"] for count in facts["video"]]
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
