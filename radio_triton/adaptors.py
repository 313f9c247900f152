"""Adaptors: what a teacher (CLIP, SigLIP2, DINOv3, SAM, ...) would have said, from the trunk's tokens.

Each has two heads: one reads a class token of every sequence, one the patches. A head is an MLP,

    v1    fc2(inner(relu(norm(fc1 x)))), inner any number of Linear, LayerNorm, ReLU
    v2    final(h), h = fc1(pre_norm x), then h = h + block(h), every block, pre_norm and final LayerNorm and GELU first

which a patch head may follow two attention blocks over the patches of each image alone ("attn"), and may end in
u x u outputs a patch, a map u times finer on each side.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from . import ops
from .config import RadioConfig
from .layers import Encoder
from .model import RadioOutput
from .packing import Grid, Packing

if TYPE_CHECKING:
    from .integrations.text import TextTower

# of the reference's attention head, in every version; no tensor shows it
ATTENTION_HEADS = 16


@dataclass(frozen=True)
class HeadSpec:
    """A head, as the shapes of its tensors show it.

    version: "v1" or "v2". blocks: of attention before the MLP, with an MLP of `block_hidden` each. inner: layers
    between the first and the last.
    """

    version: str
    width: int
    hidden: int
    output: int
    inner: int = 0
    pre_norm: bool = False
    blocks: int = 0
    block_hidden: int = 0
    qkv_bias: bool = False
    layer_scale: bool = False


@dataclass(frozen=True)
class AdaptorSpec:
    """An adaptor: its heads, the position of the class or register token that its summary reads, and upsampling.

    block_eps: of the LayerNorms in the attention blocks. It is not in the file: the reference builds these blocks
    with timm, whose Block has 1e-5 up to 1.0.15 and 1e-6 from 1.0.20 on. index: of the teacher, where heads are
    stored by that. teacher: what the training script says of it (type, model, pretrained).
    """

    summary: HeadSpec
    feature: HeadSpec
    token: int = 0
    upsample: int = 1
    block_eps: float = 1e-6
    index: int | None = None
    teacher: Mapping[str, Any] = field(default_factory=dict)


class MlpV1(nn.Module):
    """fc1, LayerNorm, ReLU; inner (Linear, LayerNorm, ReLU); fc2."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.fc1 = nn.Linear(spec.width, spec.hidden)
        self.norm = nn.LayerNorm(spec.hidden)
        size = spec.hidden
        inner = [(nn.Linear(size, size), nn.LayerNorm(size), nn.ReLU()) for _ in range(spec.inner)]
        self.inner = nn.Sequential(*(module for layer in inner for module in layer))
        self.fc2 = nn.Linear(spec.hidden, spec.output)

    def forward(self, x: Tensor) -> Tensor:
        """(T, C) to (T, output)."""
        return self.fc2(self.inner(self.norm(self.fc1(x)).relu()))


class NormGelu(nn.Sequential):
    """LayerNorm, GELU and, where a size is given, a Linear, under the names 0 and 2."""

    def __init__(self, width: int, output: int | None = None) -> None:
        last = [] if output is None else [nn.Linear(width, output)]
        super().__init__(nn.LayerNorm(width), nn.GELU(), *last)

    def forward(self, x: Tensor) -> Tensor:
        """(T, width) to (T, output)."""
        norm, _, *last = cast(Iterator[Any], self)
        x = ops.gelu(ops.layer_norm(x, norm, x.dtype))
        return last[0](x) if last else x


