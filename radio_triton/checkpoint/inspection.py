"""What a checkpoint is, from its names, shapes and metadata alone: no parameter is read."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..config import RadioConfig
from ..model import RadioModel
from ..presets import PRESETS, Preset
from .architecture import Tower, describe
from .card import Licence, fetch_licence, find_licence
from .files import Weights, open_weights
from .fill import Filler
from .keys import STATISTICS, CheckpointError, Layout, Slot, find_layout
from .load import build, check

# what new models start from, or what no released file differs in
_NOT_COMPARED = {"layerscale_value", "mlp_norm_eps", "hidden_act"}
_PARTS = {
    "embeddings.position_embedding": "position table",
    "embeddings.cls_register_token": "prefix tokens",
    "embeddings.video_patch_projection": "video patch projection",
    "embeddings.": "patch projection",
    "encoder.layer.": "blocks",
    "encoder.norm": "final norm",
    "feature_normalizer.": "feature normalizer",
    "intermediate_normalizer.": "intermediate feature normalizer",
}
_ORDER = (
    "patch projection",
    "video patch projection",
    "position table",
    "prefix tokens",
    "blocks",
    "final norm",
)
_FEATURES = {
    "layer_scale": "LayerScale",
    "qk_normalization": "QK-norm",
    "mlp_norm": "LayerNorm in the MLP",
    "final_norm": "final norm",
    "patch_bias": "bias in the patch projection",
}


@dataclass(frozen=True)
class Likeness:
    """How a checkpoint compares with released versions.

    stated: the version that its config.json names. matches: those of which no known field differs, by name,
    with the fields that nothing public states. nearest, differs: where none matches, the version with the
    fewest different fields, as {field: [here, there]}.
    """

    stated: str | None = None
    matches: dict[str, list[str]] = field(default_factory=dict)
    nearest: str | None = None
    differs: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Inspection:
    """What `inspect_checkpoint` found. refused: why `from_pretrained` would not load it, or None."""

    source: str
    files: list[str]
    bytes: int
    refused: str | None
    layout: str | None
    config: dict[str, Any] | None
    summary_width: int | None
    adaptors: list[str]
    normalizers: list[str]
    # of all tensors in the files that were opened, by part; of the tower's own, by stored dtype
    parameters: dict[str, int]
    dtypes: dict[str, int]
    loads_as: str | None
    licence: dict[str, str] | None
    likeness: Likeness
    ignored: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The same for a reader."""
        return [self.source, *(f"  {name:<13}{text}" for name, text in self._facts())]

    def _facts(self) -> Iterator[tuple[str, str]]:
        yield "layout", f"{self.layout or 'not known'}, {', '.join(self.files)} ({self.bytes / 1e6:,.1f} MB)"
        if self.config is not None:
            yield from _architecture(RadioConfig(**self.config))
        yield "adaptors", ", ".join(self.adaptors) or "none in the file"
        yield "normalizers", ", ".join(self.normalizers) or "none in the file"
        total = sum(self.parameters.values())
        yield "parameters", f"{total:,}: " + ", ".join(f"{n:,} {part}" for part, n in self.parameters.items())
        stored = ", ".join(self.dtypes) or "not known"
        yield "dtype", f"{stored}, loads as {self.loads_as}" if self.loads_as else stored
        if self.licence is None:
            yield "licence", "not stated"
        else:
            yield "licence", f"{self.licence['text']} (from {self.licence['where']})"
        yield from _likeness(self.likeness)
        if self.ignored:
            yield "ignored", ", ".join(f"{n} {why}" for why, n in self.ignored.items())
        yield "refused", self.refused or "no: from_pretrained loads it"


def inspect_checkpoint(
    source: str | os.PathLike, *, revision: str | None = None, local_files_only: bool = False
) -> Inspection:
    """Look at a folder, a file or a hub id. FileNotFoundError or CheckpointError where it cannot be read at
    all.
    """
    weights = open_weights(source, revision=revision, local_files_only=local_files_only)
    fetch_licence(source, revision=revision, local_files_only=local_files_only)
    tower, refused = None, None
    try:
        tower = describe(weights)
        check(Filler(build(RadioModel, weights, tower, None, None)), weights, tower)
    except (ValueError, TypeError) as error:
        refused = str(error)
    folder = weights.path.parent
    licence = find_licence(weights.path, weights.metadata)
    config = tower.config if tower else None
    layout = _layout(weights)
    located = _located(weights, layout, tower)
    return Inspection(
        source=os.fspath(source),
        files=[path.relative_to(folder).as_posix() for path in weights.paths],
        bytes=sum(path.stat().st_size for path in weights.paths),
        refused=refused,
        layout=layout.name if layout else None,
        config=config.to_dict() if config else None,
        summary_width=config.summary_size * config.hidden_size if config else None,
        adaptors=list(tower.adaptors) if tower else [],
        normalizers=list(tower.normalizers) if tower else [],
        parameters=_parameters(weights, located),
        dtypes=_dtypes(weights, located),
        loads_as=str(tower.dtype).removeprefix("torch.") if tower else None,
        licence=_licence_facts(licence),
        likeness=compare(config, weights.config) if config else Likeness(),
        ignored=dict(Counter(tower.ignored.values())) if tower else {},
    )


