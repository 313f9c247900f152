"""RMSNorm of q and of k over the full width, all heads together, on the packed qkv buffer.

    y[c] = cast(x[c] * rsqrt(mean_{j < embed_dim} x[j]^2 + eps)) * w[c]      c over all H * D channels

The variance runs over the first `embed_dim` channels only: dummy heads pad the width and must not change it,
yet they are scaled by it. `cast` is one rounding to the dtype of x; the weight is multiplied in that dtype, as
vLLM's RMSNorm does.

Tensor parallelism splits the channels over ranks: `qk_square_sums` gives each rank's two sums of squares a
token, which are added up across ranks, and `qk_rms_scale_` scales by the total. Two numbers a token travel
instead of q and k.

Shapes: qkv (T, 3, H, D) contiguous, weights (H * D,), sums (T, 2) fp32. v is left as it is.
dtypes: bf16, fp16, fp32.
Cost: 4 * T * H * D elements read or written (2 read, 2 written), about 4 FLOPs each.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ._common import define_differentiable, define_inplace, on_device, require_floating, tl, triton


def _wide(x: Tensor) -> Tensor:
    """x (T, H, D) as (T, H * D) in at least fp32."""
    return x.flatten(1).to(torch.promote_types(x.dtype, torch.float32))


def _scaled(x: Tensor, weight: Tensor, variance: Tensor, eps: float) -> Tensor:
    """x (T, H, D) over the root of its variance (T, 1), times the weight."""
    return ((_wide(x) * torch.rsqrt(variance + eps)).to(x.dtype) * weight.to(x.dtype)).view(x.shape)


def _normalized(x: Tensor, weight: Tensor, eps: float, embed_dim: int) -> Tensor:
    """x (T, H, D) with its (H, D) channels normalised together."""
    return _scaled(x, weight, _wide(x)[:, :embed_dim].square().mean(1, keepdim=True), eps)


def qk_rms_norm_eager(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, embed_dim: int) -> Tensor:
    """A new (T, 3, H, D) buffer: q and k normalised, v copied."""
    q, k, v = qkv.unbind(1)
    return torch.stack(
        (_normalized(q, q_weight, eps, embed_dim), _normalized(k, k_weight, eps, embed_dim), v), dim=1
    )


def qk_rms_norm_inplace_eager(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, embed_dim: int
) -> None:
    """The same, written over q and k."""
    qkv[:, 0] = _normalized(qkv[:, 0], q_weight, eps, embed_dim)
    qkv[:, 1] = _normalized(qkv[:, 1], k_weight, eps, embed_dim)


def qk_square_sums_eager(qkv: Tensor, embed_dim: int) -> Tensor:
    """Sums of the squares of the first `embed_dim` channels of q and of k: (T, 2), in at least fp32."""
    return torch.stack([_wide(x)[:, :embed_dim].square().sum(1) for x in qkv.unbind(1)[:2]], dim=1)


def qk_rms_scale_eager(
    qkv: Tensor, sums: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, embed_dim: int
) -> Tensor:
    """q and k scaled by sums of squares over `embed_dim` channels, those of all ranks together; v copied."""
    (q, k, v), variance = qkv.unbind(1), sums / embed_dim
    q, k = _scaled(q, q_weight, variance[:, :1], eps), _scaled(k, k_weight, variance[:, 1:], eps)
    return torch.stack((q, k, v), dim=1)


def qk_rms_scale_inplace_eager(
    qkv: Tensor, sums: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, embed_dim: int
) -> None:
    """The same, written over q and k."""
    qkv[:, :2] = qk_rms_scale_eager(qkv, sums, q_weight, k_weight, eps, embed_dim)[:, :2]


@triton.jit
def _kernel(
    qkv, sums, q_weight, k_weight, width, summed, total, eps,
    SUM: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """q (even programs) or k (odd) of one token. SUM without SCALE writes the sum of squares; SCALE without
    SUM reads it."""
    i_t = (tl.program_id(0) // 2).to(tl.int64)
    i_k = tl.program_id(0) % 2
    o_c = tl.arange(0, BLOCK)
    m_c = o_c < width
    row = qkv + (3 * i_t + i_k) * width
    b_x = tl.load(row + o_c, mask=m_c, other=0.0).to(tl.float32)
    if SUM:
        b_sum = tl.sum(tl.where(o_c < summed, b_x * b_x, 0.0), 0)
        if not SCALE:
            tl.store(sums + 2 * i_t + i_k, b_sum)
    else:
        b_sum = tl.load(sums + 2 * i_t + i_k)
    if SCALE:
        weight = q_weight
        if i_k == 1:
            weight = k_weight
        b_w = tl.load(weight + o_c, mask=m_c, other=0.0).to(qkv.dtype.element_ty).to(tl.float32)
        # one rounding before the weight and one after, as the formula has it
        b_y = (b_x * (1 / tl.sqrt(b_sum / total + eps))).to(qkv.dtype.element_ty).to(tl.float32)
        tl.store(row + o_c, (b_y * b_w).to(qkv.dtype.element_ty), mask=m_c)


class Config(NamedTuple):
    """A program holds the channels of q or of k of one token."""

    block: int
    num_warps: int


def _config(width: int) -> Config:
    """8 channels a thread: loads and stores of 16 bytes in bf16, two of them in fp32."""
    # triton 3.7.1, sm_90: at most 28 registers, so an SM holds 2048 threads; fp32 with 16 a thread takes 40
    block = triton.next_power_of_2(width)
    return Config(block, min(max(block // 256, 1), 16))


def _fake(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, embed_dim: int) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _fake_inplace(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, embed_dim: int) -> None:
    return None


def _check(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, embed_dim: int) -> None:
    require_floating("qk_rms_norm", qkv)
    if qkv.ndim != 4 or qkv.shape[1] != 3:
        raise ValueError(f"qk_rms_norm needs the packed buffer (T, 3, H, D), got {tuple(qkv.shape)}")
    width = qkv.shape[2] * qkv.shape[3]
    if q_weight.shape != (width,) or k_weight.shape != (width,) or not 0 < embed_dim <= width:
        raise ValueError(
            f"qk_rms_norm over {width} channels needs weights ({width},) and 0 < embed_dim <= {width}, "
            f"got {tuple(q_weight.shape)}, {tuple(k_weight.shape)} and {embed_dim}"
        )


def _check_sums(qkv: Tensor, embed_dim: int) -> None:
    weight = qkv.new_empty(qkv.shape[2:].numel() if qkv.ndim == 4 else 0, device="meta")
    _check(qkv, weight, weight, 0.0, embed_dim)


def _check_scale(
    qkv: Tensor, sums: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, embed_dim: int
) -> None:
    _check_sums(qkv, 1)
    _check(qkv, q_weight, k_weight, eps, 1)
    if sums.shape != (qkv.shape[0], 2) or sums.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"qk_rms_scale_ needs fp32 sums ({qkv.shape[0]}, 2), got {tuple(sums.shape)} {sums.dtype}"
        )


def _launch(qkv: Tensor, sums: Tensor | None, weights: tuple, summed: int, total: int, eps: float) -> None:
    tokens, width = qkv.shape[0], qkv.shape[2] * qkv.shape[3]
    if not tokens:
        return
    if not qkv.is_contiguous():
        raise ValueError(f"the qk_rms_norm kernel needs a contiguous buffer, got strides {qkv.stride()}")
    q_weight, k_weight = weights or (None, None)
    config = _config(width)
    with on_device(qkv):
        _kernel[(2 * tokens,)](
            *(qkv, sums, q_weight, k_weight, width, summed, total, eps),
            SUM=summed > 0,
            SCALE=bool(weights),
            BLOCK=config.block,
            num_warps=config.num_warps,
            enable_fp_fusion=True,
        )


def qk_rms_norm_inplace_triton(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, embed_dim: int
) -> None:
    """Overwrites q and k."""
    _launch(qkv, None, (q_weight, k_weight), embed_dim, embed_dim, eps)


def qk_rms_norm_triton(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, embed_dim: int) -> Tensor:
    """A new buffer."""
    out = qkv.clone(memory_format=torch.contiguous_format)
    qk_rms_norm_inplace_triton(out, q_weight, k_weight, eps, embed_dim)
    return out


def qk_square_sums_triton(qkv: Tensor, embed_dim: int) -> Tensor:
    """(T, 2) fp32."""
    sums = qkv.new_empty(qkv.shape[0], 2, dtype=torch.float32)
    _launch(qkv, sums, (), embed_dim, embed_dim, 0.0)
    return sums


def qk_rms_scale_inplace_triton(
    qkv: Tensor, sums: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, embed_dim: int
) -> None:
    """Overwrites q and k."""
    _launch(qkv, sums, (q_weight, k_weight), 0, embed_dim, eps)


def qk_rms_scale_triton(
    qkv: Tensor, sums: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, embed_dim: int
) -> Tensor:
    """A new buffer."""
    out = qkv.clone(memory_format=torch.contiguous_format)
    qk_rms_scale_inplace_triton(out, sums, q_weight, k_weight, eps, embed_dim)
    return out


_ARGUMENTS = "Tensor q_weight, Tensor k_weight, float eps, int embed_dim"
define_differentiable(
    f"qk_rms_norm(Tensor qkv, {_ARGUMENTS}) -> Tensor", qk_rms_norm_eager, _fake, _check, qk_rms_norm_triton
)
define_inplace(
    f"qk_rms_norm_(Tensor(a!) qkv, {_ARGUMENTS}) -> ()",
    qk_rms_norm_inplace_eager,
    _fake_inplace,
    _check,
    qk_rms_norm_inplace_triton,
)
define_differentiable(
    "qk_square_sums(Tensor qkv, int embed_dim) -> Tensor",
    qk_square_sums_eager,
    lambda qkv, embed_dim: qkv.new_empty(
        qkv.shape[0], 2, dtype=torch.promote_types(qkv.dtype, torch.float32)
    ),
    _check_sums,
    qk_square_sums_triton,
)
define_differentiable(
    f"qk_rms_scale(Tensor qkv, Tensor sums, {_ARGUMENTS}) -> Tensor",
    qk_rms_scale_eager,
    lambda qkv, sums, *rest: torch.empty_like(qkv, memory_format=torch.contiguous_format),
    _check_scale,
    qk_rms_scale_triton,
)
define_inplace(
    f"qk_rms_scale_(Tensor(a!) qkv, Tensor sums, {_ARGUMENTS}) -> ()",
    qk_rms_scale_inplace_eager,
    lambda qkv, sums, q_weight, k_weight, eps, embed_dim: None,
    _check_scale,
    qk_rms_scale_inplace_triton,
)
