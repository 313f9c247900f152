"""ViTDet windows as packings: golden files, schedules, mixed and ragged sizes against a plain reading, errors."""

import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from helpers import rel_error
from radio_triton import RadioConfig, RadioModel
from radio_triton.windows import windowed_blocks
from windowed import blocks_of

GOLDEN = Path(__file__).parent / "data" / "torchhub-vitdet"
TINY = {
    "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "patch_size": 4, "position_grid": (8, 8),
    "num_hidden_layers": 5, "vitdet_num_windowed": 1, "vitdet_window_size": 2,
}  # fmt: skip


def tiny(**changes: object) -> RadioModel:
    return RadioModel(RadioConfig(**{**TINY, **changes}), dtype=torch.float64).eval()


@pytest.mark.parametrize("size", [2, 3])
@torch.no_grad()
def test_golden(size: int) -> None:
    io = load_file(GOLDEN / "io.safetensors")
    model = RadioModel.from_pretrained(GOLDEN / "checkpoint.pth.tar", vitdet_window_size=size)
    output = model(io[f"window{size}.pixel_values"])
    assert rel_error(output.summary, io[f"window{size}.summary"]) < 1e-4
    assert rel_error(output.features, io[f"window{size}.features"]) < 1e-4


# radio.md 1.2: depth, num_windowed, num_global -> the global blocks
@pytest.mark.parametrize(
    ("depth", "num_windowed", "num_global", "expected"),
    [
        (32, None, 4, [7, 15, 23, 31]),
        (32, 5, 4, [5, 11, 17, 23, 29, 31]),
        (12, None, 4, [2, 5, 8, 11]),
        (24, None, 4, [5, 11, 17, 23]),
        (40, None, 8, [4, 9, 14, 19, 24, 29, 34, 39]),
        (32, None, 8, [3, 7, 11, 15, 19, 23, 27, 31]),
        (27, None, 4, [5, 11, 17, 23, 26]),
        (5, None, 4, [0, 1, 2, 3, 4]),
        (3, 0, 4, [0, 1, 2]),
    ],
)
def test_schedules(depth: int, num_windowed: int | None, num_global: int, expected: list[int]) -> None:
    config = RadioConfig(
        num_hidden_layers=depth,
        vitdet_window_size=16,
        vitdet_num_windowed=num_windowed,
        vitdet_num_global=num_global,
    )
    assert [i for i, windowed in enumerate(windowed_blocks(config)) if not windowed] == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("radio_v2.5-b", [2, 5, 8, 11]),
        ("c-radio_v4-h", [7, 15, 23, 31]),
        ("c-radio_v4-so400m", [5, 11, 17, 23, 26]),
    ],
)
def test_versions_have_their_schedule(name: str, expected: list[int]) -> None:
    config = RadioConfig.preset(name, vitdet_window_size=16)
    assert [i for i, windowed in enumerate(windowed_blocks(config)) if not windowed] == expected


SIZES = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(grids=SIZES, size=st.integers(1, 4))
def test_mixed_ragged_sizes_equal_a_plain_reading_of_each(grids: list[tuple[int, int]], size: int) -> None:
    torch.manual_seed(0)
    model = tiny(vitdet_window_size=size, vitdet_ragged=True)
    images = [torch.rand(3, 4 * h, 4 * w, dtype=torch.float64) for h, w in grids]
    with torch.no_grad():
        outputs = model.encode(images)
        for image, output in zip(images, outputs, strict=True):
            assert rel_error(output.last_hidden_state, blocks_of(model, image)[-1]) < 1e-12


@torch.no_grad()
def test_dense_equals_packed_and_video() -> None:
    model = tiny()
    x = torch.rand(3, 3, 16, 24, dtype=torch.float64)
    dense = model(x)
    assert rel_error(model(list(x)).last_hidden_state, dense.last_hidden_state.flatten(0, 1)) < 1e-12
    assert rel_error(model.encode([x])[0].features, dense.features) < 1e-12


def test_windows_change_the_result_and_gradients_flow() -> None:
    model = tiny()
    x = torch.rand(1, 3, 16, 16, dtype=torch.float64)
    plain = RadioModel(model.config.replace(vitdet_window_size=None), dtype=torch.float64).eval()
    plain.load_state_dict(model.state_dict())
    assert rel_error(model(x).features, plain(x).features) > 1e-3
    model(x).features.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.encoder.layer[0].mlp.parameters())


def test_a_size_that_does_not_divide_names_the_nearest() -> None:
    model = tiny(vitdet_window_size=3)
    assert model.get_nearest_supported_resolution(20, 31) == (24, 36)
    with pytest.raises(
        ValueError, match=r"20 x 24.*12 = patch size 4 x window 3.*vitdet_ragged=True.*24 x 24"
    ):
        model(torch.rand(1, 3, 20, 24, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"imgs_sizes\[0\] = \(20, 24\) is not a positive multiple of 12"):
        model(torch.rand(30, 48, dtype=torch.float64), imgs_sizes=[(20, 24)])
    with pytest.raises(ValueError, match=r"image_grid_hw\[0\] = \(5, 6\) is not a positive multiple of 3"):
        model(torch.rand(30, 48, dtype=torch.float64), image_grid_hw=[(5, 6)])


def test_unsupported_versions_warn_and_name_the_override() -> None:
    with pytest.warns(UserWarning, match="not trained with windows.*vitdet_supported=True"):
        tiny(vitdet_supported=False)
    assert not RadioConfig.preset("c-radio_v3-l").vitdet_supported
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny()
        tiny(vitdet_supported=False, vitdet_window_size=None)


@pytest.mark.parametrize("field", ["vitdet_window_size", "vitdet_num_global"])
def test_sizes_are_positive(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        RadioConfig(**{field: 0})
