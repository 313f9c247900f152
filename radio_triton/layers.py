"""The modules of the tower: embeddings and encoder, on the packed stream (T, C)."""

from collections.abc import Callable
from itertools import zip_longest
from typing import cast

import torch
from torch import Tensor, nn

from . import ops
from .config import RadioConfig
from .ops import Sequences
from .packing import Packing


class InputConditioner(nn.Module):
    """Pixel statistics, mean and std (c, 1, 1): (x - mean) / std. They stay fp32 whatever `.to()` does."""

    norm_mean: Tensor
    norm_std: Tensor

    def __init__(self, config: RadioConfig) -> None:
        super().__init__()
        self.register_buffer("norm_mean", torch.tensor(config.norm_mean, dtype=torch.float32).view(-1, 1, 1))
        self.register_buffer("norm_std", torch.tensor(config.norm_std, dtype=torch.float32).view(-1, 1, 1))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "InputConditioner":
        # bf16 would move the mean from 0.4815 to 0.4824
        kept = {"norm_mean": self.norm_mean, "norm_std": self.norm_std}
        super()._apply(fn, recurse)
        for name, exact in kept.items():
            moved = self.get_buffer(name)
            if moved.dtype != torch.float32:
                self.register_buffer(name, exact.to(moved.device))
        return self

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalise pixels (..., c, H, W) in fp32; the result has their dtype. uint8 counts as 0 .. 255."""
        scaled = pixels.float() if pixels.is_floating_point() else pixels.float() / 255
        dtype = pixels.dtype if pixels.is_floating_point() else torch.float32
        return ((scaled - self.norm_mean) / self.norm_std).to(dtype)


class PatchEmbeddings(nn.Module):
    """Patch rows (P, c * p^2) to the stream (T, C): projection, position, prefix tokens."""

    def __init__(self, config: RadioConfig) -> None:
        super().__init__()
        self.config = config
        width, row = config.hidden_size, config.num_channels * config.patch_size**2
        rows, columns = config.position_grid
        self.patch_projection = nn.Linear(row, width, bias=config.patch_bias)
        self.video_patch_projection = (
            nn.Linear(config.video_temporal_patch_size * row, width, bias=config.patch_bias)
            if config.video_projection
            else None
        )
        self.position_embedding = nn.Parameter(torch.empty(1, rows * columns, width))
        self.cls_register_token = nn.Parameter(torch.empty(config.num_prefix_tokens, width))

    def forward(
        self, image_rows: Tensor | None, video_rows: Tensor | None, packing: Packing, dtype: torch.dtype
    ) -> Tensor:
        """Rows of images and of tubelets, in the packing's order; the stream comes in `dtype`."""
        patches = [] if image_rows is None else [self.patch_projection(image_rows)]
        if video_rows is not None and self.video_patch_projection is not None:
            patches.append(self.video_patch_projection(video_rows))
        table = self.position_embedding.view(*self.config.position_grid, -1)
        rule = (self.config.cpe, self.config.pos_align_corners)
        return ops.embed_tokens(patches, self.cls_register_token, table, packing, *rule, dtype)


class Attention(nn.Module):
    """qkv in one projection, RMSNorm of q and k where the model has it, attention inside each sequence."""

    def __init__(self, config: RadioConfig) -> None:
        super().__init__()
        self.embed_dim, self.head_dim, width = config.hidden_size, config.head_dim, config.attention_width
        self.qkv = nn.Linear(config.hidden_size, 3 * width, bias=config.qkv_bias)
        self.proj = nn.Linear(width, config.hidden_size)
        self.q_norm = nn.RMSNorm(width, eps=config.layer_norm_eps) if config.qk_normalization else None
        self.k_norm = nn.RMSNorm(width, eps=config.layer_norm_eps) if config.qk_normalization else None

    @torch.no_grad()
    def zero_dummy_heads(self) -> None:
        """Zero rows of q, k and v and zero columns of proj: the heads after the first change nothing."""
        for x in (self.qkv.weight, self.qkv.bias):
            if x is not None:
                x.unflatten(0, (3, -1))[:, self.embed_dim :] = 0
        self.proj.weight[:, self.embed_dim :] = 0

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """(T, C) to (T, C)."""
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            qkv = ops.qk_rms_norm(qkv, self.q_norm, self.k_norm, self.embed_dim)
        q, k, v = qkv.unbind(1)
        return self.proj(ops.varlen_attention(q, k, v, sequences, self.head_dim**-0.5))


