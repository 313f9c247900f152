"""What every kernel file shares: Triton, the op namespace and the three ways to register an op.

An op is `torch.ops.<NAMESPACE>.<name>`. The dispatcher is the only backend switch: `<name>_eager` serves
every device, a Triton launcher (`cuda=`) takes precedence on CUDA, and a fake gives shapes to
`torch.compile`.
`Library.define/impl` costs 3 to 5 us a call; `custom_op` and `triton_op` cost 10 to 16.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:

    class _Missing:
        """Stands in for Triton: kernel files import everywhere, launching a kernel says what is missing."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self

        def __getitem__(self, grid: object) -> Any:
            raise ImportError("this kernel needs Triton: `pip install triton` (Linux only; CPUs do without)")

    triton = tl = TensorDescriptor = _Missing()

__all__ = ["NAMESPACE", "TensorDescriptor", "tl", "triton"]
NAMESPACE = "radio_triton"
library = torch.library.Library(NAMESPACE, "FRAGMENT")
Value = TypeVar("Value")


def runs(values: Iterable[Value]) -> list[tuple[int, Value]]:
    """Neighbours that are equal, as (count, value): sequences of one size are a dense batch to eager code."""
    return [(len(list(group)), value) for value, group in groupby(values)]


def require_floating(name: str, x: Tensor) -> None:
    """Integers would compute something, and round it away."""
    if not x.is_floating_point():
        raise ValueError(f"{name} needs floating point tensors, got {x.dtype}")


def require_rows(name: str, **tensors: Tensor | None) -> None:
    """A kernel reads rows in place: refuse, rather than copy, a tensor whose last dimension is strided."""
    devices = {str(x.device) for x in tensors.values() if x is not None}
    if len(devices) > 1:
        raise ValueError(f"{name} needs its tensors on one device, got {', '.join(sorted(devices))}")
    for label, x in tensors.items():
        if x is not None and x.ndim and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(
                f"{name} needs a contiguous last dimension, so a last stride of 1: {label} {tuple(x.shape)} has "
                f"strides {x.stride()}"
            )


def overload(name: str) -> Any:
    """The callable of a registered op, without the cost of resolving its overload at each call."""
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def on_device(x: Tensor) -> AbstractContextManager:
    """Makes the device of `x` the current one: Triton launches there, wherever its arguments live."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@cache
def device_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; the interpreter on a CPU takes the plainest path, (8, 0)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


def define(
    schema: str, eager: Callable, fake: Callable, check: Callable | None = None, cuda: Callable | None = None
) -> None:
    """Register an op that has no gradient. `check` sees the arguments before `eager`, `cuda` and `fake`."""
    name = schema.split("(")[0]

    def checked(function: Callable) -> Callable:
        def call(*args: Any) -> Any:
            if check is not None:
                check(*args)
            return function(*args)

        return call

    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, checked(eager), "CompositeExplicitAutograd")
    if cuda is not None:
        library.impl(name, checked(cuda), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", checked(fake), lib=library)


def define_inplace(
    schema: str, eager: Callable, fake: Callable, check: Callable | None = None, cuda: Callable | None = None
) -> None:
    """Register an op that overwrites its first argument, and refuses to where a gradient would be lost."""
    define(schema, eager, fake, check, cuda)
    name = schema.split("(")[0]
    op = overload(name)

    def guarded(x: Tensor, *args: Any) -> Any:
        # eager code would trace through and hide the mistake
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in (x, *args)):
            functional = name.removesuffix("_")
            raise RuntimeError(f"{name} works in place and has no gradient: call {functional} instead")
        with torch._C._AutoDispatchBelowAutograd():
            result = op(x, *args)
        torch.autograd.graph.increment_version(x)
        return result

    library.impl(name, guarded, "Autograd")


def _define_backward(name: str, arguments: str, eager: Callable) -> Any:
    """Register `<name>_backward(grads, needs, *inputs)`: the gradients of inputs whose `needs` is true."""

    def backward_eager(grads: Sequence[Tensor], needs: Sequence[bool], *inputs: Any) -> list[Tensor]:
        flat, spec = tree_flatten(inputs)
        key, exclude = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard
        # a dispatch mode, such as a flop counter, calls this with autograd switched off
        autograd, views = exclude(key.AutogradFunctionality, False), exclude(key.ADInplaceOrView, False)
        with autograd, views, torch.enable_grad():
            flat = [x.detach().requires_grad_() if need else x for x, need in zip(flat, needs, strict=True)]
            outputs = eager(*tree_unflatten(flat, spec))
            outputs = [outputs] if isinstance(outputs, Tensor) else outputs
            wanted = [x for x, need in zip(flat, needs, strict=True) if need]
            # an output that none of `wanted` reaches has no graph
            reached = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
            found = torch.autograd.grad(
                [out for out, _ in reached], wanted, [grad for _, grad in reached], allow_unused=True
            )
        # copies: autograd may return one tensor for two inputs, or the incoming gradient itself
        return [
            torch.zeros(x.shape, dtype=x.dtype, device=x.device)
            if grad is None
            else grad.clone(memory_format=torch.contiguous_format)
            for x, grad in zip(wanted, found, strict=True)
        ]

    def backward_fake(grads: Sequence[Tensor], needs: Sequence[bool], *inputs: Any) -> list[Tensor]:
        return [x.new_empty(x.shape) for x, need in zip(tree_flatten(inputs)[0], needs, strict=True) if need]

    schema = f"{name}_backward(Tensor[] grads, bool[] needs, {arguments}) -> Tensor[]"
    define(schema, backward_eager, backward_fake)
    backward_op = overload(f"{name}_backward")

    library.impl(f"{name}_backward", _first_order(name, backward_op), "Autograd")
    return backward_op


def _first_order(name: str, backward_op: Any) -> Callable:
    """The backward op, which refuses to be differentiated: its gradients would silently lack terms."""

    def call(grads: Sequence[Tensor], needs: Sequence[bool], *inputs: Any) -> list[Tensor]:
        tensors = [x for x in (*grads, *tree_flatten(inputs)[0]) if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise RuntimeError(f"{name} has no second derivative: take the first without create_graph=True")
        with torch._C._AutoDispatchBelowAutograd():
            return backward_op(grads, needs, *inputs)

    return call


def define_differentiable(
    schema: str, eager: Callable, fake: Callable, check: Callable | None = None, cuda: Callable | None = None
) -> None:
    """Register an op whose backward recomputes `eager` under autograd.

    The backward is an op of its own, and `torch.compile` never traces into it: eager code may read host
    sizes.
    """
    define(schema, eager, fake, check, cuda)
    name, rest = schema.split("(", 1)
    backward_op = _define_backward(name, rest.split(") ->")[0], eager)

    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        flat, ctx.spec = tree_flatten(inputs)
        ctx.constants = [None if isinstance(x, Tensor) else x for x in flat]
        ctx.is_tensor = [isinstance(x, Tensor) for x in flat]
        ctx.save_for_backward(*[x for x in flat if isinstance(x, Tensor)])

    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved = iter(ctx.saved_tensors)
        flat = [
            next(saved) if is_tensor else constant
            for is_tensor, constant in zip(ctx.is_tensor, ctx.constants, strict=True)
        ]
        needs = tree_flatten(tuple(ctx.needs_input_grad))[0]
        found = iter(backward_op(list(grads), needs, *tree_unflatten(flat, ctx.spec)))
        gradients = tree_unflatten([next(found) if need else None for need in needs], ctx.spec)
        return tuple(gradients)

    qualified = f"{NAMESPACE}::{name}"
    torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=library)
