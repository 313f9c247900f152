"""varlen_attention as an op: the eager form against the formula, gradients, compilation, what it refuses."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck
from torch.library import opcheck

from helpers import rel_error
from radio_triton import ops  # noqa: F401  (registers the ops)
from radio_triton.kernels import varlen_attention as attention

op = torch.ops.radio_triton.varlen_attention.default
Arguments = tuple[Any, ...]


def arguments(lengths: list[int], heads: int, size: int, dtype: torch.dtype, scale: float = 0.3) -> Arguments:
    """Arguments of the op, with q, k and v as views of one (T, 3, H, D) buffer."""
    qkv = torch.randn(sum(lengths), 3, heads, size, dtype=torch.float64).to(dtype)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return *qkv.unbind(1), cu_seqlens, cu_seqlens.clone(), None, 0, scale


def formula(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *rest: Any) -> Tensor:
    """softmax(scale q k^T) v, written out, in float64."""
    scale, outputs = rest[-1], []
    for first, last in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        q_, k_, v_ = (x[first:last].double() for x in (q, k, v))
        scores = torch.einsum("qhd,khd->hqk", q_, k_) * scale
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v_).flatten(1))
    return torch.cat(outputs) if outputs else q.new_empty(0, q[0].numel())


LENGTHS = [[5, 5, 5], [1, 9, 0, 9, 3], [40], [1], [0, 7, 0]]


@pytest.mark.parametrize("scale", [0.3, -1.0, 0.0])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_formula(lengths: list[int], scale: float) -> None:
    args = arguments(lengths, 3, 12, torch.float64, scale)
    assert rel_error(op(*args), formula(*args)) < 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype(dtype: torch.dtype) -> None:
    args = arguments([40, 7], 2, 16, dtype)
    out = op(*args)
    assert out.dtype == dtype and out.shape == (47, 32) and out.is_contiguous()
    assert rel_error(out, formula(*args)) < 4 * torch.finfo(dtype).eps


def test_empty() -> None:
    for lengths in ([], [0], [0, 0]):
        assert op(*arguments(lengths, 2, 16, torch.float32)).shape == (0, 32)


def test_no_value_of_another_sequence_is_touched() -> None:
    args = arguments([6, 4, 5], 2, 16, torch.float32)
    clean = op(*args)
    for x in args[:3]:
        x[6:10] = torch.nan
    poisoned = op(*args)
    assert torch.equal(poisoned[:6], clean[:6]) and torch.equal(poisoned[10:], clean[10:])


@pytest.mark.parametrize("trains", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_opcheck(lengths: list[int], trains: bool) -> None:
    q, k, v, *rest = arguments(lengths, 2, 8, torch.float32)
    opcheck(op, (*(x.clone().requires_grad_(trains) for x in (q, k, v)), *rest))


@pytest.mark.parametrize("lengths", [[3, 3], [1, 4, 0, 2]], ids=str)
def test_gradient(lengths: list[int]) -> None:
    q, k, v, *rest = arguments(lengths, 2, 4, torch.float64)
    leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))
    assert gradcheck(lambda *x: op(*x, *rest), leaves)


def test_gradient_of_one_buffer() -> None:
    args = arguments([4, 6], 2, 8, torch.float64)
    found = []
    for function in (op, formula):
        qkv = torch.stack(args[:3], dim=1).requires_grad_()
        out = function(*qkv.unbind(1), *args[3:])
        (out * torch.linspace(0.5, 2, out.numel()).view_as(out)).sum().backward()
        found.append(qkv.grad)
    assert rel_error(*found) < 1e-14


@pytest.mark.parametrize("trains", [False, True], ids=["plain", "grad"])
def test_one_compilation_for_any_lengths(trains: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda *args: op(*args), backend=counter, fullgraph=True)
    for lengths in ([5, 3], [4], [9, 2, 1, 1], [3] * 7):
        q, k, v, *rest = arguments(lengths, 2, 8, torch.float32)
        q, k, v = (x.clone().requires_grad_(trains) for x in (q, k, v))
        for x in (q, k, v, *rest[:2]):
            torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(call(q, k, v, *rest), op(q, k, v, *rest))
    assert counter.frame_count == 1


def changed(**changes: Any) -> Arguments:
    """Good arguments, for the kernel too, but for some."""
    names = ("q", "k", "v", "cu_seqlens", "cu_seqlens_cpu", "work", "block_m", "scale")
    good = dict(zip(names, arguments([64, 5], 2, 16, torch.float16), strict=True))
    good |= {"work": torch.tensor([[0, 0], [1, 0]], dtype=torch.int32), "block_m": 64}
    return tuple((good | changes).values())


def half(*shape: int, dtype: torch.dtype = torch.float16, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"k": half(69, 2, 24)}, r"q is \(69, 2, 16\).*k is \(69, 2, 24\)"),
        ({"v": half(68, 2, 16)}, r"q is \(69, 2, 16\).*v is \(68, 2, 16\)"),
        ({"k": half(69, 2, 16, dtype=torch.float32)}, r"q is .*float16.*k is .*float32"),
        ({"v": half(69, 2, 16, device="meta")}, r"q is .* on cpu.*v is .* on meta"),
        ({"q": half(69, 32), "k": half(69, 32), "v": half(69, 32)}, r"needs floating point \(T, H, D\)"),
        ({"k": half(69, 16, 2).transpose(1, 2)}, r"contiguous last dimension.*k \(69, 2, 16\) has strides"),
        ({name: half(69, 2, 12) for name in "qkv"}, "multiple of 8 up to 256.* 12"),
        ({name: half(69, 2, 264) for name in "qkv"}, "multiple of 8 up to 256.* 264"),
        ({name: half(69, 2, 16, dtype=torch.float64) for name in "qkv"}, "takes bfloat16.*got torch.float64"),
        ({"block_m": 0}, "power of two and at least 16, got block_m 0"),
        ({"block_m": 48}, "got block_m 48"),
        ({"work": torch.zeros(2, 2, dtype=torch.int64)}, "work must be .*int32.*int64"),
        ({"cu_seqlens": torch.zeros(3, dtype=torch.int64)}, "cu_seqlens must be .*int32.*int64"),
        (
            {"cu_seqlens_cpu": torch.zeros(3, dtype=torch.int32, device="meta")},
            "host's copy, got one on meta",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    op(*changed())
    with pytest.raises(ValueError, match=f"(?s){said}"):
        attention._check(*changed(**changes))


def test_a_gpu_needs_a_work_list() -> None:
    q, _, _, cu_seqlens, *_ = changed()
    with pytest.raises(ValueError, match=r"needs the work list of ops.prepare.*got no list"):
        attention._check_kernel(q, cu_seqlens, None, 0)


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from radio_triton import ops
from radio_triton.kernels import varlen_attention as attention

x = torch.ones(4, 2, 16)
cu_seqlens = torch.tensor([0, 4], dtype=torch.int32)
work = torch.zeros(1, 2, dtype=torch.int32)
args = (x, x, x, cu_seqlens, cu_seqlens, work, 32, 1.0)
print(torch.ops.radio_triton.varlen_attention(*args).sum().item())
try:
    attention.varlen_attention_triton(*args)
except ImportError as error:
    print(error)
"""


def test_without_triton_all_but_the_launch_works() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    total, said = done.stdout.splitlines()
    assert float(total) == 128 and "pip install triton" in said
