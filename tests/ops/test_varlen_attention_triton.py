"""The attention kernel against fp64: on a CUDA device where there is one, else in Triton's interpreter.

The rule: its error is at most twice that of the eager form in the same dtype.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import interpreter_bf16
from helpers import rel_error
from radio_triton import ops  # noqa: F401  (a clear error where the kernels cannot be imported)
from radio_triton.kernels import varlen_attention as attention

# numpy says so wherever NaN and Inf are the point of a test
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning"
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOPPER, AMPERE = (9, 0), (8, 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        assert hasattr(attention._kernel, "rewrite"), "set TRITON_INTERPRET=1 before triton is imported"
        interpreter_bf16.install(monkeypatch)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], list[Tensor]]:
    """Pretends that the CPU is a GPU of some compute capability; returns the tensors mapped for TMA."""

    def pretend(capability: tuple[int, int]) -> list[Tensor]:
        mapped: list[Tensor] = []
        maps = attention._maps
        monkeypatch.setattr(attention, "_maps", lambda x, rows: mapped.append(x) or maps(x, rows))
        if DEVICE == "cpu":
            monkeypatch.setattr(attention, "device_capability", lambda device: capability)
        return mapped

    return pretend


def qkv_views(layout: str, tokens: int, heads: int, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k and v (T, H, D) of standard normal values, in one of the layouts that callers have."""
    width = heads * size
    if layout == "packed":
        x = torch.randn(tokens, 3, heads, size)
        return x.to(DEVICE, dtype).unbind(1)
    if layout == "chunked":
        x = torch.randn(tokens, 3 * width + size).to(DEVICE, dtype)
        return tuple(part.unflatten(1, (heads, size)) for part in x[:, size:].chunk(3, dim=1))
    if layout == "unaligned":
        x = torch.randn(tokens, 3 * width + 1).to(DEVICE, dtype)
        return tuple(part.unflatten(1, (heads, size)) for part in x[:, 1:].chunk(3, dim=1))
    assert layout == "transposed"
    return torch.randn(3, heads, tokens, size).to(DEVICE, dtype).transpose(1, 2).unbind(0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    block_m: int,
    scale: float | None = None,
    padding: int = 0,
) -> Tensor:
    """The kernel's result; its work list holds `padding` more rows of -1."""
    longest_first = sorted(range(len(lengths)), key=lambda s: -lengths[s])
    work = [(s, block) for s in longest_first for block in range(math.ceil(lengths[s] / block_m))]
    work += [(-1, -1)] * padding
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return attention.varlen_attention_triton(
        *(q, k, v, cu_seqlens.to(DEVICE), cu_seqlens),
        torch.tensor(work, dtype=torch.int32).view(-1, 2).to(DEVICE),
        block_m,
        q.shape[2] ** -0.5 if scale is None else scale,
    )


def eager(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float | None = None) -> Tensor:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    return attention.varlen_attention_eager(q, k, v, cu_seqlens, cu_seqlens, None, 0, scale)


def check(qkv: tuple[Tensor, ...], lengths: list[int], block_m: int, scale: float | None = None) -> None:
    got = attend(*qkv, lengths, block_m, scale)
    truth = eager(*(x.double() for x in qkv), lengths, scale)
    assert got.dtype == qkv[0].dtype and got.is_contiguous()
    assert rel_error(got, truth) <= 2 * rel_error(eager(*qkv, lengths, scale), truth)


