"""A contact sheet: rows of pictures that belong together, all rows equally high, on white."""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

HEIGHT, GAP, LINE = 240, 12, 22  # of a row, between cells, of a line of text, in pixels
WIDE = 3.0  # a row of pictures of at least this aspect is laid out two by two
INK, GREY = (20, 20, 20), (110, 110, 110)


class Row(NamedTuple):
    title: str
    pictures: list[
        Tensor
    ]  # uint8 (H, W, 3), all of one aspect; the first is the photo, the others are made of patches


def contact_sheet(rows: list[Row], captions: list[str], title: str) -> "Image":
    """Every row's pictures in columns under `captions`; a panorama's two by two, each under its own
    caption."""
    from PIL import Image, ImageDraw

    width = max((_scaled(row.pictures[0], HEIGHT)[0] for row in rows if not _is_wide(row)), default=HEIGHT)
    columns = len(captions)
    top = GAP + 2 * LINE
    sheet = Image.new(
        "RGB", (columns * (width + GAP) + GAP, top + len(rows) * (LINE + HEIGHT + GAP)), "white"
    )
    draw = ImageDraw.Draw(sheet)
    _write(draw, (GAP, GAP), title, INK, 18)
    for i, caption in enumerate(captions):
        _write(draw, (GAP + i * (width + GAP), GAP + LINE + 4), caption, GREY, 14)
    for i, row in enumerate(rows):
        y = top + i * (LINE + HEIGHT + GAP)
        _write(draw, (GAP, y + 4), row.title, INK, 14)
        place = _two_by_two if _is_wide(row) else _in_columns
        place(sheet, row, captions, y + LINE, width)
    return sheet


def montage(frames: Tensor, columns: int = 3) -> Tensor:
    """uint8 frames (t, H, W, 3) → one picture, row after row, with white lines between them."""
    lines, gap = [], max(1, max(frames.shape[1:3]) // 40)
    for start in range(0, len(frames), columns):
        line = frames.new_full((columns, *frames.shape[1:]), 255)
        line[: len(frames[start : start + columns])] = frames[start : start + columns]
        lines.append(_joined(list(line), gap, dim=1))
    return _joined(lines, gap, dim=0)


def _joined(pictures: list[Tensor], gap: int, dim: int) -> Tensor:
    shape = list(pictures[0].shape)
    shape[dim] = gap
    white = pictures[0].new_full(shape, 255)
    return torch.cat([part for picture in pictures for part in (white, picture)][1:], dim=dim)


def _is_wide(row: Row) -> bool:
    height, width, _ = row.pictures[0].shape
    return width >= WIDE * height


def _in_columns(sheet: "Image", row: Row, captions: list[str], y: int, width: int) -> None:
    for i, picture in enumerate(row.pictures):
        _paste(sheet, picture, (GAP + i * (width + GAP), y), _scaled(picture, HEIGHT), photo=i == 0)


def _two_by_two(sheet: "Image", row: Row, captions: list[str], y: int, width: int) -> None:
    from PIL import ImageDraw

    columns = math.ceil(len(captions) / 2)
    for i, (picture, caption) in enumerate(zip(row.pictures, captions, strict=True)):
        left, upper = GAP + i % columns * 2 * (width + GAP), y + i // columns * HEIGHT // 2
        size = _scaled(picture, HEIGHT // 2 - LINE, 2 * width + GAP)
        _write(ImageDraw.Draw(sheet), (left, upper), caption, GREY, 14)
        _paste(sheet, picture, (left, upper + LINE), size, photo=i == 0)


def _scaled(picture: Tensor, height: int, width: float = math.inf) -> tuple[int, int]:
    """(width, height) of a picture fitted into a box."""
    scale = min(height / picture.shape[0], width / picture.shape[1])
    return round(picture.shape[1] * scale), round(picture.shape[0] * scale)


def _paste(sheet: "Image", picture: Tensor, at: tuple[int, int], size: tuple[int, int], photo: bool) -> None:
    from PIL import Image

    resampling = Image.Resampling.LANCZOS if photo else Image.Resampling.NEAREST
    sheet.paste(Image.fromarray(picture.contiguous().numpy()).resize(size, resampling), at)


def _write(
    draw: "ImageDraw", at: tuple[int, int], text: str, colour: tuple[int, int, int], size: int
) -> None:
    from PIL import ImageFont

    draw.text(at, text, fill=colour, font=ImageFont.load_default(size))
