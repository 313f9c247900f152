"""The residual and LayerNorm kernel: on a CUDA device where there is one, else in Triton's interpreter."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import rel_error
from kernel_checks import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    Traffic,
    assert_as_good_as,
    doubled,
    interpret,
    names,
    randn,
)
from op_checks import laid_out
from radio_triton import ops  # noqa: F401  (a clear error where the kernels cannot be imported)
from radio_triton.kernels import residual

# numpy says so wherever NaN is the point of a test
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
EPS = 1e-6
# dtypes of x, of y and lambda, of weight and bias, of the norm: pure, fp32 stream, autocast, fp32 parameters, mixed
STREAMS = [
    *((BF16, BF16, BF16, BF16), (FP16, FP16, FP16, FP16), (FP32, FP32, FP32, FP32)),
    *((FP32, BF16, BF16, BF16), (FP32, FP16, FP16, FP16), (FP32, BF16, FP32, BF16), (FP32, FP32, BF16, FP16)),
    *((BF16, BF16, FP32, FP32), (BF16, FP32, FP32, BF16), (BF16, FP16, FP32, FP16), (FP16, BF16, BF16, FP32)),
]
SIZES = [(7, 40), (1, 32), (3, 1280)]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(residual._kernel, monkeypatch)


def branch(
    rows: int, width: int, dtypes: tuple[torch.dtype, ...], layout: str = "contiguous"
) -> tuple[list[Tensor], tuple]:
    """x, y and lambda, then weight, bias, eps and dtype of the norm."""
    x, y, w, out = dtypes
    stream = [laid_out(randn(rows, width, dtype=dtype), layout).to(DEVICE) for dtype in (x, y)]
    weight, bias = 1 + 0.2 * randn(width).to(w), randn(width, dtype=w)
    return [*stream, randn(width, dtype=y)], (weight.to(w), bias, EPS, out)


def normed_truth(kept: Tensor, norm: tuple) -> Tensor:
    return residual.layer_norm_eager(kept.double(), *(doubled(x) for x in norm[:3]), torch.float64)


def check(stream: list[Tensor | None], norm: tuple) -> None:
    """Sum and norm against fp64; what is normalised is what is kept, the rounded sum."""
    kept, normed = residual.layerscale_residual_norm_triton(*stream, *norm)
    eager_kept, eager_normed = residual.layerscale_residual_norm_eager(*stream, *norm)
    assert kept.is_contiguous() and normed.is_contiguous() and normed.dtype == norm[3]
    truth = residual.layerscale_residual_eager(*(doubled(x) for x in stream))
    assert_as_good_as(kept, eager_kept, truth)
    allowed = 2 * rel_error(eager_normed, normed_truth(eager_kept, norm))
    assert rel_error(normed, normed_truth(kept, norm)) <= allowed


@pytest.mark.parametrize("scaled", [True, False], ids=["lambda", "no-lambda"])
@pytest.mark.parametrize("dtypes", STREAMS, ids=names)
def test_parity(dtypes: tuple[torch.dtype, ...], scaled: bool) -> None:
    for rows, width in SIZES:
        stream, norm = branch(rows, width, dtypes)
        check(stream if scaled else [*stream[:2], None], norm)


@pytest.mark.parametrize("width", [32, 33, 100, 768, 1152, 1536, 4096])
def test_widths(width: int) -> None:
    for dtypes in (STREAMS[0], STREAMS[3]):
        stream, norm = branch(2, width, dtypes)
        check(stream, norm)


@pytest.mark.parametrize("dtypes", STREAMS, ids=names)
def test_layer_norm_alone(dtypes: tuple[torch.dtype, ...]) -> None:
    for rows, width in SIZES:
        (x, *_), norm = branch(rows, width, dtypes)
        x = 3 * x + 2
        got, eager = residual.layer_norm_triton(x, *norm), residual.layer_norm_eager(x, *norm)
        assert_as_good_as(got, eager, normed_truth(x, norm))


@pytest.mark.parametrize("layout", ["contiguous", "chunk", "rows"])
@pytest.mark.parametrize("dtypes", STREAMS[::3], ids=names)
def test_layouts_and_in_place(dtypes: tuple[torch.dtype, ...], layout: str) -> None:
    stream, norm = branch(5, 72, dtypes, layout)
    x, y, scale = stream
    check(stream, norm)
    want, normed = residual.layerscale_residual_norm_triton(*stream, *norm)
    assert torch.equal(residual.layerscale_residual_triton(*stream), want)
    for call in (
        lambda x: residual.layerscale_residual_inplace_triton(x, y, scale),
        lambda x: residual.layerscale_residual_norm_inplace_triton(x, y, scale, *norm),
    ):
        again = laid_out(x, layout).to(DEVICE)
        result = call(again)
        assert torch.equal(again, want)
        assert result is None or torch.equal(result, normed)
        if layout != "contiguous":
            # nothing between its elements was written
            assert int(again._base.isnan().sum()) == again._base.numel() - again.numel()


def test_statistics_are_not_those_of_bf16() -> None:
    # a mean of 256 has a spacing of 2 in bf16: the variance of +-1 around it would vanish
    x = 256 + 2.0 * torch.tensor([[1.0, -1.0] * 32], dtype=BF16, device=DEVICE)
    ones, zeros = torch.ones(64, dtype=BF16, device=DEVICE), torch.zeros(64, dtype=BF16, device=DEVICE)
    assert torch.equal(residual.layer_norm_triton(x, ones, zeros, EPS, BF16), (x - 256) / 2)
    # a mean far larger than the deviation, in fp32: E[x^2] - E[x]^2 would be all rounding
    x = 1e4 + randn(2, 768)
    norm = (torch.ones(768, device=DEVICE), torch.zeros(768, device=DEVICE), EPS, FP32)
    assert_as_good_as(
        residual.layer_norm_triton(x, *norm), residual.layer_norm_eager(x, *norm), normed_truth(x, norm)
    )


def test_nan_in_a_neighbour_changes_nothing() -> None:
    stream, norm = branch(3, 100, STREAMS[0])
    clean = residual.layerscale_residual_norm_triton(*stream, *norm)
    stream[0][1] = math.nan
    got = residual.layerscale_residual_norm_triton(*stream, *norm)
    for mine, want in zip(got, clean, strict=True):
        assert mine[1].isnan().all() and torch.equal(mine[::2], want[::2])


class Launches(list):
    """Stands in for the kernel: keeps the grid of each launch."""

    def __getitem__(self, grid: Any) -> Callable:
        return lambda *args, **options: self.append(grid)


def test_nothing_is_launched_for_nothing_and_grids_may_be_huge(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    monkeypatch.setattr(residual, "_kernel", launches)
    stream, norm = branch(0, 64, STREAMS[0])
    assert residual.layer_norm_triton(stream[0], *norm).shape == (0, 64)
    assert residual.layerscale_residual_triton(*stream).shape == (0, 64)
    assert [x.shape for x in residual.layerscale_residual_norm_triton(*stream, *norm)] == [(0, 64)] * 2
    assert not launches
    x = torch.zeros(1, 1280, dtype=BF16, device=DEVICE).expand(262_784, -1)
    residual.layerscale_residual_inplace_triton(x, x, None)
    assert launches == [(262_784,)]


def test_a_strided_last_dimension_is_refused() -> None:
    x = randn(8, 8).T
    with pytest.raises(ValueError, match=r"contiguous last dimension.*x \(8, 8\) has strides \(1, 8\)"):
        residual.layerscale_residual_triton(x, x, None)


@pytest.mark.skipif(DEVICE == "cuda", reason="masks are counted in the interpreter")
@pytest.mark.parametrize("dtypes", [STREAMS[0], STREAMS[3]], ids=names)
@pytest.mark.parametrize("width", [128, 100])
def test_bytes_moved(width: int, dtypes: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    (x, y, scale), norm = branch(3, width, dtypes)
    rows = 3 * width
    traffic = Traffic(monkeypatch)
    normed = residual.layerscale_residual_norm_inplace_triton(x, y, scale, *norm)
    # four streams, each element once, and the three vectors once a row
    assert traffic.loaded(x) == traffic.loaded(y) == traffic.stored(x) == traffic.stored(normed) == {1}
    assert traffic.loaded(scale) == traffic.loaded(norm[0]) == traffic.loaded(norm[1]) == {3}
    assert (traffic.loads.total(), traffic.stores.total()) == (5 * rows, 2 * rows)
    traffic = Traffic(monkeypatch)
    out = residual.layerscale_residual_triton(x, y, None)
    assert traffic.loaded(x) == traffic.loaded(y) == traffic.stored(out) == {1}
    assert (traffic.loads.total(), traffic.stores.total()) == (2 * rows, rows)
    traffic = Traffic(monkeypatch)
    normed = residual.layer_norm_triton(x, *norm)
    assert traffic.loaded(x) == traffic.stored(normed) == {1}
    assert (traffic.loads.total(), traffic.stores.total()) == (3 * rows, rows)
