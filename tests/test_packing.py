"""Packing: where each sequence begins, against loops over the sizes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radio_triton.packing import Grid, Item, Packing

GRIDS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=8)


@given(images=GRIDS, tubelets=GRIDS, prefix=st.integers(0, 10))
def test_sizes(images: list[Grid], tubelets: list[Grid], prefix: int) -> None:
    packing = Packing(images, tubelets, prefix=prefix)
    grids = images + tubelets
    begins = [0]
    for h, w in grids:
        begins.append(begins[-1] + prefix + h * w)
    assert len(packing) == len(grids)
    assert packing.grids == grids
    assert packing.lengths == [prefix + h * w for h, w in grids]
    assert packing.starts() == begins[:-1]
    assert packing.tokens == begins[-1]
    assert packing.patches == sum(h * w for h, w in grids)
    assert packing.image_patches == sum(h * w for h, w in images)
    assert packing.max_seqlen == max([prefix + h * w for h, w in grids], default=0)
    assert type(packing.max_seqlen) is int
    assert packing.cu_seqlens.dtype == packing.grid_table.dtype == torch.int32
    assert packing.cu_seqlens.tolist() == packing.cu_seqlens_cpu.tolist() == begins
    assert packing.grid_table.shape == (len(grids), 2)
    assert packing.grid_table.tolist() == packing.grid_table_cpu.tolist() == [[h, w] for h, w in grids]


@given(images=GRIDS, tubelets=GRIDS, prefix=st.integers(1, 5), data=st.data())
def test_rows(images: list[Grid], tubelets: list[Grid], prefix: int, data: st.DataObject) -> None:
    packing = Packing(images, tubelets, prefix=prefix)
    positions = data.draw(st.lists(st.integers(0, prefix - 1), max_size=4))
    where = list(zip(packing.starts(), packing.lengths, strict=True))
    assert packing.token_rows(positions).tolist() == [start + i for start, _ in where for i in positions]
    assert packing.patch_rows.tolist() == [
        row for start, length in where for row in range(start + prefix, start + length)
    ]
    assert packing.token_rows(positions).dtype == packing.patch_rows.dtype == torch.int64


@given(images=GRIDS, tubelets=GRIDS, block_m=st.sampled_from([1, 16, 32, 128]))
def test_work_list_has_each_block_once_and_the_longest_sequences_first(
    images: list[Grid], tubelets: list[Grid], block_m: int
) -> None:
    packing = Packing(images, tubelets, prefix=3)
    work = packing.work_list(block_m)
    assert work.dtype == torch.int32
    assert work.shape[1] == 2
    order = sorted(range(len(packing)), key=lambda s: -packing.lengths[s])
    blocks = [(s, b) for s in order for b in range(-(-packing.lengths[s] // block_m))]
    assert [tuple(item) for item in work.tolist()] == blocks
    padded = packing.work_list(block_m, padded_to=len(blocks) + 3)
    assert padded[: len(blocks)].equal(work)
    assert padded[len(blocks) :].tolist() == [[-1, -1]] * 3


def test_a_work_list_is_built_once() -> None:
    packing = Packing([(4, 4), (2, 9)], prefix=2)
    assert packing.work_list(16) is packing.work_list(16)
    assert packing.work_list(16, padded_to=8) is packing.work_list(16, padded_to=8)
    assert len(packing.work_list(16)) == 4
    assert len(packing.work_list(32)) == 2
    assert len(packing.work_list(16, padded_to=8)) == 8


def test_a_work_list_that_does_not_fit_its_padding() -> None:
    with pytest.raises(ValueError, match="a work list of 4 items does not fit in 3"):
        Packing([(4, 4), (2, 9)], prefix=2).work_list(16, padded_to=3)


def test_items_are_images_unless_given() -> None:
    assert Packing([(1, 2), (3, 4)], prefix=1).items == [Item(0, 1, False), Item(1, 1, False)]
    items = [Item(1, 2, True), Item(0, 1, False)]
    assert Packing([(1, 2)], [(3, 4), (3, 4)], prefix=1, items=items).items == items


@pytest.mark.parametrize("grid", [(0, 3), (3, 0), (-1, 3)])
@pytest.mark.parametrize("kind", ["image", "tubelet"])
def test_a_sequence_without_patches_is_refused(grid: Grid, kind: str) -> None:
    images, tubelets = ([(1, 1), grid], []) if kind == "image" else ([(1, 1)], [grid])
    with pytest.raises(ValueError, match=rf"{grid[0]} x {grid[1]} patches .* at least 1 x 1"):
        Packing(images, tubelets, prefix=2)


def test_the_device_gets_copies_and_the_host_keeps_its_own() -> None:
    packing = Packing([(2, 3), (4, 4)], prefix=2, device="meta")
    for x in (packing.cu_seqlens, packing.grid_table, packing.patch_rows, packing.token_rows([0])):
        assert x.device.type == "meta"
    assert packing.work_list(16).device.type == "meta"
    assert packing.cu_seqlens_cpu.tolist() == [0, 8, 26]
    assert packing.grid_table_cpu.tolist() == [[2, 3], [4, 4]]
    assert packing.starts() == [0, 8]


def test_the_host_copies_ignore_the_default_device() -> None:
    # torch.set_default_device("cuda") would otherwise put them where reading waits for the device
    with torch.device("meta"):
        packing = Packing([(2, 3), (4, 4)], prefix=2)
        assert packing.cu_seqlens_cpu.tolist() == [0, 8, 26]
        assert packing.grid_table_cpu.tolist() == [[2, 3], [4, 4]]
        assert packing.token_rows([1]).tolist() == [1, 9]
        assert packing.patch_rows.tolist() == [*range(2, 8), *range(10, 26)]
        assert len(packing.work_list(16)) == 3


def test_repr_is_short() -> None:
    assert repr(Packing([(2, 3)], prefix=2)) == "Packing(1 sequences, 8 tokens, grids=[(2, 3)])"
    assert repr(Packing([(1, 1)] * 9, prefix=0)).endswith("grids=[(1, 1), (1, 1), (1, 1), (1, 1)]...)")
