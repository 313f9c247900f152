"""patchify: images or video frames become rows of normalised patches.

    row[(n, py, px)][(k, c, y, x)] = (pixel[K n + k, c, p py + y, p px + x] / 255 - mean[c]) / std[c]

The division by 255 is for uint8 only. K frames make one tubelet; a short last one repeats its own video's last
frame. Normalised in fp32, one rounding at the end.

Shapes: frames (F, c, H, W), uint8 or float, any strides; H and W multiples of p; K = 1 for images. Result
(ceil(F / K) * H/p * W/p, K * c * p^2) in `dtype`. `patchify_list` takes videos of any sizes, (F, c, H, W) each,
and lays their rows end to end; it reads them through a table of addresses and strides that the host builds, so
it is for calls outside torch.compile and CUDA graphs. mean and std (c,) fp32; both None leaves values alone.
Cost: each pixel read once, each row element written once; 2 FLOPs an element.
"""

from itertools import accumulate
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from ._common import define_differentiable, on_device, tl, triton


def patchify_eager(
    frames: Tensor, mean: Tensor | None, std: Tensor | None, patch_size: int, tubelet: int, dtype: torch.dtype
) -> Tensor:
    """The formula: repeat the tail, rearrange, then normalise the rows in place."""
    missing = -len(frames) % tubelet
    if missing:
        frames = torch.cat((frames, frames[-1:].expand(missing, *frames.shape[1:])))
    channels = frames.shape[1]
    cells = frames.unflatten(0, (-1, tubelet)).unflatten(3, (-1, patch_size)).unflatten(5, (-1, patch_size))
    # (n, k, c, py, y, px, x) -> (n, py, px, k, c, y, x)
    cells = cells.permute(0, 3, 5, 1, 2, 4, 6)
    wide = torch.promote_types(frames.dtype, torch.float32)
    rows = cells.to(wide, memory_format=torch.contiguous_format, copy=True)
    if not frames.is_floating_point():
        rows.div_(255)
    if mean is not None and std is not None:
        rows.sub_(mean.to(wide).view(channels, 1, 1)).div_(std.to(wide).view(channels, 1, 1))
    return rows.to(dtype).view(-1, tubelet * channels * patch_size**2)


def patchify_list_eager(
    videos: list[Tensor],
    mean: Tensor | None,
    std: Tensor | None,
    patch_size: int,
    tubelet: int,
    dtype: torch.dtype,
) -> Tensor:
    """Rows of every video, one after the other."""
    return torch.cat([patchify_eager(frames, mean, std, patch_size, tubelet, dtype) for frames in videos])


