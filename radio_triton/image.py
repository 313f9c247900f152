"""Pictures from outside: a file, PIL image, array or tensor as a uint8 (3, H, W) tensor of a size that a
model takes."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".jp2"}
    | {".ppm", ".pgm", ".pbm", ".tga", ".avif", ".heic", ".heif"}
)


def read_image(source: "str | os.PathLike[str] | BinaryIO | Image | np.ndarray | Tensor") -> Tensor:
    """uint8 (3, H, W) from a file, a PIL image, an array (H, W) or (H, W, c), or a tensor (H, W) or (c, H,
    W).

    c is 1 (grey), 2 (grey, alpha), 3 or 4 (RGB, alpha). Files are turned upright as EXIF says; transparent
    parts lie on white; 16 bits become 8; of an animation the first frame is taken. Arrays and tensors hold
    uint8, uint16, bool, or floats in [0, 1]. Raises ValueError or TypeError for other values, and what Pillow
    raises for a broken file.
    """
    if isinstance(source, Tensor):
        source = source.float() if source.is_floating_point() else source  # numpy has no bfloat16
        array = source.detach().cpu().numpy()
        return _from_array(np.moveaxis(array, 0, -1) if array.ndim == 3 else array)
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if isinstance(source, str | os.PathLike) or hasattr(source, "read"):
        with _open(source) as opened:
            return _from_pil(opened)
    if hasattr(source, "getbands"):
        return _from_pil(source)
    raise TypeError(
        f"an image is a path, a PIL image, a numpy array or a tensor, not {type(source).__name__}"
    )


def fit_image(
    image: Tensor, nearest: Callable[[int, int], tuple[int, int]], long_side: int | None = None
) -> Tensor:
    """Resize (3, H, W) to `nearest(H, W)`, a model's `get_nearest_supported_resolution`; where the longer
    side is above `long_side` pixels, both sides are scaled down by the same factor first."""
    height, width = image.shape[-2:]
    scale = min(1.0, long_side / max(height, width)) if long_side else 1.0
    return resize_image(image, *nearest(max(1, round(height * scale)), max(1, round(width * scale))))


def resize_image(image: Tensor, height: int, width: int) -> Tensor:
    """uint8 (3, H, W) → uint8 (3, height, width): bicubic with antialiasing, in fp32, rounded once."""
    if tuple(image.shape[-2:]) == (height, width):
        return image
    resized = F.interpolate(image[None].float(), (height, width), mode="bicubic", antialias=True)[0]
    return resized.round_().clamp_(0, 255).to(torch.uint8)


def _open(source: Any) -> "Image":
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ImportError("reading image files needs Pillow: pip install 'radio_triton[cli]'") from error
    try:
        return Image.open(source)
    except UnidentifiedImageError:
        raise ValueError("not an image, or of a kind that Pillow does not read") from None


def _from_pil(image: "Image") -> Tensor:
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16-bit grey; "I" holds it in 32 bits, and convert("RGB") would clip both
        array = np.asarray(image)
        if array.min() < 0 or array.max() > 65535:
            raise ValueError(
                f"grey levels lie between {array.min()} and {array.max()}; 0 to 65535 are accepted"
            )
        return _from_array(array.astype(np.uint16))
    if image.mode == "F":
        return _from_array(np.asarray(image))
    return _from_array(np.asarray(image.convert("RGBA" if image.has_transparency_data else "RGB")))


def _from_array(array: np.ndarray) -> Tensor:
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (1, 2, 3, 4) or array.size == 0:
        raise ValueError(
            f"an image array is (H, W) or (H, W, c), a tensor (H, W) or (c, H, W), with 1 to 4 channels c "
            f"and at least one pixel; this one, channels last, is {array.shape}"
        )
    array = _eight_bits(array)
    if array.shape[-1] in (2, 4):
        alpha = array[..., -1:].astype(np.float32) / 255
        array = np.rint(array[..., :-1] * alpha + 255 * (1 - alpha)).astype(np.uint8)
    array = np.broadcast_to(array, (*array.shape[:2], 3))
    return torch.from_numpy(
        np.array(array.transpose(2, 0, 1), order="C")
    )  # a copy: PIL's buffers are read-only


def _eight_bits(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array * np.uint8(255)
    if array.dtype == np.uint16:
        return np.rint(array / np.float32(257)).astype(np.uint8)
    if not np.issubdtype(array.dtype, np.floating):
        raise TypeError(f"pixels are uint8, uint16, bool, or floats in [0, 1], not {array.dtype}")
    if not (array.min() >= 0 and array.max() <= 1):  # also false for NaN
        raise ValueError(
            f"float pixels lie in [0, 1]; these lie between {array.min():.4g} and {array.max():.4g}"
        )
    return np.rint(array * 255).astype(np.uint8)
