"""PHI-S normalizers: what some checkpoints (radio_v2.5-h-norm) apply to patch features after the trunk.

features                 y = (x - mean) @ tx^T
features after block i   y = alphas[i] * (x - means[i]) @ rotation^T, one rotation or one a block
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Statistics(nn.Module):
    """A module whose buffers stay fp32 whatever `.to()` does: bf16 would move a mean by more than it corrects."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        kept = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, exact in kept.items():
            moved = self.get_buffer(name)
            if moved.dtype != exact.dtype:
                self.register_buffer(name, exact.to(moved.device))
        return self


class FeatureNormalizer(Statistics):
    """mean (C,) and tx (C, C) of the features that `forward` returns; summaries are not normalized."""

    mean: Tensor
    tx: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float32))
        self.register_buffer("tx", torch.eye(width, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) to (..., C) of the same dtype. The mean is taken off in fp32 at least, and rounded once."""
        return linear((x - self.mean).to(x.dtype), self.tx.to(x.dtype)).to(x.dtype)


class IntermediateNormalizer(Statistics):
    """alphas (L,), means (L, C) and rotation (C, C) or (L, C, C) of the features after each of L blocks."""

    alphas: Tensor
    means: Tensor
    rotation: Tensor

    def __init__(self, depth: int, width: int, per_layer: bool = False) -> None:
        super().__init__()
        self.register_buffer("alphas", torch.ones(depth, dtype=torch.float32))
        self.register_buffer("means", torch.zeros(depth, width, dtype=torch.float32))
        eye = torch.eye(width, dtype=torch.float32)
        self.register_buffer("rotation", eye.expand(depth, -1, -1).clone() if per_layer else eye)

    def center(self, x: Tensor, block: int) -> Tensor:
        """Patches (..., C) after a block, less their mean, in the same dtype."""
        return (x - self.means[block]).to(x.dtype)

    def rotate(self, x: Tensor, block: int) -> Tensor:
        """Centered patches (..., C), rotated as for a block, in the same dtype; alpha is not applied."""
        rotation = self.rotation if self.rotation.ndim == 2 else self.rotation[block]
        return linear(x, rotation.to(x.dtype)).to(x.dtype)
