"""What bench.static compiles: for each kernel, calls of its launcher on small CPU tensors of real widths."""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from radio_triton.kernels import activation, patchify, position, qk_norm, residual, varlen_attention
from radio_triton.packing import Packing

HEAD_DIMS = (64, 72, 80, 128)
# RADIO-B, L, SO400M, H and g: width, then the width inside the MLP (g's is a SwiGLU's)
WIDTHS, INNER, GATED = (768, 1024, 1152, 1280, 1536), (3072, 4096, 4304, 5120), (4096,)
TOKENS, EPS = 16, 1e-6


class Case(NamedTuple):
    """A kernel file, its jit function, and a call of its launcher: (dtype, head size or None, arch, without)."""

    module: ModuleType
    function: str
    call: Callable[..., None]
    by_head_size: bool = False


def capability(arch: str) -> tuple[int, int]:
    return divmod(int(arch.removeprefix("sm_")), 10)


def attend(dtype: torch.dtype, head_dim: int, arch: str, without: str | None) -> None:
    """The tiles of a large batch and, where it differs, of a small one, on a (T, 3, 16, D) buffer."""
    width = 3 * 16 * head_dim
    # eight more elements a row: aligned, but no multiple of a head's stride, which TMA needs
    gap = {None: 0, "maps": 8, "alignment": 1}[without]
    rows = torch.zeros(256, width + gap, dtype=dtype)[:, :width]
    q, k, v = rows.unflatten(1, (3, 16, head_dim)).unbind(1)
    cu_seqlens = torch.tensor([0, 256], dtype=torch.int32)
    work = torch.zeros(2, 2, dtype=torch.int32)
    tiles = [varlen_attention.block_m(head_dim, dtype, capability(arch), 16, [1034] * n) for n in (16, 1)]
    for block_m in dict.fromkeys(tiles):
        varlen_attention.varlen_attention_triton(
            q, k, v, cu_seqlens, cu_seqlens, work, block_m, head_dim**-0.5
        )


def elementwise(module: ModuleType, call: Callable[..., object], widths: tuple[int, ...] = WIDTHS) -> Case:
    """A call (dtype, width), made for every width: `_kernel` of one tile is compiled once for all of them."""

    def calls(dtype: torch.dtype, head_dim: None, arch: str, without: str | None) -> None:
        for width in widths:
            call(dtype, width)

    return Case(module, "_kernel", calls)


def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def _norm(dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor, float, torch.dtype]:
    return zeros(dtype, width), zeros(dtype, width), EPS, dtype


def _layer_norm(dtype: torch.dtype, width: int) -> None:
    residual.layer_norm_triton(zeros(dtype, TOKENS, width), *_norm(dtype, width))


def _residual(dtype: torch.dtype, width: int) -> None:
    for stream in dict.fromkeys((dtype, torch.float32)):
        x, y = zeros(stream, TOKENS, width), zeros(dtype, TOKENS, width)
        residual.layerscale_residual_inplace_triton(x, y, zeros(dtype, width))


def _residual_norm(dtype: torch.dtype, width: int) -> None:
    for stream in dict.fromkeys((dtype, torch.float32)):
        x, y = zeros(stream, TOKENS, width), zeros(dtype, TOKENS, width)
        norm = _norm(dtype, width)
        residual.layerscale_residual_norm_inplace_triton(x, y, zeros(dtype, width), *norm)


def _qk(dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor, Tensor]:
    return zeros(dtype, TOKENS, 3, width // 8, 8), zeros(dtype, width), zeros(dtype, width)


def _qk_norm(dtype: torch.dtype, width: int) -> None:
    qk_norm.qk_rms_norm_inplace_triton(*_qk(dtype, width), EPS, width)


def _qk_sums(dtype: torch.dtype, width: int) -> None:
    qk_norm.qk_square_sums_triton(_qk(dtype, width)[0], width)


def _qk_scale(dtype: torch.dtype, width: int) -> None:
    qkv, *weights = _qk(dtype, width)
    qk_norm.qk_rms_scale_inplace_triton(qkv, zeros(torch.float32, TOKENS, 2), *weights, EPS, width)


def _embed(dtype: torch.dtype, width: int) -> None:
    packing = Packing([(4, 4)], [(2, 4)], prefix=10)
    where = (packing.grid_table, packing.grid_table_cpu, packing.cu_seqlens)
    rows, prefix, table = (zeros(dtype, n, width) for n in (16, 10, 128 * 128))
    for stream in dict.fromkeys((dtype, torch.float32)):
        position.embed_tokens_triton(
            *(rows, rows[:8], prefix, table.view(128, 128, width), *where),
            *(packing.work_list(position.BLOCK_T), True, False, stream),
        )


def _pixels(dtype: torch.dtype, patch: int) -> tuple:
    return (
        zeros(dtype, 2, 3, 32 * patch, 32 * patch),
        zeros(torch.float32, 3),
        zeros(torch.float32, 3),
        patch,
        1,
    )


def _patchify(dtype: torch.dtype, patch: int) -> None:
    for pixels in (torch.uint8, dtype):
        patchify.patchify_triton(*_pixels(pixels, patch), dtype)


def _patchify_list(dtype: torch.dtype, patch: int) -> None:
    for pixels in (torch.uint8, dtype):
        frames, *rest = _pixels(pixels, patch)
        patchify.patchify_list_triton([frames, frames], *rest, dtype)


KERNELS = {
    "varlen_attention": Case(varlen_attention, "_kernel", attend, by_head_size=True),
    "patchify": elementwise(patchify, _patchify, (16, 14)),
    "patchify_list": elementwise(patchify, _patchify_list, (16, 14))._replace(function="_list_kernel"),
    "embed_tokens": elementwise(position, _embed),
    "layer_norm": elementwise(residual, _layer_norm),
    "layerscale_residual": elementwise(residual, _residual),
    "layerscale_residual_norm": elementwise(residual, _residual_norm),
    "qk_rms_norm": elementwise(qk_norm, _qk_norm),
    "qk_square_sums": elementwise(qk_norm, _qk_sums),
    "qk_rms_scale": elementwise(qk_norm, _qk_scale),
    "gelu": elementwise(
        activation, lambda dtype, n: activation.gelu_inplace_triton(zeros(dtype, TOKENS, n)), INNER
    ),
    "swiglu": elementwise(
        activation, lambda dtype, n: activation.swiglu_inplace_triton(zeros(dtype, TOKENS, 2 * n)), GATED
    ),
}
