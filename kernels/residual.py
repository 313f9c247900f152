"""The residual stream: add a scaled branch, and normalise for the next branch in the same pass.

    x <- x + lambda * y                    layerscale_residual          lambda is optional
    n  = LayerNorm(x) * w + b              layerscale_residual_norm     of the updated x, in a dtype of its own
    n  = LayerNorm(x) * w + b              layer_norm                   of x as it is: before the first branch

Shapes: x, y, n (T, C); lambda, w, b (C,). dtypes: x in fp32 or in the model's dtype, y in the model's (or
autocast's) dtype. The sum is taken in fp32 and rounded once to the dtype of x; the norm reads the rounded x,
so that what is normalised is what is kept.
Cost: x and y read, x and n written: 4 streams of T * C elements, where separate kernels take 8; 9 FLOPs each.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._common import (
    define_differentiable,
    define_inplace,
    on_device,
    require_floating,
    require_rows,
    tl,
    triton,
)


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


@triton.jit
def _kernel(
    x, x_t, y, y_t, scale, out, out_t, weight, bias, normed, C, eps,
    ADD: tl.constexpr, SCALE: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_t = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BLOCK)
    m_c = o_c < C
    b_x = tl.load(x + i_t * x_t + o_c, mask=m_c, other=0.0).to(tl.float32)
    if ADD:
        b_y = tl.load(y + i_t * y_t + o_c, mask=m_c, other=0.0).to(tl.float32)
        if SCALE:
            b_y *= tl.load(scale + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_x = (b_x + b_y).to(out.dtype.element_ty)
        tl.store(out + i_t * out_t + o_c, b_x, mask=m_c)
        # what is normalised is what is kept
        b_x = b_x.to(tl.float32)
    if NORM:
        mean = tl.sum(b_x, 0) / C
        b_x = tl.where(m_c, b_x - mean, 0.0)
        b_x *= 1 / tl.sqrt(tl.sum(b_x * b_x, 0) / C + eps)
        b_w = tl.load(weight + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_b = tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)
        tl.store(normed + i_t * C + o_c, (b_x * b_w + b_b).to(normed.dtype.element_ty), mask=m_c)


class Config(NamedTuple):
    """A program holds one row; `block` is C rounded up to a power of two."""

    block: int
    num_warps: int


def _config(channels: int) -> Config:
    """8 channels a thread: loads and stores of 16 bytes in bf16, two of them in fp32."""
    # triton 3.7.1, sm_90: at most 32 registers, so an SM holds 2048 threads; with 16 a thread 40 to 44, 1280 to 1536
    block = triton.next_power_of_2(channels)
    return Config(block, min(max(block // 256, 1), 16))


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _check_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> None:
    require_floating("LayerNorm", x)
    if x.ndim != 2 or weight.shape != x.shape[1:] or bias.shape != x.shape[1:]:
        raise ValueError(
            f"LayerNorm needs x (T, C) with weight and bias (C,), got {tuple(x.shape)}, {tuple(weight.shape)} "
            f"and {tuple(bias.shape)}"
        )


def _check_residual(x: Tensor, y: Tensor, scale: Tensor | None, *norm: Any) -> None:
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


def _launch(
    x: Tensor,
    y: Tensor | None,
    scale: Tensor | None,
    out: Tensor | None,
    norm: tuple[Tensor, Tensor, float] | None,
    normed: Tensor | None,
) -> None:
    """One pass: `out` gets the sum, where there is a y, and `normed` the LayerNorm, where there is a norm."""
    tokens, channels = x.shape
    if not tokens:
        return
    require_rows("layerscale_residual", x=x, y=y, out=out, scale=scale)
    weight, bias, eps = norm or (None, None, 0.0)
    config = _config(channels)
    with on_device(x):
        _kernel[(tokens,)](
            *(x, x.stride(0), y, 0 if y is None else y.stride(0), scale),
            *(out, 0 if out is None else out.stride(0), weight, bias, normed, channels, eps),
            ADD=y is not None,
            SCALE=scale is not None,
            NORM=norm is not None,
            BLOCK=config.block,
            num_warps=config.num_warps,
            enable_fp_fusion=True,
        )


def layer_norm_triton(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """LayerNorm alone: before the first block."""
    normed = _like(x, dtype)
    _launch(x, None, None, None, (weight, bias, eps), normed)
    return normed


def layerscale_residual_triton(x: Tensor, y: Tensor, scale: Tensor | None) -> Tensor:
    """The sum alone: after the last block."""
    out = _like(x)
    _launch(x, y, scale, out, None, None)
    return out


def layerscale_residual_inplace_triton(x: Tensor, y: Tensor, scale: Tensor | None) -> None:
    """The same, written over x."""
    _launch(x, y, scale, x, None, None)


def layerscale_residual_norm_triton(
    x: Tensor, y: Tensor, scale: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Sum and norm, in new memory."""
    out, normed = _like(x), _like(x, dtype)
    _launch(x, y, scale, out, (weight, bias, eps), normed)
    return out, normed


def layerscale_residual_norm_inplace_triton(
    x: Tensor, y: Tensor, scale: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Sum written over x, norm in new memory."""
    normed = _like(x, dtype)
    _launch(x, y, scale, x, (weight, bias, eps), normed)
    return normed


_NORM = "Tensor weight, Tensor bias, float eps, ScalarType dtype"
define_differentiable(
    f"layer_norm(Tensor x, {_NORM}) -> Tensor",
    layer_norm_eager,
    lambda x, weight, bias, eps, dtype: _like(x, dtype),
    _check_norm,
    layer_norm_triton,
)
define_differentiable(
    "layerscale_residual(Tensor x, Tensor y, Tensor? scale) -> Tensor",
    layerscale_residual_eager,
    lambda x, y, scale: _like(x),
    _check_residual,
    layerscale_residual_triton,
)
define_inplace(
    "layerscale_residual_(Tensor(a!) x, Tensor y, Tensor? scale) -> ()",
    layerscale_residual_inplace_eager,
    lambda x, y, scale: None,
    _check_residual,
    layerscale_residual_inplace_triton,
)
define_differentiable(
    f"layerscale_residual_norm(Tensor x, Tensor y, Tensor? scale, {_NORM}) -> (Tensor, Tensor)",
    layerscale_residual_norm_eager,
    lambda x, y, scale, weight, bias, eps, dtype: (_like(x), _like(x, dtype)),
    _check_residual,
    layerscale_residual_norm_triton,
)
define_inplace(
    f"layerscale_residual_norm_(Tensor(a!) x, Tensor y, Tensor? scale, {_NORM}) -> Tensor",
    layerscale_residual_norm_inplace_eager,
    lambda x, y, scale, weight, bias, eps, dtype: _like(x, dtype),
    _check_residual,
    layerscale_residual_norm_inplace_triton,
)
