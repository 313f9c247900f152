"""What stands beside the trunk in a checkpoint: adaptors, whose heads are stored by name or by the index of their
teacher, and normalizers.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..adaptors import ATTENTION_HEADS, Adaptor, AdaptorSpec, HeadSpec
from ..config import RadioConfig
from ..normalizers import FeatureNormalizer, IntermediateNormalizer
from .files import Weights, open_weights
from .keys import CheckpointError, Layout, Slot, find_layout, locate_in_trunk
from .teachers import (
    HEAD,
    asked_names,
    entry_of,
    index_of,
    is_index,
    resolve,
    stored_names,
    teachers_of,
    token_of,
)

if TYPE_CHECKING:
    from ..model import RadioModel

Shapes = Mapping[str, tuple[int, ...]]

_PARTS = {
    "_heads": "summary", "head_mlp": "summary", "_feature_projections": "feature", "feat_mlp": "feature",
}  # fmt: skip
_NORMALIZER = re.compile(
    r"(?:_?(?P<plain>feature_normalizer)|_?(?:inter(?:mediate)?_feature|intermediate)_normalizer)\."
    r"(?P<leaf>.+)"
)


@dataclass(frozen=True)
class Beside:
    """What a model has beside its trunk. intermediate: (blocks, whether each has its own rotation)."""

    adaptors: dict[str, AdaptorSpec] = field(default_factory=dict)
    features: bool = False
    intermediate: tuple[int, bool] | None = None

    def attach(self, model: "RadioModel") -> None:
        """Make the modules in a model, on its device, with memory only where that is not meta."""
        width = model.config.hidden_size
        with torch.device(model.device):
            for name, spec in self.adaptors.items():
                model.adaptors[name] = Adaptor(name, spec).to(model.dtype)
            if self.features:
                model.feature_normalizer = FeatureNormalizer(width)
            if self.intermediate:
                model.intermediate_normalizer = IntermediateNormalizer(
                    self.intermediate[0], width, self.intermediate[1]
                )

    def lost_in(self, form: str) -> list[str]:
        """What of it a form of checkpoint cannot hold, in words."""
        if form == "fused":
            return []
        attends = [
            f"the attention in adaptor {name}" for name, spec in self.adaptors.items() if spec.feature.blocks
        ]
        if form == "legacy":
            return attends
        return [
            *(["adaptors"] if self.adaptors else []),
            *(["a feature normalizer"] if self.features else []),
            *(["an intermediate feature normalizer"] if self.intermediate else []),
        ]


def beside(model: "RadioModel") -> Beside:
    """What a model has beside its trunk."""
    after = model.intermediate_normalizer
    adaptors: dict[str, Any] = dict(model.adaptors.items())
    return Beside(
        {name: adaptor.spec for name, adaptor in adaptors.items()},
        model.feature_normalizer is not None,
        None if after is None else (len(after.alphas), after.rotation.ndim == 3),
    )


def available_adaptors(
    source: str | os.PathLike, *, revision: str | None = None, local_files_only: bool = False
) -> list[str]:
    """Names that `from_pretrained(source, adaptor_names=...)` takes; no weight is read.

    FileNotFoundError or CheckpointError where `source` is no checkpoint.
    """
    weights = open_weights(source, revision=revision, local_files_only=local_files_only)
    layout = find_layout([*weights.shapes, *weights.outside])
    return list(dict.fromkeys(stored_names(weights, layout).values()))


def read_beside(
    weights: Weights,
    layout: Layout,
    config: RadioConfig,
    adaptor_names: str | Iterable[str] | None = None,
    block_eps: float | None = None,
) -> tuple[Beside, dict[str, Slot]]:
    """The adaptors asked for and the normalizers in the file, with their slots by key; no weight is read.

    CheckpointError for an adaptor that the file has not, or whose tensors show no head that is known.
    """
    heads = stored_names(weights, layout)
    names = dict.fromkeys([] if adaptor_names is None else asked_names(adaptor_names))
    chosen = dict.fromkeys(resolve(name, list(dict.fromkeys(heads.values())), weights) for name in names)
    slots: dict[str, Slot] = {}
    for key in weights.entries:
        if slot := slot_beside(key, layout, {s: name for s, name in heads.items() if name in chosen}):
            slots[key] = slot
    adaptors = {name: _spec(name, weights, slots, heads, config, block_eps) for name in chosen}
    shapes = {slot.name: weights.entries[key].shape for key, slot in slots.items()}
    rotation = shapes.get("intermediate_normalizer.rotation", ())
    depth = next(iter(shapes.get("intermediate_normalizer.alphas", ())), 0)
    after = any(name.startswith("intermediate_normalizer.") for name in shapes)
    if after and depth < config.num_hidden_layers:
        raise CheckpointError(
            f"{weights.path}: the intermediate feature normalizer is for {depth} blocks, the trunk has "
            f"{config.num_hidden_layers}"
        )
    features = any(name.startswith("feature_normalizer.") for name in shapes)
    return Beside(adaptors, features, (depth, len(rotation) == 3) if after else None), slots


def slot_beside(key: str, layout: Layout, stored: Mapping[str, str]) -> Slot | None:
    """The slot of a head's or normalizer's key; `stored` is the name of an adaptor by how the file spells it."""
    if not key.startswith(layout.beside):
        return None
    rest = key.removeprefix(layout.beside)
    if match := _NORMALIZER.fullmatch(rest):
        return Slot(f"{'feature' if match['plain'] else 'intermediate'}_normalizer.{match['leaf']}")
    match = HEAD.fullmatch(rest)
    name = stored.get(match["stored"] or match["name"]) if match else None
    if match is None or name is None:
        return None
    leaf, part = match["leaf"], match["group"] or match["part"]
    if leaf.startswith("blocks."):
        # the attention blocks of a head are named as those of a trunk; v2's own blocks are not
        found = locate_in_trunk(leaf)
        leaf = found.name if isinstance(found, Slot) else leaf
    return Slot(f"adaptors.{name}.{_PARTS.get(part, part)}.{leaf}")


def slot_in_model(key: str, layout: Layout, model: "RadioModel") -> Slot | None:
    """The same for what a model has, of a file of which only keys are known."""
    stored = {name: name for name in model.adaptors}
    stored |= {str(a.spec.index): name for name, a in model.adaptors.items() if a.spec.index is not None}
    slot = slot_beside(key, layout, stored)
    # a module that is None is one that the model does not have
    return slot if slot and getattr(model, slot.name.partition(".")[0]) is not None else None


def is_beside(key: str, model: "RadioModel") -> bool:
    """Whether a key may be of a head or normalizer that the model has, whatever its prefix."""
    parts = key.split(".")
    layouts = (Layout("", "", ".".join([*parts[:i], ""]) if i else "") for i in range(len(parts)))
    return any(slot_in_model(key, layout, model) for layout in layouts)


def written_beside(has: Beside, width: int) -> dict[str, Any]:
    """Entries of a config.json that tell of adaptors and normalizers, under the names of NVIDIA's class."""
    entries: dict[str, Any] = {}
    if has.adaptors:
        entries["adaptor_names"] = list(has.adaptors)
        entries["adaptor_configs"] = {name: _written_spec(spec) for name, spec in has.adaptors.items()}
    if has.features:
        entries["feature_normalizer_config"] = {"embed_dim": width}
    if has.intermediate:
        entries["inter_feature_normalizer_config"] = {
            "num_intermediates": has.intermediate[0], "embed_dim": width, "rot_per_layer": has.intermediate[1],
        }  # fmt: skip
    return entries


