"""What the tests of the ops share: the same values in other strides, and the distance to a float64 truth."""

import torch
from torch import Tensor

LAYOUTS = ("contiguous", "chunk", "rows", "transposed")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal values, rounded to `dtype`."""
    return torch.randn(shape).to(dtype)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values of x (T, C) in one of LAYOUTS; memory between its elements is NaN."""
    count, width = x.shape
    if layout == "contiguous":
        return x.clone(memory_format=torch.contiguous_format)
    if layout == "transposed":
        return x.t().clone(memory_format=torch.contiguous_format).t()
    if layout == "rows":
        view = torch.full((2 * count, width), torch.nan, dtype=x.dtype)[::2]
    else:
        view = torch.full((count, 3 * width), torch.nan, dtype=x.dtype)[:, width : 2 * width]
    return view.copy_(x)


def assert_rounded(got: Tensor, truth: Tensor, size: Tensor | float, roundings: int = 1) -> None:
    """`got` is the float64 `truth`, but for so many roundings to its dtype and the error of its terms.

    Those are fp32 (float64 where `got` is) and of magnitude `size`.
    """
    assert got.shape == truth.shape, f"got {tuple(got.shape)}, want {tuple(truth.shape)}"
    own, working = torch.finfo(got.dtype), torch.finfo(torch.promote_types(got.dtype, torch.float32))
    # eps / 2 is one rounding of a normal number; subnormal numbers are spaced smallest_normal * eps
    allowed = roundings * (own.eps / 2 * truth.abs() + own.smallest_normal * own.eps) + 8 * working.eps * size
    excess = (got.double() - truth).abs() - allowed
    # a NaN compares false
    wrong = int((~(excess <= 0)).sum())
    assert wrong == 0, f"{wrong} of {excess.numel()} elements are wrong, the worst by {excess.max()} too much"