class MlpV2(nn.Module):
    """fc1, residual blocks, and the final layer, each after LayerNorm and GELU."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.pre_norm = NormGelu(spec.width) if spec.pre_norm else None
        self.fc1 = nn.Linear(spec.width, spec.hidden)
        self.blocks = nn.ModuleList(NormGelu(spec.hidden, spec.hidden) for _ in range(spec.inner))
        self.final = NormGelu(spec.hidden, spec.output)

    def forward(self, x: Tensor) -> Tensor:
        """(T, C) to (T, output)."""
        x = self.fc1(x if self.pre_norm is None else self.pre_norm(x))
        for block in self.blocks:
            x = x + block(x)
        return self.final(x)


class AttentionHead(nn.Module):
    """Blocks of attention over the patches of each sequence, without its class and register tokens; then an MLP."""

    def __init__(self, spec: HeadSpec, eps: float) -> None:
        super().__init__()
        self.config = RadioConfig(
            hidden_size=spec.width,
            num_hidden_layers=spec.blocks,
            num_attention_heads=ATTENTION_HEADS,
            intermediate_size=spec.block_hidden,
            qkv_bias=spec.qkv_bias,
            layer_scale=spec.layer_scale,
            layer_norm_eps=eps,
        )
        self.encoder = Encoder(self.config)
        self.mlp = make_mlp(spec)

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        """Patches (P, C) of a packing to (P, output)."""
        patches = Packing(packing.grids, prefix=0, device=packing.device)
        weight = self.encoder.get_parameter("layer.0.norm1.weight")
        dtype = ops.compute_dtype(weight)
        sequences = ops.prepare(patches, self.config.attention_width, self.config.head_dim, dtype)
        # the blocks work in place, and these rows may be the trunk's own
        return self.mlp(self.encoder(x.clone(), sequences).to(weight.dtype))


def make_mlp(spec: HeadSpec) -> MlpV1 | MlpV2:
    """The MLP of a head."""
    return MlpV1(spec) if spec.version == "v1" else MlpV2(spec)


class Adaptor(nn.Module):
    """The two heads of one teacher. Outputs are fp32, as the reference's are."""

    def __init__(self, name: str, spec: AdaptorSpec) -> None:
        super().__init__()
        self.name, self.spec = name, spec
        self.summary = make_mlp(spec.summary)
        attends = spec.feature.blocks > 0
        self.feature = AttentionHead(spec.feature, spec.block_eps) if attends else make_mlp(spec.feature)

    def forward(self, trunk: RadioOutput) -> RadioOutput:
        """Of a trunk's output with features in NLC: summary (S, output), features as the trunk's, on a finer grid.

        `last_hidden_state` and `packing` are the trunk's.
        """
        packing, factor = trunk.packing, self.spec.upsample
        dtype = next(self.parameters()).dtype
        stream = trunk.last_hidden_state.reshape(packing.tokens, -1)
        summary = self.summary(stream[packing.token_rows([self.spec.token])].to(dtype)).float()
        given = cast(Tensor, trunk.features)
        rows = given.reshape(packing.patches, -1)
        attends = isinstance(self.feature, AttentionHead)
        rows = self.feature(rows, packing) if attends else self.feature(rows.to(dtype))
        features = upsample(rows.float(), packing.grids, factor)
        if given.ndim == 3:
            features = features.unflatten(0, (len(given), -1))
        grid = finer(trunk.grid, factor)
        return RadioOutput(summary, features, trunk.last_hidden_state, packing, grid, (self.spec.token,))

    @cached_property
    def text(self) -> "TextTower":
        """The teacher's text tower, which the first use loads; ValueError where the teacher has none."""
        from .integrations.text import text_tower

        return text_tower(self.name, self.spec.teacher)

    @property
    def tokenizer(self) -> Any:
        """Texts to token ids (n, L), as the teacher's text tower takes them."""
        return self.text.tokenize

    def encode_text(self, texts: str | list[str] | Tensor, normalize: bool = False) -> Tensor:
        """Texts, or the tokenizer's ids (n, L), to fp32 (n, output) in the space of this adaptor's summary.

        Loads the text tower at the first call: ImportError where the package for it is not installed, OSError
        where its weights cannot be had.
        """
        return self.text.encode(texts, normalize, next(self.parameters()).device)


def finer(grid: tuple[int, ...] | list[Grid], factor: int) -> tuple[int, ...] | list[Grid]:
    """A grid, or the grid of every sequence, with `factor` times as many rows and columns."""
    if isinstance(grid, list):
        return [(h * factor, w * factor) for h, w in grid]
    return (*grid[:-2], grid[-2] * factor, grid[-1] * factor)


def upsample(rows: Tensor, grids: list[Grid], factor: int) -> Tensor:
    """Rows of patches (P, factor^2 * C), each a block of factor x factor, to rows of the finer map (P', C)."""
    if factor == 1:
        return rows
    if len(set(grids)) <= 1:
        return _upsample(rows, grids[0], factor) if grids else rows.view(0, -1)
    parts = rows.split([h * w for h, w in grids])
    return torch.cat([_upsample(part, grid, factor) for part, grid in zip(parts, grids, strict=True)])


def _upsample(rows: Tensor, grid: Grid, factor: int) -> Tensor:
    """Of images of one grid: (n h w, u v c) to (n h u w v, c)."""
    blocks = rows.unflatten(0, (-1, *grid)).unflatten(-1, (factor, factor, -1))
    return blocks.permute(0, 1, 3, 2, 4, 5).flatten(0, 4)
