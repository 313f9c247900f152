"""embed_tokens: prefix tokens, patches and the cropped position embedding (CPE), written as one packed stream.

    out[start_s + g]             = prefix[g]                                  g < G: no position
    out[start_s + G + y*w + x]   = patch[y, x] + E(u_y, u_x)                  for every sequence s of grid (h, w)

E(u_y, u_x) is the bilinear sample of the table (Ry, Rx, C) at taps i0 = floor u, i1 = min(i0 + 1, extent - 1), with
u(i) = max(0, (i + 1/2) * extent / target - 1/2), or i * (extent - 1) / (target - 1) under align_corners.

CPE: extent = (Ry, Rx), target = max(h, w) on both axes: the square resize of the reference, of which only the top-left
h x w corner is computed. Without CPE: extent = min(needed, R) on each axis, target = what is needed. A grid equal to the table
takes it as it is. The sample is rounded to the table's dtype before it is added, as in the reference.

Shapes: patches (Pi, C) of the images, then video_patches (Pv, C) of the tubelets, in stream order; grids (S, 2) int32 (h, w);
cu_seqlens (S + 1,) int32; result (T, C) in `dtype`, T = Pi + Pv + S * G. dtypes: bf16, fp16, fp32.
Cost: T * C written, P * C read, the table read once from memory; 8 FLOPs for each patch channel.
"""

import torch
from torch import Tensor

from ._common import define_differentiable, require_floating, runs


def axis_taps(
    needed: int, extent: int, target: int, align_corners: bool, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Lower tap, upper tap (int64) and the upper tap's weight, each (needed,), for positions 0 .. needed - 1."""
    wide = torch.promote_types(like.dtype, torch.float32)
    position = torch.arange(needed, device=like.device, dtype=wide)
    if align_corners:
        source = position * ((extent - 1) / (target - 1) if target > 1 else 0.0)
    else:
        # the scale is rounded to the working dtype first, as in F.interpolate
        scale = torch.tensor(extent, dtype=wide) / target
        source = ((position + 0.5) * scale.to(like.device) - 0.5).clamp_(min=0)
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
        grid: sample_positions(table, grid, cpe, align_corners).flatten(0, 1).to(dtype) for grid in set(shapes)
    }
    first_row = first_patch = 0
    for count, (h, w) in runs(shapes):
        last_row, last_patch = first_row + count * (h * w + skip), first_patch + count * h * w
        stream = out[first_row:last_row].unflatten(0, (count, -1))
        stream[:, :skip] = prefix
        stream[:, skip:] = rows[first_patch:last_patch].unflatten(0, (count, -1)).to(dtype) + known[h, w]
        first_row, first_patch = last_row, last_patch
    return out


def _fake(
    patches: Tensor,
    video_patches: Tensor | None,
    prefix: Tensor,
    table: Tensor,
    grids: Tensor,
    grids_cpu: Tensor,
    cu_seqlens: Tensor,
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
    if video_patches is not None and (video_patches.shape[1:] != (width,) or video_patches.dtype != patches.dtype):
        raise ValueError(
            f"embed_tokens needs video_patches like patches, (P, {width}) {patches.dtype}, "
            f"got {tuple(video_patches.shape)} {video_patches.dtype}"
        )
    if grids.ndim != 2 or grids.shape[1] != 2 or grids_cpu.shape != grids.shape or grids_cpu.device.type != "cpu":
        raise ValueError(f"embed_tokens needs grids (S, 2) and its CPU copy, got {tuple(grids.shape)}")


define_differentiable(
    "embed_tokens(Tensor patches, Tensor? video_patches, Tensor prefix, Tensor table, Tensor grids, Tensor grids_cpu, "
    "Tensor cu_seqlens, bool cpe, bool align_corners, ScalarType dtype) -> Tensor",
    embed_tokens_eager,
    _fake,
    _check,
)
