"""What a checkpoint is: its layout, its architecture, and what each of its keys means."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..config import RadioConfig
from .files import Weights
from .heads import Beside, read_beside
from .keys import STATISTICS, CheckpointError, Layout, Slot, find_layout
from .shapes import read_config

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# a buffer of statistics has a few values
_MOST_VALUES = 4096


@dataclass(frozen=True)
class Tower:
    """The RADIO tower of a checkpoint.

    dtype: what its parameters become unless the caller says otherwise. slots: our parameter, or part of one,
    by key. ignored: a reason by key. unknown: keys of the tower that nothing explains. adaptors, normalizers:
    what stands beside the trunk. beside: what of it is loaded.
    """

    layout: Layout
    config: RadioConfig
    dtype: torch.dtype
    slots: dict[str, Slot]
    ignored: dict[str, str]
    unknown: tuple[str, ...]
    adaptors: tuple[str, ...]
    normalizers: tuple[str, ...]
    beside: Beside


def describe(
    weights: Weights,
    *,
    adaptor_names: str | Iterable[str] | None = None,
    adaptor_block_eps: float | None = None,
    **overrides: Any,
) -> Tower:
    """Read layout and architecture; no parameter is read. `overrides` are fields of RadioConfig.

    num_hidden_layers=n means the first n blocks. CheckpointError where the file holds no RADIO tower,
    contradicts its config, or leaves open what only the caller can say; ValueError for an architecture that
    is not supported.
    """
    layout = find_layout([*weights.shapes, *weights.outside])
    located = {key: layout.locate(key) for key in weights.entries}
    slots = {key: slot for key, slot in located.items() if isinstance(slot, Slot)}
    ignored = {key: slot for key, slot in located.items() if isinstance(slot, str)}
    ignored |= dict.fromkeys(weights.outside, "outside the tower")
    _check_tensors(weights, slots)
    config = read_config(weights, slots, overrides)
    depth = config.num_hidden_layers
    ignored |= {
        key: f"of a block after the first {depth}"
        for key, slot in slots.items()
        if (slot.block or 0) >= depth
    }
    slots = {key: slot for key, slot in slots.items() if key not in ignored}
    adaptors = {key: _adaptor_name(weights, name) for key in located if (name := layout.adaptor(key))}
    ignored |= {key: f"part of adaptor {name}" for key, name in adaptors.items()}
    normalizers = dict.fromkeys(
        why.removeprefix("part of the ") for why in ignored.values() if why.endswith("normalizer")
    )
    beside, more = read_beside(weights, layout, config, adaptor_names, adaptor_block_eps)
    _check_tensors(weights, more)
    return Tower(
        layout,
        config,
        _dtype(weights, slots),
        slots | more,
        {key: why for key, why in ignored.items() if key not in more},
        tuple(key for key, slot in located.items() if slot is None),
        tuple(dict.fromkeys(adaptors.values())),
        tuple(normalizers),
        beside,
    )


def _adaptor_name(weights: Weights, name: str) -> str:
    """The name of an adaptor, whose heads are stored by name or by the index of their teacher."""
    teachers = weights.stated_args.get("teachers")
    if not name.isdecimal() or not isinstance(teachers, list | tuple) or int(name) >= len(teachers):
        return name
    teacher = teachers[int(name)]
    return str(teacher.get("name", name)) if isinstance(teacher, Mapping) else name


def _check_tensors(weights: Weights, slots: Mapping[str, Slot]) -> None:
    """CheckpointError for tensors of the tower that are empty, or of a dtype that parameters do not have."""
    wrong = []
    for key, slot in slots.items():
        entry = weights.entries[key]
        allowed = (torch.int64, torch.int32) if slot.name == "summary_idxs" else _FLOATS
        if entry.dtype not in allowed:
            wrong.append(f"{key} ({entry.dtype or 'a dtype that torch lacks'})")
        elif slot.name in STATISTICS and torch.Size(entry.shape).numel() > _MOST_VALUES:
            wrong.append(f"{key} ({entry.shape})")
        elif 0 in entry.shape and slot.name != "summary_idxs":
            wrong.append(f"{key} (empty, {entry.shape})")
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors of the tower cannot be used: {', '.join(wrong[:20])}. Parameters are "
            "float64, float32, float16 or bfloat16; quantised towers are not read"
        )


def _dtype(weights: Weights, slots: Mapping[str, Slot]) -> torch.dtype:
    """What args.dtype names, else what the file's patch projection has."""
    stated = weights.stated_args.get("dtype")
    if stated is None:
        projection = next(
            key for key, slot in slots.items() if slot.name == "embeddings.patch_projection.weight"
        )
        return weights.entries[projection].dtype or torch.float32
    dtype = getattr(torch, str(stated).rpartition(".")[2], None)
    if dtype not in _FLOATS:
        raise CheckpointError(
            f"args.dtype is {stated!r}: expected float32, float16 or bfloat16; pass dtype=…"
        )
    return dtype
