"""The embed_tokens kernel: on a CUDA device where there is one, else in Triton's interpreter."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import rel_error
from kernel_checks import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    Traffic,
    assert_as_good_as,
    doubled,
    interpret,
    names,
    randn,
)
from radio_triton import ops  # noqa: F401  (a clear error where the kernels cannot be imported)
from radio_triton.kernels import position
from radio_triton.packing import Grid, Packing

# numpy says so wherever NaN is the point of a test
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
MODES = [
    pytest.param(cpe, align, id=f"{'cpe' if cpe else 'crop'}{'-align' if align else ''}")
    for cpe in (True, False)
    for align in (False, True)
]
# one patch, a row, a column, larger than every table, like the first table, wide
GRIDS: list[Grid] = [(1, 1), (1, 6), (7, 1), (9, 11), (8, 8), (3, 5)]
# dtypes of patches, prefix and table, result: pure, fp32 stream, autocast, and the other way round
DTYPES = [
    *((BF16, BF16, BF16), (FP16, FP16, FP16), (FP32, FP32, FP32)),
    *((BF16, BF16, FP32), (BF16, FP32, BF16), (BF16, FP32, FP32), (FP16, BF16, FP32), (FP32, BF16, FP16)),
]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(position._kernel, monkeypatch)


def arguments(
    images: list[Grid],
    tubelets: list[Grid] = (),  # type: ignore[assignment]
    sides: Grid = (8, 8),
    width: int = 40,
    prefix: int = 3,
    dtypes: tuple[torch.dtype, ...] = (FP32, FP32, FP32),
    cpe: bool = True,
    align: bool = False,
    padding: int = 0,
) -> tuple:
    """What the op takes, in order; the work list holds `padding` more rows of -1."""
    packing = Packing(images, tubelets, prefix=prefix, device=DEVICE)
    rows, weights, out = dtypes
    counts = [sum(h * w for h, w in grids) for grids in (images, tubelets)]
    work = packing.work_list(position.BLOCK_T)
    work = packing.work_list(position.BLOCK_T, padded_to=len(work) + padding)
    return (
        randn(counts[0], width, dtype=rows),
        randn(counts[1], width, dtype=rows) if tubelets else None,
        *(randn(prefix, width, dtype=weights), randn(*sides, width, dtype=weights)),
        *(packing.grid_table, packing.grid_table_cpu, packing.cu_seqlens, work, cpe, align, out),
    )


def truth(call: tuple) -> Tensor:
    return position.embed_tokens_eager(*(doubled(x) for x in call[:-1]), torch.float64)


def check(call: tuple) -> Tensor:
    got, eager = position.embed_tokens_triton(*call), position.embed_tokens_eager(*call)
    assert got.is_contiguous() and got.isfinite().all()
    assert_as_good_as(got, eager, truth(call))
    return got


@pytest.mark.parametrize(("cpe", "align"), MODES)
@pytest.mark.parametrize("sides", [(8, 8), (5, 8), (9, 4)], ids=str)
def test_parity_on_all_tables(sides: Grid, cpe: bool, align: bool) -> None:
    for dtype in (FP32, FP16, BF16):
        check(arguments([*GRIDS, sides], sides=sides, dtypes=(dtype,) * 3, cpe=cpe, align=align))


@pytest.mark.parametrize("dtypes", DTYPES, ids=names)
def test_parity_of_all_dtypes(dtypes: tuple[torch.dtype, ...]) -> None:
    for width in (32, 136, 1280):
        check(arguments([(3, 5), (1, 2)], [(2, 3)], width=width, dtypes=dtypes))


@pytest.mark.parametrize("prefix", [0, 1, 16, 20])
def test_images_and_tubelets_in_one_launch(prefix: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = count_launches(monkeypatch)
    call = arguments([(3, 5), (1, 1)], [(4, 4), (4, 4), (2, 7)], prefix=prefix)
    got = check(call)
    assert len(launches) == 1
    # each kind alone has the same bits; tubelets are then all there is
    images = position.embed_tokens_triton(*arguments_of(call, slice(0, 2), images=True))
    videos = position.embed_tokens_triton(*arguments_of(call, slice(2, 5), images=False))
    assert torch.equal(torch.cat((images, videos)), got)


def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    kernel, grids = position._kernel, []

    class Counted:
        def __getitem__(self, grid: Any) -> Any:
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(position, "_kernel", Counted())
    return grids


def arguments_of(call: tuple, which: slice, images: bool) -> tuple:
    """The call for some of its sequences, all images or all tubelets; these come as the second tensor."""
    patches, video_patches, prefix, table, _, grids_cpu, _, _, *rest = call
    grids = [tuple(grid) for grid in grids_cpu[which].tolist()]
    packing = Packing(grids, prefix=len(prefix), device=DEVICE)
    rows = (patches, None) if images else (patches[:0], video_patches)
    where = (packing.grid_table, packing.grid_table_cpu, packing.cu_seqlens)
    return (*rows, prefix, table, *where, packing.work_list(position.BLOCK_T), *rest)


def test_a_grid_like_the_table_takes_it_as_it_is() -> None:
    for sides in ((8, 8), (5, 8)):
        for cpe in (True, False):
            call = arguments([sides], sides=sides, prefix=0, cpe=cpe)
            call[0].zero_()
            assert torch.equal(position.embed_tokens_triton(*call), call[3].flatten(0, 1))


def interpolated(table: Tensor, grid: Grid, cpe: bool, align: bool) -> Tensor:
    """E (h, w, C) as the reference makes it: F.interpolate in fp32 on a whole square, or after the crop."""
    (h, w), image = grid, table.permute(2, 0, 1)[None].float()
    if grid == tuple(table.shape[:2]):
        return table
    if not cpe:
        image = image[..., :h, :w]
    size = (max(grid),) * 2 if cpe else grid
    image = F.interpolate(image, size, mode="bilinear", align_corners=align)[..., :h, :w]
    return image[0].permute(1, 2, 0).to(table.dtype)


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """How many 16-bit numbers lie between a and b."""
    bits = [x.contiguous().view(torch.int16).int() for x in (a, b)]
    first, second = [torch.where(x < 0, -(x & 0x7FFF), x) for x in bits]
    return (first - second).abs()


@pytest.mark.parametrize(("cpe", "align"), MODES)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_agrees_with_interpolate(dtype: torch.dtype, cpe: bool, align: bool) -> None:
    sides = (9, 7)
    for grid in ((20, 13), (5, 6), (1, 16), sides):
        call = arguments([grid], sides=sides, prefix=0, dtypes=(dtype,) * 3, cpe=cpe, align=align)
        table = (2 * torch.rand(*sides, 40) - 1).to(DEVICE, dtype)
        got = position.embed_tokens_triton(call[0].zero_(), *call[1:3], table, *call[4:]).view(*grid, -1)
        want = interpolated(table, grid, cpe, align)
        exact = position.sample_positions(table.double(), grid, cpe, align)
        assert rel_error(got, exact) <= 2 * rel_error(want, exact), grid
        difference = (got.double() - want.double()).abs()
        if dtype == FP32:
            assert difference.max() <= 1e-6, grid
        else:
            # beside zero a rounding error of fp32 is many such steps
            assert bool(((ulps(got, want) <= 1) | (difference <= 1e-6)).all()), grid
            assert (got != want).double().mean() <= 0.01, grid


def test_the_sample_is_rounded_before_it_is_added() -> None:
    call = arguments([(20, 20)], sides=(7, 7), dtypes=(FP32, BF16, FP32), prefix=0)
    patches, table = call[0], call[3]
    want = patches + position.sample_positions(table, (20, 20), True, False).flatten(0, 1).float()
    got = position.embed_tokens_triton(*call)
    exact = patches + position.sample_positions(table.float(), (20, 20), True, False).flatten(0, 1)
    assert (got != want).double().mean() < 0.01 and (exact - want).abs().mean() > 100 * (
        got - want
    ).abs().mean()


def test_rows_of_minus_one_in_the_work_list_do_nothing() -> None:
    call = arguments([(3, 5), (6, 6)], padding=4)
    assert call[7][-4:].eq(-1).all()
    packing = Packing([(3, 5), (6, 6)], prefix=3, device=DEVICE)
    plain = (*call[:7], packing.work_list(position.BLOCK_T), *call[8:])
    assert torch.equal(position.embed_tokens_triton(*call), position.embed_tokens_triton(*plain))


def test_nan_in_a_neighbour_changes_nothing() -> None:
    call = arguments([(3, 5), (2, 2), (4, 4)])
    clean = position.embed_tokens_triton(*call)
    call[0][15:19] = math.nan
    got = position.embed_tokens_triton(*call)
    assert torch.equal(got[:18], clean[:18]) and torch.equal(got[25:], clean[25:])
    # the prefix tokens of the poisoned image are its own as well
    assert torch.equal(got[18:21], clean[18:21]) and got[21:25].isnan().all()


def test_packed_equals_alone_bit_for_bit() -> None:
    call = arguments([(9, 11), (1, 1), (3, 5)], dtypes=(BF16, BF16, BF16))
    packed, start, row = position.embed_tokens_triton(*call), 0, 0
    for i, (h, w) in enumerate(call[5].tolist()):
        alone = arguments_of((call[0][row : row + h * w], *call[1:]), slice(i, i + 1), images=True)
        part = position.embed_tokens_triton(*alone)
        assert torch.equal(packed[start : start + 3 + h * w], part)
        start, row = start + 3 + h * w, row + h * w


class Launches(list):
    """Stands in for the kernel: keeps the grid of each launch."""

    def __getitem__(self, grid: Any) -> Callable:
        return lambda *args, **options: self.append(grid)


def test_nothing_is_launched_for_nothing_and_grids_may_be_huge(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    monkeypatch.setattr(position, "_kernel", launches)
    assert position.embed_tokens_triton(*arguments([])).shape == (0, 40)
    assert not launches
    position.embed_tokens_triton(*arguments([(1, 1)] * 70_000, width=8))
    assert launches == [(70_000,)]


def test_refusals() -> None:
    call = arguments([(3, 5)])
    with pytest.raises(ValueError, match=r"needs the work list of Packing.work_list\(16\)"):
        position.embed_tokens_triton(*call[:7], None, *call[8:])
    with pytest.raises(ValueError, match=r"contiguous tensors, patches has strides \(80, 1\)"):
        position.embed_tokens_triton(randn(30, 40)[::2], *call[1:])


@pytest.mark.skipif(DEVICE == "cuda", reason="masks are counted in the interpreter")
@pytest.mark.parametrize("width", [128, 40])
def test_bytes_moved(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = arguments([(3, 5), (8, 8)], [(2, 3)], width=width)
    patches, videos, prefix, table = call[:4]
    traffic = Traffic(monkeypatch)
    out = position.embed_tokens_triton(*call)
    assert traffic.loaded(patches) == traffic.loaded(videos) == traffic.stored(out) == {1}
    # prefix tokens once a sequence, four taps a patch, from the cache after the first time
    assert traffic.loaded(prefix) == {3}
    assert traffic.loads_of(table) == 4 * (15 + 64 + 6) * width
    assert traffic.stores.total() == out.numel()
