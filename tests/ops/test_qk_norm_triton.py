"""The QK-norm kernel, whole and in its two steps: on a CUDA device where there is one, else interpreted."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
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
from radio_triton.kernels import qk_norm

# numpy says so wherever NaN is the point of a test
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
EPS = 1e-6
# dtypes of qkv and of the weights
DTYPES = [(BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, FP32), (FP16, FP32), (FP32, BF16)]
# tokens, heads, head size, embed_dim: dummy heads, half a head, odd widths, all of RADIO-H
SIZES = [(5, 3, 16, 32), (1, 2, 16, 24), (7, 4, 8, 32), (3, 1, 40, 40), (2, 5, 7, 35), (2, 16, 80, 1280)]
Call = tuple[Tensor, Tensor, Tensor, float, int]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(qk_norm._kernel, monkeypatch)


def arguments(size: tuple[int, int, int, int], dtypes: tuple[torch.dtype, torch.dtype]) -> Call:
    tokens, heads, head_dim, embed_dim = size
    weights = (1 + 0.3 * randn(heads * head_dim) for _ in range(2))
    q_weight, k_weight = (w.to(dtypes[1]) for w in weights)
    return randn(tokens, 3, heads, head_dim, dtype=dtypes[0]), q_weight, k_weight, EPS, embed_dim


def truth(call: Call) -> Tensor:
    return qk_norm.qk_rms_norm_eager(*(doubled(x) for x in call))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=names)
def test_parity(dtypes: tuple[torch.dtype, torch.dtype], size: tuple[int, int, int, int]) -> None:
    call = arguments(size, dtypes)
    before = call[0].clone()
    got = qk_norm.qk_rms_norm_triton(*call)
    assert torch.equal(call[0], before) and got.is_contiguous()
    assert torch.equal(got[:, 2], before[:, 2])
    assert_as_good_as(got[:, :2], qk_norm.qk_rms_norm_eager(*call)[:, :2], truth(call)[:, :2])
    assert qk_norm.qk_rms_norm_inplace_triton(*call) is None
    assert torch.equal(call[0], got)


@pytest.mark.parametrize("dtypes", DTYPES, ids=names)
def test_two_steps(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    qkv, q_weight, k_weight, eps, embed_dim = arguments((5, 3, 16, 40), dtypes)
    want = truth((qkv, q_weight, k_weight, eps, embed_dim))
    eager = qkv.clone()
    qk_norm.qk_rms_scale_inplace_eager(
        eager, qk_norm.qk_square_sums_eager(eager, 40), q_weight, k_weight, eps, 40
    )
    sums = qk_norm.qk_square_sums_triton(qkv, embed_dim)
    assert sums.shape == (5, 2) and sums.dtype == FP32
    wide = qk_norm.qk_square_sums_eager(qkv.double(), embed_dim)
    assert rel_error(sums, wide) <= 2 * max(rel_error(qk_norm.qk_square_sums_eager(qkv, 40), wide), 2**-24)
    v = qkv[:, 2].clone()
    assert qk_norm.qk_rms_scale_inplace_triton(qkv, sums, q_weight, k_weight, eps, embed_dim) is None
    assert torch.equal(qkv[:, 2], v)
    assert_as_good_as(qkv[:, :2], eager[:, :2], want[:, :2])


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_add_up_their_sums(ranks: int) -> None:
    qkv, q_weight, k_weight, eps, width = arguments((5, 4, 16, 64), (BF16, BF16))
    want = qk_norm.qk_rms_norm_triton(qkv, q_weight, k_weight, eps, width)
    shards = [x.contiguous() for x in qkv.chunk(ranks, dim=2)]
    total = sum(qk_norm.qk_square_sums_triton(x, width // ranks) for x in shards)
    for shard, q, k in zip(shards, q_weight.chunk(ranks), k_weight.chunk(ranks), strict=True):
        qk_norm.qk_rms_scale_inplace_triton(shard, total, q, k, eps, width)
    got = torch.cat(shards, dim=2)
    # sums of another order move a few values by one rounding
    assert (got != want).double().mean() < 0.01
    assert_as_good_as(got[:, :2], want[:, :2], truth((qkv, q_weight, k_weight, eps, width))[:, :2])


def test_weight_multiplies_the_rounded_value() -> None:
    qkv, q_weight, k_weight, eps, width = arguments((20, 2, 16, 32), (BF16, BF16))
    ones = torch.ones_like(q_weight)
    rounded = truth((qkv, ones, ones, eps, width)).bfloat16()
    got = qk_norm.qk_rms_norm_triton(qkv, q_weight, k_weight, eps, width)
    want = rounded[:, 0].flatten(1) * q_weight
    once = truth((qkv, q_weight, k_weight, eps, width))[:, 0].flatten(1).bfloat16()
    assert (got[:, 0].flatten(1) != want).double().mean() < 0.01 < (once != want).double().mean()


def test_dummy_heads_do_not_change_the_real_ones() -> None:
    qkv, q_weight, k_weight, eps, _ = arguments((5, 4, 8, 24), (BF16, BF16))
    qkv[:, :2, 3] = 0
    zero = qk_norm.qk_rms_norm_triton(qkv, q_weight, k_weight, eps, 24)
    qkv[:, :2, 3] = 1000
    large = qk_norm.qk_rms_norm_triton(qkv, q_weight, k_weight, eps, 24)
    assert torch.equal(zero[:, :, :3], large[:, :, :3])
    assert large[:, :2, 3].abs().min() > 100 and not zero[:, :2, 3].any()


def test_nan_in_a_neighbour_changes_nothing() -> None:
    call = arguments((3, 2, 16, 32), (BF16, BF16))
    clean = qk_norm.qk_rms_norm_triton(*call)
    call[0][1, 0] = math.nan
    call[0][:, 2] = math.nan
    got = qk_norm.qk_rms_norm_triton(*call)
    assert got[1, 0].isnan().all() and torch.equal(got[1, 1], clean[1, 1])
    assert torch.equal(got[::2, :2], clean[::2, :2])


class Launches(list):
    """Stands in for the kernel: keeps the grid of each launch."""

    def __getitem__(self, grid: Any) -> Callable:
        return lambda *args, **options: self.append(grid)


def test_nothing_is_launched_for_nothing_and_grids_may_be_huge(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    monkeypatch.setattr(qk_norm, "_kernel", launches)
    call = arguments((0, 2, 16, 32), (BF16, BF16))
    assert qk_norm.qk_rms_norm_triton(*call).shape == (0, 3, 2, 16)
    assert qk_norm.qk_square_sums_triton(call[0], 32).shape == (0, 2)
    assert not launches
    qk_norm.qk_square_sums_triton(randn(70_000, 3, 1, 2), 2)
    assert launches == [(140_000,)]


def test_a_buffer_with_gaps_is_refused_in_place_and_copied_otherwise() -> None:
    qkv, *rest = arguments((4, 2, 16, 32), (FP32, FP32))
    gaps = qkv[::2]
    with pytest.raises(ValueError, match=r"contiguous buffer, got strides \(192, 32, 16, 1\)"):
        qk_norm.qk_rms_norm_inplace_triton(gaps, *rest)
    assert torch.equal(
        qk_norm.qk_rms_norm_triton(gaps, *rest), qk_norm.qk_rms_norm_triton(gaps.contiguous(), *rest)
    )


@pytest.mark.skipif(DEVICE == "cuda", reason="masks are counted in the interpreter")
@pytest.mark.parametrize(("heads", "size"), [(2, 16), (3, 20)])
def test_bytes_moved(heads: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    width = heads * size
    qkv, *rest = arguments((4, heads, size, width), (BF16, BF16))
    q_and_k, streams = qkv[:, :2], 2 * 4 * width
    traffic = Traffic(monkeypatch)
    qk_norm.qk_rms_norm_inplace_triton(qkv, *rest)
    assert traffic.loaded(q_and_k) == traffic.stored(q_and_k) == {1}
    assert traffic.loaded(qkv[:, 2]) == traffic.stored(qkv[:, 2]) == {0}
    # the weights once a row, from the cache
    assert (traffic.loads.total(), traffic.stores.total()) == (2 * streams, streams)
    traffic = Traffic(monkeypatch)
    sums = qk_norm.qk_square_sums_triton(qkv, width)
    assert traffic.loaded(q_and_k) == traffic.stored(sums) == {1}
    assert (traffic.loads.total(), traffic.stores.total()) == (streams, 4 * 2)
