"""Attention inside each sequence of a packed batch.

    o[t, h] = sum_s softmax_s(scale * q[t, h] . k[s, h]) v[s, h]      s over the tokens of t's own sequence

Shapes: q, k, v (T, H, D), any strides with a contiguous last dimension, so the three parts of one
(T, 3, H, D) buffer are read in place; cu_seqlens (S + 1,) int32, exclusive prefix sums that end at T; result
(T, H * D). The kernel also takes `work`, (n, 2) int32 rows (sequence, query block) as
`Packing.work_list(block_m)` makes them, and runs one program for each row and head.
dtypes: bf16, fp16, fp32 (fp64 in eager). Softmax and sums in fp32, one rounding at the end.
Cost, L tokens in a sequence: 4 * sum(L^2) * H * D FLOPs; 4 * T * H * D elements read or written once.
"""

from collections.abc import Iterable
from math import e, gcd, log2
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._common import TensorDescriptor, define_differentiable, device_capability, on_device, runs, tl, triton


def varlen_attention_eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor,
    work: Tensor | None,
    block_m: int,
    scale: float,
) -> Tensor:
    """The formula by scaled_dot_product_attention, one call for each run of equal lengths."""
    heads, size = q.shape[1:]
    outputs, start = [], 0
    for count, length in runs(cu_seqlens_cpu.diff().tolist()):
        rows = slice(start, start + count * length)
        dense = [x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v)]
        if length:
            out = F.scaled_dot_product_attention(dense[0], dense[1], dense[2], scale=scale)
            outputs.append(out.transpose(1, 2).reshape(count * length, heads * size))
        start = rows.stop
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs) if outputs else q.new_empty(0, heads * size)


# Triton's blocks are powers of two, and a dot is at least 16 deep. So a block of D columns is a tuple of
# pieces, the binary digits of D rounded up to a multiple of 16, widest first: 80 = 64 + 16,
# 104 = 64 + 32 + 16. At most 8 columns are wasted, and they hold zeros: 72 = 64 + 16, of which 8 are used.


@triton.jit
def _columns(D: tl.constexpr, WIDTH: tl.constexpr):
    """Columns of the piece that is this wide: it begins where the wider ones end."""
    return D // (2 * WIDTH) * (2 * WIDTH) + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _load(x, count, stride, D: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """Rows 0 .. ROWS - 1 at x, by pointers; zeros from column D on and, where MASKED, from row `count` on."""
    o_row = tl.arange(0, ROWS)
    p_row = x + o_row[:, None] * stride
    m_row = (o_row < count)[:, None]
    blocks: tl.tuple = ()
    for log in tl.static_range(8, 3, -1):
        if (D + 15) // 16 * 16 & (1 << log):
            o_d = _columns(D, 1 << log)
            if MASKED:
                blocks += (tl.load(p_row + o_d, mask=m_row & (o_d < D), other=0.0),)
            elif log == 4 and D % 16 != 0:
                blocks += (tl.load(p_row + o_d, mask=o_d < D, other=0.0),)
            else:
                blocks += (tl.load(p_row + o_d),)
    return blocks


@triton.jit
def _load_mapped(wide, tail, row, i_h):
    """The block that begins at token `row`, by TMA; the hardware gives zeros from column D on."""
    b_wide = wide.load([row, i_h, 0])
    blocks: tl.tuple = (b_wide.reshape(b_wide.shape[0], b_wide.shape[2]),)
    if tail is not None:
        b_tail = tail.load([row, i_h, b_wide.shape[2]])
        blocks += (b_tail.reshape(b_tail.shape[0], b_tail.shape[2]),)
    return blocks


