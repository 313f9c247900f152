"""The attention kernel at real sizes, on a real GPU."""

import shutil
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from helpers import rel_error
from radio_triton import ops  # noqa: F401  (registers the ops)
from radio_triton.kernels import varlen_attention as attention
from radio_triton.packing import Packing

pytestmark = pytest.mark.gpu

LENGTHS = {"one": [1034], "dense": [1034] * 4, "long": [4106], "mix": [266, 1034, 1, 4106, 65, 586, 10]}


def attend(qkv: Tensor, lengths: list[int], block_m: int | None = None) -> Tensor:
    """The op on a (T, 3, H, D) buffer, by way of a Packing, as the model calls it."""
    size, heads = qkv.shape[3], qkv.shape[2]
    packing = Packing([(1, n) for n in lengths], prefix=0, device=qkv.device)
    if block_m is None:
        capability = attention.device_capability(qkv.device)
        block_m = attention.block_m(size, qkv.dtype, capability, heads, lengths)
    sequences = (packing.cu_seqlens, packing.cu_seqlens_cpu, packing.work_list(block_m), block_m)
    return torch.ops.radio_triton.varlen_attention(*qkv.unbind(1), *sequences, size**-0.5)


def eager(qkv: Tensor, lengths: list[int]) -> Tensor:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return attention.varlen_attention_eager(
        *qkv.unbind(1), cu_seqlens, cu_seqlens, None, 0, qkv.shape[3] ** -0.5
    )


def buffer(lengths: list[int], heads: int, size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(sum(lengths), 3, heads, size, device="cuda").to(dtype)


@pytest.mark.parametrize("batch", LENGTHS)
@pytest.mark.parametrize("size", [64, 72, 80, 96, 104, 128, 256])
def test_bf16_at_real_sizes(size: int, batch: str) -> None:
    lengths = LENGTHS[batch]
    qkv = buffer(lengths, 16, size)
    truth = eager(qkv.double(), lengths)
    assert rel_error(attend(qkv, lengths), truth) <= 2 * rel_error(eager(qkv, lengths), truth)


@pytest.mark.parametrize("size", [72, 80])
def test_every_run_gives_the_same_bits(size: int) -> None:
    qkv = buffer(LENGTHS["mix"], 16, size)
    first = attend(qkv, LENGTHS["mix"])
    assert all(torch.equal(attend(qkv, LENGTHS["mix"]), first) for _ in range(20))


@pytest.mark.parametrize("size", [72, 80, 128])
def test_bits_depend_on_the_sequence_alone(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = LENGTHS["mix"]
    qkv = buffer(lengths, 16, size)
    packed = attend(qkv, lengths)
    for part, alone, length in zip(packed.split(lengths), qkv.split(lengths), lengths, strict=True):
        assert torch.equal(attend(alone, [length]), part)
    assert torch.equal(attend(qkv, lengths, 64), packed)
    monkeypatch.setattr(attention, "_can_map", lambda x: False)
    assert torch.equal(attend(qkv, lengths), packed)


def test_nan_in_a_neighbour_changes_nothing() -> None:
    lengths = [1034, 100, 1034]
    qkv = buffer(lengths, 16, 72)
    clean = attend(qkv, lengths)
    qkv[1034:1134] = torch.nan
    poisoned = attend(qkv, lengths)
    assert torch.equal(poisoned[:1034], clean[:1034]) and torch.equal(poisoned[1134:], clean[1134:])


def test_nothing_waits_for_the_device_and_a_graph_replays() -> None:
    lengths = LENGTHS["dense"]
    qkv = buffer(lengths, 16, 80)
    packing = Packing([(1, n) for n in lengths], prefix=0, device="cuda")
    args = (packing.cu_seqlens, packing.cu_seqlens_cpu, packing.work_list(128, 200), 128, 80**-0.5)
    want = torch.ops.radio_triton.varlen_attention(*qkv.unbind(1), *args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.ops.radio_triton.varlen_attention(*qkv.unbind(1), *args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.ops.radio_triton.varlen_attention(*qkv.unbind(1), *args)
    got.fill_(torch.nan)
    graph.replay()
    assert torch.equal(got, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_second_device() -> None:
    qkv = buffer([1034], 4, 80)
    assert torch.equal(attend(qkv.to("cuda:1"), [1034]).cpu(), attend(qkv, [1034]).cpu())


def test_more_than_2_to_the_31_elements() -> None:
    lengths = [1034] * 560
    qkv = torch.zeros(sum(lengths), 3, 16, 80, dtype=torch.bfloat16, device="cuda")
    assert qkv.numel() > 2**31
    qkv[-1034:] = torch.randn(1034, 3, 16, 80, device="cuda")
    last = qkv[-1034:]
    assert torch.equal(attend(qkv, lengths)[-1034:], attend(last.clone(), [1034], 128))


SMALL = """
import torch
from radio_triton import ops
from radio_triton.kernels import varlen_attention as attention
from radio_triton.packing import Packing

for size in (72, 80):
    for block_m in (64, 128):
        packing = Packing([(1, n) for n in (70, 1, 130)], prefix=0, device="cuda")
        q, k, v = torch.randn(201, 3, 2, size, device="cuda").bfloat16().unbind(1)
        sequences = (packing.cu_seqlens, packing.cu_seqlens_cpu, packing.work_list(block_m), block_m)
        torch.ops.radio_triton.varlen_attention(q, k, v, *sequences, 0.1)
torch.cuda.synchronize()
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool: str) -> None:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", sys.executable, "-c", SMALL]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
