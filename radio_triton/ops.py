"""The functions that layers call: each one dispatcher op, in place where nothing needs a gradient.

Sizes are validated where a `Packing` is built; these functions trust them, and read no device value.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .packing import Packing

try:
    # importing a kernel's file registers its ops
    from .kernels import activation, position, qk_norm, residual  # noqa: F401
    from .kernels import patchify as patchify_kernel  # noqa: F401
    from .kernels import varlen_attention as varlen_attention_kernel
    from .kernels._common import device_capability
except ModuleNotFoundError as error:
    link = Path(__file__).with_name("kernels")
    if link.is_file():
        raise ImportError(
            f"{link} is a text file where the repository has a symbolic link to ../kernels (git on Windows "
            "writes it so): run `git config core.symlinks true` and `git checkout -- radio_triton/kernels`, or "
            "install the wheel"
        ) from error
    raise

# fmt: off
OPS = (
    "patchify", "patchify_list", "embed_tokens", "layer_norm", "varlen_attention", "gelu", "gelu_", "swiglu", "swiglu_",
    "qk_rms_norm", "qk_rms_norm_", "qk_square_sums", "qk_rms_scale", "qk_rms_scale_", "layerscale_residual",
    "layerscale_residual_", "layerscale_residual_norm", "layerscale_residual_norm_",
)
# fmt: on
_op = {name: getattr(torch.ops.radio_triton, name).default for name in OPS}


class Sequences(NamedTuple):
    """What attention needs to know of a packing, as tensors: see `varlen_attention` in kernels/."""

    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    work: Tensor | None
    block_m: int


def prepare(packing: Packing, width: int, head_dim: int, dtype: torch.dtype) -> Sequences:
    """Build what the encoder's attention reads, once a call, before the encoder.

    On CUDA that is the kernel's work list, in blocks of as many tokens as the kernel wants for this batch.
    """
    if packing.device.type != "cuda":
        return Sequences(packing.cu_seqlens, packing.cu_seqlens_cpu, None, 0)
    capability = device_capability(packing.device)
    block_m = varlen_attention_kernel.block_m(head_dim, dtype, capability, width // head_dim, packing.lengths)
    return Sequences(packing.cu_seqlens, packing.cu_seqlens_cpu, packing.work_list(block_m), block_m)


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd records one of these: then nothing may work in place."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of a GEMM with this weight: autocast's where it is on, else the weight's own."""
    device = weight.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weight.dtype


def patchify(
    frames: Tensor | Sequence[Tensor],
    mean: Tensor | None,
    std: Tensor | None,
    patch_size: int,
    tubelet: int,
    dtype: torch.dtype,
) -> Tensor:
    """Frames (F, c, H, W), or a list of such, to normalised patch rows (P, tubelet * c * patch_size^2)."""
    name = "patchify" if isinstance(frames, Tensor) else "patchify_list"
    return _op[name](frames, mean, std, patch_size, tubelet, dtype)


def embed_tokens(
    patches: Sequence[Tensor],
    prefix: Tensor,
    table: Tensor,
    packing: Packing,
    cpe: bool,
    align_corners: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Prefix tokens, and patches with their positions, as the packed stream (T, C) in `dtype`.

    `patches` are (P, C) of the images, of the tubelets, or of both in this order.
    """
    first, second = (*patches, None)[:2]
    work = packing.work_list(position.BLOCK_T) if packing.device.type == "cuda" else None
    where = (packing.grid_table, packing.grid_table_cpu, packing.cu_seqlens, work)
    return _op["embed_tokens"](first, second, prefix, table, *where, cpe, align_corners, dtype)


def layer_norm(x: Tensor, norm: nn.LayerNorm, dtype: torch.dtype) -> Tensor:
    """LayerNorm of the stream (T, C), in `dtype`."""
    return _op["layer_norm"](x, norm.weight, norm.bias, norm.eps, dtype)


def qk_rms_norm(qkv: Tensor, q_norm: nn.RMSNorm, k_norm: nn.RMSNorm, embed_dim: int) -> Tensor:
    """RMSNorm of q and k of (T, 3, H, D), over all heads; overwrites it where no gradient is needed."""
    arguments = (qkv, q_norm.weight, k_norm.weight, q_norm.eps, embed_dim)
    if needs_grad(*arguments[:3]):
        return _op["qk_rms_norm"](*arguments)
    _op["qk_rms_norm_"](*arguments)
    return qkv


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float) -> Tensor:
    """Attention inside each sequence: (T, H, D) three times to (T, H * D)."""
    return _op["varlen_attention"](q, k, v, *sequences, scale)


def layerscale_residual(
    x: Tensor, y: Tensor, scale: Tensor | None, norm: nn.LayerNorm | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x + scale * y, and its LayerNorm in `dtype`; overwrites x where no gradient is needed."""
    if norm is None:
        if needs_grad(x, y, scale):
            x = _op["layerscale_residual"](x, y, scale)
        else:
            _op["layerscale_residual_"](x, y, scale)
        return x, x
    arguments = (x, y, scale, norm.weight, norm.bias, norm.eps, dtype)
    if needs_grad(*arguments[:5]):
        return _op["layerscale_residual_norm"](*arguments)
    return x, _op["layerscale_residual_norm_"](*arguments)


def gelu(x: Tensor) -> Tensor:
    """Exact GELU; overwrites x where no gradient is needed."""
    if needs_grad(x):
        return _op["gelu"](x)
    _op["gelu_"](x)
    return x


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of x (T, 2 I): (T, I), in the first half of x where no gradient is needed."""
    if needs_grad(x):
        return _op["swiglu"](x)
    _op["swiglu_"](x)
    return x.chunk(2, dim=-1)[0]
