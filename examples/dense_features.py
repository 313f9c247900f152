"""Train a linear segmentation head on dense features in NCHW, from images of different sizes in one call.

    python examples/dense_features.py [checkpoint] [--adaptor sam]

Without a checkpoint, the built-in model. The labels are a toy's: which pixels are brighter than their image's mean.
"""

import argparse
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, interpolate

from radio_triton import RadioModel
from radio_triton.demo_model import demo_model


def toy(sizes: list[tuple[int, int]], side: int) -> tuple[list[Tensor], list[Tensor]]:
    """Blurred noise (3, H, W) of these sizes in units of `side` pixels, and labels (H, W)."""
    noise = [torch.rand(3, h, w) for h, w in sizes]
    images = [interpolate(avg_pool2d(x, 3, 1, 1)[None], scale_factor=side)[0].clamp(0, 1) for x in noise]
    return images, [(x.mean(0) > x.mean()).long() for x in images]


def main(arguments: list[str]) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--adaptor")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    if options.checkpoint:
        names = [options.adaptor] if options.adaptor else []
        model = RadioModel.from_pretrained(options.checkpoint, adaptor_names=names)
    else:
        model = demo_model()
    images, labels = toy([(8, 12), (6, 6), (10, 4)], side=model.patch_size)
    with torch.no_grad():
        output = model(images, feature_fmt="NCHW")
    # one map (C, h, w) for each image; an adaptor's may be finer than the patches
    maps = output[next(iter(model.adaptors), "backbone")].features

    head = nn.Sequential(nn.GroupNorm(1, maps[0].shape[0]), nn.Conv2d(maps[0].shape[0], 2, 1))
    optimizer = torch.optim.Adam(head.parameters(), 1e-2)
    for _ in range(options.steps):
        logits = [interpolate(head(x[None].float()), y.shape) for x, y in zip(maps, labels, strict=True)]
        loss = torch.stack([cross_entropy(z, y[None]) for z, y in zip(logits, labels, strict=True)]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = torch.cat([(z.argmax(1)[0] == y).flatten() for z, y in zip(logits, labels, strict=True)])
    print(f"{len(maps)} maps such as {tuple(maps[0].shape)}: {right.float().mean():.1%} of the pixels right")
    return right.float().mean().item()


if __name__ == "__main__":
    main(sys.argv[1:])
