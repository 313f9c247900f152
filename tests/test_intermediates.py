"""forward_intermediates: golden files, every call form, windows, the caller's order, and what bad arguments get."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers import rel_error
from radio_triton import RadioModel
from test_windows import tiny
from windowed import blocks_of

GOLDEN = Path(__file__).parent / "data" / "torchhub-intermediates"
LIMIT = 1e-4


@pytest.fixture(scope="module")
def golden() -> tuple[RadioModel, dict[str, torch.Tensor]]:
    model = RadioModel.from_pretrained(GOLDEN / "checkpoint.pth.tar")
    return model, load_file(GOLDEN / "io.safetensors")


@pytest.mark.parametrize("aggregation", ["sparse", "dense"])
@pytest.mark.parametrize("scheme", ["none", "post-alpha", "pre-alpha"])
@torch.no_grad()
def test_golden(golden: tuple[RadioModel, dict], aggregation: str, scheme: str) -> None:
    model, io = golden
    final, found = model.forward_intermediates(
        io["pixel_values"],
        [1, 3, 5],
        True,
        output_fmt="NLC",
        aggregation=aggregation,
        norm_alpha_scheme=scheme,
    )
    for block, output in zip((3, 5), found[1:], strict=True):
        assert rel_error(output.features, io[f"{aggregation}.{scheme}.{block}.features"]) < LIMIT
        assert rel_error(output.summary, io[f"{aggregation}.{scheme}.{block}.summary"]) < LIMIT
    assert rel_error(final.features, io["features"]) < LIMIT


@pytest.mark.parametrize("aggregation", ["sparse", "dense"])
@torch.no_grad()
def test_golden_in_bf16(aggregation: str) -> None:
    """The normalizer's statistics stay fp32 beside a bf16 stream."""
    io = load_file(GOLDEN / "io.safetensors")
    model = RadioModel.from_pretrained(GOLDEN / "checkpoint.pth.tar", dtype=torch.bfloat16)
    options = {"output_fmt": "NLC", "aggregation": aggregation, "norm_alpha_scheme": "pre-alpha"}
    found = model.forward_intermediates(io["pixel_values"], [1, 3, 5], intermediates_only=True, **options)
    for block, got in zip((3, 5), found[1:], strict=True):
        assert got.dtype == torch.bfloat16
        # a dozen roundings of 2^-9 each
        assert rel_error(got, io[f"{aggregation}.pre-alpha.{block}.features"]) < 12 * 2**-9


@torch.no_grad()
def test_golden_last_blocks_and_negative_indices(golden: tuple[RadioModel, dict]) -> None:
    model, io = golden
    maps = model.forward_intermediates(io["pixel_values"], 2, intermediates_only=True)
    for i, found in enumerate(maps):
        assert found.is_contiguous()
        assert rel_error(found, io[f"last2.NCHW.{i}"]) < LIMIT
    options = {"stop_early": True, "output_fmt": "NLC", "intermediates_only": True}
    (found,) = model.forward_intermediates(io["pixel_values"], [-3], **options)
    assert rel_error(found, io["neg3.NLC"]) < LIMIT


