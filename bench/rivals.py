"""Who else can do it: other implementations of an op, as callables that take the op's own arguments.

Each is made for one set of arguments, so that masks and plans are built before the clock starts, as ours are.
One that cannot run here raises, and its reason becomes the row.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.cases import Case, Shape
from bench.measure import importable

Call = Callable[..., Any]


def rivals(case: Case, shape: Shape, args: tuple, device: str, compile_too: bool) -> dict[str, Call]:
    """By name; on a CPU only what runs there."""
    found: dict[str, Call] = {"eager": case.eager}
    if compile_too and case.compiles:
        found["torch.compile"] = torch.compile(case.eager, dynamic=False)
    if case.op == "varlen_attention" and device == "cuda":
        found |= _attention(shape, args)
    return found


def _attention(shape: Shape, args: tuple) -> dict[str, Call]:
    bounds = args[3]
    longest, count = max(shape.lengths), len(shape.lengths)
    found: dict[str, Call] = {"torch varlen_attn": _varlen(bounds, longest), "FlexAttention": _flex(args)}
    if shape.dense:
        backends = (
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
        )
        found |= {
            f"SDPA {b.name.removesuffix('_ATTENTION').lower()}": _sdpa(b, count, longest) for b in backends
        }
    if importable("flash_attn"):
        found["flash-attn"] = _flash(bounds, longest)
    return found


def _sdpa(backend: SDPBackend, count: int, length: int) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        dense = [x.unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v)]
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*dense, scale=rest[-1])
        return out.transpose(1, 2).flatten(0, 1).flatten(1)

    return call


def _varlen(bounds: Tensor, longest: int) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        # not in every torch that we support
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=rest[-1]).flatten(1)

    return call


def _flash(bounds: Tensor, longest: int) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        from flash_attn import flash_attn_varlen_func

        out = flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, softmax_scale=rest[-1])
        return out.flatten(1)

    return call


def _flex(args: tuple) -> Call:
    """FlexAttention over one sequence of all tokens, whose mask lets a token see its own picture."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    made: list[Any] = []

    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        if not made:
            lengths = args[4].diff().to(q.device)
            picture = torch.arange(len(lengths), device=q.device).repeat_interleave(lengths)

            def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return picture[i] == picture[j]

            made.append(create_block_mask(same, None, None, len(q), len(q), device=q.device, _compile=True))
            made.append(torch.compile(flex_attention, dynamic=False))
        mask, attend = made
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return attend(q, k, v, block_mask=mask, scale=rest[-1])[0].transpose(0, 1).flatten(1)

    return call