class Mlp(nn.Module):
    """fc2(norm(gelu(fc1(x)))); the norm only where the checkpoint has one."""

    def __init__(self, config: RadioConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.norm = (
            nn.LayerNorm(config.intermediate_size, eps=config.mlp_norm_eps) if config.mlp_norm else None
        )
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(T, C) to (T, C)."""
        x = ops.gelu(self.fc1(x))
        if self.norm is not None:
            x = ops.layer_norm(x, self.norm, x.dtype)
        return self.fc2(x)


class SwiGlu(nn.Module):
    """down(silu(gate) * up), [gate | up] one fused projection."""

    def __init__(self, config: RadioConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(T, C) to (T, C)."""
        return self.down_proj(ops.swiglu(self.gate_up_proj(x)))


class LayerScale(nn.Module):
    """Holds lambda (C,); the residual op applies it."""

    def __init__(self, config: RadioConfig) -> None:
        super().__init__()
        self.lambda1 = nn.Parameter(torch.full((config.hidden_size,), config.layerscale_value))


class Layer(nn.Module):
    """x += l1 * attention(norm1 x); x += l2 * mlp(norm2 x): each norm comes with the addition before it."""

    def __init__(self, config: RadioConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = Attention(config)
        self.layer_scale1 = LayerScale(config) if config.layer_scale else None
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = SwiGlu(config) if config.use_swiglu_ffn else Mlp(config)
        self.layer_scale2 = LayerScale(config) if config.layer_scale else None

    def forward(
        self, x: Tensor, normed: Tensor, next_norm: nn.LayerNorm | None, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """The stream x and norm1(x), both (T, C), to the new stream and next_norm of it."""
        dtype = ops.compute_dtype(self.norm1.weight)
        scale1 = self.layer_scale1.lambda1 if self.layer_scale1 is not None else None
        scale2 = self.layer_scale2.lambda1 if self.layer_scale2 is not None else None
        x, normed = ops.layerscale_residual(x, self.attention(normed, sequences), scale1, self.norm2, dtype)
        return ops.layerscale_residual(x, self.mlp(normed), scale2, next_norm, dtype)


class Encoder(nn.Module):
    """The blocks, and the final norm of the few checkpoints that have one. This is the unit to compile."""

    def __init__(self, config: RadioConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.final_norm else None

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """The stream (T, C) to the encoded stream (T, C); overwrites it where no gradient is needed."""
        return self.final_norm(self.blocks(x, sequences, 0, len(self.layer)))

    def blocks(self, x: Tensor, sequences: Sequences, first: int, last: int) -> Tensor:
        """The stream (T, C) after blocks first .. last - 1; overwrites it where no gradient is needed."""
        layers = cast(list[Layer], list(self.layer))[first:last]
        norms = [layer.norm1 for layer in layers]
        if layers:
            normed = ops.layer_norm(x, norms[0], ops.compute_dtype(norms[0].weight))
        for layer, next_norm in zip_longest(layers, norms[1:]):
            x, normed = layer(x, normed, next_norm, sequences)
        return x

    def final_norm(self, x: Tensor) -> Tensor:
        """The norm after the last block, in the dtype of the stream; most checkpoints have none."""
        return x if self.norm is None else ops.layer_norm(x, self.norm, x.dtype)
