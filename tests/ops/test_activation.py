"""gelu and swiglu against erf and exp, one element at a time."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from op_checks import DTYPES, LAYOUTS, assert_rounded, laid_out, rand
from radio_triton import ops

op = torch.ops.radio_triton


def gelu_truth(x: Tensor) -> Tensor:
    values = [v / 2 * math.erfc(-v / math.sqrt(2)) for v in x.double().flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).view(x.shape)


def swiglu_truth(x: Tensor) -> Tensor:
    width = x.shape[1] // 2
    values = x.double().tolist()
    rows = [[row[i] / (1 + math.exp(-row[i])) * row[width + i] for i in range(width)] for row in values]
    return torch.tensor(rows, dtype=torch.float64).view(len(x), width)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu(dtype: torch.dtype, layout: str):
    x = laid_out(4 * rand(13, 24, dtype=dtype), layout)
    got = op.gelu(x)
    assert got.dtype == dtype
    assert_rounded(got, gelu_truth(x), x.double().abs())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype, layout: str):
    x = laid_out(4 * rand(13, 24, dtype=dtype), layout)
    got, want = op.swiglu(x), swiglu_truth(x)
    assert got.dtype == dtype
    assert_rounded(got, want, want.abs())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_in_place_has_the_same_bits_and_writes_nothing_else(name: str, dtype: torch.dtype, layout: str):
    x = laid_out(rand(7, 20, dtype=dtype), layout)
    before = x.clone()
    want = getattr(op, name)(x)
    assert getattr(op, f"{name}_")(x) is None
    width = want.shape[1]
    assert torch.equal(x[:, :width], want)
    assert torch.equal(x[:, width:], before[:, width:])
    if layout in ("chunk", "rows"):
        assert int(x._base.isnan().sum()) == x._base.numel() - x.numel()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 9), st.integers(1, 17))
def test_any_size_in_float64(rows: int, width: int):
    x = torch.randn(rows, 2 * width, dtype=torch.float64)
    assert_rounded(op.gelu(x), gelu_truth(x), x.abs())
    assert_rounded(op.swiglu(x), swiglu_truth(x), swiglu_truth(x).abs())


def test_gelu_is_the_erf_form():
    x = torch.linspace(-6, 6, 1201)
    truth = gelu_truth(x)
    assert (op.gelu(x) - truth).abs().max() < 1e-6
    # the tanh form is what this test is there to see
    assert (torch.nn.functional.gelu(x, approximate="tanh") - truth).abs().max() > 4e-4


def test_gelu_at_the_ends():
    got = op.gelu(torch.tensor([-30.0, -0.0, 0.0, 30.0, torch.nan]))
    assert got[:4].tolist() == [0, 0, 0, 30]
    assert got[4].isnan()


def test_swiglu_gates_with_the_first_half():
    silu_10, silu_2 = 10 / (1 + math.exp(-10)), 2 / (1 + math.exp(-2))
    assert op.swiglu(torch.tensor([[10.0, 2.0]])).item() == pytest.approx(2 * silu_10)
    assert op.swiglu(torch.tensor([[2.0, 10.0]])).item() == pytest.approx(10 * silu_2)


def test_swiglu_rounds_once():
    # silu(a) rounded to bf16 before the product moves more than half of these
    x = rand(64, 256, dtype=torch.bfloat16)
    want = swiglu_truth(x).bfloat16()
    assert (op.swiglu(x) != want).double().mean() < 0.01


@pytest.mark.parametrize("shape", [(4, 5), (8,), (2, 3, 4)])
@pytest.mark.parametrize("name", ["swiglu", "swiglu_"])
def test_swiglu_refuses_other_shapes(name: str, shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=re.escape(f"swiglu needs x (T, 2 I), got {shape}")):
        getattr(op, name)(torch.zeros(shape))


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_layers_overwrite_only_what_needs_no_gradient(name: str):
    x = rand(3, 8)
    want = getattr(op, name)(x)
    leaf = x.clone().requires_grad_()
    got = getattr(ops, name)(leaf)
    assert got.requires_grad
    assert torch.equal(leaf, x) and torch.equal(got, want)
    with torch.no_grad():
        kept = getattr(ops, name)(leaf)
    assert kept.data_ptr() == leaf.data_ptr() and torch.equal(kept, want)
