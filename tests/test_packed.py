"""Packed equals alone: what an item gives does not depend on what is packed beside it.

GEMM libraries pick a kernel, and so an order of summation, by the number of rows. There are two ways
around it, without a tolerance in either. With a linear layer that sums each row in one fixed order,
packed equals alone bit for bit. With the library's own, the error against float64 is at most twice that
of the item alone with those textbook sums: no library sums in a worse order than one term after the
other.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers import rel_error
from radio_triton import Packing, RadioModel, RadioOutput, ops
from tiny import PATCH, VARIANTS, pixels, tiny_model

SIDES = st.integers(1, 7)
# (h, w) in patches, and the number of frames or None for an image
ITEMS = st.lists(st.tuples(SIDES, SIDES, st.none() | st.integers(1, 6)), min_size=1, max_size=5)
MIXED = [(3, 5, None), (2, 2, 3), (7, 1, None), (4, 6, 4), (1, 1, 1)]
# variants with tubelets of 1, 2 and 4 frames
NAMES = ["scaled", "qknorm", "swiglu"]
drawn = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def make(sizes: list[tuple[int, int, int | None]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random pixels for each size; the same each time."""
    shapes = [(() if frames is None else (frames,), h * PATCH, w * PATCH) for h, w, frames in sizes]
    return [pixels(*lead, 3, h, w, seed=i).to(dtype) for i, (lead, h, w) in enumerate(shapes)]


@cache
def frozen(name: str, dtype: torch.dtype = torch.float32) -> RadioModel:
    return tiny_model(**VARIANTS[name], dtype=dtype).requires_grad_(False)


@cache
def truth(name: str, dtype: torch.dtype) -> RadioModel:
    """The weights as rounded to `dtype`, computed with in float64."""
    return copy.deepcopy(frozen(name, dtype)).double()


