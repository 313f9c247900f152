"""Pictures of features: segments keep their contrast beside outliers, patches stay flat, sheets show all."""

import numpy as np
import pytest
import torch
from torch import Tensor

from radio_triton.sheet import GAP, HEIGHT, LINE, Row, contact_sheet, montage
from radio_triton.viz import enlarge, pca_colours, picture, principal_directions


def segments(h: int = 12, w: int = 16, width: int = 32, noise: float = 0.05) -> Tensor:
    """Four quadrants around four random vectors, (h, w, width)."""
    centres = torch.randn(2, 2, width)
    x = centres.repeat_interleave(h // 2, 0).repeat_interleave(w // 2, 1)
    return x + noise * torch.randn(h, w, width)


def spread(colours: Tensor) -> float:
    """The smallest distance between the mean colours of two quadrants."""
    h, w, _ = colours.shape
    means = colours.float().unflatten(0, (2, h // 2)).unflatten(2, (2, w // 2)).mean(dim=(1, 3)).reshape(4, 3)
    return torch.pdist(means).min().item()


def test_segments_get_different_colours() -> None:
    assert spread(pca_colours(segments())) > 80


@pytest.mark.parametrize("size", [1e2, 1e4, 1e8])
@pytest.mark.parametrize("count", [1, 4])
def test_outlier_patches_do_not_flatten_the_picture(size: float, count: int) -> None:
    x = segments()
    plain = pca_colours(x)
    x[0, :count] = size * torch.randn(count, x.shape[-1])
    colours = pca_colours(x)
    assert spread(colours) > 80
    rest = torch.ones(12, 16, dtype=torch.bool)
    rest[0, :count] = False
    assert (colours[rest].int() - plain[rest].int()).abs().float().mean() < 8


def test_outliers_of_a_tiny_picture() -> None:
    x = segments(4, 4)
    x[0, 0] = 1e4
    colours = pca_colours(x).float()
    assert torch.pdist(torch.stack([colours[0, 3], colours[3, 0], colours[3, 3]])).min() > 60


def test_half_the_picture_is_not_an_outlier() -> None:
    x = torch.zeros(10, 10, 8) + 1e-4 * torch.randn(10, 10, 8)
    x[:, 6:] += 1.0
    x[:5, 6:] -= 3.0
    colours = pca_colours(x).float()
    means = torch.stack(
        [colours[:, :6].mean((0, 1)), colours[:5, 6:].mean((0, 1)), colours[5:, 6:].mean((0, 1))]
    )
    assert torch.pdist(means).min() > 50


def test_channels_use_the_full_range_between_the_percentiles() -> None:
    colours = pca_colours(torch.randn(50, 50, 16)).flatten(0, 1).float()
    for channel in colours.T:
        assert 0.01 <= (channel == 0).float().mean() <= 0.03
        assert 0.01 <= (channel == 255).float().mean() <= 0.03


def test_directions_are_the_principal_ones() -> None:
    x = torch.randn(400, 24) * torch.logspace(2, -1, 24)
    got = principal_directions(x)
    want = torch.linalg.svd(x - x.mean(0), full_matrices=False)[2][:3].T
    assert (got * want).sum(0).abs().min() > 0.999


def test_same_features_same_picture_and_the_callers_random_state_is_left_alone() -> None:
    x = segments()
    torch.manual_seed(7)
    first = pca_colours(x)
    after = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(pca_colours(x), first)
    assert torch.equal(pca_colours(x * 3 + 5), first)


@pytest.mark.parametrize("shape", [(1, 8), (1, 1, 8), (2, 8), (3, 3, 2)])
def test_few_patches_and_few_channels(shape: tuple[int, ...]) -> None:
    colours = pca_colours(torch.randn(shape))
    assert colours.shape == (*shape[:-1], 3) and colours.dtype == torch.uint8
    if shape[0] == 2:
        assert colours[:, 0].sort().values.tolist() == [0, 255]


def test_equal_patches_are_grey() -> None:
    assert pca_colours(torch.full((4, 4, 8), 3.0)).unique().tolist() == [128]


def test_low_precision_and_not_finite() -> None:
    assert spread(pca_colours(segments().bfloat16())) > 80
    x = segments()
    x[0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        pca_colours(x)


def test_patches_are_flat_rectangles() -> None:
    colours = torch.randint(0, 256, (3, 5, 3), dtype=torch.uint8)
    assert torch.equal(enlarge(colours, 24, 40), colours.repeat_interleave(8, 0).repeat_interleave(8, 1))


def test_frames_of_a_video_lie_side_by_side() -> None:
    colours = torch.randint(0, 256, (4, 2, 3, 3), dtype=torch.uint8)
    strip = picture(colours, (16, 24))
    assert strip.shape == (16, 96, 3)
    assert torch.equal(strip[:, 48:72], enlarge(colours[2], 16, 24))


def test_montage_keeps_every_frame() -> None:
    frames = torch.arange(1, 6, dtype=torch.uint8)[:, None, None, None].expand(5, 40, 40, 3)
    whole = montage(frames, columns=3)
    assert whole.shape == (81, 122, 3)
    assert torch.equal(torch.bincount(whole[..., 0].flatten().int())[1:6], torch.full((5,), 1600))


def flat(height: int, width: int, colour: int) -> Tensor:
    return torch.tensor([colour, 255 - colour, 1], dtype=torch.uint8).expand(height, width, 3)


def test_sheet_shows_every_picture_whole_at_one_row_height() -> None:
    shapes = [(200, 300), (300, 200), (100, 520), (64, 64)]
    rows = [
        Row(f"row {i}", [flat(*shape, 50 * i + 10 * j) for j in range(4)]) for i, shape in enumerate(shapes)
    ]
    sheet = np.asarray(contact_sheet(rows, ["photo", "a", "b", "c"], "title")).astype(int)
    assert tuple(sheet[0, 0]) == (255, 255, 255)
    tops = []
    for i, (height, width) in enumerate(shapes):
        for j in range(4):
            colour = 50 * i + 10 * j
            ys, xs = np.nonzero((sheet == (colour, 255 - colour, 1)).all(-1))
            shown = (np.ptp(ys) + 1, np.ptp(xs) + 1)
            assert len(ys) == shown[0] * shown[1], "something lies over the picture"
            assert shown[1] / shown[0] == pytest.approx(width / height, rel=0.02)
            assert shown[0] == (HEIGHT // 2 - LINE if width > 3 * height else HEIGHT)
            if j == 0:
                tops.append(ys.min())
    tops[2] -= LINE  # a panorama's captions lie inside its row
    assert np.diff(tops).tolist() == [HEIGHT + LINE + GAP] * 3