@pytest.mark.parametrize("aggregation", ["sparse", "dense"])
@torch.no_grad()
def test_windows_and_mixed_sizes_equal_a_plain_reading(aggregation: str) -> None:
    """The reference crashes here, or gives windows for images."""
    model = tiny(vitdet_ragged=True, vitdet_window_size=3)
    images = [torch.rand(3, 16, 24, dtype=torch.float64), torch.rand(3, 12, 12, dtype=torch.float64)]
    prefix = model.config.num_prefix_tokens
    wanted = [4, 0, 2, 2]
    final, maps = model.forward_intermediates(images, wanted, aggregation=aggregation)
    streams = [blocks_of(model, image) for image in images]
    groups = {0: [0], 2: [1, 2], 4: [3, 4]} if aggregation == "dense" else {0: [0], 2: [2], 4: [4]}
    for block, per_image in zip(wanted, maps, strict=True):
        for image, stream, found in zip(images, streams, per_image, strict=True):
            mean = torch.stack([stream[j] for j in groups[block]]).mean(0)
            want = mean[prefix:].T.reshape(16, image.shape[1] // 4, image.shape[2] // 4)
            assert rel_error(found, want) < 1e-12
    assert torch.equal(final.features, model(images).features)


@torch.no_grad()
def test_packed_equals_alone_and_forms() -> None:
    model = tiny(vitdet_window_size=None)
    images = [torch.rand(3, 8, 12, dtype=torch.float64), torch.rand(3, 16, 4, dtype=torch.float64)]
    packed = model.forward_intermediates(images, [1, 3], intermediates_only=True, output_fmt="NLC")
    alone = [
        model.forward_intermediates(x[None], [1, 3], intermediates_only=True, output_fmt="NLC")
        for x in images
    ]
    for i in range(2):
        assert rel_error(packed[i], torch.cat([each[i][0] for each in alone])) < 1e-12
    outputs = model.forward_intermediates(images[0][None], [1], True, intermediates_only=True)
    assert outputs[0].features.shape == (1, 16, 2, 3)
    assert outputs[0].summary.shape == (1, 32)
    assert outputs[0].last_hidden_state.shape == (1, 16, 16)
    assert torch.equal(outputs[0].last_hidden_state[:, :2].flatten(1), outputs[0].summary)


@torch.no_grad()
def test_final_norm() -> None:
    model = tiny(vitdet_window_size=None, final_norm=True)
    model.encoder.norm.weight.uniform_(0.5, 2)
    x = torch.rand(1, 3, 8, 8, dtype=torch.float64)
    final, (raw,) = model.forward_intermediates(x, [-1], output_fmt="NLC")
    _, (normed,) = model.forward_intermediates(x, [-1], norm=True, output_fmt="NLC")
    assert torch.equal(final.features, model(x).features)
    assert torch.equal(normed, final.features)
    assert rel_error(raw, normed) > 0.1
    assert rel_error(model.encoder.norm(raw), normed) < 1e-12


@pytest.mark.parametrize("options", [{"stop_early": True}, {"intermediates_only": True}])
@torch.no_grad()
def test_no_block_is_computed_after_the_last_needed(options: dict[str, Any]) -> None:
    model = tiny(vitdet_window_size=None)
    ran: list[int] = []
    for i, layer in enumerate(model.encoder.layer):
        layer.register_forward_hook(lambda *_, i=i: ran.append(i))
    model.forward_intermediates(torch.rand(1, 3, 8, 8, dtype=torch.float64), [2, 0], **options)
    assert ran == [0, 1, 2]


def test_gradients_flow_and_nothing_is_overwritten() -> None:
    model = tiny(vitdet_window_size=None)
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    final, maps = model.forward_intermediates(x)
    with torch.no_grad():
        frozen, frozen_maps = model.forward_intermediates(x)
    assert len(maps) == 5
    assert all(torch.equal(a, b) for a, b in zip(maps, frozen_maps, strict=True))
    assert torch.equal(final.features, frozen.features)
    maps[1].square().sum().backward()
    assert model.encoder.layer[1].mlp.fc1.weight.grad.abs().sum() > 0
    assert model.encoder.layer[2].mlp.fc1.weight.grad is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"indices": [5]}, "no block 5: the model has 5, 0 to 4 or -5 to -1"),
        ({"indices": [-6]}, "no block -6"),
        ({"indices": ["1"]}, "no block '1'"),
        ({"indices": []}, "indices is empty"),
        ({"indices": 0}, "indices=0 means the last 0 blocks: give 1 to 5"),
        ({"indices": 6}, "indices=6"),
        ({"output_fmt": "NHWC"}, "output_fmt is one of NCHW, NLC, got 'NHWC'"),
        ({"aggregation": "mean"}, "aggregation is one of sparse, dense"),
        ({"norm_alpha_scheme": "alpha"}, "norm_alpha_scheme is one of"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tiny().forward_intermediates(torch.rand(1, 3, 8, 8, dtype=torch.float64), **arguments)


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match=r"unknown arguments \['layers'\]"):
        tiny().forward_intermediates(torch.rand(1, 3, 8, 8, dtype=torch.float64), layers=3)
