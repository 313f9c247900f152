"""embed_tokens against the formula patch by patch, and its positions against F.interpolate."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from op_checks import DTYPES, assert_rounded, rand
from radio_triton import ops
from radio_triton.packing import Grid, Packing

op = torch.ops.radio_triton
TABLES = [(16, 16), (8, 8), (9, 16), (16, 5)]
GRIDS = [(1, 16), (16, 1), (7, 9), (3, 5), (12, 7), (1, 1), (20, 1), (16, 16), (8, 8), (9, 16), (40, 33)]
MODES = [
    pytest.param(cpe, align, id=f"{'cpe' if cpe else 'crop'}{'-align' if align else ''}")
    for cpe in (True, False)
    for align in (False, True)
]


def source(i: int, extent: int, target: int, align: bool) -> float:
    if align:
        return i * (extent - 1) / (target - 1) if target > 1 else 0.0
    return max(0.0, (i + 0.5) * extent / target - 0.5)


def truth(table: Tensor, grid: Grid, cpe: bool, align: bool) -> Tensor:
    """E (h, w, C) in float64: four taps for each patch."""
    if grid == tuple(table.shape[:2]):
        return table.double()
    out = torch.empty(*grid, table.shape[2], dtype=torch.float64)
    sides = table.shape[:2] if cpe else [min(n, side) for n, side in zip(grid, table.shape[:2], strict=True)]
    targets = (max(grid),) * 2 if cpe else grid
    for y in range(grid[0]):
        for x in range(grid[1]):
            uy, ux = source(y, sides[0], targets[0], align), source(x, sides[1], targets[1], align)
            y0, x0 = int(uy), int(ux)
            y1, x1 = min(y0 + 1, sides[0] - 1), min(x0 + 1, sides[1] - 1)
            ay, ax = uy - y0, ux - x0
            top = (1 - ax) * table[y0, x0].double() + ax * table[y0, x1].double()
            bottom = (1 - ax) * table[y1, x0].double() + ax * table[y1, x1].double()
            out[y, x] = (1 - ay) * top + ay * bottom
    return out


def interpolated(table: Tensor, grid: Grid, cpe: bool, align: bool) -> Tensor:
    """E (h, w, C) as the reference makes it: F.interpolate in fp32 on a whole square, or after the crop."""
    (h, w), image = grid, table.permute(2, 0, 1)[None].float()
    if grid == tuple(table.shape[:2]):
        return table
    if cpe:
        image = F.interpolate(image, (max(grid),) * 2, mode="bilinear", align_corners=align)[..., :h, :w]
    else:
        image = image[..., :h, :w]
        if image.shape[2:] != grid:
            image = F.interpolate(image, grid, mode="bilinear", align_corners=align)
    return image[0].permute(1, 2, 0).to(table.dtype)


def positions(table: Tensor, grid: Grid, cpe: bool, align: bool) -> Tensor:
    """E (h, w, C) as the op adds it, to patches of zero."""
    patches, prefix = table.new_zeros(grid[0] * grid[1], table.shape[2]), table.new_zeros(0, table.shape[2])
    out = ops.embed_tokens([patches], prefix, table, Packing([grid], prefix=0), cpe, align, table.dtype)
    return out.view(*grid, -1)


def stream(rows: Tensor, prefix: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
    """The packed stream, one sequence after the other."""
    parts, start = [], 0
    for e in embeddings:
        stop = start + e.shape[0] * e.shape[1]
        parts += [prefix, rows[start:stop] + e.flatten(0, 1)]
        start = stop
    return torch.cat(parts) if parts else rows[:0]


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """How many 16-bit numbers lie between a and b."""
    bits = [x.contiguous().view(torch.int16).int() for x in (a, b)]
    first, second = [torch.where(x < 0, -(x & 0x7FFF), x) for x in bits]
    return (first - second).abs()


@pytest.mark.parametrize(("cpe", "align"), MODES)
@pytest.mark.parametrize("sides", TABLES)
def test_fp32_agrees_with_interpolate(sides: Grid, cpe: bool, align: bool):
    table = 2 * torch.rand(*sides, 24) - 1
    for grid in (*GRIDS, sides):
        got, want = positions(table, grid, cpe, align), interpolated(table, grid, cpe, align)
        assert (got - want).abs().max() <= 1e-6, grid
        exact = truth(table, grid, cpe, align)
        assert (got - exact).norm() <= 2 * (want - exact).norm(), grid


@pytest.mark.parametrize(("cpe", "align"), MODES)
@pytest.mark.parametrize("sides", TABLES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_agrees_with_interpolate(dtype: torch.dtype, sides: Grid, cpe: bool, align: bool):
    table = (2 * torch.rand(*sides, 24) - 1).to(dtype)
    for grid in (*GRIDS, sides):
        got, want = positions(table, grid, cpe, align), interpolated(table, grid, cpe, align)
        # beside zero a rounding error of fp32 is many such steps
        assert bool(((ulps(got, want) <= 1) | ((got - want).abs() <= 1e-6)).all()), grid
        assert (got != want).double().mean() <= 0.01, grid
        exact = truth(table, grid, cpe, align)
        assert (got - exact).norm() <= 2 * (want - exact).norm(), grid


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_grid_of_the_tables_size_takes_it_as_it_is(dtype: torch.dtype):
    table = rand(5, 7, 8, dtype=dtype)
    for cpe in (True, False):
        for align in (True, False):
            assert torch.equal(positions(table, (5, 7), cpe, align), table)
    # turned round it is resized: 7 x 5 is another grid
    assert not torch.equal(positions(table, (7, 5), True, False).flatten(), table.flatten())


def test_known_values_of_a_ramp():
    ramp = torch.arange(64.0).view(8, 8, 1)
    cpe, crop = positions(ramp, (4, 4), True, False), positions(ramp, (4, 4), False, False)
    assert cpe[0].flatten().tolist() == [4.5, 6.5, 8.5, 10.5]
    assert crop[0].flatten().tolist() == [0, 1, 2, 3]
    assert torch.equal(crop, ramp[:4, :4])
    # with aligned corners the ends of the table are the ends of the grid
    aligned = positions(ramp, (4, 4), True, True)
    assert aligned[::3, ::3].flatten().tolist() == [0, 7, 56, 63]


def test_crop_resizes_only_the_axis_that_is_too_small():
    table = torch.randn(4, 9, 6)
    got = positions(table, (6, 3), False, False)
    columns = F.interpolate(table[:, :3].permute(2, 0, 1)[None], (6, 3), mode="bilinear", align_corners=False)
    assert (got - columns[0].permute(1, 2, 0)).abs().max() <= 1e-6
    assert torch.equal(positions(table, (3, 5), False, False), table[:3, :5])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_packing_in_float64(data: st.DataObject):
    side = st.integers(1, 6)
    sides, grids = data.draw(st.tuples(side, side)), data.draw(st.lists(st.tuples(side, side), max_size=5))
    videos = data.draw(st.integers(0, len(grids)))
    skip, cpe, align = data.draw(st.integers(0, 3)), data.draw(st.booleans()), data.draw(st.booleans())
    packing = Packing(grids[videos:], grids[:videos], prefix=skip)
    table, prefix = torch.randn(*sides, 3, dtype=torch.float64), torch.randn(skip, 3, dtype=torch.float64)
    rows = torch.randn(packing.patches, 3, dtype=torch.float64)
    video_rows = rows[packing.image_patches :] if videos else None
    got = ops.embed_tokens(
        [rows[: packing.image_patches], video_rows], prefix, table, packing, cpe, align, torch.float64
    )
    want = stream(rows, prefix, [truth(table, grid, cpe, align) for grid in packing.grids])
    assert got.shape == (packing.tokens, 3)
    assert_rounded(got, want, 20.0)


@pytest.mark.parametrize("prefix_dtype", DTYPES)
@pytest.mark.parametrize("out", DTYPES)
def test_prefix_rows_are_the_parameter(prefix_dtype: torch.dtype, out: torch.dtype):
    packing = Packing([(2, 3), (2, 3), (1, 4)], prefix=3)
    prefix, table = rand(3, 8, dtype=prefix_dtype), rand(4, 4, 8, dtype=prefix_dtype)
    rows = rand(packing.patches, 8, dtype=prefix_dtype)
    got = ops.embed_tokens([rows], prefix, table, packing, True, False, out)
    assert got.dtype == out
    for start in packing.starts():
        assert torch.equal(got[start : start + 3], prefix.to(out))


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("model", DTYPES)
def test_the_sample_is_rounded_before_it_is_added(model: torch.dtype, out: torch.dtype):
    grids = [(3, 5), (3, 5), (7, 2), (4, 4)]
    packing = Packing(grids, prefix=2)
    table, prefix = rand(4, 4, 16, dtype=model), rand(2, 16, dtype=model)
    rows = rand(packing.patches, 16, dtype=model)
    got = ops.embed_tokens([rows], prefix, table, packing, True, False, out)
    sampled = [positions(table, grid, True, False).to(out) for grid in grids]
    assert torch.equal(got, stream(rows.to(out), prefix.to(out), sampled))


def test_packed_equals_alone():
    grids, tubelets = [(3, 5), (1, 1), (3, 5)], [(2, 2), (2, 2), (6, 1)]
    packing = Packing(grids, tubelets, prefix=2)
    table, prefix, rows = rand(4, 6, 8), rand(2, 8), rand(packing.patches, 8)
    split = packing.image_patches
    got = ops.embed_tokens([rows[:split], rows[split:]], prefix, table, packing, True, False, torch.float32)
    pieces = rows.split([h * w for h, w in packing.grids])
    alone = [
        ops.embed_tokens([piece], prefix, table, Packing([grid], prefix=2), True, False, torch.float32)
        for piece, grid in zip(pieces, packing.grids, strict=True)
    ]
    assert torch.equal(got, torch.cat(alone))


def test_strides_do_not_matter():
    packing = Packing([(2, 3), (1, 4)], prefix=2)
    rows, prefix, table = rand(30, 10)[::3, 1:9], rand(8, 2).t(), rand(8, 5, 4).permute(2, 1, 0)
    assert not (rows.is_contiguous() or prefix.is_contiguous() or table.is_contiguous())
    got = ops.embed_tokens([rows], prefix, table, packing, True, False, torch.float32)
    dense = [x.contiguous() for x in (rows, prefix, table)]
    want = ops.embed_tokens([dense[0]], *dense[1:], packing, True, False, torch.float32)
    assert got.is_contiguous() and torch.equal(got, want)


def test_no_sequences():
    got = ops.embed_tokens(
        [rand(0, 8)], rand(2, 8), rand(4, 4, 8), Packing([], prefix=2), True, False, torch.float16
    )
    assert got.shape == (0, 8) and got.dtype == torch.float16


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"patches": torch.ones(1, 6, 8)}, r"patches \(P, C\).*got \(1, 6, 8\)"),
        ({"prefix": torch.ones(2, 7)}, r"prefix \(G, C\).*\(2, 7\)"),
        ({"table": torch.ones(16, 8)}, r"table \(Ry, Rx, C\).*\(16, 8\)"),
        ({"table": torch.ones(4, 4, 9)}, r"\(4, 4, 9\)"),
        ({"video_patches": torch.ones(6, 9)}, r"like patches, \(P, 8\) torch.float32, got \(6, 9\)"),
        ({"video_patches": torch.ones(6, 8).half()}, r"got \(6, 8\) torch.float16"),
        ({"grids": torch.ones(3, dtype=torch.int32)}, r"grids \(S, 2\) and its CPU copy, got \(3,\)"),
        ({"grids_cpu": torch.ones(2, 2, dtype=torch.int32)}, r"grids \(S, 2\) and its CPU copy"),
        ({"grids_cpu": torch.ones(1, 2, device="meta")}, r"grids \(S, 2\) and its CPU copy"),
    ],
)
def test_refusals(changed: dict[str, Tensor], text: str):
    grids = torch.tensor([[2, 3]], dtype=torch.int32)
    arguments = {"patches": torch.ones(6, 8), "video_patches": None, "prefix": torch.ones(2, 8)}
    arguments |= {"table": torch.ones(4, 4, 8), "grids": grids, "grids_cpu": grids}
    arguments |= {"cu_seqlens": torch.tensor([0, 8], dtype=torch.int32), **changed}
    with pytest.raises(ValueError, match=text):
        op.embed_tokens(*arguments.values(), None, True, False, torch.float32)
