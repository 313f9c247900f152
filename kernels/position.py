"""embed_tokens: prefix tokens, patches and the cropped position embedding (CPE), as one packed stream.

    out[start_s + g]           = prefix[g]                         g < G: no position
    out[start_s + G + y*w + x] = patch[y, x] + E(u_y, u_x)         for every sequence s of grid (h, w)

E(u_y, u_x) is the bilinear sample of the table (Ry, Rx, C) at taps i0 = floor u, i1 = min(i0 + 1, extent - 1),
u(i) = max(0, (i + 1/2) * extent / target - 1/2), or i * (extent - 1) / (target - 1) under align_corners.

CPE: extent = (Ry, Rx), target = max(h, w) on both axes: the square resize of the reference, of which only the
top-left h x w corner is computed. Without CPE: extent = min(needed, R) on each axis, target = what is needed.
A grid equal to the table takes it as it is. The sample is rounded to the table's dtype before it is added, as
in the reference.

Shapes: patches (Pi, C) of the images, then video_patches (Pv, C) of the tubelets, in stream order; grids
(S, 2) int32 (h, w); cu_seqlens (S + 1,) int32; result (T, C) in `dtype`, T = Pi + Pv + S * G. The kernel also
takes `work`, (n, 2) int32 rows (sequence, block of BLOCK_T tokens), as `Packing.work_list(BLOCK_T)` makes it.
dtypes: bf16, fp16, fp32.
Cost: T * C written, P * C read, the table read once from memory; 8 FLOPs for each channel of a patch.
"""

import torch
from torch import Tensor

from ._common import define_differentiable, on_device, require_floating, require_rows, runs, tl, triton

# tokens and channels of one program: the width of every RADIO is a multiple of 128
BLOCK_T, BLOCK_C = 16, 128


