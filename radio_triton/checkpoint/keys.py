"""Key layouts: where each tensor of a checkpoint belongs in our tree.

Every layout is the same tower under other names, so one table of names serves them all; what differs is the prefix. A layout
is recognised by the key of its patch projection, the anchor, and everything else is read relative to it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """A parameter of ours, or `part` of the `parts` equal row blocks that it fuses."""

    name: str
    part: int | None = None


# row blocks of fused parameters: [q | k | v] and [gate | up]
FUSED = {"attention.qkv": 3, "mlp.gate_up_proj": 2}

_EMBEDDINGS = {
    "patch_generator.embedder": "embeddings.patch_projection",
    "patch_generator.video_embedder": "embeddings.video_patch_projection",
    "patch_generator.pos_embed": "embeddings.position_embedding",
    "patch_generator.cls_token.token": "embeddings.cls_register_token",
    "norm": "encoder.norm",
}
_BLOCK: dict[str, tuple[str, int | None]] = {
    "norm1": ("norm1", None),
    "norm2": ("norm2", None),
    "attn.qkv": ("attention.qkv", None),
    "attention.qkv": ("attention.qkv", None),
    "attention.q_proj": ("attention.qkv", 0),
    "attention.k_proj": ("attention.qkv", 1),
    "attention.v_proj": ("attention.qkv", 2),
    "attention.attention.query": ("attention.qkv", 0),
    "attention.attention.key": ("attention.qkv", 1),
    "attention.attention.value": ("attention.qkv", 2),
    "attn.proj": ("attention.proj", None),
    "attention.proj": ("attention.proj", None),
    "attention.o_proj": ("attention.proj", None),
    "attention.output.dense": ("attention.proj", None),
    "attention.q_norm": ("attention.q_norm", None),
    "attention.k_norm": ("attention.k_norm", None),
    "mlp.fc1": ("mlp.fc1", None),
    "mlp.fc2": ("mlp.fc2", None),
    "mlp.norm": ("mlp.norm", None),
    "mlp.w12": ("mlp.gate_up_proj", None),
    "mlp.w3": ("mlp.down_proj", None),
    "mlp.gate_proj": ("mlp.gate_up_proj", 0),
    "mlp.up_proj": ("mlp.gate_up_proj", 1),
    "mlp.gate_up_proj": ("mlp.gate_up_proj", None),
    "mlp.down_proj": ("mlp.down_proj", None),
}
_LAYER_SCALE = re.compile(r"(?:ls|layer_scale)([12])(?:\.(?:grandma|gamma|weight|lambda1))?")
# parameters that the reference creates and never reads
_UNUSED = ("reg_token", "mask_token")
_REFUSED = {
    "attn.q_norm": "timm's LayerNorm of each head; only RMSNorm over all heads (attention.q_norm) is supported",
    "attn.k_norm": "timm's LayerNorm of each head; only RMSNorm over all heads (attention.k_norm) is supported",
    "patch_generator.patch_normalizer": "a norm of the embedded patches, which no released version has",
}
# the two spellings of native attention; a file has one of them
_SPELLINGS = ("attention.attention.query.", "attention.q_proj.")


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message names the file's keys or facts and what is accepted."""


@dataclass(frozen=True)
class Layout:
    """How one file names the tower: `name`, the prefix of its trunk, and that of what stands beside the trunk."""

    name: str
    trunk: str
    beside: str

    def locate(self, key: str) -> Slot | str | None:
        """The slot of a key; a reason, where it is known and not needed; None, where it is not known."""
        if not key.startswith(self.beside):
            return "outside the tower" if self.beside.split("radio_model.")[0] else None
        rest = key.removeprefix(self.beside)
        if rest in ("summary_idxs", "input_conditioner.norm_mean", "input_conditioner.norm_std"):
            return Slot(rest)
        if key.startswith(self.trunk):
            return locate_in_trunk(key.removeprefix(self.trunk))
        return None


_ANCHORS = (
    ("legacy", "patch_generator.embedder.weight", re.compile(r"((?:.*\.)?radio_model\.)model\.")),
    ("native", "embeddings.patch_projection.weight", re.compile(r"((?:.*\.)?)")),
)


def find_layout(keys: Iterable[str]) -> Layout:
    """The layout of a file by its keys; CheckpointError where it holds no RADIO tower, or names one in two ways."""
    keys = list(keys)
    found = []
    for name, anchor, prefix in _ANCHORS:
        for key in keys:
            match = prefix.fullmatch(key.removesuffix(anchor)) if key.endswith(anchor) else None
            if match:
                found.append(Layout(name, match[0], match[1]))
    if len(found) > 1:
        raise CheckpointError(f"the file holds {len(found)} towers, under {[layout.trunk for layout in found]}: keep one")
    if not found:
        raise CheckpointError(
            "no RADIO tower found: expected a key that ends in patch_generator.embedder.weight or "
            f"embeddings.patch_projection.weight, got {len(keys)} keys such as {keys[:4]}"
        )
    spellings = [s for s in _SPELLINGS if any(s in key for key in keys if key.startswith(found[0].trunk))]
    if len(spellings) > 1:
        raise CheckpointError(f"the file mixes two spellings of attention, {spellings[0]}* and {spellings[1]}*: keep one")
    return found[0]


def locate_in_trunk(key: str) -> Slot | str | None:
    """The slot of a key that is relative to its trunk, in any spelling."""
    for refused, reason in _REFUSED.items():
        if refused in key:
            raise CheckpointError(f"{key} is not supported: {reason}")
    if key in _UNUSED:
        return "unused by the reference"
    module, _, leaf = key.rpartition(".")
    if key in _EMBEDDINGS or key in _EMBEDDINGS.values():
        return Slot(_EMBEDDINGS.get(key, key))
    if module in _EMBEDDINGS or module in _EMBEDDINGS.values():
        return Slot(f"{_EMBEDDINGS.get(module, module)}.{leaf}")
    block = re.fullmatch(r"(?:blocks|encoder\.layer)\.(\d+)\.(.+)", key)
    if block is None:
        return None
    prefix, rest = f"encoder.layer.{block[1]}", block[2]
    scale = _LAYER_SCALE.fullmatch(rest)
    if scale:
        return Slot(f"{prefix}.layer_scale{scale[1]}.lambda1")
    module, _, leaf = rest.rpartition(".")
    if module not in _BLOCK or leaf not in ("weight", "bias"):
        return None
    ours, part = _BLOCK[module]
    return Slot(f"{prefix}.{ours}.{leaf}", part)
