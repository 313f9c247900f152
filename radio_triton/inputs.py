"""What the caller may pass: every call form is checked, and brought to frames of images and of tubelets."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from .config import RadioConfig
from .packing import Grid, Item

Frames = Tensor | list[Tensor]
PIXELS = (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Inputs:
    """Pixels and their sizes.

    `images` are (F, c, H, W) frames, one sequence each; `videos` are (F, c, H, W) frames of which
    `video_temporal_patch_size` make a sequence. `image_grids` and `tubelet_grids` are the sequences' (h, w).
    `form` is the shape of the output: "dense" (S, N, C), "packed" (P, C) or "packed_batch" (1, P, C).
    """

    image_grids: list[Grid]
    tubelet_grids: list[Grid]
    items: list[Item]
    form: str
    images: Frames | None = None
    videos: Frames | None = None


def nearest_resolution(step: int, height: int, width: int) -> tuple[int, int]:
    """The nearest multiples of `step`, at least one; halves go to the even one, as in the reference."""
    return max(round(height / step), 1) * step, max(round(width / step), 1) * step


def read(config: RadioConfig, x: Any, imgs_sizes: Any, image_grid_hw: Any, num_frames: int | None) -> Inputs:
    """`Inputs` of one call of `RadioModel.forward`; ValueError or TypeError says what is accepted."""
    sizes = [
        name
        for name, given in (("imgs_sizes", imgs_sizes), ("image_grid_hw", image_grid_hw))
        if given is not None
    ]
    if len(sizes) == 2:
        raise ValueError(
            "got both imgs_sizes and image_grid_hw: pass one, pixels (H, W) or patches (h, w) of each image"
        )
    if num_frames is not None and sizes:
        raise ValueError(
            f"num_frames is for the frames (F, c, H, W) of one video, {sizes[0]} for packed patches: pass one"
        )
    if isinstance(x, (list, tuple)):
        if sizes or num_frames is not None:
            raise ValueError(f"a list of images knows its sizes: drop {sizes[0] if sizes else 'num_frames'}")
        return read_images(config, x)
    _require_tensor(x, "the input")
    if sizes:
        return read_patches(config, x, _grids(config, imgs_sizes, image_grid_hw))
    if x.ndim != 4:
        raise ValueError(_wrong_rank(config, x))
    return read_batch(config, x) if num_frames is None else read_video(config, x, num_frames)


def read_batch(config: RadioConfig, x: Tensor) -> Inputs:
    """Images (B, c, H, W), or Transformers' stacked video (B, K * c, H, W), frame-major."""
    tubelet, channels = config.video_temporal_patch_size, config.num_channels
    if tubelet > 1 and x.shape[1] == tubelet * channels:
        _require_video(config)
        grid = _grid(config, x.shape, "the stacked video", channels * tubelet)
        items = [Item(i, 1, True) for i in range(len(x))]
        frames = x.reshape(len(x) * tubelet, channels, *x.shape[2:])
        return Inputs([], [grid] * len(x), items, "dense", videos=frames)
    grid = _grid(config, x.shape, "the batch", channels)
    return Inputs([grid] * len(x), [], [Item(i, 1, False) for i in range(len(x))], "dense", images=x)


def read_images(config: RadioConfig, images: Sequence[Any]) -> Inputs:
    """A list of (c, H, W) images of any sizes."""
    frames = _frames(config, images, "image", (3,))
    grids = [_grid(config, x.shape, f"image {i}", config.num_channels) for i, x in enumerate(images)]
    return Inputs(grids, [], [Item(i, 1, False) for i in range(len(grids))], "packed", images=frames)


def read_patches(config: RadioConfig, x: Tensor, grids: list[Grid]) -> Inputs:
    """Packed patches (P, c * p^2) or (1, P, c * p^2) of images of these grids."""
    patch, channels = config.patch_size, config.num_channels
    row = channels * patch**2
    if x.ndim not in (2, 3) or x.shape[-1] != row:
        raise ValueError(
            f"packed patches are (P, {row}) or (1, P, {row}) = {channels} x {patch}^2, got {tuple(x.shape)}"
        )
    if x.ndim == 3 and len(x) != 1:
        raise ValueError(
            f"packed patches have batch 1, got {tuple(x.shape)}: lay the images end to end in one row"
        )
    rows = x.reshape(-1, row)
    total = sum(h * w for h, w in grids)
    if total != len(rows):
        raise ValueError(
            f"the sizes given add up to {total} patches, but {len(rows)} were passed: {_few(grids)}"
        )
    # each row is an image of one patch: the order (c, y, x) is that of pixels
    frames = rows.view(-1, channels, patch, patch)
    items = [Item(i, 1, False) for i in range(len(grids))]
    return Inputs(grids, [], items, "packed" if x.ndim == 2 else "packed_batch", images=frames)