@triton.jit
def _step(b_q, b_k, b_v, b_acc, b_max, b_sum, scale, count, MASKED: tl.constexpr):
    """One block of keys and values into the running softmax: o = b_acc / b_sum, b_max in units of log2."""
    last: tl.constexpr = len(b_q) - 1
    # the small piece first: the wide one is then in flight together with the previous block's p v
    b_s = tl.dot(b_q[last], b_k[last].T, input_precision="ieee")
    for i in tl.static_range(last - 1, -1, -1):
        b_s = tl.dot(b_q[i], b_k[i].T, b_s, input_precision="ieee")
    m_n = (tl.arange(0, b_s.shape[1]) < count)[None, :]
    if MASKED:
        b_s = tl.where(m_n, b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale)
    b_p = tl.exp2(b_s * scale - b_new[:, None])
    if MASKED:
        # -inf * 0 is NaN: a scale of zero needs this too
        b_p = tl.where(m_n, b_p, 0.0)
    b_shrink = tl.exp2(b_max - b_new)
    b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
    b_p = b_p.to(b_v[0].dtype)
    b_out: tl.tuple = ()
    for i in tl.static_range(last + 1):
        b_out += (tl.dot(b_p, b_v[i], b_acc[i] * b_shrink[:, None], input_precision="ieee"),)
    return b_out, b_new, b_sum


@triton.jit
def _negative(blocks):
    """-x, exactly: the running maximum needs a positive scale, and (-scale) q . k is scale (-q) . k."""
    negative: tl.tuple = ()
    for i in tl.static_range(len(blocks)):
        negative += ((-blocks[i].to(tl.float32)).to(blocks[i].dtype),)
    return negative


@triton.jit
def _store(out, count, stride, b_out, b_sum, D: tl.constexpr):
    """The first `count` rows of b_out / b_sum, D columns, rounded once."""
    o_row = tl.arange(0, b_sum.shape[0])
    p_row = out + o_row.to(tl.int64)[:, None] * stride
    for i in tl.static_range(len(b_out)):
        o_d = _columns(D, b_out[i].shape[1])
        b_o = (b_out[i] / b_sum[:, None]).to(out.dtype.element_ty)
        tl.store(p_row + o_d, b_o, mask=(o_row < count)[:, None] & (o_d < D))


