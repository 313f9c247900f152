"""Count what a run dispatches: operations, and the bytes and FLOPs of each, as they come by.

Bytes: every tensor that an operation reads or writes, once each; views and allocations move nothing, and
indices (int32, int64) are left out. A gather reads what it takes. Nothing is timed.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
# allocations, and views that their schema does not show
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "_unsafe_view"}
# what overwrites its first argument without reading it
WRITERS = {"copy_", "fill_", "zero_"}
GATHERS = {"index", "embedding", "index_select", "gather"}
# the statistics that attention also returns are not counted
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention",
}  # fmt: skip


@dataclass
class Counts:
    """Dispatched calls by name; `kernels` are those that move bytes, on a GPU a launch or more each."""

    calls: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)

    def __sub__(self, other: "Counts") -> "Counts":
        found = Counts()
        for name in ("calls", "kernels", "bytes", "flops"):
            mine, theirs = getattr(self, name), getattr(other, name)
            difference = {key: mine[key] - theirs[key] for key in mine | theirs}
            getattr(found, name).update({key: n for key, n in difference.items() if n})
        return found

    def totals(self, pick: Callable[[str], bool] = lambda name: True) -> dict[str, int]:
        """Sums over the operations that are picked by name."""
        return {
            name: sum(n for key, n in getattr(self, name).items() if pick(key))
            for name in ("calls", "kernels", "bytes", "flops")
        }


def is_matmul(name: str) -> bool:
    return name in ("mm", "addmm", "bmm", "baddbmm", "linear")


def is_attention(name: str) -> bool:
    return name in ATTENTION or name == "varlen_attention"


def is_elementwise(name: str) -> bool:
    """Everything between matrix products and attention: what fusion can remove."""
    return not is_matmul(name) and not is_attention(name)


def size(x: Tensor) -> int:
    """Bytes that are there: an expanded dimension is one."""
    if x.dtype in (torch.int32, torch.int64, torch.bool):
        return 0
    return x.itemsize * math.prod(n if stride else 1 for n, stride in zip(x.shape, x.stride(), strict=True))


def _tensors(values: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(values) if isinstance(x, Tensor))


def traffic(name: str, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    """Bytes read and written by one call."""
    outputs = list(_tensors(out))
    if name in GATHERS:
        return 2 * sum(map(size, outputs))
    if name == "qk_rms_norm_":
        # v lies in the same buffer and is left alone
        return args[0].numel() // 3 * 4 * args[0].itemsize + size(args[1]) + size(args[2])
    if name in ATTENTION:
        return sum(map(size, _tensors(args[:3]))) + size(outputs[0])
    mutated = [
        value
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
    ]
    known = {id(x) for x in mutated}
    written = sum(map(size, mutated)) + sum(size(x) for x in outputs if id(x) not in known)
    inputs = list(_tensors((args, kwargs)))
    read = sum(map(size, inputs[1:] if name in WRITERS else inputs))
    return read + written


def work(name: str, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of matrix products and of attention; none of other operations."""
    if name == "varlen_attention":
        q, lengths = args[0], args[4].diff().tolist()
        return 4 * q.shape[1] * q.shape[2] * sum(n * n for n in lengths)
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        batch, heads, queries, width = args[0].shape
        return 4 * batch * heads * queries * args[1].shape[2] * width
    if formula := flop_registry.get(func._overloadpacket):
        return int(formula(*args, **kwargs, out_val=out))
    return 0


class Recorder(TorchDispatchMode):
    """Within, every dispatched operation is counted. Use it under torch.no_grad: inference mode hides views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._overloadpacket.__name__
        self.counts.calls[name] += 1
        if func.is_view or name in FREE or name.startswith("_local_scalar"):
            return out
        if moved := traffic(name, func, args, kwargs, out):
            self.counts.kernels[name] += 1
            self.counts.bytes[name] += moved
            self.counts.flops[name] += work(name, func, args, kwargs, out)
        return out


@torch.no_grad()
def count(call: Callable[[], Any]) -> Counts:
    """What one call dispatches."""
    with Recorder() as recorder:
        call()
    return recorder.counts
