"""The residual stream: add a scaled branch, and normalise for the next branch in the same pass.

    x <- x + lambda * y                    layerscale_residual          lambda is optional
    n  = LayerNorm(x) * w + b              layerscale_residual_norm     of the updated x, in a dtype of its own
    n  = LayerNorm(x) * w + b              layer_norm                   of x as it is: before the first branch

Shapes: x, y, n (T, C); lambda, w, b (C,). dtypes: x in fp32 or in the model's dtype, y in the model's (or autocast's) dtype.
The sum is taken in fp32 and rounded once to the dtype of x; the norm reads the rounded x, so that what is normalised is
what is kept.
Cost: x and y read, x and n written: 4 streams of T * C elements, where separate kernels take 8.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._common import define_differentiable, define_inplace, require_floating


def layer_norm_eager(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """LayerNorm over the last dimension, statistics in at least fp32, result in `dtype`."""
    # torch keeps the statistics of bf16 and fp16 in fp32 itself, where input and weights share a dtype
    if not x.dtype == weight.dtype == dtype:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), eps).to(dtype)


def layerscale_residual_eager(x: Tensor, y: Tensor, scale: Tensor | None) -> Tensor:
    """x + scale * y in the dtype of x."""
    if scale is None:
        total = x + y
    elif x.dtype == y.dtype == scale.dtype == torch.float32 or x.dtype == torch.float64:
        total = torch.addcmul(x, y, scale)
    else:
        total = torch.addcmul(x.float(), y.float(), scale.float())
    return total.to(x.dtype).contiguous()


def layerscale_residual_inplace_eager(x: Tensor, y: Tensor, scale: Tensor | None) -> None:
    """The same, written over x."""
    if scale is None:
        x.add_(y)
    elif x.dtype == y.dtype == scale.dtype == torch.float32 or x.dtype == torch.float64:
        x.addcmul_(y, scale)
    else:
        x.copy_(x.float().addcmul_(y.float(), scale.float()))


def layerscale_residual_norm_eager(
    x: Tensor, y: Tensor, scale: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The updated x and its LayerNorm."""
    x = layerscale_residual_eager(x, y, scale)
    return x, layer_norm_eager(x, weight, bias, eps, dtype)


def layerscale_residual_norm_inplace_eager(
    x: Tensor, y: Tensor, scale: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """x is overwritten; the result is its LayerNorm."""
    layerscale_residual_inplace_eager(x, y, scale)
    return layer_norm_eager(x, weight, bias, eps, dtype)


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _check_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> None:
    require_floating("LayerNorm", x)
    if x.ndim != 2 or weight.shape != x.shape[1:] or bias.shape != x.shape[1:]:
        raise ValueError(
            f"LayerNorm needs x (T, C) with weight and bias (C,), got {tuple(x.shape)}, {tuple(weight.shape)} "
            f"and {tuple(bias.shape)}"
        )


def _check_residual(x: Tensor, y: Tensor, scale: Tensor | None, *norm: object) -> None:
    require_floating("layerscale_residual", x)
    if x.ndim != 2 or x.shape != y.shape or x.device != y.device:
        raise ValueError(
            f"layerscale_residual needs x and y (T, C) on one device, got {tuple(x.shape)} on {x.device} "
            f"and {tuple(y.shape)} on {y.device}"
        )
    if scale is not None and scale.shape != x.shape[1:]:
        raise ValueError(f"layerscale_residual needs lambda ({x.shape[1]},), got {tuple(scale.shape)}")
    if norm:
        _check_norm(x, *norm)


_NORM = "Tensor weight, Tensor bias, float eps, ScalarType dtype"
define_differentiable(
    f"layer_norm(Tensor x, {_NORM}) -> Tensor",
    layer_norm_eager,
    lambda x, weight, bias, eps, dtype: _like(x, dtype),
    _check_norm,
)
define_differentiable(
    "layerscale_residual(Tensor x, Tensor y, Tensor? scale) -> Tensor",
    layerscale_residual_eager,
    lambda x, y, scale: _like(x),
    _check_residual,
)
define_inplace(
    "layerscale_residual_(Tensor(a!) x, Tensor y, Tensor? scale) -> ()",
    layerscale_residual_inplace_eager,
    lambda x, y, scale: None,
    _check_residual,
)
define_differentiable(
    f"layerscale_residual_norm(Tensor x, Tensor y, Tensor? scale, {_NORM}) -> (Tensor, Tensor)",
    layerscale_residual_norm_eager,
    lambda x, y, scale, weight, bias, eps, dtype: (_like(x), _like(x, dtype)),
    _check_residual,
)
define_inplace(
    f"layerscale_residual_norm_(Tensor(a!) x, Tensor y, Tensor? scale, {_NORM}) -> Tensor",
    layerscale_residual_norm_inplace_eager,
    lambda x, y, scale, weight, bias, eps, dtype: _like(x, dtype),
    _check_residual,
)
