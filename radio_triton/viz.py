"""Features as colours: the three main directions in which the patches of a picture differ become red,
green and blue."""

import torch
import torch.nn.functional as F
from torch import Tensor

OUTLIER = 4.0  # a patch this many times farther from the median than nine in ten patches are is an outlier
CLIP = 0.02  # share of the patches that each end of each channel may saturate


def pca_colours(features: Tensor) -> Tensor:
    """(..., C) → uint8 (..., 3), by a PCA over all leading dimensions together.

    A RADIO may give a few patches a hundred times the length of the others: these would take all the variance
    and leave the rest of the picture one colour. So the centre is the median, outliers choose neither the
    directions nor the range of a channel, and a channel runs from the 2nd to the 98th percentile of the
    others, its longer tail towards white.
    """
    x = features.detach().float().cpu().flatten(0, -2)
    if not x.isfinite().all():
        raise ValueError(
            "the features hold NaN or infinity; encode in float32 or bfloat16 if they come from float16"
        )
    x = x - x.median(dim=0).values
    distance = x.norm(dim=1)
    usual = _percentile(distance, 0.9)
    near = distance <= (OUTLIER * usual if usual > 0 else distance.max())
    y = x @ principal_directions(x[near])
    skew = (y[near] - y[near].mean(dim=0)).pow(3).sum(dim=0)
    y = y * torch.where(skew < 0, -1.0, 1.0)
    low, high = _percentile(y[near], CLIP), _percentile(y[near], 1 - CLIP)
    width = high - low
    scaled = torch.where(width > 1e-6 * distance[near].max(), (y - low) / width.clamp_min(1e-30), 0.5)
    return (scaled.clamp(0, 1) * 255).round().to(torch.uint8).reshape(*features.shape[:-1], 3)


def principal_directions(x: Tensor, count: int = 3) -> Tensor:
    """The `count` main directions (C, count) of rows (N, C), zeros where there are fewer."""
    x = x - x.mean(dim=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # svd_lowrank starts at random
        v = torch.svd_lowrank(x, q=min(count + 5, *x.shape), niter=6)[2][:, :count]
    return F.pad(v, (0, count - v.shape[1]))


def enlarge(colours: Tensor, height: int, width: int) -> Tensor:
    """(h, w, 3) → (height, width, 3): every patch a flat rectangle."""
    return F.interpolate(colours.permute(2, 0, 1)[None], (height, width), mode="nearest")[0].permute(1, 2, 0)


def picture(colours: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 (h, w, 3) of an image or (t, h, w, 3) of a video → (H, W, 3); the frames of a video lie side
    by side."""
    frames = colours if colours.ndim == 4 else colours[None]
    return torch.cat([enlarge(frame, *size) for frame in frames], dim=1)


def _percentile(x: Tensor, share: float) -> Tensor:
    # torch.quantile stops at 16 million elements
    return x.sort(dim=0).values[round(share * (len(x) - 1))]
