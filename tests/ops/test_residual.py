"""The residual stream: x + lambda * y and LayerNorm against float64 loops over rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from op_checks import LAYOUTS, assert_rounded, laid_out, rand
from radio_triton import ops

op = torch.ops.radio_triton
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
EPS = 1e-6

# dtypes of x, y and lambda: pure, fp32 stream, fp32 lambda, autocast, and a stream narrower than the branch
STREAMS = [
    *((F32, F32, F32), (BF16, BF16, BF16), (F16, F16, F16)),
    *((F32, BF16, BF16), (F32, F16, F16), (F32, BF16, F32), (F32, F32, BF16)),
    *((BF16, BF16, F32), (BF16, F32, F32), (BF16, F16, BF16)),
]
# dtypes of x, of weight and bias, and of the result: pure, fp32 stream, and a stream narrower than its norm
NORMS = [
    *((F32, F32, F32), (BF16, BF16, BF16), (F16, F16, F16)),
    *((F32, BF16, BF16), (F32, F16, F16), (F32, F32, BF16)),
    *((BF16, BF16, F32), (BF16, F32, F32), (BF16, F32, BF16)),
]


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    return "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def branch(rows: int, width: int, dtypes: tuple[torch.dtype, ...], scaled: bool) -> list[Tensor | None]:
    """x, y and lambda, or None for it."""
    x, y, scale = dtypes
    return [
        rand(rows, width, dtype=x),
        rand(rows, width, dtype=y),
        rand(width, dtype=scale) if scaled else None,
    ]


def norm_truth(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """LayerNorm of every row, and the size of the terms that are added up for it."""
    out, size = torch.empty(2, *x.shape, dtype=torch.float64)
    w, b = weight.double(), bias.double()
    for i, row in enumerate(x.double()):
        mean = row.sum() / len(row)
        sigma = ((row - mean).pow(2).sum() / len(row) + eps).sqrt()
        out[i] = (row - mean) / sigma * w + b
        size[i] = (row.abs() + mean.abs()) / sigma * w.abs() + b.abs()
    return out, size


def sum_truth(x: Tensor, y: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """x + scale * y, and the size of its terms."""
    branch = y.double() if scale is None else torch.einsum("tc,c->tc", y.double(), scale.double())
    return x.double() + branch, x.double().abs() + branch.abs()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", NORMS, ids=names)
def test_layer_norm(dtypes: tuple[torch.dtype, ...], layout: str):
    x_dtype, dtype, out = dtypes
    x = laid_out((3 * rand(9, 40) + 2).to(x_dtype), layout)
    weight, bias = rand(40, dtype=dtype), rand(40, dtype=dtype)
    got = op.layer_norm(x, weight, bias, EPS, out)
    assert got.dtype == out
    assert_rounded(got, *norm_truth(x, weight, bias, EPS))


def test_layer_norm_statistics_are_not_those_of_bf16():
    # a mean of 256 has a spacing of 2 in bf16: the variance of +-1 around it would vanish
    x = 256 + 2.0 * torch.tensor([[1.0, -1.0] * 32], dtype=BF16)
    ones, zeros = torch.ones(64, dtype=BF16), torch.zeros(64, dtype=BF16)
    assert torch.equal(op.layer_norm(x, ones, zeros, EPS, BF16), torch.tensor([[1.0, -1.0] * 32], dtype=BF16))


def test_layer_norm_uses_eps_inside_the_root():
    x = torch.tensor([[1.0, -1.0]])
    got = op.layer_norm(x, torch.ones(2), torch.zeros(2), 3.0, F32)
    assert torch.equal(got, torch.tensor([[0.5, -0.5]]))


@pytest.mark.parametrize("scaled", [True, False], ids=["lambda", "no-lambda"])
@pytest.mark.parametrize("dtypes", STREAMS, ids=names)
def test_residual_rounds_once(dtypes: tuple[torch.dtype, ...], scaled: bool):
    x, y, scale = branch(11, 24, dtypes, scaled)
    got = op.layerscale_residual(x, y, scale)
    assert got.dtype == x.dtype
    assert_rounded(got, *sum_truth(x, y, scale))


@pytest.mark.parametrize("scaled", [True, False], ids=["lambda", "no-lambda"])
@pytest.mark.parametrize("dtypes", STREAMS, ids=names)
def test_in_place_has_the_same_bits(dtypes: tuple[torch.dtype, ...], scaled: bool):
    x, y, scale = branch(40, 64, dtypes, scaled)
    norm = (rand(64, dtype=y.dtype), rand(64, dtype=y.dtype), EPS, y.dtype)
    want, normed = op.layerscale_residual_norm(x, y, scale, *norm)
    assert torch.equal(op.layerscale_residual(x, y, scale), want)
    first, second = x.clone(), x.clone()
    assert op.layerscale_residual_(first, y, scale) is None
    assert torch.equal(first, want)
    assert torch.equal(op.layerscale_residual_norm_(second, y, scale, *norm), normed)
    assert torch.equal(second, want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scaled", [True, False], ids=["lambda", "no-lambda"])
@pytest.mark.parametrize(("x_dtype", "dtype"), [(F32, F32), (F32, BF16), (BF16, BF16), (F16, F16)])
def test_residual_norm(x_dtype: torch.dtype, dtype: torch.dtype, scaled: bool, layout: str):
    x, y = laid_out(rand(9, 40, dtype=x_dtype), layout), laid_out(rand(9, 40, dtype=dtype), layout)
    scale = rand(40, dtype=dtype) if scaled else None
    weight, bias = rand(40, dtype=dtype), rand(40, dtype=dtype)
    stream, normed = op.layerscale_residual_norm(x, y, scale, weight, bias, EPS, dtype)
    assert (stream.dtype, normed.dtype) == (x_dtype, dtype)
    assert_rounded(stream, *sum_truth(x, y, scale))
    # what is normalised is what is kept: the rounded sum
    assert_rounded(normed, *norm_truth(stream, weight, bias, EPS))


@pytest.mark.parametrize("layout", ["chunk", "rows"])
def test_in_place_writes_only_its_own_elements(layout: str):
    x, y, scale = laid_out(rand(5, 12), layout), laid_out(rand(5, 12), layout), rand(12)
    want, kept = op.layerscale_residual(x, y, scale), y.clone()
    op.layerscale_residual_(x, y, scale)
    assert torch.equal(x, want) and torch.equal(y, kept)
    assert int(x._base.isnan().sum()) == x._base.numel() - x.numel()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 9), st.integers(1, 33), st.booleans())
def test_any_size_in_float64(rows: int, width: int, scaled: bool):
    x, y = torch.randn(2, rows, width, dtype=torch.float64)
    scale, weight, bias = torch.randn(3, width, dtype=torch.float64)
    scale = scale if scaled else None
    stream, normed = op.layerscale_residual_norm(x, y, scale, weight, bias, EPS, torch.float64)
    assert_rounded(stream, *sum_truth(x, y, scale))
    truth, size = norm_truth(stream, weight, bias, EPS)
    # one channel is its own mean: only eps is left below the fraction line
    assert_rounded(normed, truth, size * width)
    assert torch.equal(op.layer_norm(stream, weight, bias, EPS, torch.float64), normed)


NORMED = ["layerscale_residual_norm", "layerscale_residual_norm_"]


@pytest.mark.parametrize("name", ["layerscale_residual", "layerscale_residual_", *NORMED])
def test_residual_refuses_other_shapes(name: str):
    norm = (torch.ones(4), torch.ones(4), EPS, F32) if "norm" in name else ()
    call = getattr(op, name)
    with pytest.raises(ValueError, match=r"x and y \(T, C\) on one device, got \(3, 4\) on cpu and \(2, 4\)"):
        call(torch.ones(3, 4), torch.ones(2, 4), None, *norm)
    with pytest.raises(ValueError, match=r"got \(1, 3, 4\) on cpu"):
        call(torch.ones(1, 3, 4), torch.ones(1, 3, 4), None, *norm)
    with pytest.raises(ValueError, match=r"needs lambda \(4,\), got \(1,\)"):
        call(torch.ones(3, 4), torch.ones(3, 4), torch.ones(1), *norm)
    with pytest.raises(ValueError, match=r"got \(3, 4\) on cpu and \(3, 4\) on meta"):
        call(torch.ones(3, 4), torch.ones(3, 4, device="meta"), None, *norm)


@pytest.mark.parametrize("name", ["layer_norm", *NORMED])
def test_norm_refuses_other_shapes(name: str):
    x = torch.ones(3, 4)
    stream = (x,) if name == "layer_norm" else (x, x, None)
    with pytest.raises(ValueError, match=r"weight and bias \(C,\), got \(3, 4\), \(5,\) and \(4,\)"):
        getattr(op, name)(*stream, torch.ones(5), torch.ones(4), EPS, F32)
    with pytest.raises(ValueError, match=r"got \(3, 4\), \(4,\) and \(1,\)"):
        getattr(op, name)(*stream, torch.ones(4), torch.ones(1), EPS, F32)


@pytest.mark.parametrize("norm", [None, nn.LayerNorm(8, eps=0.5)], ids=["alone", "norm"])
def test_layers_overwrite_only_what_needs_no_gradient(norm: nn.LayerNorm | None):
    x, y = rand(3, 8), rand(3, 8)
    stream, normed = ops.layerscale_residual(x.clone(), y.clone().requires_grad_(), None, norm, F32)
    assert stream.requires_grad
    assert torch.equal(stream, x + y)
    assert torch.equal(normed, stream if norm is None else ops.layer_norm(stream, norm, F32))
    with torch.no_grad():
        kept, again = ops.layerscale_residual(x, y, None, norm, F32)
    assert kept is x and torch.equal(kept, stream) and torch.equal(again, normed)