def _layout(weights: Weights) -> Layout | None:
    try:
        return find_layout([*weights.shapes, *weights.outside])
    except ValueError:
        return None


def _located(weights: Weights, layout: Layout | None, tower: Tower | None) -> dict[str, Slot | str | None]:
    """By key: its slot, the reason why it is ignored, or None for one that nothing explains."""
    if tower is not None:
        return {key: tower.slots.get(key) or tower.ignored.get(key) for key in weights.shapes}
    found: dict[str, Slot | str | None] = dict.fromkeys(weights.shapes)
    if layout is None:
        return found
    for key in found:
        # a key that is refused by name is not recognised either
        with suppress(CheckpointError):
            found[key] = layout.locate(key)
    return found


def _parameters(weights: Weights, located: Mapping[str, Slot | str | None]) -> dict[str, int]:
    counts = Counter(dict.fromkeys(_ORDER, 0))
    for key, slot in located.items():
        if isinstance(slot, Slot) and slot.name in STATISTICS:
            continue
        if isinstance(slot, Slot):
            part = next((part for prefix, part in _PARTS.items() if slot.name.startswith(prefix)), "other")
        else:
            part = slot.removeprefix("part of ").removeprefix("the ") if slot else "not recognised"
        size = 1
        for side in weights.shapes[key]:
            size *= side
        counts[part] += size
    return {part: count for part, count in counts.items() if count}


def _dtypes(weights: Weights, located: Mapping[str, Slot | str | None]) -> dict[str, int]:
    tower = [key for key, slot in located.items() if isinstance(slot, Slot) and slot.name not in STATISTICS]
    counts = Counter(
        str(weights.dtypes[key] or "unknown").removeprefix("torch.") for key in tower or weights.shapes
    )
    return dict(counts.most_common())


def _licence_facts(licence: Licence | None) -> dict[str, str] | None:
    return None if licence is None else {**licence.fields(), "where": licence.where, "text": str(licence)}


def compare(config: RadioConfig, source: Mapping[str, Any] | None = None) -> Likeness:
    """Which released versions have this architecture; `source` is the config.json, which may name one."""
    stated = (source or {}).get("version")
    found = {preset.name: differences(config, preset) for preset in PRESETS}
    unknown = {preset.name: list(preset.unknown) for preset in PRESETS}
    # the version of which most is known comes first
    matches = sorted((name for name in found if not found[name]), key=lambda name: len(unknown[name]))
    likeness = Likeness(str(stated) if stated else None, {name: unknown[name] for name in matches})
    if matches:
        return likeness
    nearest = min(found, key=lambda name: len(found[name]) + len(unknown[name]))
    return replace(likeness, nearest=nearest, differs=found[nearest])


def differences(config: RadioConfig, preset: Preset) -> dict[str, list[Any]]:
    """{field: [of the config, of the preset]} of the known fields that differ."""
    # image models say nothing of tubelets
    known = {"video_temporal_patch_size": 1, **preset.fields}
    return {
        name: [getattr(config, name), value]
        for name, value in known.items()
        if name not in _NOT_COMPARED and getattr(config, name) != value
    }


def _architecture(config: RadioConfig) -> Iterator[tuple[str, str]]:
    mlp = "SwiGLU" if config.use_swiglu_ffn else "GELU"
    has = [text for name, text in _FEATURES.items() if getattr(config, name)]
    yield (
        "architecture",
        f"{config.num_hidden_layers} blocks of width {config.hidden_size}, {config.num_attention_heads} "
        f"heads of {config.head_dim}, MLP {config.intermediate_size} ({mlp}), patch {config.patch_size}"
        + "".join(f", {text}" for text in has),
    )
    yield "tokens", f"{config.num_cls_tokens} class, {config.num_registers} register"
    chosen = range(config.num_cls_tokens) if config.summary_idxs is None else config.summary_idxs
    names = ", ".join(map(str, chosen)) or "none"
    yield "summary", f"class tokens {names}: {config.summary_size * config.hidden_size} values"
    rows, columns = config.position_grid
    height, width = config.max_resolution
    how = "resized" if config.cpe else "cropped"
    yield "positions", f"{rows} x {columns} table, for {height} x {width} pixels, {how} for other sizes"
    if config.video_projection:
        yield "video", f"tubelets of {config.video_temporal_patch_size} frames"


def _likeness(likeness: Likeness) -> Iterator[tuple[str, str]]:
    if likeness.stated:
        yield "says it is", f"{likeness.stated} (config.json)"
    for name, unknown in likeness.matches.items():
        rest = f"; nothing public states its {', '.join(unknown)}" if unknown else ""
        yield "looks like", f"{name}: every known field agrees{rest}"
    if likeness.nearest:
        text = ", ".join(
            f"{name} {here} instead of {there}" for name, (here, there) in likeness.differs.items()
        )
        yield "looks like", f"no released version; nearest is {likeness.nearest}, but {text}"
