"""One Case for every op: its inputs, ours, eager, what it must move and compute, and where it is used.

Letters as in DESIGN.md 4: T tokens, P patches, C width, H heads, D head size, I width of the MLP, e bytes of an
element. Bytes are what must move: every input read once, every output written once; indices (int32, int64) are
left out. FLOPs of elementwise ops follow the table of kernels/README.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radio_triton import ops
from radio_triton.config import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from radio_triton.kernels import activation, patchify, position, qk_norm, residual, varlen_attention
from radio_triton.packing import Packing

PATCH, CHANNELS = 16, 3
Grid = tuple[int, int]


@dataclass(frozen=True)
class Tower:
    """What of a released RADIO decides the shapes."""

    name: str
    width: int
    heads: int
    inner: int
    layers: int
    prefix: int
    table: Grid = (128, 128)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


TOWERS = {
    "H": Tower("C-RADIOv4-H", 1280, 16, 5120, 32, 10),
    "SO400M": Tower("C-RADIOv4-SO400M", 1152, 16, 4304, 27, 10),
    "B": Tower("C-RADIOv2-B", 768, 12, 3072, 12, 8),
    "tiny": Tower("tiny", 32, 2, 128, 2, 10, (8, 8)),
}
MIX = [(32, 32)] * 8 + [(64, 64)] * 2 + [(16, 16)] * 8 + [(24, 24)] * 6 + [(48, 48)] * 4 + [(32, 48)] * 4
# grids of patches; a side of 14 is 224 pixels, 32 is 512, 128 is 2048
WORKLOADS: dict[str, list[Grid]] = {
    "1 x 224^2": [(14, 14)],
    "1 x 512^2": [(32, 32)],
    "1 x 1024^2": [(64, 64)],
    "1 x 2048^2": [(128, 128)],
    "16 x 512^2": [(32, 32)] * 16,
    "2 x 1024^2": [(64, 64)] * 2,
    "mix of 32": MIX,
    "64 x 224^2": [(14, 14)] * 64,
    "128 tubelets": [(32, 32)] * 128,
    # small enough for a CPU
    "4 x 224^2": [(14, 14)] * 4,
    "mix of 4": [(14, 14), (20, 31), (32, 32), (8, 40)],
    "tiny": [(2, 2), (1, 3)],
    "tiny dense": [(2, 3), (2, 3)],
}
ON_GPU = list(WORKLOADS)[:9]
ON_CPU = ["4 x 224^2", "1 x 512^2", "mix of 4"]


@dataclass(frozen=True)
class Shape:
    """A tower at work on a batch; `tubelet` frames make one sequence."""

    tower: Tower
    case: str
    grids: tuple[Grid, ...]
    tubelet: int = 1

    @classmethod
    def of(cls, tower: str, workload: str) -> "Shape":
        grids = tuple(WORKLOADS[workload])
        return cls(TOWERS[tower], f"{tower} {workload}", grids, 2 if "tubelets" in workload else 1)

    @property
    def patches(self) -> int:
        return sum(h * w for h, w in self.grids)

    @property
    def tokens(self) -> int:
        return self.patches + len(self.grids) * self.tower.prefix

    @property
    def lengths(self) -> list[int]:
        return [h * w + self.tower.prefix for h, w in self.grids]

    @property
    def row(self) -> int:
        return CHANNELS * PATCH**2 * self.tubelet

    @property
    def dense(self) -> bool:
        return len(set(self.grids)) == 1

    def packing(self, device: str) -> Packing:
        return Packing(self.grids, prefix=self.tower.prefix, device=device)


@dataclass(frozen=True)
class Case:
    """`inputs(shape, dtype, device)` are the arguments of `ours` (the op), `eager` and `launcher` (Triton).

    What is computed is what a call returns or, for an op that works in place, its first argument afterwards.
    `moved(shape, e)` and `flops(shape)` are those of the useful work. `compiles`: torch.compile takes the eager
    form whole; `captures`: a CUDA graph takes the op.
    """

    op: str
    inputs: Callable[[Shape, torch.dtype, str], tuple]
    eager: Callable
    launcher: Callable
    moved: Callable[[Shape, int], int]
    flops: Callable[[Shape], int]
    bound: str = "memory"
    fits: Callable[[Shape], bool] = lambda shape: True
    compiles: bool = True
    captures: bool = True

    @property
    def ours(self) -> Callable:
        return ops._op[self.op]


def _rand(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _vectors(count: int, width: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [_rand((width,), dtype, device) for _ in range(count)]


def _pixels(s: Shape, device: str) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    sizes = [(s.tubelet, CHANNELS, h * PATCH, w * PATCH) for h, w in s.grids]
    frames = [torch.randint(256, size, dtype=torch.uint8, device=device) for size in sizes]
    return frames, (
        torch.tensor(OPENAI_CLIP_MEAN, device=device),
        torch.tensor(OPENAI_CLIP_STD, device=device),
    )


def _patchify(s: Shape, dtype: torch.dtype, device: str) -> tuple:
    frames, statistics = _pixels(s, device)
    return torch.cat(frames), *statistics, PATCH, s.tubelet, dtype


def _patchify_list(s: Shape, dtype: torch.dtype, device: str) -> tuple:
    frames, statistics = _pixels(s, device)
    return frames, *statistics, PATCH, s.tubelet, dtype


def _embed_tokens(s: Shape, dtype: torch.dtype, device: str) -> tuple:
    packing, width = s.packing(device), s.tower.width
    rows, prefix = _rand((s.patches, width), dtype, device), _rand((s.tower.prefix, width), dtype, device)
    table = _rand((*s.tower.table, width), dtype, device)
    where = (
        packing.grid_table,
        packing.grid_table_cpu,
        packing.cu_seqlens,
        packing.work_list(position.BLOCK_T),
    )
    return rows, None, prefix, table, *where, True, False, dtype


def _layer_norm(s: Shape, dtype: torch.dtype, device: str) -> tuple:
    x = _rand((s.tokens, s.tower.width), dtype, device)
    return x, *_vectors(2, s.tower.width, dtype, device), 1e-6, dtype


def _residual(s: Shape, dtype: torch.dtype, device: str) -> tuple:
    # released towers have no LayerScale, but for the B and L of version 3
    return *(_rand((s.tokens, s.tower.width), dtype, device) for _ in range(2)), None


def _residual_norm(s: Shape, dtype: torch.dtype, device: str) -> tuple:
    return *_residual(s, dtype, device), *_vectors(2, s.tower.width, dtype, device), 1e-6, dtype


def _qk_rms_norm(s: Shape, dtype: torch.dtype, device: str) -> tuple:
    buffer = _rand((s.tokens, 3, s.tower.heads, s.tower.head_dim), dtype, device)
    # signs: a weight that is applied a thousand times, in place, must keep the values' size
    weights = [torch.sign(x) for x in _vectors(2, s.tower.width, dtype, device)]
    return buffer, *weights, 1e-6, s.tower.width


def _attention(s: Shape, dtype: torch.dtype, device: str) -> tuple:
    buffer = _rand((s.tokens, 3, s.tower.heads, s.tower.head_dim), dtype, device)
    packing = s.packing(device)
    sequences = ops.prepare(packing, s.tower.width, s.tower.head_dim, dtype)
    if sequences.work is None:
        # the interpreter's; the eager form reads neither
        sequences = sequences._replace(work=packing.work_list(32), block_m=32)
    return *buffer.unbind(1), *sequences, s.tower.head_dim**-0.5


def _gelu(s: Shape, dtype: torch.dtype, device: str) -> tuple:
    return (_rand((s.tokens, s.tower.inner), dtype, device),)


def _swiglu(s: Shape, dtype: torch.dtype, device: str) -> tuple:
    return (_rand((s.tokens, 2 * s.tower.inner), dtype, device),)


def _stream(s: Shape) -> int:
    return s.tokens * s.tower.width


def _embed_bytes(s: Shape, e: int) -> int:
    table = s.tower.table[0] * s.tower.table[1]
    return (s.patches + s.tokens + s.tower.prefix + table) * s.tower.width * e


def _patchify_bytes(s: Shape, e: int) -> int:
    # and the statistics, fp32
    return s.patches * s.row * (1 + e) + 2 * CHANNELS * 4


def _attention_flops(s: Shape) -> int:
    return 4 * s.tower.width * sum(n * n for n in s.lengths)


CASES = {
    case.op: case
    for case in (
        Case(
            "varlen_attention", _attention, varlen_attention.varlen_attention_eager,
            varlen_attention.varlen_attention_triton,
            lambda s, e: 4 * _stream(s) * e, _attention_flops, bound="compute", compiles=False,
        ),
        Case(
            "layerscale_residual_norm", _residual_norm, residual.layerscale_residual_norm_eager,
            residual.layerscale_residual_norm_triton,
            lambda s, e: (4 * _stream(s) + 2 * s.tower.width) * e, lambda s: 9 * _stream(s),
        ),
        Case(
            "gelu", _gelu, activation.gelu_eager, activation.gelu_triton,
            lambda s, e: 2 * s.tokens * s.tower.inner * e, lambda s: 34 * s.tokens * s.tower.inner,
        ),
        Case(
            "embed_tokens", _embed_tokens, position.embed_tokens_eager, position.embed_tokens_triton,
            _embed_bytes, lambda s: 8 * s.patches * s.tower.width, compiles=False,
        ),
        Case(
            "patchify", _patchify, patchify.patchify_eager, patchify.patchify_triton,
            _patchify_bytes, lambda s: 2 * s.patches * s.row, fits=lambda s: s.dense,
        ),
        # its table of addresses goes to the device at each call
        Case(
            "patchify_list", _patchify_list, patchify.patchify_list_eager, patchify.patchify_list_triton,
            _patchify_bytes, lambda s: 2 * s.patches * s.row, fits=lambda s: not s.dense, captures=False,
        ),
        Case(
            "qk_rms_norm_", _qk_rms_norm, qk_norm.qk_rms_norm_inplace_eager, qk_norm.qk_rms_norm_inplace_triton,
            lambda s, e: (4 * _stream(s) + 2 * s.tower.width) * e, lambda s: 8 * _stream(s),
        ),
        Case(
            "layer_norm", _layer_norm, residual.layer_norm_eager, residual.layer_norm_triton,
            lambda s, e: (2 * _stream(s) + 2 * s.tower.width) * e, lambda s: 8 * _stream(s),
        ),
        Case(
            "layerscale_residual", _residual, residual.layerscale_residual_eager,
            residual.layerscale_residual_triton, lambda s, e: 3 * _stream(s) * e, lambda s: _stream(s),
        ),
        Case(
            "swiglu", _swiglu, activation.swiglu_eager, activation.swiglu_triton,
            lambda s, e: 3 * s.tokens * s.tower.inner * e, lambda s: 5 * s.tokens * s.tower.inner,
        ),
    )
}  # fmt: skip


def shapes(towers: list[str], workloads: list[str]) -> list[Shape]:
    return [Shape.of(tower, workload) for tower in towers for workload in workloads]


def arguments(case: Case, shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> tuple:
    """The inputs of one contestant: the same values for each of them, in memory of their own."""
    torch.manual_seed(seed)
    return case.inputs(shape, dtype, device)


def run(function: Callable, args: tuple) -> list[Tensor]:
    """What a call computes, as a list."""
    found = function(*args)
    found = args[0] if found is None else found
    return [found] if isinstance(found, Tensor) else list(found)


def as_float64(x: Tensor) -> Tensor:
    return x.to(torch.float64, copy=True) if x.is_floating_point() else x


def as_double(values: Any) -> Any:
    """Floating point tensors, and a dtype that is asked for, in float64; uint8 pixels as 0 to 1."""
    if isinstance(values, Tensor):
        return values.double() / 255 if values.dtype == torch.uint8 else as_float64(values)
    if isinstance(values, torch.dtype):
        return torch.float64
    return type(values)(map(as_double, values)) if type(values) in (list, tuple) else values


def truth(case: Case, args: tuple) -> list[Tensor]:
    """The eager form in float64; `args` stay as they are.

    Attention goes one sequence and head at a time: all scores in float64 would not fit.
    """
    if case.op != "varlen_attention":
        return run(case.eager, as_double(args))
    q, k, v, _, bounds, _, _, scale = args
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for first, last in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        for head in range(q.shape[1]):
            one_q, one_k, one_v = (x[first:last, head].double() for x in (q, k, v))
            out[first:last, head] = torch.softmax(one_q @ one_k.T * scale, dim=-1) @ one_v
    return [out.flatten(1)]