def one_running_sum(self: nn.Linear, x: Tensor) -> Tensor:
    """x @ weight.T, each element summed from the first product to the last, whatever else is in x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(len(x), len(self.weight), dtype=wide)
    for column, weight in zip(x.to(wide).unbind(1), self.weight.to(wide).unbind(1), strict=True):
        total += column[:, None] * weight
    return (total if self.bias is None else total + self.bias).to(x.dtype)


@contextmanager
def textbook_sums() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "forward", one_running_sum)
        yield


def assert_same(got: RadioOutput, want: RadioOutput) -> None:
    """Bit for bit, in every field."""
    assert got.grid == want.grid
    assert torch.equal(got.summary, want.summary)
    assert torch.equal(got.features, want.features)
    assert torch.equal(got.last_hidden_state, want.last_hidden_state)


@pytest.mark.parametrize("name", NAMES)
@drawn
@given(sizes=ITEMS)
def test_packed_is_alone_bit_for_bit(name: str, sizes: list[tuple[int, int, int | None]]) -> None:
    model, items = frozen(name), make(sizes)
    with textbook_sums():
        for got, item in zip(model.encode(items), items, strict=True):
            assert_same(got, model.encode([item])[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", VARIANTS)
def test_packed_is_alone_bit_for_bit_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    model, items = frozen(name, dtype), make(MIXED)
    with textbook_sums():
        for got, item in zip(model.encode(items), items, strict=True):
            assert_same(got, model.encode([item])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
@drawn
@given(sizes=ITEMS)
def test_packed_is_as_exact_as_alone(
    name: str, dtype: torch.dtype, sizes: list[tuple[int, int, int | None]]
) -> None:
    model, items = frozen(name, dtype), make(sizes)
    packed = model.encode(items)
    for got, item in zip(packed, items, strict=True):
        want = truth(name, dtype).encode([item.double()])[0]
        with textbook_sums():
            alone = model.encode([item])[0]
        baseline = rel_error(alone.last_hidden_state, want.last_hidden_state)
        assert rel_error(got.last_hidden_state, want.last_hidden_state) <= 2 * baseline


@pytest.mark.parametrize("name", NAMES)
@drawn
@given(sizes=ITEMS, data=st.data())
def test_the_order_of_items_does_not_matter(
    name: str, sizes: list[tuple[int, int, int | None]], data: st.DataObject
) -> None:
    model, items = frozen(name), make(sizes)
    order = data.draw(st.permutations(range(len(items))))
    with textbook_sums():
        packed, shuffled = model.encode(items), model.encode([items[i] for i in order])
    for got, i in zip(shuffled, order, strict=True):
        assert_same(got, packed[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("order", [[4, 3, 2, 1, 0], [1, 0, 3, 2, 4], [2, 4, 0, 1, 3]])
def test_as_many_tokens_give_the_same_bits(name: str, dtype: torch.dtype, order: list[int]) -> None:
    # with the library's own sums: they depend on the number of rows alone
    model, items = frozen(name, dtype), make(MIXED)
    packed = model.encode(items)
    for got, i in zip(model.encode([items[i] for i in order]), order, strict=True):
        assert_same(got, packed[i])


@pytest.mark.parametrize("value", [0.25, float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("changed", range(len(MIXED)))
@pytest.mark.filterwarnings("ignore:pixels range from")
def test_pixels_of_one_item_move_no_other(name: str, changed: int, value: float) -> None:
    model, items = frozen(name), make(MIXED)
    before = model.encode(items)
    items[changed] = torch.full_like(items[changed], value)
    after = model.encode(items)
    for i, (got, want) in enumerate(zip(after, before, strict=True)):
        if i != changed:
            assert_same(got, want)
        elif value == 0.25:
            assert not torch.equal(got.features, want.features)
        else:
            assert got.features.isnan().all()
            assert got.summary.isnan().all()


@pytest.mark.parametrize("name", ["qknorm", "swiglu"])
@pytest.mark.parametrize("frames", [1, 2, 3, 5, 7])
def test_a_short_tubelet_repeats_the_last_frame_of_its_own_video(name: str, frames: int) -> None:
    model = frozen(name)
    tubelet = model.config.video_temporal_patch_size
    image, video, other = make([(2, 3, None), (3, 4, frames), (3, 4, 2 * tubelet)])
    whole = torch.cat((video, *[video[-1:]] * (-frames % tubelet)))
    got, want = (model.encode([image, x, other]) for x in (video, whole))
    assert got[1].grid == (-(-frames // tubelet), 3, 4)
    for one, two in zip(got, want, strict=True):
        assert_same(one, two)


def test_a_change_of_one_frame_stays_in_its_tubelet() -> None:
    model = frozen("qknorm")
    image, video = make([(2, 3, None), (3, 4, 5)])
    before = model.encode([video, image])[0]
    video[2] = 0
    after = model.encode([video, image])[0]
    moved = [not torch.equal(*pair) for pair in zip(after.features, before.features, strict=True)]
    assert moved == [False, True, False]


GRIDS = st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=6)
HEADS, SIZE = 2, 24


def row_ops(dtype: torch.dtype) -> dict[str, object]:
    """Each op that works on a row (of width HEADS * SIZE, or more) at a time."""
    width = HEADS * SIZE
    y, scale, weight, bias = (pixels(*shape, seed=9).to(dtype) for shape in ((1, width), *[(width,)] * 3))
    norm = nn.LayerNorm(width, dtype=dtype).requires_grad_(False)
    norm.weight.copy_(weight)
    norm.bias.copy_(bias)
    rms = nn.RMSNorm(width, eps=1e-6, dtype=dtype).requires_grad_(False)
    rms.weight.copy_(weight)
    return {
        "layer_norm": lambda x: ops.layer_norm(x, norm, dtype),
        "layer_norm to fp32": lambda x: ops.layer_norm(x, norm, torch.float32),
        "residual": lambda x: ops.layerscale_residual(x, y.expand_as(x), scale, None, dtype)[0],
        "residual and norm": lambda x: torch.cat(
            ops.layerscale_residual(x, y.expand_as(x), None, norm, dtype)
        ),
        "gelu": ops.gelu,
        "swiglu": ops.swiglu,
        "qk_rms_norm": lambda x: ops.qk_rms_norm(
            torch.stack((x, 2 * x, -x), 1).unflatten(2, (HEADS, SIZE)), rms, rms, width - SIZE
        ),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", row_ops(torch.float32))
@drawn
@given(counts=st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_row_ops_bit_for_bit(op: str, dtype: torch.dtype, counts: list[int]) -> None:
    function = row_ops(dtype)[op]
    x = (4 * pixels(sum(counts), HEADS * SIZE) - 2).to(dtype)
    parts = [function(part.clone()) for part in x.split(counts)]
    whole = function(x.clone())
    if op == "residual and norm":
        # the sum and the norm one after the other
        parts = [half for which in (0, 1) for half in (part.chunk(2)[which] for part in parts)]
    assert torch.equal(whole, torch.cat(parts))


def sequences(packing: Packing) -> ops.Sequences:
    return ops.Sequences(packing.cu_seqlens, packing.cu_seqlens_cpu, None, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@drawn
@given(grids=GRIDS, poisoned=st.integers(0, 5))
def test_attention_bit_for_bit(dtype: torch.dtype, grids: list[tuple[int, int]], poisoned: int) -> None:
    packing = Packing(grids, prefix=3)
    qkv = (4 * pixels(packing.tokens, 3, HEADS, SIZE) - 2).to(dtype)
    bad = poisoned % len(grids)
    qkv.split(packing.lengths)[bad].fill_(float("nan"))
    whole = ops.varlen_attention(*qkv.unbind(1), sequences(packing), SIZE**-0.5).split(packing.lengths)
    for i, (got, part) in enumerate(zip(whole, qkv.split(packing.lengths), strict=True)):
        alone = sequences(Packing([grids[i]], prefix=3))
        if i == bad:
            assert got.isnan().all()
        else:
            assert torch.equal(got, ops.varlen_attention(*part.clone().unbind(1), alone, SIZE**-0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cpe", "corners"), [(True, False), (True, True), (False, False)])
@drawn
@given(images=GRIDS, videos=GRIDS)
def test_embed_tokens_bit_for_bit(
    dtype: torch.dtype, cpe: bool, corners: bool, images: list[tuple[int, int]], videos: list[tuple[int, int]]
) -> None:
    width = 48
    table, prefix = pixels(5, 6, width, seed=1).to(dtype), pixels(3, width, seed=2).to(dtype)
    packing = Packing(images, videos, prefix=3)
    rows = pixels(packing.patches, width).to(dtype)
    first, second = rows.split([packing.image_patches, packing.patches - packing.image_patches])
    got = ops.embed_tokens([first, second], prefix, table, packing, cpe, corners, dtype)
    counts = [h * w for h, w in packing.grids]
    for part, patches, grid in zip(
        got.split(packing.lengths), rows.split(counts), packing.grids, strict=True
    ):
        alone = Packing([grid], prefix=3)
        assert torch.equal(part, ops.embed_tokens([patches], prefix, table, alone, cpe, corners, dtype))
        assert torch.equal(part[:3], prefix)


@pytest.mark.parametrize("tubelet", [1, 2, 4])
@drawn
@given(sizes=st.lists(st.tuples(SIDES, SIDES, st.integers(1, 6)), min_size=1, max_size=5))
def test_patchify_bit_for_bit(tubelet: int, sizes: list[tuple[int, int, int]]) -> None:
    videos, mean, std = make(sizes), torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.3, 0.4])
    whole = ops.patchify(videos, mean, std, PATCH, tubelet, torch.float32)
    parts = [ops.patchify(video, mean, std, PATCH, tubelet, torch.float32) for video in videos]
    assert torch.equal(whole, torch.cat(parts))