# every dtype meets every layout, number of heads and (but for 256) head size; every layout both ways to load
@pytest.mark.parametrize(
    ("lengths", "heads", "size", "dtype", "layout", "capability", "block_m"),
    [
        ([1, 64, 9], 1, 8, BF16, "packed", HOPPER, 64),
        ([63, 10], 2, 8, FP16, "unaligned", AMPERE, 32),
        ([65, 1], 3, 8, FP32, "transposed", AMPERE, 32),
        ([127, 10], 2, 16, BF16, "chunked", AMPERE, 64),
        ([9, 64], 4, 16, FP16, "packed", HOPPER, 64),
        ([65, 63], 1, 16, FP32, "unaligned", AMPERE, 32),
        ([65, 127], 3, 40, FP16, "chunked", HOPPER, 128),
        ([10, 63], 2, 40, FP32, "packed", AMPERE, 32),
        ([64, 9], 1, 40, BF16, "transposed", AMPERE, 64),
        ([266, 1], 2, 64, BF16, "packed", HOPPER, 128),
        ([10, 65], 4, 64, FP32, "chunked", AMPERE, 32),
        ([127, 9], 1, 64, FP16, "transposed", AMPERE, 64),
        ([266, 10], 1, 72, BF16, "chunked", HOPPER, 128),
        ([63, 127], 2, 72, FP16, "packed", AMPERE, 64),
        ([64, 1], 3, 72, FP32, "unaligned", AMPERE, 32),
        ([65, 9, 127], 4, 72, FP16, "packed", HOPPER, 64),
        ([266, 63], 2, 80, FP16, "packed", HOPPER, 128),
        ([65, 1, 127], 3, 80, BF16, "unaligned", HOPPER, 64),
        ([64, 10], 1, 80, FP32, "chunked", AMPERE, 32),
        ([9, 127], 4, 80, BF16, "transposed", AMPERE, 64),
        ([65, 10], 2, 96, BF16, "packed", HOPPER, 64),
        ([9, 65], 3, 96, FP32, "packed", AMPERE, 16),
        ([127, 1], 1, 96, FP16, "unaligned", AMPERE, 64),
        ([63, 9], 2, 104, BF16, "chunked", HOPPER, 64),
        ([65, 64], 1, 104, FP16, "packed", AMPERE, 64),
        ([10, 64], 1, 104, FP32, "transposed", AMPERE, 16),
        ([127, 64], 2, 128, BF16, "packed", HOPPER, 128),
        ([65, 9], 3, 128, FP16, "chunked", AMPERE, 64),
        ([63, 1], 1, 128, FP32, "packed", AMPERE, 16),
        ([65, 10], 1, 256, BF16, "transposed", HOPPER, 64),
    ],
)
def test_parity(
    lengths: list[int],
    heads: int,
    size: int,
    dtype: torch.dtype,
    layout: str,
    capability: tuple[int, int],
    block_m: int,
    on: Callable,
) -> None:
    mapped = on(capability)
    qkv = qkv_views(layout, sum(lengths), heads, size, dtype)
    check(qkv, lengths, block_m)
    takes_maps = capability == HOPPER and layout in ("packed", "chunked") and size != 104
    assert DEVICE == "cuda" or len(mapped) == (2 if takes_maps else 0)


@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_scores_of_plus_and_minus_80(dtype: torch.dtype, capability: tuple[int, int], on: Callable) -> None:
    on(capability)
    lengths = [65, 10]
    k, v = torch.randn(2, 75, 1, 64, device=DEVICE).unbind(0)
    k /= k.norm(dim=2, keepdim=True)
    q = 80 * k[torch.randperm(75)] * torch.tensor([1.0, -1.0, 1.0]).repeat(25)[:, None, None].to(DEVICE)
    qkv = tuple(x.to(dtype) for x in (q, k, v))
    scores = qkv[0][:65, 0].float() @ qkv[1][:65, 0].float().T
    assert scores.max() > 79 and scores.min() < -79
    check(qkv, lengths, 64 if dtype != FP32 else 32, scale=1.0)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_scores_that_are_all_far_below_zero(dtype: torch.dtype) -> None:
    q, k, v = qkv_views("packed", 65, 1, 16, dtype)
    # the empty half of the last block would be far above them
    q[:, :, 0], k[:, :, 0] = -300, 1
    check((q, k, v), [65], 32, scale=1.0)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 3.0])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_any_scale(dtype: torch.dtype, scale: float) -> None:
    check(qkv_views("packed", 74, 1, 40, dtype), [65, 9], 32, scale)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("size", "capability"), [(72, HOPPER), (72, AMPERE), (80, HOPPER), (40, AMPERE)])
def test_no_value_of_another_image_is_touched(
    size: int, capability: tuple[int, int], bad: float, on: Callable
) -> None:
    on(capability)
    lengths, dtype = [70, 33, 65], FP16 if size == 80 else BF16
    qkv = torch.randn(168, 3, 2, size).to(DEVICE, dtype)
    clean = attend(*qkv.unbind(1), lengths, 64)
    qkv[70:103] = bad
    poisoned = attend(*qkv.unbind(1), lengths, 64)
    assert poisoned[70:103].isnan().all()
    assert torch.equal(poisoned[:70], clean[:70]) and torch.equal(poisoned[103:], clean[103:])