def axis_taps(
    needed: int, extent: int, target: int, align_corners: bool, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Lower tap, upper tap (int64) and the upper tap's weight, each (needed,)."""
    wide = torch.promote_types(like.dtype, torch.float32)
    position = torch.arange(needed, device=like.device, dtype=wide)
    if align_corners:
        source = position * ((extent - 1) / (target - 1) if target > 1 else 0.0)
    else:
        # the scale is rounded to the working dtype first, as in F.interpolate
        scale = torch.tensor(extent, dtype=wide, device=like.device) / target
        source = ((position + 0.5) * scale - 0.5).clamp_(min=0)
    lower = source.long().clamp_(max=extent - 1)
    return lower, (lower + 1).clamp_(max=extent - 1), source - lower


def sample_positions(table: Tensor, grid: tuple[int, int], cpe: bool, align_corners: bool) -> Tensor:
    """The position embedding of one grid: (h, w, C) in the table's dtype."""
    if grid == tuple(table.shape[:2]):
        return table
    taps = []
    for needed, side in zip(grid, table.shape[:2], strict=True):
        extent, target = (side, max(grid)) if cpe else (min(needed, side), needed)
        taps.append(axis_taps(needed, extent, target, align_corners, table))
    (y0, y1, wy), (x0, x1, wx) = taps
    wy, wx = wy[:, None, None], wx[None, :, None]
    # mixed products widen bf16 and fp16 taps, and only the taps
    top = table[y0[:, None], x0] * (1 - wx) + table[y0[:, None], x1] * wx
    bottom = table[y1[:, None], x0] * (1 - wx) + table[y1[:, None], x1] * wx
    return (top * (1 - wy) + bottom * wy).to(table.dtype)


def embed_tokens_eager(
    patches: Tensor,
    video_patches: Tensor | None,
    prefix: Tensor,
    table: Tensor,
    grids: Tensor,
    grids_cpu: Tensor,
    cu_seqlens: Tensor,
    work: Tensor | None,
    cpe: bool,
    align_corners: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The formula, one write for each run of sequences of one grid."""
    rows = patches if video_patches is None else torch.cat((patches, video_patches))
    shapes = [tuple(grid) for grid in grids_cpu.tolist()]
    skip = len(prefix)
    out = rows.new_empty(len(rows) + len(shapes) * skip, rows.shape[1], dtype=dtype)
    known = {
        grid: sample_positions(table, grid, cpe, align_corners).flatten(0, 1).to(dtype)
        for grid in set(shapes)
    }
    first_row = first_patch = 0
    for count, (h, w) in runs(shapes):
        last_row, last_patch = first_row + count * (h * w + skip), first_patch + count * h * w
        stream = out[first_row:last_row].unflatten(0, (count, -1))
        stream[:, :skip] = prefix
        stream[:, skip:] = rows[first_patch:last_patch].unflatten(0, (count, -1)).to(dtype) + known[h, w]
        first_row, first_patch = last_row, last_patch
    return out


@triton.jit
def _taps(o_i, needed, side, longest, CPE: tl.constexpr, ALIGN_CORNERS: tl.constexpr):
    """Lower tap, upper tap and the upper tap's weight, on an axis of `needed` patches and a table of `side`
    rows."""
    extent = side
    target = longest
    if not CPE:
        extent = tl.minimum(needed, side)
        target = needed
    if ALIGN_CORNERS:
        b_u = o_i.to(tl.float32) * tl.div_rn(
            (extent - 1).to(tl.float32), tl.maximum(target - 1, 1).to(tl.float32)
        )
    else:
        b_u = (o_i.to(tl.float32) + 0.5) * tl.div_rn(extent.to(tl.float32), target.to(tl.float32)) - 0.5
        b_u = tl.maximum(b_u, 0.0)
    o_low = tl.minimum(b_u.to(tl.int32), extent - 1)
    return o_low, tl.minimum(o_low + 1, extent - 1), b_u - o_low.to(tl.float32)


@triton.jit
def _sample(table, o_y, o_x, Rx, C, o_c, m):
    """One tap of every patch, in fp32."""
    row = o_y.to(tl.int64) * Rx + o_x
    return tl.load(table + row[:, None] * C + o_c, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _position(table, o_p, h, w, Ry, Rx, C, o_c, m, CPE: tl.constexpr, ALIGN_CORNERS: tl.constexpr):
    """The embedding of patches o_p of an (h, w) grid, rounded to the table's dtype."""
    height = tl.maximum(h, w)
    width = height
    if (h == Ry) & (w == Rx):
        # a grid like the table takes it as it is, on a rectangular table too
        height, width = h, w
    y0, y1, b_wy = _taps(o_p // w, h, Ry, height, CPE, ALIGN_CORNERS)
    x0, x1, b_wx = _taps(o_p % w, w, Rx, width, CPE, ALIGN_CORNERS)
    b_wy, b_wx = b_wy[:, None], b_wx[:, None]
    b_top = _sample(table, y0, x0, Rx, C, o_c, m) * (1 - b_wx) + _sample(table, y0, x1, Rx, C, o_c, m) * b_wx
    b_low = _sample(table, y1, x0, Rx, C, o_c, m) * (1 - b_wx) + _sample(table, y1, x1, Rx, C, o_c, m) * b_wx
    return (b_top * (1 - b_wy) + b_low * b_wy).to(table.dtype.element_ty)


@triton.jit(do_not_specialize=["image_patches"])
def _kernel(
    patches, video_patches, image_patches,  # (Pi, C), (Pv, C), Pi
    prefix, table, grids, cu_seqlens, work, out,  # (G, C), (Ry, Rx, C), (S, 2), (S + 1,), (n, 2), (T, C)
    C, G, Ry, Rx,
    CPE: tl.constexpr, ALIGN_CORNERS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    chunks = tl.cdiv(C, BLOCK_C)
    i_item, i_c = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    i_s = tl.load(work + 2 * i_item)
    if i_s < 0:
        return
    h, w = tl.load(grids + 2 * i_s), tl.load(grids + 2 * i_s + 1)
    start = tl.load(cu_seqlens + i_s).to(tl.int64)
    length = tl.load(cu_seqlens + i_s + 1) - start
    i_t = tl.load(work + 2 * i_item + 1) * BLOCK_T
    o_t = i_t + tl.arange(0, BLOCK_T)
    o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = (o_c < C)[None, :]
    o_c = o_c[None, :]
    p_out = out + (start + o_t)[:, None] * C + o_c
    if i_t < G:
        m_prefix = (o_t < G)[:, None] & m_c
        b_prefix = tl.load(prefix + o_t.to(tl.int64)[:, None] * C + o_c, mask=m_prefix, other=0.0)
        tl.store(p_out, b_prefix.to(out.dtype.element_ty), mask=m_prefix)
    o_p = o_t - G
    m_p = ((o_p >= 0) & (o_t < length))[:, None] & m_c

    # rows of this sequence: images come first, then the tubelets in a tensor of their own
    first = start - i_s.to(tl.int64) * G
    rows = patches
    if first >= image_patches:
        rows = video_patches
        first -= image_patches
    b_x = tl.load(rows + (first + o_p)[:, None] * C + o_c, mask=m_p, other=0.0).to(tl.float32)

    b_position = _position(table, tl.maximum(o_p, 0), h, w, Ry, Rx, C, o_c, m_p, CPE, ALIGN_CORNERS)
    b_out = b_x + b_position.to(out.dtype.element_ty).to(tl.float32)
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_p)


def _num_warps(element_bytes: int) -> int:
    """16 bytes a thread, of the widest tensor that is read."""
    # triton 3.7.1, sm_90: 32 registers, so an SM holds 2048 threads (bf16 to fp32: 40); with twice as much a thread 56
    # to 86
    return BLOCK_T * BLOCK_C * element_bytes // (16 * 32)


def _fake(
    patches: Tensor,
    video_patches: Tensor | None,
    prefix: Tensor,
    table: Tensor,
    grids: Tensor,
    grids_cpu: Tensor,
    cu_seqlens: Tensor,
    work: Tensor | None,
    cpe: bool,
    align_corners: bool,
    dtype: torch.dtype,
) -> Tensor:
    tokens = patches.shape[0] + grids.shape[0] * prefix.shape[0]
    if video_patches is not None:
        tokens = tokens + video_patches.shape[0]
    return patches.new_empty(tokens, patches.shape[1], dtype=dtype)


def _check(
    patches: Tensor,
    video_patches: Tensor | None,
    prefix: Tensor,
    table: Tensor,
    grids: Tensor,
    grids_cpu: Tensor,
    cu_seqlens: Tensor,
    work: Tensor | None,
    cpe: bool,
    align_corners: bool,
    dtype: torch.dtype,
) -> None:
    require_floating("embed_tokens", patches)
    width = patches.shape[-1]
    if patches.ndim != 2 or prefix.shape[1:] != (width,) or table.ndim != 3 or table.shape[2] != width:
        raise ValueError(
            f"embed_tokens needs patches (P, C), prefix (G, C) and table (Ry, Rx, C), got {tuple(patches.shape)}, "
            f"{tuple(prefix.shape)} and {tuple(table.shape)}"
        )
    if video_patches is not None and (
        video_patches.shape[1:] != (width,) or video_patches.dtype != patches.dtype
    ):
        raise ValueError(
            f"embed_tokens needs video_patches like patches, (P, {width}) {patches.dtype}, "
            f"got {tuple(video_patches.shape)} {video_patches.dtype}"
        )
    if (
        grids.ndim != 2
        or grids.shape[1] != 2
        or grids_cpu.shape != grids.shape
        or grids_cpu.device.type != "cpu"
    ):
        raise ValueError(f"embed_tokens needs grids (S, 2) and its CPU copy, got {tuple(grids.shape)}")


def _check_kernel(work: Tensor | None, **tensors: Tensor) -> None:
    """What the kernel needs beyond what the eager form does."""
    if work is None:
        raise ValueError(f"embed_tokens on a GPU needs the work list of Packing.work_list({BLOCK_T})")
    require_rows("embed_tokens", work=work, **tensors)
    for name, x in tensors.items():
        if not x.is_contiguous():
            raise ValueError(
                f"the embed_tokens kernel needs contiguous tensors, {name} has strides {x.stride()}"
            )


def embed_tokens_triton(
    patches: Tensor,
    video_patches: Tensor | None,
    prefix: Tensor,
    table: Tensor,
    grids: Tensor,
    grids_cpu: Tensor,
    cu_seqlens: Tensor,
    work: Tensor | None,
    cpe: bool,
    align_corners: bool,
    dtype: torch.dtype,
) -> Tensor:
    """One launch for all sequences, images and tubelets."""
    second = patches if video_patches is None else video_patches
    _check_kernel(
        work, patches=patches, video_patches=second, prefix=prefix, table=table, cu_seqlens=cu_seqlens
    )
    rows = len(patches) + (0 if video_patches is None else len(video_patches))
    out = patches.new_empty(rows + len(grids) * len(prefix), patches.shape[1], dtype=dtype)
    if work is None or not len(work):
        return out
    channels = patches.shape[1]
    with on_device(patches):
        _kernel[(len(work) * triton.cdiv(channels, BLOCK_C),)](
            *(patches, second, len(patches), prefix, table, grids, cu_seqlens, work, out),
            *(channels, len(prefix), table.shape[0], table.shape[1]),
            CPE=cpe,
            ALIGN_CORNERS=align_corners,
            BLOCK_T=BLOCK_T,
            BLOCK_C=BLOCK_C,
            num_warps=_num_warps(max(patches.itemsize, prefix.itemsize, table.itemsize)),
            enable_fp_fusion=True,
        )
    return out


define_differentiable(
    "embed_tokens(Tensor patches, Tensor? video_patches, Tensor prefix, Tensor table, Tensor grids, Tensor grids_cpu, "
    "Tensor cu_seqlens, Tensor? work, bool cpe, bool align_corners, ScalarType dtype) -> Tensor",
    embed_tokens_eager,
    _fake,
    _check,
    embed_tokens_triton,
)
