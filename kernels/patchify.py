"""patchify: images or video frames become rows of normalised patches.

    row[(n, py, px)][(k, c, y, x)] = (pixel[K n + k, c, p py + y, p px + x] / 255 - mean[c]) / std[c]

The division by 255 is for uint8 only. K frames make one tubelet; a short last one repeats its own video's last frame.
Shapes: frames (F, c, H, W), uint8 or float, any strides; H and W multiples of p; K = 1 for images. Result
(ceil(F / K) * H/p * W/p, K * c * p^2) in `dtype`. `patchify_list` takes videos of any sizes, (F, c, H, W) each, and lays
their rows end to end. mean and std (c,) fp32; both None leaves the values alone.
Normalised in fp32, one rounding at the end.
Cost: each pixel read once, each row element written once; 2 FLOPs an element.
"""

import torch
from torch import Tensor

from ._common import define_differentiable


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
    videos: list[Tensor], mean: Tensor | None, std: Tensor | None, patch_size: int, tubelet: int, dtype: torch.dtype
) -> Tensor:
    """Rows of every video, one after the other."""
    return torch.cat([patchify_eager(frames, mean, std, patch_size, tubelet, dtype) for frames in videos])


def _rows(frames: Tensor, patch_size: int, tubelet: int) -> int:
    count, _, height, width = frames.shape
    return -(-count // tubelet) * (height // patch_size) * (width // patch_size)


def _fake(
    frames: Tensor, mean: Tensor | None, std: Tensor | None, patch_size: int, tubelet: int, dtype: torch.dtype
) -> Tensor:
    row = tubelet * frames.shape[1] * patch_size**2
    return frames.new_empty(_rows(frames, patch_size, tubelet), row, dtype=dtype)


def _fake_list(
    videos: list[Tensor], mean: Tensor | None, std: Tensor | None, patch_size: int, tubelet: int, dtype: torch.dtype
) -> Tensor:
    row = tubelet * videos[0].shape[1] * patch_size**2
    return videos[0].new_empty(sum(_rows(x, patch_size, tubelet) for x in videos), row, dtype=dtype)


def _check(
    frames: Tensor, mean: Tensor | None, std: Tensor | None, patch_size: int, tubelet: int, dtype: torch.dtype
) -> None:
    if frames.ndim != 4 or frames.shape[2] % patch_size or frames.shape[3] % patch_size:
        raise ValueError(f"patchify needs (F, c, H, W), H and W multiples of {patch_size}, got {tuple(frames.shape)}")
    if not (frames.is_floating_point() or frames.dtype == torch.uint8):
        raise ValueError(f"patchify needs uint8 or floating point pixels, got {frames.dtype}")
    if (mean is None) != (std is None) or (mean is not None and len(mean) != frames.shape[1]):
        raise ValueError(f"patchify needs mean and std of {frames.shape[1]} channels, or neither")


def _check_list(
    videos: list[Tensor], mean: Tensor | None, std: Tensor | None, patch_size: int, tubelet: int, dtype: torch.dtype
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


_ARGUMENTS = "Tensor? mean, Tensor? std, int patch_size, int tubelet, ScalarType dtype"
define_differentiable(f"patchify(Tensor frames, {_ARGUMENTS}) -> Tensor", patchify_eager, _fake, _check)
define_differentiable(f"patchify_list(Tensor[] videos, {_ARGUMENTS}) -> Tensor", patchify_list_eager, _fake_list, _check_list)