def _written_spec(spec: AdaptorSpec) -> dict[str, Any]:
    def sizes(head: HeadSpec) -> dict[str, Any]:
        return {
            "input_dim": head.width, "hidden_dim": head.hidden, "output_dim": head.output,
            "num_inner": head.inner,
        }  # fmt: skip

    return {
        "summary": sizes(spec.summary),
        "feature": {**sizes(spec.feature), "upsample_factor": spec.upsample, "upsample_rank": None},
        "head_idx": spec.token,
        "block_eps": spec.block_eps,
        "teacher": {
            key: value for key, value in spec.teacher.items() if isinstance(value, str | int | float)
        },
    }


def _spec(
    name: str,
    weights: Weights,
    slots: Mapping[str, Slot],
    heads: Mapping[str, str],
    config: RadioConfig,
    block_eps: float | None,
) -> AdaptorSpec:
    """An adaptor by the shapes of its tensors, its teacher's arguments and its entry in config.json."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {"summary": {}, "feature": {}}
    for key, slot in slots.items():
        if slot.name.startswith(f"adaptors.{name}."):
            part, _, leaf = slot.name.removeprefix(f"adaptors.{name}.").partition(".")
            shapes[part][leaf] = weights.entries[key].shape
    read = {part: _head(f"adaptor {name}, {part} head", found, config) for part, found in shapes.items()}
    if read["summary"].blocks:
        raise CheckpointError(
            f"adaptor {name}: its summary head has attention blocks, which only features have"
        )
    entry = entry_of(name, weights)
    index = next((int(s) for s, n in heads.items() if n == name and is_index(s, weights)), None)
    place = index_of(name, weights)
    teacher = teachers_of(weights)[place] if place is not None else entry.get("teacher") or {}
    upsample = (entry.get("feature") or {}).get("upsample_factor") or teacher.get("fd_upsample_factor") or 1
    if not isinstance(upsample, int) or upsample < 1 or read["feature"].output % upsample**2:
        raise CheckpointError(
            f"adaptor {name}: {read['feature'].output} outputs are no whole number for an upsampling of {upsample!r}"
        )
    token = token_of(name, teacher, place, entry, weights, config)
    eps = entry.get("block_eps", AdaptorSpec.block_eps) if block_eps is None else block_eps
    return AdaptorSpec(read["summary"], read["feature"], token, upsample, float(eps), index, dict(teacher))


def _head(where: str, shapes: Shapes, config: RadioConfig) -> HeadSpec:
    """The sizes of a head. Shapes that contradict each other are found when the tensors are put in place."""
    blocks = {leaf.split(".")[2] for leaf in shapes if leaf.startswith("encoder.layer.")}
    mlp = {
        leaf.removeprefix("mlp."): shape for leaf, shape in shapes.items() if not blocks or leaf[:4] == "mlp."
    }
    version = "v1" if "fc2.weight" in mlp else "v2"
    first, last = (
        mlp.get("fc1.weight", ()),
        mlp.get("fc2.weight" if version == "v1" else "final.2.weight", ()),
    )
    if len(first) != 2 or len(last) != 2:
        raise CheckpointError(
            f"{where}: it is none of the known MLPs (v1: fc1, norm, fc2; v2: fc1, final), after attention blocks or "
            f"not; it has {', '.join(list(shapes)[:8]) or 'no tensors'}"
        )
    if first[1] != config.hidden_size:
        raise CheckpointError(f"{where}: it takes width {first[1]}, the trunk has {config.hidden_size}")
    if blocks and first[1] % ATTENTION_HEADS:
        raise CheckpointError(f"{where}: width {first[1]} does not divide into {ATTENTION_HEADS} heads")
    inner = r"inner\.\d+\.weight" if version == "v1" else r"blocks\.\d+\.2\.weight"
    weights = [shape for leaf, shape in mlp.items() if re.fullmatch(inner, leaf) and len(shape) == 2]
    fc1 = next(
        (shape for leaf, shape in shapes.items() if re.fullmatch(r"encoder.*\.mlp\.fc1\.weight", leaf)), (0,)
    )
    return HeadSpec(
        version, first[1], first[0], last[0], len(weights), "pre_norm.0.weight" in mlp, len(blocks), fc1[0],
        any(leaf.endswith(".qkv.bias") for leaf in shapes), any(leaf.endswith(".lambda1") for leaf in shapes),
    )  # fmt: skip
