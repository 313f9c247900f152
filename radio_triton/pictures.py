"""The work behind `radio-triton viz`: features files in, one PNG an item out."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from radio_triton.sources import Source
from radio_triton.storage import Item, read_features, replacing
from radio_triton.viz import pca_colours, picture

if TYPE_CHECKING:
    from PIL.Image import Image


def draw_files(
    sources: list[Source],
    out: Path,
    *,
    joint: bool = False,
    advance: Callable[[int], object] = lambda n: None,
) -> tuple[int, list[tuple[str, str]]]:
    """Draw every item of every file into `out`; return the number of pictures and the files that failed, with
    reasons.

    Each item gets a PCA of its own; with `joint`, all share one, and hence must be of one width. A file of
    several items makes a folder of pictures.
    """
    drawn, failed, items = 0, [], []
    for source in sources:
        try:
            found = read_features(source.path)
            base = out / source.name.removesuffix(".safetensors")
            named = [(base / item.name if len(found) > 1 else base, item) for item in found]
            if joint:
                items += named
            else:
                for path, item in named:
                    save_picture(path, pca_colours(on_grid(item)), item)
                    drawn += 1
        except (ValueError, OSError) as error:
            failed.append((str(source.path), str(error)))
        advance(1)
    for (path, item), colours in zip(items, joint_colours([item for _, item in items]), strict=True):
        save_picture(path, colours, item)
        drawn += 1
    return drawn, failed


def on_grid(item: Item) -> Tensor:
    return item.features.reshape(*item.grid, -1)


def joint_colours(items: list[Item]) -> list[Tensor]:
    """Colours (h, w, 3) of each item in one basis."""
    widths = sorted({item.features.shape[-1] for item in items})
    if len(widths) > 1:
        raise ValueError(
            f"one PCA for all needs features of one model; these have widths {widths}: leave out --joint"
        )
    if not items:
        return []
    rows = [item.features.flatten(0, -2) for item in items]
    colours = pca_colours(torch.cat(rows)).split([len(each) for each in rows])
    return [each.reshape(*item.grid, 3) for each, item in zip(colours, items, strict=True)]


def save_picture(path: Path, colours: Tensor, item: Item) -> None:
    from PIL import Image

    save_png(
        path.with_name(f"{path.name}.png"), Image.fromarray(picture(colours, item.size).contiguous().numpy())
    )


def save_png(path: Path, image: "Image") -> None:
    """Write a PIL image, whole or not at all."""
    with replacing(path) as temporary:
        image.save(temporary, format="PNG")
