"""Zero-shot classification with a teacher's text tower.

    python examples/zero_shot.py c-radio_v4-h_half.pth.tar photo.jpg cat dog car --adaptor siglip2-g

The checkpoint must hold the adaptor (see radio_triton.available_adaptors); the text tower needs
`pip install radio-triton[text]` and its own weights, from the network or a cache.
"""

import argparse
import sys

import torch

from radio_triton import RadioModel
from radio_triton.image import read_image, resize_image


@torch.inference_mode()
def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("image")
    parser.add_argument("classes", nargs="+")
    parser.add_argument("--adaptor", default="siglip2-g")
    options = parser.parse_args(arguments)

    try:
        model = RadioModel.from_pretrained(options.checkpoint, adaptor_names=[options.adaptor])
        (adaptor,) = model.adaptors.values()
        texts = [f"a photo of a {name}" for name in options.classes]
        words = adaptor.encode_text(texts, normalize=True)
    except (ImportError, OSError, ValueError) as error:
        print(f"skipped: {error}")
        return
    image = read_image(options.image)
    image = resize_image(image, *model.get_nearest_supported_resolution(*image.shape[1:]))
    summary = model([image])[adaptor.name].summary[0]
    scores = words @ torch.nn.functional.normalize(summary, dim=0)
    for i in scores.argsort(descending=True).tolist():
        print(f"{scores[i]:.3f}  {options.classes[i]}")


if __name__ == "__main__":
    main(sys.argv[1:])
