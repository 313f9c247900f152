"""A large image with ViTDet windows: most blocks attend inside windows of 16 x 16 patches.

    python examples/windowed.py [CHECKPOINT IMAGE]

Without arguments: a random tiny model on a sample photo. Prints the attention scores computed, with and without.
"""

import sys
from importlib.resources import as_file, files

import torch

from radio_triton import RadioConfig, RadioModel
from radio_triton.image import read_image, resize_image
from radio_triton.windows import windowed_blocks

WINDOW = 16


def tiny() -> RadioModel:
    config = RadioConfig(hidden_size=64, num_hidden_layers=8, num_attention_heads=4, intermediate_size=256)
    return RadioModel(config.replace(vitdet_window_size=WINDOW)).eval()


def scores(model: RadioModel, patches: int) -> tuple[int, int]:
    """Attention scores of one image: all blocks global, and as scheduled."""
    whole = (patches + model.config.num_prefix_tokens) ** 2
    windowed = [patches * WINDOW**2 if inside else whole for inside in windowed_blocks(model.config)]
    return whole * len(windowed), sum(windowed)


@torch.no_grad()
def main(arguments: list[str]) -> None:
    if arguments:
        checkpoint, path = arguments
        model = RadioModel.from_pretrained(checkpoint, vitdet_window_size=WINDOW)
        image = read_image(path)
    else:
        model = tiny()
        with as_file(files("radio_triton") / "samples" / "rocket.jpg") as path:
            image = read_image(path)
    # sides must be multiples of patch size x window; vitdet_ragged=True takes smaller windows at the edges
    height, width = model.get_nearest_supported_resolution(*image.shape[1:])
    summary, features = model(resize_image(image, height, width)[None], feature_fmt="NCHW")
    everywhere, scheduled = scores(model, features[0, 0].numel())
    print(f"{width} x {height} pixels: summary {tuple(summary.shape)}, features {tuple(features.shape)}")
    print(f"attention scores a head: {scheduled:,} instead of {everywhere:,}")


if __name__ == "__main__":
    main(sys.argv[1:])
