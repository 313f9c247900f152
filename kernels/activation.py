"""The activations of the MLP: exact GELU, and SwiGLU.

    gelu(x)   = x * Phi(x) = x / 2 * (1 + erf(x / sqrt 2))     not the tanh form, which is off by up to 4.7e-4
    swiglu(x) = silu(x[:, :I]) * x[:, I:]                      silu(a) = a / (1 + exp(-a))

Shapes: x (T, I) for gelu, (T, 2 I) for swiglu, whose result is (T, I); in place it is the first half of each row.
dtypes: bf16, fp16, fp32; computed in fp32, one rounding at the end.
Cost: gelu reads and writes T * I elements; swiglu reads 2 T * I and writes T * I.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._common import define_differentiable, define_inplace, require_floating


def gelu_eager(x: Tensor) -> Tensor:
    """Exact GELU."""
    return F.gelu(x).contiguous()


def gelu_inplace_eager(x: Tensor) -> None:
    """Exact GELU, written over x."""
    torch.ops.aten.gelu_(x)


def swiglu_eager(x: Tensor) -> Tensor:
    """silu of the first half of each row, times the second half."""
    gate, up = x.chunk(2, dim=-1)
    wide = torch.promote_types(x.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(x.dtype).contiguous()


def swiglu_inplace_eager(x: Tensor) -> None:
    """The same, written over the first half of each row."""
    x.chunk(2, dim=-1)[0].copy_(swiglu_eager(x))


def _check_gelu(x: Tensor) -> None:
    require_floating("gelu", x)


def _check_swiglu(x: Tensor) -> None:
    require_floating("swiglu", x)
    if x.ndim != 2 or x.shape[1] % 2:
        raise ValueError(f"swiglu needs x (T, 2 I), got {tuple(x.shape)}")


def _contiguous_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


define_differentiable("gelu(Tensor x) -> Tensor", gelu_eager, _contiguous_like, _check_gelu)
define_inplace("gelu_(Tensor(a!) x) -> ()", gelu_inplace_eager, lambda x: None, _check_gelu)
define_differentiable(
    "swiglu(Tensor x) -> Tensor", swiglu_eager, lambda x: x.new_empty(x.shape[0], x.shape[1] // 2), _check_swiglu
)
define_inplace("swiglu_(Tensor(a!) x) -> ()", swiglu_inplace_eager, lambda x: None, _check_swiglu)
