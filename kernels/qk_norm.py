"""RMSNorm of q and of k over the full width, all heads together, on the packed qkv buffer.

    y[c] = cast(x[c] * rsqrt(mean_{j < embed_dim} x[j]^2 + eps)) * w[c]      c over all H * D channels

The variance runs over the first `embed_dim` channels only: dummy heads pad the width and must not change it, yet they are
scaled by it. `cast` is one rounding to the dtype of x; the weight is multiplied in that dtype, as vLLM's RMSNorm does.
Shapes: qkv (T, 3, H, D) contiguous, weights (H * D,). dtypes: bf16, fp16, fp32. v is left as it is.
Cost: 4 * T * H * D elements read or written (2 read, 2 written), about 4 FLOPs each.
"""

import torch
from torch import Tensor

from ._common import define_differentiable, define_inplace, require_floating


def _normalized(x: Tensor, weight: Tensor, eps: float, embed_dim: int) -> Tensor:
    """x (T, H, D) with its (H, D) channels normalised together."""
    wide = x.flatten(1).to(torch.promote_types(x.dtype, torch.float32))
    variance = wide[:, :embed_dim].square().mean(1, keepdim=True)
    return ((wide * torch.rsqrt(variance + eps)).to(x.dtype) * weight.to(x.dtype)).view(x.shape)


def qk_rms_norm_eager(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, embed_dim: int) -> Tensor:
    """A new (T, 3, H, D) buffer: q and k normalised, v copied."""
    q, k, v = qkv.unbind(1)
    return torch.stack(
        (_normalized(q, q_weight, eps, embed_dim), _normalized(k, k_weight, eps, embed_dim), v), dim=1
    )


def qk_rms_norm_inplace_eager(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, embed_dim: int) -> None:
    """The same, written over q and k."""
    qkv[:, 0] = _normalized(qkv[:, 0], q_weight, eps, embed_dim)
    qkv[:, 1] = _normalized(qkv[:, 1], k_weight, eps, embed_dim)


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


_ARGUMENTS = "Tensor q_weight, Tensor k_weight, float eps, int embed_dim"
define_differentiable(f"qk_rms_norm(Tensor qkv, {_ARGUMENTS}) -> Tensor", qk_rms_norm_eager, _fake, _check)
define_inplace(f"qk_rms_norm_(Tensor(a!) qkv, {_ARGUMENTS}) -> ()", qk_rms_norm_inplace_eager, _fake_inplace, _check)
