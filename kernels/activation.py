"""The activations of the MLP: exact GELU, and SwiGLU.

    gelu(x)   = x * Phi(x) = x / 2 * (1 + erf(x / sqrt 2))     not the tanh form, which is off by up to 4.7e-4
    swiglu(x) = silu(x[:, :I]) * x[:, I:]                      silu(a) = a / (1 + exp(-a))

Shapes: x (T, I) for gelu, (T, 2 I) for swiglu, whose result is (T, I); in place it is the first half of each
row. dtypes: bf16, fp16, fp32; computed in fp32, one rounding at the end.
Cost: gelu reads and writes T * I elements; swiglu reads 2 T * I and writes T * I.

With erf a channel of gelu takes 38 instructions (sm_90, all in all), with Abramowitz and Stegun's 7.1.28 28,
which is what an H200 has time for while it moves the channel's 4 bytes. Its error is at most 7.1e-7 (erf in
fp32: 4.5e-7). Of all bf16 inputs it misses the rounded exact result for 0.42 %, erf for 0.30 %, nearly all
where gelu is under 1e-4: bf16 takes it. fp16 (1.08 % against 0.52 %) and fp32 show the difference and take erf.
"""

from typing import NamedTuple

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


@triton.jit
def _cheap_gelu(b_x):
    """x Phi(x) = max(x, 0) - |x| / 2 * erfc(|x| / sqrt 2), with erfc(z) = (1 + a1 z + ... + a6 z^6)^-16."""
    # beyond 1e4 the second term is 0, and infinity would make it NaN
    b_size = tl.minimum(tl.abs(b_x), 1e4)
    b_z = b_size * 0.7071067811865476
    b_p = b_z * 0.0000430638 + 0.0002765672
    b_p = b_p * b_z + 0.0001520143
    b_p = b_p * b_z + 0.0092705272
    b_p = b_p * b_z + 0.0422820123
    b_p = b_p * b_z + 0.0705230784
    b_p = b_p * b_z + 1
    b_p *= b_p
    b_p *= b_p
    b_p *= b_p
    b_p *= b_p
    return tl.maximum(b_x, 0.0, propagate_nan=tl.PropagateNan.ALL) - 0.5 * b_size / b_p


@triton.jit
def _kernel(
    x, x_t, out, out_t, C: tl.constexpr, GATED: tl.constexpr, CHEAP: tl.constexpr, BLOCK: tl.constexpr
):
    """One block of the channels of one row: gelu(x), or silu(x) times the channel C further on."""
    blocks: tl.constexpr = (C + BLOCK - 1) // BLOCK
    i_t = (tl.program_id(0) // blocks).to(tl.int64)
    o_i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < C
    b_x = tl.load(x + i_t * x_t + o_i, mask=m_i, other=0.0).to(tl.float32)
    if GATED:
        b_up = tl.load(x + i_t * x_t + C + o_i, mask=m_i, other=0.0).to(tl.float32)
        b_y = b_x / (1 + tl.exp(-b_x)) * b_up
    elif CHEAP:
        b_y = _cheap_gelu(b_x)
    else:
        b_y = 0.5 * b_x * (1 + tl.erf(b_x * 0.7071067811865476))
    tl.store(out + i_t * out_t + o_i, b_y.to(out.dtype.element_ty), mask=m_i)


class Config(NamedTuple):
    """A program has `block` channels of one row."""

    block: int
    num_warps: int


def _config(channels: int) -> Config:
    """8 channels a thread: loads of 16 bytes in bf16, two of them in fp32."""
    block = min(1024, max(triton.next_power_of_2(channels), 32))
    return Config(block, max(block // 256, 1))


def _check_gelu(x: Tensor) -> None:
    require_floating("gelu", x)


def _check_swiglu(x: Tensor) -> None:
    require_floating("swiglu", x)
    if x.ndim != 2 or x.shape[1] % 2:
        raise ValueError(f"swiglu needs x (T, 2 I), got {tuple(x.shape)}")


def _contiguous_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _launch(x: Tensor, out: Tensor, gated: bool) -> None:
    tokens, channels = out.shape
    if not out.numel():
        return
    require_rows("swiglu" if gated else "gelu", x=x, out=out)
    config = _config(channels)
    with on_device(x):
        _kernel[(tokens * triton.cdiv(channels, config.block),)](
            *(x, x.stride(0), out, out.stride(0)),
            C=channels,
            GATED=gated,
            CHEAP=x.dtype == torch.bfloat16,
            BLOCK=config.block,
            num_warps=config.num_warps,
            enable_fp_fusion=True,
        )


def gelu_into(x: Tensor, out: Tensor) -> None:
    """The kernel knows rows: any other shape is viewed as (T, I)."""
    _launch(x.view(-1, x.shape[-1]), out.view(-1, x.shape[-1]), gated=False)


def gelu_triton(x: Tensor) -> Tensor:
    """GELU in new memory."""
    out = _contiguous_like(x)
    gelu_into(x, out)
    return out


def gelu_inplace_triton(x: Tensor) -> None:
    """GELU written over x."""
    gelu_into(x, x)


def swiglu_triton(x: Tensor) -> Tensor:
    """SwiGLU in new memory (T, I)."""
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    _launch(x, out, gated=True)
    return out


def swiglu_inplace_triton(x: Tensor) -> None:
    """SwiGLU written over the first half of each row."""
    _launch(x, x.chunk(2, dim=-1)[0], gated=True)


define_differentiable("gelu(Tensor x) -> Tensor", gelu_eager, _contiguous_like, _check_gelu, gelu_triton)
define_inplace(
    "gelu_(Tensor(a!) x) -> ()", gelu_inplace_eager, lambda x: None, _check_gelu, gelu_inplace_triton
)
define_differentiable(
    "swiglu(Tensor x) -> Tensor",
    swiglu_eager,
    lambda x: x.new_empty(x.shape[0], x.shape[1] // 2),
    _check_swiglu,
    swiglu_triton,
)
define_inplace(
    "swiglu_(Tensor(a!) x) -> ()", swiglu_inplace_eager, lambda x: None, _check_swiglu, swiglu_inplace_triton
)
