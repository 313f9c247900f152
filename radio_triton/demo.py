"""The work behind `radio-triton demo`: the sample photos and a clip in one packed call, and pictures of
what comes out."""

import json
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from radio_triton import __version__
from radio_triton.demo_model import demo_model
from radio_triton.image import fit_image, read_image, resize_image
from radio_triton.pictures import save_png
from radio_triton.sheet import Row, contact_sheet, montage
from radio_triton.storage import fingerprint, write_features
from radio_triton.viz import enlarge, pca_colours, picture

if TYPE_CHECKING:
    from radio_triton.model import RadioModel, RadioOutput

MODEL_NAME = "radio-tiny-meanshift"
BLOCKS = (0, 3, 6)  # the blocks whose features are shown
FRAMES, FRAME_SIDE = 6, 160


def run_demo(out: Path, step: Callable[[str], object] = lambda what: None) -> list[str]:
    """Write features.safetensors, <name>.png of every item and demo.png into `out`; return lines that say
    what was done.

    `step(what)` is called before each of the `count_steps()` steps.
    """
    step("reading the samples")
    model = demo_model()
    photos = sample_photos()
    items = {name: fit_image(photo, model.get_nearest_supported_resolution) for name, photo in photos.items()}
    items["clip"] = pan_and_zoom(photos["coffee"])

    alone = {}
    for name, item in items.items():
        step(f"{name} alone")
        alone[name] = model.encode([item])[0]
    step("all in one packed call")
    start = time.perf_counter()
    packed = dict(zip(items, model.encode(list(items.values())), strict=True))
    seconds = time.perf_counter() - start

    step("writing the features")
    write_items(out / "features.safetensors", model, items, packed)
    columns = []
    for block in BLOCKS:
        step(f"features after block {block}")
        outputs = (
            packed.values() if block == BLOCKS[-1] else after_block(model, block).encode(list(items.values()))
        )
        columns.append([pca_colours(grid_features(output)) for output in outputs])
    step("drawing")
    draw(out, items, columns)
    return report(out, items, packed, alone, seconds)


def count_steps() -> int:
    return 4 + len(sample_files()) + 1 + len(BLOCKS)


def sample_files() -> list:
    folder = files("radio_triton") / "samples"
    return sorted(
        (file for file in folder.iterdir() if file.name.endswith(".jpg")), key=lambda file: file.name
    )


def sample_photos() -> dict[str, Tensor]:
    """The packaged photos by name, uint8 (3, H, W)."""
    photos = {}
    for path in sample_files():
        with path.open("rb") as file:
            photos[path.name.removesuffix(".jpg")] = read_image(file)
    return photos


def pan_and_zoom(photo: Tensor) -> Tensor:
    """A clip, uint8 (FRAMES, 3, FRAME_SIDE, FRAME_SIDE): a square window over the photo that moves right
    and closes in."""
    _, height, width = photo.shape
    frames = []
    for i in range(FRAMES):
        t = i / (FRAMES - 1)
        side = round(min(height, width) * (1 - 0.4 * t))
        y, x = round((height - side) / 2), round((width - side) * t * 0.75)
        frames.append(resize_image(photo[:, y : y + side, x : x + side], FRAME_SIDE, FRAME_SIDE))
    return torch.stack(frames)


def after_block(model: "RadioModel", block: int) -> "RadioModel":
    """The same weights, cut after the given block."""
    from radio_triton.model import RadioModel

    cut = RadioModel(model.config.replace(num_hidden_layers=block + 1))
    weights = model.state_dict()
    cut.load_state_dict({name: weights[name] for name in cut.state_dict()})
    return cut.eval().requires_grad_(False)


def grid_features(output: "RadioOutput") -> Tensor:
    """Features of one item on its grid: (h, w, C), a video's (t, h, w, C)."""
    _, features = output
    return features.reshape(*output.grid, -1)


def write_items(
    path: Path, model: "RadioModel", items: dict[str, Tensor], outputs: dict[str, "RadioOutput"]
) -> None:
    tensors: dict[str, Tensor] = {}
    facts = {}
    for name, output in outputs.items():
        tensors[f"{name}.summary"], tensors[f"{name}.features"] = output
        facts[name] = {"grid": output.grid, "encoded_size": items[name].shape[-2:]}
    metadata = {"model": MODEL_NAME, "model_fingerprint": fingerprint(model), "radio_triton": __version__}
    write_features(path, tensors, metadata | {"items": json.dumps(facts)})


def draw(out: Path, items: dict[str, Tensor], columns: list[list[Tensor]]) -> None:
    """The PCA picture of every item after the last block, and the contact sheet of all of them after each
    block."""
    from PIL import Image

    rows = []
    for (name, item), *colours in zip(items.items(), *columns, strict=True):
        size = tuple(item.shape[-2:])
        save_png(out / f"{name}.png", Image.fromarray(picture(colours[-1], size).contiguous().numpy()))
        pictures = [item.movedim(-3, -1)]
        for colour in colours:
            pictures.append(
                torch.stack([enlarge(frame, *size) for frame in colour.reshape(-1, *colour.shape[-3:])])
            )
        pictures[1:] = pictures[1:] if item.ndim == 4 else [each[0] for each in pictures[1:]]
        patches = colours[-1].numel() // 3
        kind = f"{len(item)} frames of " if item.ndim == 4 else ""
        title = f"{name}: {kind}{size[1]} x {size[0]} pixels, {patches} patches"
        rows.append(Row(title, [montage(each) if each.ndim == 4 else each for each in pictures]))
    captions = ["photo", *(f"features after block {block}" for block in BLOCKS)]
    title = f"{MODEL_NAME} (weights by a formula, not trained): PCA of the features, one packed call"
    save_png(out / "demo.png", contact_sheet(rows, captions, title))


def report(
    out: Path,
    items: dict[str, Tensor],
    packed: dict[str, "RadioOutput"],
    alone: dict[str, "RadioOutput"],
    seconds: float,
) -> list[str]:
    images = [item for item in items.values() if item.ndim == 3]
    sizes = ", ".join(f"{item.shape[2]}×{item.shape[1]}" for item in images)
    frames = sum(len(item) if item.ndim == 4 else 1 for item in items.values())
    pairs = [(grid_features(packed[name]), grid_features(alone[name])) for name in items]
    difference = max((a - b).abs().max().item() for a, b in pairs)
    patches = sum(a[..., 0].numel() for a, _ in pairs)
    largest = max(a.abs().max().item() for a, _ in pairs)
    return [
        f"encoded {len(images)} photos ({sizes}) and a {FRAMES}-frame clip, {patches} patches, in one call:",
        f"{seconds:.2f} s, {frames / seconds:.0f} images/s, with {MODEL_NAME} (a formula, not trained)",
        f"packed and alone differ by at most {difference:.2g}; the largest feature is {largest:.3g}",
        f"look at {out / 'demo.png'}; the features are in {out / 'features.safetensors'}",
        "next: radio-triton encode YOUR_PHOTOS --out features",
    ]