@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
@pytest.mark.parametrize("size", [8, 72])
def test_no_value_of_another_head_is_touched(size: int, capability: tuple[int, int], on: Callable) -> None:
    on(capability)
    qkv = torch.randn(65, 3, 3, size).to(DEVICE, FP16)
    clean = attend(*qkv.unbind(1), [65], 64)
    qkv[:, :, 1] = math.inf
    poisoned = attend(*qkv.unbind(1), [65], 64)
    for columns in (slice(0, size), slice(2 * size, 3 * size)):
        assert torch.equal(poisoned[:, columns], clean[:, columns])


@pytest.mark.parametrize("lengths", [[0, 10, 0, 0, 65, 0], [1], [1, 0]])
def test_empty_sequences_and_one_token(lengths: list[int]) -> None:
    check(qkv_views("packed", sum(lengths), 2, 16, FP16), lengths, 32)


def test_300_sequences_of_one_token() -> None:
    q, k, v = qkv_views("packed", 300, 1, 16, FP16)
    assert torch.equal(attend(q, k, v, [1] * 300, 16), v.flatten(1))


@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
def test_packed_equals_alone_bit_for_bit(capability: tuple[int, int], on: Callable) -> None:
    on(capability)
    lengths = [10, 127, 65]
    qkv = qkv_views("packed", 202, 2, 80, BF16)
    packed = attend(*qkv, lengths, 64).split(lengths)
    for part, length, *alone in zip(packed, lengths, *(x.split(lengths) for x in qkv), strict=True):
        assert torch.equal(attend(*alone, [length], 64), part)


def test_rows_of_minus_one_in_the_work_list_do_nothing() -> None:
    qkv = qkv_views("packed", 75, 2, 64, FP16)
    assert torch.equal(attend(*qkv, [65, 10], 64, padding=5), attend(*qkv, [65, 10], 64))


class Launches(list):
    """Stands in for the kernel: keeps the grid and the arguments of each launch."""

    def __getitem__(self, grid: Any) -> Callable:
        return lambda *args, **options: self.append((grid, options))


def test_nothing_is_launched_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    monkeypatch.setattr(attention, "_kernel", launches)
    for lengths in ([], [0], [0, 0]):
        out = attend(*torch.zeros(3, 0, 2, 64, dtype=FP16, device=DEVICE).unbind(0), lengths, 64)
        assert out.shape == (0, 128) and out.dtype == FP16
    assert not launches


def test_the_grid_of_70_000_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    monkeypatch.setattr(attention, "_kernel", launches)
    attend(*qkv_views("packed", 70_000, 2, 16, FP16), [1] * 70_000, 64)
    assert [grid for grid, _ in launches] == [(140_000,)]


def test_every_head_size_is_cut_without_waste() -> None:
    for size in range(8, 257, 8):
        pieces = attention._pieces(size)
        assert all(width >= 16 and width & (width - 1) == 0 for width in pieces)
        assert pieces == sorted(set(pieces), reverse=True)
        # where each begins, as the kernel has it
        assert [size // (2 * w) * 2 * w for w in pieces] == [sum(pieces[:i]) for i in range(len(pieces))]
        assert 0 <= sum(pieces) - size <= 8
    assert [attention._pieces(n) for n in (72, 80, 96, 104)] == [[64, 16], [64, 16], [64, 32], [64, 32, 16]]


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_the_block_of_keys_ignores_the_batch(dtype: torch.dtype, capability: tuple[int, int]) -> None:
    for size in range(8, 257, 8):
        sizes = {attention.block_m(size, dtype, capability, 16, [1034] * count) for count in (1, 2, 64)}
        configs = [attention._config(size, dtype, capability, block_m) for block_m in sizes]
        assert len({config.block_n for config in configs}) == 1


def test_the_block_of_queries_follows_the_batch() -> None:
    def block_m(images: int, capability: tuple[int, int] = HOPPER) -> int:
        return attention.block_m(80, BF16, capability, 16, [1034] * images)

    assert [block_m(n) for n in (0, 1, 2, 16)] == [64, 64, 128, 128]
    assert block_m(16, AMPERE) == 64