@triton.jit
def _patch_row(
    frames, f_f, f_c, f_h, f_w, F, W,  # (F, c, H, W) and its strides
    mean, std, out, i_n, i_k, i_c, i_y,  # out: first row of this tubelet's row i_y of patches
    K: tl.constexpr, C: tl.constexpr, NORMALIZE: tl.constexpr,
    P: tl.constexpr, P2: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """One channel of one frame: the W patches of P image rows."""
    # indices are widened, not strides: a stride of 1 is a compile-time constant
    i_f = tl.minimum(i_n.to(tl.int64) * K + i_k, F - 1)
    source = frames + i_f * f_f + i_c.to(tl.int64) * f_c + i_y.to(tl.int64) * P * f_h
    o_r = tl.arange(0, BLOCK_X * P2)
    o_y, o_x = (o_r % P2)[:, None], tl.arange(0, P2)[None, :]
    # products, not divisions: 2 instructions a pixel for about 20
    if NORMALIZE:
        b_mean, b_inverse = tl.load(mean + i_c), tl.div_rn(1.0, tl.load(std + i_c))
    for i_x in range(0, W, BLOCK_X):
        o_p = i_x + (o_r // P2)[:, None]
        m = (o_p < W) & (o_y < P) & (o_x < P)
        p_x = source + o_y.to(tl.int64) * f_h + (o_p * P + o_x).to(tl.int64) * f_w
        b_x = tl.load(p_x, mask=m, other=0).to(tl.float32)
        if frames.dtype.element_ty == tl.uint8:
            if out.dtype.element_ty == tl.float32:
                # the error of 1 / 255 would show
                b_x = tl.div_rn(b_x, 255.0)
            else:
                b_x *= 1 / 255
        if NORMALIZE:
            b_x = (b_x - b_mean) * b_inverse
        p_out = out + (o_p.to(tl.int64) * (K * C) + i_k * C + i_c) * (P * P) + o_y * P + o_x
        tl.store(p_out, b_x.to(out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["F"])
def _kernel(
    frames, f_f, f_c, f_h, f_w, mean, std, out, F, H, W,  # H and W in patches
    K: tl.constexpr, C: tl.constexpr, NORMALIZE: tl.constexpr,
    P: tl.constexpr, P2: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Dense form: program (tubelet, row of patches, frame of the tubelet, channel)."""
    i_c, i_k = tl.program_id(0) % C, tl.program_id(0) // C % K
    i_row = tl.program_id(0) // (C * K)
    out += i_row.to(tl.int64) * W * (K * C * P * P)
    _patch_row(
        frames, f_f, f_c, f_h, f_w, F, W, mean, std, out, i_row // H, i_k, i_c, i_row % H,
        K, C, NORMALIZE, P, P2, BLOCK_X,
    )  # fmt: skip


# columns of the list form's table, int64: where a video lies, its strides in units of ALIGN elements, its
# size, and its first row of patches
_TABLE = ("address", "f_f", "f_c", "f_h", "f_w", "F", "W", "H", "first")


@triton.jit
def _list_kernel(
    table, jobs, mean, std, out, like,
    ALIGN: tl.constexpr, UNIT: tl.constexpr, K: tl.constexpr, C: tl.constexpr, NORMALIZE: tl.constexpr,
    P: tl.constexpr, P2: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """List form: program (job, frame of the tubelet, channel); a job is (video, tubelet, row of patches).

    UNIT: pixels of a row lie side by side in every video.
    """
    i_c, i_k = tl.program_id(0) % C, tl.program_id(0) // C % K
    job = jobs + tl.program_id(0) // (C * K) * 3
    video = table + tl.load(job) * 9
    i_n, i_y = tl.load(job + 1), tl.load(job + 2)
    size: tl.constexpr = like.dtype.element_ty.primitive_bitwidth // 8
    frames = tl.multiple_of(tl.load(video).to(tl.pointer_type(like.dtype.element_ty)), ALIGN * size)
    f_f, f_c, f_h = tl.load(video + 1) * ALIGN, tl.load(video + 2) * ALIGN, tl.load(video + 3) * ALIGN
    f_w = 1 if UNIT else tl.load(video + 4)
    F, W, H = tl.load(video + 5), tl.load(video + 6).to(tl.int32), tl.load(video + 7)
    out += (tl.load(video + 8) + (i_n * H + i_y) * W) * (K * C * P * P)
    _patch_row(
        frames, f_f, f_c, f_h, f_w, F, W, mean, std, out, i_n, i_k, i_c, i_y,
        K, C, NORMALIZE, P, P2, BLOCK_X,
    )  # fmt: skip


class Config(NamedTuple):
    """A program's step is `block_x` patches of one channel; `padded` is the patch size rounded up to a power
    of two."""

    padded: int
    block_x: int
    num_warps: int


def _config(patch_size: int, pixel_bytes: int, row_bytes: int) -> Config:
    """2048 pixels a step, 8 a thread, or 16 of uint8 to a 16-bit row: loads and stores of 16 bytes."""
    # triton 3.7.1, sm_90, patches of 16: 32 registers, so an SM holds 2048 threads (uint8 to fp32, which divides: 40);
    # 16 pixels a thread of any other kind take 40 to 48; rows of 14 begin anywhere, and go 2 elements at a time
    padded = triton.next_power_of_2(patch_size)
    return Config(padded, max(2048 // padded**2, 1), 4 if pixel_bytes == 1 and row_bytes == 2 else 8)


def _rows(frames: Tensor, patch_size: int, tubelet: int) -> int:
    count, _, height, width = frames.shape
    return -(-count // tubelet) * (height // patch_size) * (width // patch_size)


def _fake(
    frames: Tensor, mean: Tensor | None, std: Tensor | None, patch_size: int, tubelet: int, dtype: torch.dtype
) -> Tensor:
    row = tubelet * frames.shape[1] * patch_size**2
    return frames.new_empty(_rows(frames, patch_size, tubelet), row, dtype=dtype)


def _fake_list(
    videos: list[Tensor],
    mean: Tensor | None,
    std: Tensor | None,
    patch_size: int,
    tubelet: int,
    dtype: torch.dtype,
) -> Tensor:
    row = tubelet * videos[0].shape[1] * patch_size**2
    return videos[0].new_empty(sum(_rows(x, patch_size, tubelet) for x in videos), row, dtype=dtype)


def _check(
    frames: Tensor, mean: Tensor | None, std: Tensor | None, patch_size: int, tubelet: int, dtype: torch.dtype
) -> None:
    if frames.ndim != 4 or frames.shape[2] % patch_size or frames.shape[3] % patch_size:
        raise ValueError(
            f"patchify needs (F, c, H, W), H and W multiples of {patch_size}, got {tuple(frames.shape)}"
        )
    if not (frames.is_floating_point() or frames.dtype == torch.uint8):
        raise ValueError(f"patchify needs uint8 or floating point pixels, got {frames.dtype}")
    if (mean is None) != (std is None) or (mean is not None and len(mean) != frames.shape[1]):
        raise ValueError(f"patchify needs mean and std of {frames.shape[1]} channels, or neither")


def _check_list(
    videos: list[Tensor],
    mean: Tensor | None,
    std: Tensor | None,
    patch_size: int,
    tubelet: int,
    dtype: torch.dtype,
) -> None:
    if not videos:
        raise ValueError("patchify_list needs at least one video")
    for frames in videos:
        _check(frames, mean, std, patch_size, tubelet, dtype)
        if frames.shape[1] != videos[0].shape[1]:
            raise ValueError(
                f"patchify_list needs videos of as many channels, got {videos[0].shape[1]} and {frames.shape[1]}"
            )
        if (frames.dtype, frames.device) != (videos[0].dtype, videos[0].device):
            raise ValueError(
                f"patchify_list needs one dtype and device, got {videos[0].dtype} on {videos[0].device} "
                f"and {frames.dtype} on {frames.device}"
            )


def patchify_triton(
    frames: Tensor, mean: Tensor | None, std: Tensor | None, patch_size: int, tubelet: int, dtype: torch.dtype
) -> Tensor:
    """One launch for the batch, whatever its strides."""
    out = _fake(frames, mean, std, patch_size, tubelet, dtype)
    if not out.numel():
        return out
    count, channels, height, width = frames.shape
    h, w = height // patch_size, width // patch_size
    config = _config(patch_size, frames.itemsize, out.itemsize)
    with on_device(frames):
        _kernel[(-(-count // tubelet) * h * tubelet * channels,)](
            *(frames, *frames.stride(), mean, std, out, count, h, w),
            K=tubelet,
            C=channels,
            NORMALIZE=mean is not None,
            P=patch_size,
            P2=config.padded,
            BLOCK_X=config.block_x,
            num_warps=config.num_warps,
            enable_fp_fusion=True,
        )
    return out


def _alignment(videos: list[Tensor]) -> int:
    """Elements, at most 16 bytes of them, that divide every address and every stride but that of x."""
    size = videos[0].itemsize
    return gcd(16 // size, *(n for x in videos for n in (x.data_ptr() // size, *x.stride()[:3])))


def _tables(videos: list[Tensor], patch_size: int, tubelet: int, align: int) -> tuple[Tensor, Tensor]:
    """The table (videos, 9) int64 and the jobs (n, 3) int32 of the list kernel, on the host."""
    firsts = accumulate([_rows(x, patch_size, tubelet) for x in videos], initial=0)
    table = []
    for x, first in zip(videos, firsts, strict=False):
        f_f, f_c, f_h, f_w = x.stride()
        strides = (f_f // align, f_c // align, f_h // align, f_w)
        table.append(
            (x.data_ptr(), *strides, len(x), x.shape[3] // patch_size, x.shape[2] // patch_size, first)
        )
    jobs = []
    for i, x in enumerate(videos):
        counts = (range(i, i + 1), range(-(-len(x) // tubelet)), range(x.shape[2] // patch_size))
        axes = [torch.tensor(count, dtype=torch.int32, device="cpu") for count in counts]
        jobs.append(torch.cartesian_prod(*axes))
    return torch.tensor(table, dtype=torch.int64, device="cpu"), torch.cat(jobs)


def patchify_list_triton(
    videos: list[Tensor],
    mean: Tensor | None,
    std: Tensor | None,
    patch_size: int,
    tubelet: int,
    dtype: torch.dtype,
) -> Tensor:
    """One launch for all videos. Stream order keeps their memory alive until the kernel has read it."""
    out = _fake_list(videos, mean, std, patch_size, tubelet, dtype)
    if not out.numel():
        return out
    align = _alignment(videos)
    table, jobs = _tables(videos, patch_size, tubelet, align)
    config, channels = _config(patch_size, videos[0].itemsize, out.itemsize), videos[0].shape[1]
    if videos[0].is_cuda:
        table, jobs = (x.pin_memory().to(out.device, non_blocking=True) for x in (table, jobs))
    with on_device(out):
        _list_kernel[(len(jobs) * tubelet * channels,)](
            *(table, jobs, mean, std, out, videos[0]),
            ALIGN=align,
            UNIT=all(x.stride(3) == 1 for x in videos),
            K=tubelet,
            C=channels,
            NORMALIZE=mean is not None,
            P=patch_size,
            P2=config.padded,
            BLOCK_X=config.block_x,
            num_warps=config.num_warps,
            enable_fp_fusion=True,
        )
    return out


_ARGUMENTS = "Tensor? mean, Tensor? std, int patch_size, int tubelet, ScalarType dtype"
define_differentiable(
    f"patchify(Tensor frames, {_ARGUMENTS}) -> Tensor", patchify_eager, _fake, _check, patchify_triton
)
define_differentiable(
    f"patchify_list(Tensor[] videos, {_ARGUMENTS}) -> Tensor",
    patchify_list_eager,
    _fake_list,
    _check_list,
    patchify_list_triton,
)
