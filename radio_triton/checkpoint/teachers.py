"""Adaptors by name: which a checkpoint holds, what it says of their teachers, and which of them a caller means."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ..config import RadioConfig
from .files import Weights
from .keys import CheckpointError, Layout

# names that users know, or NVIDIA's README has, for a file's own; both without case and separators
ALIASES = {"dinov3": "dinov37b", "siglip2": "siglip2g"}
# a key of a head, after the prefix of what stands beside the trunk
HEAD = re.compile(
    r"(?:(?P<group>_heads|_feature_projections)\.(?P<stored>[^.]+)"
    r"|adaptors\.(?P<name>[^.]+)\.(?P<part>head_mlp|feat_mlp|summary|feature))\.(?P<leaf>.+)"
)
_ELSEWHERE = (
    "NVIDIA publishes the heads in the .pth.tar that torch.hub.load('NVlabs/RADIO', 'radio_model', version=...) "
    "downloads (from huggingface.co/nvidia, into ~/.cache/torch/hub/checkpoints); the model.safetensors there hold the "
    "trunk alone. Pass the path of that .pth.tar"
)


def stored_names(weights: Weights, layout: Layout) -> dict[str, str]:
    """The name of an adaptor by how the file spells it: by name, or by the first index of a teacher of that name."""
    found: dict[str, str] = {}
    for key in (*weights.entries, *weights.outside):
        match = HEAD.fullmatch(key.removeprefix(layout.beside)) if key.startswith(layout.beside) else None
        if match and (stored := match["stored"] or match["name"]) not in found:
            teacher = teachers_of(weights)[int(stored)] if is_index(stored, weights) else {}
            name = str(teacher.get("name", stored))
            # the reference looks for the first teacher of a name; heads of a later one are never used
            if not teacher or int(stored) == index_of(name, weights):
                found[stored] = name
    return found


def teachers_of(weights: Weights) -> list[Mapping[str, Any]]:
    """What the training script was told of each teacher."""
    teachers = weights.stated_args.get("teachers")
    teachers = teachers if isinstance(teachers, list | tuple) else []
    return [teacher if isinstance(teacher, Mapping) else {} for teacher in teachers]


def is_index(stored: str, weights: Weights) -> bool:
    """Whether heads are stored by the index of a teacher."""
    return stored.isdecimal() and int(stored) < len(teachers_of(weights))


def index_of(name: str, weights: Weights) -> int | None:
    """The first teacher of a name."""
    return next((i for i, teacher in enumerate(teachers_of(weights)) if teacher.get("name") == name), None)


def asked_names(names: Any) -> list[str]:
    """One name or several as a list; TypeError for anything else."""
    found = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else [names]
    if not all(isinstance(name, str) for name in found):
        raise TypeError(f"adaptor_names is a name or a list of names, got {names!r}")
    return found


def resolve(asked: str, present: list[str], weights: Weights) -> str:
    """The file's name of an adaptor, whatever the case and separators, and known aliases; never one of two."""

    def plain(name: str) -> str:
        return re.sub(r"[-_. ]", "", name).lower()

    same = [name for name in present if plain(name) == plain(asked)]
    alias = [name for name in present if plain(name) == ALIASES.get(plain(asked))]
    found = [asked] if asked in present else same or alias
    if len(found) == 1:
        if "." in found[0] or hasattr(nn.ModuleDict, found[0]):
            raise CheckpointError(f"{weights.path}: an adaptor cannot be called {found[0]!r}")
        return found[0]
    if found:
        raise CheckpointError(f"adaptor {asked!r} could be {' or '.join(found)}: pass one of these names")
    teachers = [str(teacher.get("name", "")) for teacher in teachers_of(weights)]
    named = [name for name in teachers if plain(name) in (plain(asked), ALIASES.get(plain(asked)))]
    holds = f"its adaptors are {', '.join(present)}" if present else "it holds none"
    if named:
        raise CheckpointError(
            f"{weights.path} has no weights of adaptor {asked!r}, though {named[0]} taught this model; {holds}. "
            f"{_ELSEWHERE}"
        )
    hint = "" if present else f". {_ELSEWHERE}"
    raise CheckpointError(f"{weights.path} has no adaptor {asked!r}: {holds}{hint}")


def entry_of(name: str, weights: Weights) -> Mapping[str, Any]:
    """What config.json says of an adaptor."""
    entries = (weights.config or {}).get("adaptor_configs")
    entry = entries.get(name) if isinstance(entries, Mapping) else None
    return entry if isinstance(entry, Mapping) else {}


def token_of(
    name: str,
    teacher: Mapping[str, Any],
    index: int | None,
    entry: Mapping[str, Any],
    weights: Weights,
    config: RadioConfig,
) -> int:
    """Where the summary head reads: a teacher's own slot, which may be a register, or its place among teachers."""
    slot = entry.get("head_idx", teacher.get("token_slot"))
    if slot is None:
        per_teacher = bool(weights.stated_args.get("cls_token_per_teacher")) and config.num_cls_tokens > 1
        slot = index if per_teacher and index is not None else 0
    if isinstance(slot, bool) or not isinstance(slot, int) or not 0 <= slot < config.num_prefix_tokens:
        raise CheckpointError(
            f"adaptor {name} reads token {slot!r}, but the model has {config.num_prefix_tokens} class and register "
            "tokens"
        )
    return slot