def read_video(config: RadioConfig, frames: Tensor, num_frames: int) -> Inputs:
    """The frames (F, c, H, W) of one video."""
    if not isinstance(num_frames, Integral):
        raise TypeError(f"num_frames is the number of frames, an integer, got {num_frames!r}")
    if num_frames != len(frames):
        raise ValueError(
            f"num_frames={num_frames}, but {len(frames)} frames were passed: {tuple(frames.shape)}"
        )
    grid = _grid(config, frames.shape, "the video", config.num_channels)
    if config.video_temporal_patch_size == 1:
        return Inputs([grid] * num_frames, [], [Item(0, num_frames, True)], "dense", images=frames)
    _require_video(config)
    count = -(-num_frames // config.video_temporal_patch_size)
    return Inputs([], [grid] * count, [Item(0, count, True)], "dense", videos=frames)


def read_items(config: RadioConfig, items: Any) -> Inputs:
    """Any mix of images (c, H, W) and videos (F, c, H, W)."""
    if isinstance(items, Tensor):
        raise ValueError(
            f"encode takes a list of images (c, H, W) and videos (F, c, H, W), got one tensor {tuple(items.shape)}: "
            "[*x] encodes it as a batch of images, [x] as one video"
        )
    frames = _frames(config, items, "item", (3, 4))
    separate = config.video_temporal_patch_size > 1
    parts: dict[bool, list[Tensor]] = {False: [], True: []}
    grids: dict[bool, list[Grid]] = {False: [], True: []}
    found = []
    for i, (item, x) in enumerate(zip(items, frames, strict=True)):
        is_video = item.ndim == 4
        as_tubelets = is_video and separate
        if as_tubelets:
            _require_video(config)
        count = -(-len(x) // config.video_temporal_patch_size) if as_tubelets else len(x)
        found.append((as_tubelets, Item(len(grids[as_tubelets]), count, is_video)))
        grids[as_tubelets] += [_grid(config, item.shape, f"item {i}", config.num_channels)] * count
        parts[as_tubelets].append(x)
    # tubelets come after all images in the stream
    shift = {False: 0, True: len(grids[False])}
    ordered = [Item(item.first + shift[late], item.count, item.is_video) for late, item in found]
    return Inputs(
        grids[False], grids[True], ordered, "packed", images=parts[False] or None, videos=parts[True] or None
    )


def _frames(config: RadioConfig, items: Any, name: str, ranks: tuple[int, ...]) -> list[Tensor]:
    """Each item as frames (F, c, H, W); all of one dtype and device."""
    if not isinstance(items, (list, tuple)):
        raise TypeError(f"expected a list of {name}s, got {type(items).__name__}")
    if not items:
        raise ValueError(f"got an empty list: pass at least one {name}")
    shapes = " or ".join({3: "(c, H, W)", 4: "(F, c, H, W)"}[rank] for rank in ranks)
    for i, x in enumerate(items):
        _require_tensor(x, f"{name} {i}")
        if x.ndim not in ranks:
            raise ValueError(
                f"{name} {i} must be {shapes} with c = {config.num_channels}, got {tuple(x.shape)}"
            )
        if (x.dtype, x.device) != (items[0].dtype, items[0].device):
            raise ValueError(
                f"{name} {i} is {x.dtype} on {x.device}, {name} 0 is {items[0].dtype} on {items[0].device}: "
                "bring all to one dtype and device"
            )
    return [x if x.ndim == 4 else x[None] for x in items]


def _grid(config: RadioConfig, shape: Sequence[int], name: str, channels: int) -> Grid:
    """Patches (h, w) of pixels (channels, H, W) or (F, channels, H, W), after checking all of it."""
    patch, step, (given, height, width) = config.patch_size, config.resolution_step, shape[-3:]
    if given != channels:
        axes = "(2, 0, 1)" if len(shape) == 3 else "(0, 3, 1, 2)"
        hint = f": it looks channels-last, use x.permute{axes}" if width == channels else ""
        raise ValueError(f"{name} needs {channels} channels, (…, {channels}, H, W), got {tuple(shape)}{hint}")
    if 0 in shape:
        raise ValueError(f"{name} has no pixels: {tuple(shape)}")
    if height % step or width % step:
        near = nearest_resolution(step, height, width)
        raise ValueError(
            f"{name} is {height} x {width}, not a multiple of {_step_words(config)}: resize it to {near[0]} x "
            f"{near[1]}, the nearest supported (get_nearest_supported_resolution)"
        )
    return height // patch, width // patch


def _step_words(config: RadioConfig) -> str:
    if config.resolution_step == config.patch_size:
        return f"the patch size {config.patch_size}"
    return (
        f"{config.resolution_step} = patch size {config.patch_size} x window {config.vitdet_window_size} "
        "(vitdet_ragged=True takes smaller windows at the edges)"
    )


def _grids(config: RadioConfig, imgs_sizes: Any, image_grid_hw: Any) -> list[Grid]:
    """Patches (h, w) of each image. A CUDA tensor of sizes costs one copy to the host."""
    name, given = ("imgs_sizes", imgs_sizes) if imgs_sizes is not None else ("image_grid_hw", image_grid_hw)
    pairs = given.tolist() if isinstance(given, Tensor) else given
    if not isinstance(pairs, (list, tuple)) or not all(map(_is_pair, pairs)):
        raise ValueError(
            f"{name} is a list of (height, width) pairs of integers, or an (n, 2) tensor, got {given!r}"
        )
    if not pairs:
        raise ValueError(f"{name} is empty: pass the size of each image")
    unit = config.patch_size if imgs_sizes is not None else 1
    step = config.resolution_step // config.patch_size * unit
    for i, (h, w) in enumerate(pairs):
        if h < 1 or w < 1 or h % step or w % step:
            near = nearest_resolution(step, max(h, 0), max(w, 0))
            raise ValueError(
                f"{name}[{i}] = {(h, w)} is not a positive multiple of {step}: the nearest is {near}"
            )
    return [(int(h) // unit, int(w) // unit) for h, w in pairs]


def _is_pair(pair: Any) -> bool:
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        return False
    return all(isinstance(side, Real) and float(side).is_integer() for side in pair)


def _require_tensor(x: Any, name: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor (c, H, W), uint8 or float in [0, 1], got {type(x).__module__}."
            f"{type(x).__name__}: radio_triton.image.to_tensor converts PIL images and (H, W, c) arrays"
        )
    if x.dtype not in PIXELS:
        accepted = ", ".join(str(dtype) for dtype in PIXELS)
        raise TypeError(f"{name} must be uint8 or floating point, got {x.dtype}: the accepted are {accepted}")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {x.layout} (x.to_dense())")


def _require_video(config: RadioConfig) -> None:
    if not config.video_projection:
        raise ValueError(
            f"this model groups {config.video_temporal_patch_size} frames, but its checkpoint has no video projection "
            "(embeddings.video_patch_projection): encode the frames as images, [*frames]"
        )


def _wrong_rank(config: RadioConfig, x: Tensor) -> str:
    channels, row = config.num_channels, config.num_channels * config.patch_size**2
    if x.ndim == 3 and x.shape[0] == channels:
        return f"got one image {tuple(x.shape)}: pass x[None], or [x]"
    if x.ndim in (2, 3) and x.shape[-1] == row:
        return f"got packed patches {tuple(x.shape)} without sizes: pass imgs_sizes=[(H, W), …] or image_grid_hw="
    last = x.ndim == 3 and x.shape[-1] == channels
    hint = ": it looks channels-last, use x.permute(2, 0, 1)[None]" if last else ""
    return f"expected images (B, {channels}, H, W), a list of images, or patches, got {tuple(x.shape)}{hint}"


def _few(grids: list[Grid]) -> str:
    return f"grids {grids[:4]}" + (f" and {len(grids) - 4} more" if len(grids) > 4 else "")