@triton.jit
def _attend(
    b_q, k, k_t, k_wide, k_tail, v, v_t, v_wide, v_tail, start, length, i_h, scale,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """All keys and values of one sequence and head, whose first are at k and v: b_out / b_sum is the result."""
    b_out: tl.tuple = ()
    for i in tl.static_range(len(b_q)):
        b_out += (tl.zeros(b_q[i].shape, tl.float32),)
    b_max = tl.full((b_q[0].shape[0],), float("-inf"), tl.float32)
    b_sum = tl.zeros((b_q[0].shape[0],), tl.float32)
    full = length // BLOCK_N * BLOCK_N
    for i_n in range(0, full, BLOCK_N):
        if TMA:
            b_k = _load_mapped(k_wide, k_tail, start + i_n, i_h)
            b_v = _load_mapped(v_wide, v_tail, start + i_n, i_h)
        else:
            b_k = _load(k + i_n * k_t, BLOCK_N, k_t, D, BLOCK_N, False)
            b_v = _load(v + i_n * v_t, BLOCK_N, v_t, D, BLOCK_N, False)
        b_out, b_max, b_sum = _step(b_q, b_k, b_v, b_out, b_max, b_sum, scale, BLOCK_N, False)
    # the last block by masked pointers: the next sequence's values, NaN included, are never touched
    rest = length - full
    if rest > 0:
        b_k = _load(k + full * k_t, rest, k_t, D, BLOCK_N, True)
        b_v = _load(v + full * v_t, rest, v_t, D, BLOCK_N, True)
        b_out, b_max, b_sum = _step(b_q, b_k, b_v, b_out, b_max, b_sum, scale, rest, True)
    return b_out, b_sum


# Strides of tokens (_t) and heads (_h) come in units of ALIGN elements: so the compiler knows that loads can
# be 16 bytes wide, for D = 72 too, and a new stride does not recompile.
@triton.jit(
    do_not_specialize=["q_t", "q_h", "k_t", "k_h", "v_t", "v_h"],
    do_not_specialize_on_alignment=["cu_seqlens", "work"],
)
def _kernel(
    q, q_t, q_h, k, k_t, k_h, v, v_t, v_h,  # (T, H, D)
    k_wide, k_tail, v_wide, v_tail,  # TMA maps of the pieces of k and v, or None
    out, cu_seqlens, work, scale,  # (T, H * D), (S + 1,), (n, 2); scale is that of base 2, and not negative
    H: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr, NEGATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    i_item, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_s = tl.load(work + 2 * i_item)
    if i_s < 0:
        return
    i_m = tl.load(work + 2 * i_item + 1) * BLOCK_M
    start = tl.load(cu_seqlens + i_s)
    length = tl.load(cu_seqlens + i_s + 1) - start

    q_t, k_t, v_t = q_t.to(tl.int64) * ALIGN, k_t.to(tl.int64) * ALIGN, v_t.to(tl.int64) * ALIGN
    q_h, k_h, v_h = q_h.to(tl.int64) * ALIGN, k_h.to(tl.int64) * ALIGN, v_h.to(tl.int64) * ALIGN
    q += (start + i_m) * q_t + i_h * q_h
    k += start * k_t + i_h * k_h
    v += start * v_t + i_h * v_h

    b_q = _load(q, length - i_m, q_t, D, BLOCK_M, True)
    if NEGATE:
        b_q = _negative(b_q)
    b_out, b_sum = _attend(
        b_q, k, k_t, k_wide, k_tail, v, v_t, v_wide, v_tail, start, length, i_h, scale, D, BLOCK_N, TMA
    )
    out += ((start + i_m).to(tl.int64) * H + i_h) * D
    _store(out, length - i_m, H * D, b_out, b_sum, D)


def block_m(
    head_dim: int, dtype: torch.dtype, capability: tuple[int, int], heads: int, lengths: Iterable[int]
) -> int:
    """Query rows of one program, for `Packing.work_list`; no result depends on it."""
    if dtype == torch.float32:
        return 32 if head_dim <= 80 else 16
    if capability[0] not in (9, 10):
        return 64
    # 132 SMs (H100, H200) hold two programs of 128 rows each: a batch with fewer becomes twice as many of 64
    programs = heads * sum(-(-length // 128) for length in lengths)
    return 128 if programs > 2 * 132 else 64


class Config(NamedTuple):
    """How the kernel is compiled; `tma`: whole blocks of k and v come by TMA maps, else by pointers."""

    block_n: int
    num_warps: int
    num_stages: int
    tma: bool


def _config(head_dim: int, dtype: torch.dtype, capability: tuple[int, int], block_m: int) -> Config:
    """Tile and schedule. BLOCK_N does not depend on the batch: nor do the bits of a sequence's result."""
    # evidence: `python -m bench.static` and kernels/README.md; no GPU has timed any of this yet
    if dtype == torch.float32:
        # without tensor cores a dot keeps whole rows of both operands in registers: 32 keys spill
        return Config(16, 8, 2, False)
    if capability[0] in (9, 10):
        # 128 rows read k and v from L2 half as often as 64. Maps keep D <= 80 to 128 registers, pointers take
        # up to 178: so an SM holds two programs of 8 warps, or four of 4. There are maps for two pieces
        return Config(64, 8 if block_m >= 128 else 4, 2, len(_pieces(head_dim)) <= 2)
    if head_dim > 80:
        # mma.sync keeps q in registers too: 64 keys spill at 4 warps and at 8
        return Config(32, 8, 2, False)
    # masked columns cost registers: D = 72 spills with 64 keys on sm_120
    return Config(64 if head_dim % 16 == 0 else 32, 4, 2, False)


def _pieces(head_dim: int) -> list[int]:
    """Widths of the pieces of a block of D columns."""
    rounded = -(-head_dim // 16) * 16
    return [1 << log for log in range(8, 3, -1) if rounded & 1 << log]


def _maps(x: Tensor, rows: int) -> list[Any]:
    """TMA maps of x for blocks of `rows` tokens of one head: one for each of two pieces, or None."""
    return [*(TensorDescriptor.from_tensor(x, [rows, 1, width]) for width in _pieces(x.shape[2])), None][:2]


def _can_map(x: Tensor) -> bool:
    """Whether TMA takes x: address and strides are multiples of 16 bytes, a token's of a head's."""
    by_token, by_head = (n * x.itemsize for n in x.stride()[:2])
    aligned = x.data_ptr() % 16 == by_token % 16 == by_head % 16 == 0
    return aligned and by_head > 0 and by_token % by_head == 0


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor,
    work: Tensor | None,
    block_m: int,
    scale: float,
) -> None:
    if q.ndim != 3 or not q.is_floating_point():
        raise ValueError(f"varlen_attention needs floating point (T, H, D), got {tuple(q.shape)} {q.dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.shape != q.shape or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"varlen_attention needs q, k and v of one shape (T, H, D), dtype and device: "
                f"q is {tuple(q.shape)} {q.dtype} on {q.device}, "
                f"{name} is {tuple(x.shape)} {x.dtype} on {x.device}"
            )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[2] > 1 and x.stride(2) != 1:
            raise ValueError(
                f"varlen_attention needs a contiguous last dimension, so a last stride of 1: "
                f"{name} {tuple(x.shape)} has strides {x.stride()}"
            )
    if cu_seqlens_cpu.device.type != "cpu":
        raise ValueError(f"cu_seqlens_cpu must be the host's copy, got one on {cu_seqlens_cpu.device}")
    if q.is_cuda or work is not None:
        _check_kernel(q, cu_seqlens, work, block_m)


def _check_kernel(q: Tensor, cu_seqlens: Tensor, work: Tensor | None, block_m: int) -> None:
    """What the kernel needs beyond what the eager form does."""
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or q.shape[2] % 8 or q.shape[2] > 256:
        raise ValueError(
            f"varlen_attention on a GPU takes bfloat16, float16 or float32 and a head size that is a "
            f"multiple of 8 up to 256, got {q.dtype} and {q.shape[2]}"
        )
    if work is None or block_m < 16 or block_m & (block_m - 1):
        given = "no list" if work is None else f"block_m {block_m}"
        raise ValueError(
            f"varlen_attention on a GPU needs the work list of ops.prepare, for a block_m that is a power of "
            f"two and at least 16, got {given}"
        )
    for name, x in (("cu_seqlens", cu_seqlens), ("work", work)):
        if x.dtype != torch.int32 or x.device != q.device or not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32 on {q.device}, got {x.dtype} on {x.device}")


def varlen_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor,
    work: Tensor | None,
    block_m: int,
    scale: float,
) -> Tensor:
    """Launches the kernel; the tensors are read where they are, whatever their strides."""
    tokens, heads, size = q.shape
    out = q.new_empty(tokens, heads * size)
    if work is None or not work.shape[0]:
        return out
    config = _config(size, q.dtype, device_capability(q.device), block_m)
    tma = config.tma and _can_map(k) and _can_map(v)
    maps = [*_maps(k, config.block_n), *_maps(v, config.block_n)] if tma else [None] * 4
    strides = [x.stride()[:2] for x in (q, k, v)]
    align = gcd(16 // q.itemsize, *(n for pair in strides for n in pair))
    q_strides, k_strides, v_strides = ([n // align for n in pair] for pair in strides)
    constants = {"H": heads, "D": size, "ALIGN": align, "NEGATE": scale < 0, "TMA": tma}
    with on_device(q):
        _kernel[(work.shape[0] * heads,)](
            *(q, *q_strides, k, *k_strides, v, *v_strides, *maps, out, cu_seqlens, work),
            abs(scale) * log2(e),
            **constants,
            BLOCK_M=block_m,
            BLOCK_N=config.block_n,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=True,
        )
    return out


define_differentiable(
    "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor cu_seqlens_cpu, Tensor? work, "
    "int block_m, float scale) -> Tensor",
    varlen_attention_eager,
    lambda q, *rest: q.new_empty(q.shape[0], q.shape[1] * q.shape[2]),
    _check,
    varlen_attention_triton,
)
