"""The gelu and swiglu kernels: on a CUDA device where there is one, else in Triton's interpreter."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_checks import BF16, DEVICE, FP16, FP32, Traffic, assert_as_good_as, interpret, randn
from op_checks import laid_out
from radio_triton import ops  # noqa: F401  (a clear error where the kernels cannot be imported)
from radio_triton.kernels import activation

# numpy says so wherever NaN and Inf are the point of a test
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning"
)
DTYPES = [BF16, FP16, FP32]
ROWS = ["contiguous", "chunk", "rows"]
FORMS = {
    "gelu": (activation.gelu_triton, activation.gelu_inplace_triton, activation.gelu_eager),
    "swiglu": (activation.swiglu_triton, activation.swiglu_inplace_triton, activation.swiglu_eager),
}


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(activation._kernel, monkeypatch)


@pytest.mark.parametrize("layout", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_parity(name: str, dtype: torch.dtype, layout: str) -> None:
    triton_form, _, eager = FORMS[name]
    for rows, width in ((1, 32), (3, 1024), (2, 1544), (5, 4096), (4, 40), (3, 2)):
        x = laid_out(3 * randn(rows, width, dtype=dtype), layout).to(DEVICE)
        got = triton_form(x)
        assert got.is_contiguous()
        assert_as_good_as(got, eager(x), eager(x.double()))


@pytest.mark.parametrize("layout", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_in_place_has_the_same_bits_and_writes_nothing_else(
    name: str, dtype: torch.dtype, layout: str
) -> None:
    triton_form, inplace, _ = FORMS[name]
    x = laid_out(randn(3, 1300, dtype=dtype), layout)
    before, want = x.clone(), triton_form(x)
    assert inplace(x) is None
    width = want.shape[1]
    assert torch.equal(x[:, :width], want) and torch.equal(x[:, width:], before[:, width:])
    if layout != "contiguous":
        assert int(x._base.isnan().sum()) == x._base.numel() - x.numel()


@pytest.mark.parametrize("shape", [(8,), (2, 3, 40), (1, 1, 7)])
def test_gelu_of_other_shapes(shape: tuple[int, ...]) -> None:
    x = randn(*shape)
    got = activation.gelu_triton(x)
    assert got.shape == shape
    assert_as_good_as(got, activation.gelu_eager(x), activation.gelu_eager(x.double()))


@pytest.mark.parametrize("name", FORMS)
def test_nan_in_a_neighbour_changes_nothing(name: str) -> None:
    x = randn(3, 48, dtype=BF16)
    clean = FORMS[name][0](x)
    x[1] = math.nan
    got = FORMS[name][0](x)
    assert got[1].isnan().all() and torch.equal(got[::2], clean[::2])


def every_value(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All 65,536 of a 16-bit type, and their gelu in float64."""
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).view(64, 1024)
    wide = x.double()
    return x.to(DEVICE), wide / 2 * torch.special.erfc(-wide / math.sqrt(2))


def missed(got: Tensor, truth: Tensor, dtype: torch.dtype) -> Tensor:
    """Which finite inputs have a result that is not the rounded truth."""
    return (got.cpu() != truth.to(dtype)) & truth.isfinite()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gelu_of_every_16_bit_value(dtype: torch.dtype) -> None:
    x, truth = every_value(dtype)
    got, finite = activation.gelu_triton(x), x.isfinite().cpu()
    eager = activation.gelu_eager(x)
    assert got[finite].isfinite().all() and got[x.isnan()].isnan().all()
    assert got[x == math.inf].item() == math.inf
    assert_as_good_as(got[finite], eager[finite], truth[finite])
    # PyTorch's own form misses more
    assert missed(got, truth, dtype).sum() <= missed(eager, truth, dtype).sum()
    bad = missed(got, truth, dtype)
    # beyond one step of the type only where the result is next to nothing
    step = truth.abs().clamp(min=2e-4) * torch.finfo(dtype).eps
    assert bool(((got.cpu().double() - truth).abs() <= step)[finite].all())
    if DEVICE == "cpu":
        # what the docstring says; a GPU's erf may differ in the last place
        percent = 100 * bad[finite].double().mean()
        assert percent == pytest.approx({BF16: 0.42, FP16: 0.52}[dtype], abs=0.005)


@pytest.mark.skipif(DEVICE == "cuda", reason="about figures that are those of the interpreter")
def test_why_bf16_takes_the_cheap_form_and_fp16_does_not() -> None:
    def run(x: Tensor, cheap: bool) -> Tensor:
        out = torch.full_like(x, math.nan)
        width = x.shape[1]
        activation._kernel[(len(x),)](x, width, out, width, width, GATED=False, CHEAP=cheap, BLOCK=1024)
        return out

    for dtype, cheap, percent in ((BF16, False, 0.30), (FP16, True, 1.08)):
        x, truth = every_value(dtype)
        share = missed(run(x, cheap), truth, dtype)[x.isfinite()].double().mean()
        assert 100 * share == pytest.approx(percent, abs=0.005)
    x = torch.linspace(-8, 8, 160_000).view(160, 1000)
    truth = activation.gelu_eager(x.double())
    for cheap, error in ((True, 7.1e-7), (False, 4.5e-7)):
        assert (run(x, cheap) - truth).abs().max() <= error


def test_the_tanh_form_would_be_seen() -> None:
    x, truth = every_value(BF16)
    tanh = torch.nn.functional.gelu(x.float(), approximate="tanh").to(BF16)
    ordinary = (x.abs() > 0.1).cpu() & (x.abs() < 4).cpu()
    wrong = [missed(y, truth, BF16)[ordinary].sum() for y in (tanh, activation.gelu_triton(x))]
    assert wrong[0] > 10 * wrong[1]


class Launches(list):
    """Stands in for the kernel: keeps the grid of each launch."""

    def __getitem__(self, grid: Any) -> Callable:
        return lambda *args, **options: self.append(grid)


def test_nothing_is_launched_for_nothing_and_grids_may_be_huge(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    monkeypatch.setattr(activation, "_kernel", launches)
    assert activation.gelu_triton(randn(0, 64)).shape == (0, 64)
    assert activation.swiglu_triton(randn(0, 64)).shape == (0, 32)
    activation.swiglu_inplace_triton(randn(0, 64))
    assert not launches
    activation.gelu_inplace_triton(torch.zeros(1, 5120, device=DEVICE).expand(262_784, -1))
    assert launches == [(262_784 * 5,)]


def test_a_strided_last_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match=r"contiguous last dimension.*x \(8, 6\) has strides \(1, 8\)"):
        activation.swiglu_triton(randn(6, 8).T)


@pytest.mark.skipif(DEVICE == "cuda", reason="masks are counted in the interpreter")
@pytest.mark.parametrize("width", [1024, 1500])
def test_bytes_moved(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic, x = Traffic(monkeypatch), randn(3, width, dtype=BF16)
    activation.gelu_inplace_triton(x)
    assert traffic.loaded(x) == {1} == traffic.stored(x)
    assert traffic.loads.total() == x.numel() == traffic.stores.total()
    traffic, x = Traffic(monkeypatch), randn(3, 2 * width)
    out = activation.swiglu_triton(x)
    assert traffic.loaded(x) == {1} == traffic.stored(out)
    assert (traffic.loads.total(), traffic.stores.total()) == (x.numel(), out.numel())
