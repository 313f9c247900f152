"""Key layouts: where each tensor of a checkpoint belongs in our tree.

Every layout is the same tower under other names, so one table of names serves them all; what differs is the
prefix. A layout is recognised by the key of its patch projection, the anchor, and everything else is read
relative to it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """A parameter of ours, or `part` of the `parts` equal row blocks that it fuses."""

    name: str
    part: int | None = None

    @property
    def parts(self) -> int:
        """How many row blocks the parameter fuses; 1 where it fuses none."""
        return next((parts for module, parts in FUSED.items() if f".{module}." in self.name), 1)

    @property
    def block(self) -> int | None:
        """The index of the block that holds the parameter."""
        match = re.match(r"encoder\.layer\.(\d+)\.", self.name)
        return int(match[1]) if match else None


# row blocks of fused parameters: [q | k | v] and [gate | up]
FUSED = {"attention.qkv": 3, "mlp.gate_up_proj": 2}
STATISTICS = ("summary_idxs", "input_conditioner.norm_mean", "input_conditioner.norm_std")

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
_BLOCK_KEY = re.compile(r"(?:blocks|encoder\.layer)\.(0|[1-9]\d{0,3})\.(.+)")
_LAYER_SCALE = re.compile(r"(?:ls|layer_scale)([12])(?:\.(?:grandma|gamma|weight|lambda1))?")
# parameters that the reference creates and never reads
_UNUSED = ("reg_token", "mask_token")
_REFUSED = {
    "attn.q_norm": "timm's LayerNorm of each head; only RMSNorm over all heads (attention.*_norm) is known",
    "attn.k_norm": "timm's LayerNorm of each head; only RMSNorm over all heads (attention.*_norm) is known",
    "patch_generator.patch_normalizer": "a norm of the embedded patches, which no released version has",
}
# the spellings of attention, with the name of the layout each makes of the native tree; a file has one of
# them
_SPELLINGS = {
    "attention.attention.query.": "native (attention.query)",
    "attention.q_proj.": "native",
    "attention.qkv.": "fused",
    "attn.qkv.": "",
}
# what stands beside the trunk, and is no part of it
_ADAPTOR = re.compile(r"(?:adaptors|_heads|_feature_projections)\.([^.]+)\.")
_IN_ADAPTOR = re.compile(r"(?:^|\.)" + _ADAPTOR.pattern)
_NORMALIZER = re.compile(r"_?(feature|inter_feature|intermediate_feature|intermediate)_normalizer\.")
# the names at the top of a tower whose prefix is empty
_ROOTS = re.compile(
    r"(base_model|model|radio_model|embeddings|encoder|blocks|patch_generator|input_conditioner|summary_idxs|norm"
    r"|adaptors|reg_token|mask_token|_heads|_feature_projections|_?\w*feature_normalizer|intermediate_normalizer)(\.|$)"
)


# a message fits on a screen, whatever names and values a file has
_LONGEST = 4000


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message names the file's keys or facts and what is accepted."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= _LONGEST else f"{message[:_LONGEST]}…")


@dataclass(frozen=True)
class Layout:
    """How one file names the tower: `name`, the prefix of its trunk, and that of what stands beside the
    trunk.

    name: "torch.hub", "remote-code", "trunk" (the reference's names), "native", "native (attention.query)" or
    "fused".
    """

    name: str
    trunk: str
    beside: str

    @property
    def is_reference(self) -> bool:
        """Whether the names are those of the public reference."""
        return self.name in ("torch.hub", "remote-code", "trunk")

    def owns(self, key: str) -> bool:
        """Whether a key is the tower's, or stands beside its trunk."""
        return key.startswith(self.beside) and (bool(self.beside) or _ROOTS.match(key) is not None)

    def locate(self, key: str) -> Slot | str | None:
        """The slot of a key; a reason, where it is known and not needed; None, where it is not known."""
        if not key.startswith(self.beside):
            return "outside the tower"
        rest = key.removeprefix(self.beside)
        if rest in STATISTICS:
            return Slot(rest)
        if adaptor := _ADAPTOR.match(rest):
            return f"part of adaptor {adaptor[1]}"
        if normalizer := _NORMALIZER.match(rest):
            kind = "feature" if normalizer[1] == "feature" else "intermediate feature"
            return f"part of the {kind} normalizer"
        outer = self.trunk.removesuffix("inner.")
        if key.startswith(outer) and key.removeprefix(outer) in STATISTICS:
            # the native trunk's own are the tower's; the reference never applies those of its trunk
            return "unused by the reference" if self.is_reference else Slot(key.removeprefix(outer))
        return locate_in_trunk(key.removeprefix(self.trunk)) if key.startswith(self.trunk) else None

    def adaptor(self, key: str) -> str | None:
        """The adaptor, by name or by index, that a key belongs to."""
        match = _ADAPTOR.match(key.removeprefix(self.beside)) if key.startswith(self.beside) else None
        return match[1] if match else None


def make_layout(trunk: str, spelling: str) -> Layout:
    """The layout whose trunk has this prefix; `spelling` is how its keys write attention."""
    outer = trunk.removesuffix("inner.")
    tail = next((t for t in ("base_model.", "hf_model.", "model.") if f".{outer}".endswith(f".{t}")), "")
    beside = outer.removesuffix(tail)
    if named := _SPELLINGS.get(spelling):
        return Layout(named, trunk, beside)
    if tail == "base_model.":
        return Layout("torch.hub", trunk, beside)
    return Layout("remote-code" if f".{outer}".endswith(".radio_model.model.") else "trunk", trunk, beside)


_ANCHORS = (
    ("patch_generator.embedder.weight", "attn.qkv."),
    ("embeddings.patch_projection.weight", "attention.qkv."),
)


def find_layout(keys: Iterable[str]) -> Layout:
    """The layout of a file by its keys; CheckpointError where it holds no RADIO tower, or names one in two
    ways.
    """
    keys = list(keys)
    refuse_other_families(keys)
    found = []
    for anchor, spelling in _ANCHORS:
        for key in keys:
            if key == anchor or key.endswith(f".{anchor}"):
                found.append((key.removesuffix(anchor), spelling))
    if len(found) > 1:
        raise CheckpointError(
            f"the file holds {len(found)} towers, under {[trunk for trunk, _ in found][:4]}: keep one"
        )
    if not found:
        raise CheckpointError(
            "no RADIO tower found: expected a key that ends in patch_generator.embedder.weight or "
            f"embeddings.patch_projection.weight, got {len(keys)} keys such as {keys[:4]}"
        )
    trunk, spelling = found[0]
    spellings = {s: None for key in keys if key.startswith(trunk) for s in [spelling_of(key)] if s}
    check_spellings(spellings)
    return make_layout(trunk, next(iter(spellings), spelling) if spelling != "attn.qkv." else spelling)


def spelling_of(key: str) -> str | None:
    """How a key writes attention, where it shows that."""
    return next((s for s in _SPELLINGS if f".{s}" in key), None)


def check_spellings(spellings: Iterable[str]) -> None:
    """CheckpointError where one file has several spellings of attention."""
    found = list(spellings)
    if len(found) > 1:
        raise CheckpointError(f"the file mixes spellings of attention, {found[0]}* and {found[1]}*: keep one")


_FAMILIES = (
    (
        r"(^|\.)(patch_embed\.conv_down|high_res_neck)\.",
        "E-RADIO, a hybrid of convolutions and windowed attention, not a ViT",
    ),
    (
        r"(^|\.)(downscale_blocks\.\d+\.reduction\.|decoder\.filler_tokens$)",
        "RADIO1D, an encoder and decoder that merges and splits patches",
    ),
    (r"(^|\.)(vit_to_conv|conv_to_vit)_fusion\.", "a hybrid, which joins a ViT and a ConvNeXt"),
    (r"(^|\.)blocks\.0\.norm1\.alpha$", "a ViT with DyT in place of LayerNorm"),
)


def refuse_other_families(keys: Iterable[str]) -> None:
    """CheckpointError that names the family, for relatives of RADIO that are another network."""
    keys = list(keys)
    for pattern, family in _FAMILIES:
        hit = next((key for key in keys if re.search(pattern, key)), None)
        if hit:
            raise CheckpointError(f"the file holds {family}; it is not supported (recognised by {hit})")
    tails = {
        match[1]
        for key in keys
        if (match := re.search(r"(?:^|\.)(patch_generator|patch_embed\.proj|pos_embed)\b", key))
    }
    tower = "patch_generator" in tails or any("embeddings.patch_projection." in key for key in keys)
    if tower or "patch_embed.proj" not in tails:
        return
    if "pos_embed" in tails:
        raise CheckpointError(
            "the file holds a plain timm ViT (patch_embed.proj, pos_embed) without RADIO's patch generator: "
            "load it with timm"
        )
    raise CheckpointError(
        "the file holds a NaViT student, which rotates queries and keys (RoPE) instead of adding a position table; "
        "it is not supported (recognised by patch_embed.proj without pos_embed)"
    )


_WRAPPERS = re.compile(r"(?<![^.])(?:module|_orig_mod)\.")


def clean(key: str) -> str:
    """A key without the `module.` and `_orig_mod.` that DataParallel and torch.compile put anywhere in it."""
    return _WRAPPERS.sub("", key)


_START = re.compile(r"(?:^|\.)((?:blocks|encoder\.layer)\.\d+\.|patch_generator\.|embeddings\.)")


def guess_trunk(key: str) -> str | None:
    """The prefix of the trunk that this one key would have; None, where it shows none."""
    # the attention blocks of a head are named as a trunk's
    match = None if _IN_ADAPTOR.search(key) else _START.search(key)
    return key[: match.start(1)] if match else None


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
        return Slot(f"{_EMBEDDINGS.get(module, module)}.{leaf}") if leaf in ("weight", "bias") else None
    block = _BLOCK_KEY.fullmatch(key)
    if block is None:
        return None
    prefix, rest = f"encoder.layer.{int(block[1])}", block[2]
    scale = _LAYER_SCALE.fullmatch(rest)
    if scale:
        return Slot(f"{prefix}.layer_scale{scale[1]}.lambda1")
    module, _, leaf = rest.rpartition(".")
    if module not in _BLOCK or leaf not in ("weight", "bias"):
        return None
    ours, part = _BLOCK[module]
    return Slot(f"{prefix}.{ours}.{leaf}", part)
