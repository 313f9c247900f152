"""Load a checkpoint: architecture from config and keys, parameters one tensor at a time, a report, strict keys."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config import RadioConfig
from .files import Weights, open_weights
from .keys import FUSED, CheckpointError, Layout, Slot, find_layout

if TYPE_CHECKING:
    from ..model import RadioModel

# what a file may lack: the config knows it
_DEFAULTS = ("summary_idxs", "input_conditioner.norm_mean", "input_conditioner.norm_std")
SHOWN = 20


@dataclass(frozen=True)
class LoadReport:
    """What a load did: the layout, our parameters that were set or kept from the config, and keys left aside with a reason."""

    source: str
    layout: str
    loaded: tuple[str, ...]
    defaulted: tuple[str, ...]
    ignored: dict[str, str]

    def __str__(self) -> str:
        return (
            f"{self.source}: {self.layout} layout, {len(self.loaded)} parameters loaded, {len(self.defaulted)} from the "
            f"config ({', '.join(self.defaulted) or 'none'}), {len(self.ignored)} keys ignored"
        )


@dataclass
class Problems:
    """What does not fit, gathered so that one error shows all of it."""

    unknown: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def raise_if_any(self, source: str) -> None:
        """CheckpointError that lists up to twenty keys of each kind."""
        kinds = (("unknown", self.unknown), ("wrongly shaped", self.wrong), ("missing", self.missing))
        texts = []
        for kind, keys in kinds:
            if keys:
                more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
                texts.append(f"{len(keys)} {kind}: {', '.join(keys[:SHOWN])}{more}")
        if texts:
            raise CheckpointError(f"{source} does not fit the model; " + "; ".join(texts))


def load_model(
    cls: type["RadioModel"],
    source: str | os.PathLike,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    trainable: bool = False,
    residual_dtype: torch.dtype | None = None,
    **overrides: Any,
) -> "RadioModel":
    """Read a checkpoint: a folder with model.safetensors and config.json, or the file beside its config.json.

    dtype: of the parameters; None keeps the config's `args.dtype`, else the file's own. device: None is the CPU.
    trainable: leave the parameters trainable. overrides: any RadioConfig field. The model comes in eval mode.
    Raises CheckpointError (a ValueError) for what does not fit, FileNotFoundError, ValueError for an unknown override.
    """
    weights = open_weights(source)
    layout = find_layout(weights.shapes)
    if weights.config is None:
        raise CheckpointError(f"{weights.path.parent / 'config.json'} does not exist: it is needed beside the weights")
    config = RadioConfig.from_hf(weights.config)
    keys = {slot.name: key for key, slot in _slots(layout, weights.shapes)}
    config = fit_config(config, {name: weights.shapes[key] for name, key in keys.items()})
    config = config.replace(**{**_stored_facts(weights, keys), **overrides})
    dtype = dtype or _file_dtype(weights, keys["embeddings.patch_projection.weight"])
    model = cls(config, dtype=dtype, device="meta", residual_dtype=residual_dtype)
    model.to_empty(device=device or "cpu")
    model.load_report = fill(model, weights, layout, str(weights.path))
    return model.requires_grad_(trainable).eval()


def load_weights(model: "RadioModel", pairs: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Stream (name, tensor) pairs into a model; CheckpointError for keys that are unknown, missing or wrongly shaped."""
    pairs = list(pairs)
    layout = find_layout(key for key, _ in pairs)
    model.load_report = fill(model, pairs, layout, "the weights given")
    return set(model.load_report.loaded)


def fit_config(config: RadioConfig, shapes: dict[str, tuple[int, ...]]) -> RadioConfig:
    """The config as the file's keys and shapes have it: they decide what they can show."""
    depth = 1 + max((int(name.split(".")[2]) for name in shapes if name.startswith("encoder.layer.")), default=-1)
    first = "encoder.layer.0."
    gated = f"{first}mlp.gate_up_proj.weight" in shapes
    facts: dict[str, Any] = {
        "num_hidden_layers": depth,
        "layer_scale": f"{first}layer_scale1.lambda1" in shapes,
        "mlp_norm": f"{first}mlp.norm.weight" in shapes,
        "qk_normalization": f"{first}attention.q_norm.weight" in shapes,
        "qkv_bias": f"{first}attention.qkv.bias" in shapes,
        "final_norm": "encoder.norm.weight" in shapes,
        "patch_bias": "embeddings.patch_projection.bias" in shapes,
        "use_swiglu_ffn": gated,
        "video_projection": "embeddings.video_patch_projection.weight" in shapes,
    }
    inner = shapes.get(f"{first}mlp.{'down_proj' if gated else 'fc2'}.weight")
    if inner is not None:
        facts["intermediate_size"] = inner[1]
    table = shapes.get("embeddings.position_embedding")
    if table is not None:
        facts["position_grid"] = _table_sides(config, table[1])
    return config.replace(**facts)


def _table_sides(config: RadioConfig, positions: int) -> tuple[int, int]:
    """The sides of a flat table: the config's where they fit, else the square root, else an error."""
    rows, columns = config.position_grid
    side = round(positions**0.5)
    if rows * columns == positions:
        return rows, columns
    if side * side != positions:
        raise CheckpointError(
            f"the position table has {positions} rows, neither the {rows} x {columns} of the config nor a square: "
            "pass position_grid=(rows, columns)"
        )
    return side, side


def _stored_facts(weights: Weights, keys: dict[str, str]) -> dict[str, Any]:
    """Fields of the config that the file holds as buffers: they win over its config.json."""
    fields = {"summary_idxs": "summary_idxs"} | {
        f"norm_{kind}": f"input_conditioner.norm_{kind}" for kind in ("mean", "std")
    }
    found = {name: weights.read(keys[key]) for name, key in fields.items() if key in keys}
    return {name: tuple(values.flatten().tolist()) for name, values in found.items()}


def _slots(layout: Layout, keys: Iterable[str]) -> list[tuple[str, Slot]]:
    found = ((key, layout.locate(key)) for key in keys)
    return [(key, slot) for key, slot in found if isinstance(slot, Slot)]


def _file_dtype(weights: Weights, projection: str) -> torch.dtype:
    """What `args.dtype` names, else what the file's patch projection has."""
    named = ((weights.config or {}).get("args") or {}).get("dtype")
    return getattr(torch, str(named).rsplit(".", 1)[-1]) if named else weights.dtypes[projection]


def fill(model: nn.Module, pairs: Iterable[tuple[str, Tensor]], layout: Layout, source: str) -> LoadReport:
    """Copy each tensor into its parameter; every parameter must be set, once."""
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    width = model.config.hidden_size
    expected = {(name, part) for name in targets for part in range(_fused_parts(name))}
    problems, ignored, seen = Problems(), {}, set()
    for key, tensor in pairs:
        slot = layout.locate(key)
        if isinstance(slot, str):
            ignored[key] = slot
            continue
        if slot is None or slot.name not in targets:
            # Transformers keeps a LayerScale of ones in every model
            if slot is not None and slot.name.endswith(".lambda1") and bool((tensor == 1).all()):
                ignored[key] = "a LayerScale of ones is the identity"
            else:
                problems.unknown.append(key)
            continue
        parts = range(_fused_parts(slot.name)) if slot.part is None else (slot.part,)
        seen |= {(slot.name, part) for part in parts}
        shape = place(targets[slot.name], tensor, slot, width)
        if shape is not None:
            problems.wrong.append(f"{key} {tuple(tensor.shape)} where {shape} is needed")
    absent = {name for name, _ in expected - seen}
    problems.missing = sorted(absent - set(_DEFAULTS))
    problems.raise_if_any(source)
    defaulted = tuple(name for name in _DEFAULTS if name in absent)
    _set_defaults(model, defaulted)
    return LoadReport(source, layout.name, tuple(sorted({name for name, _ in seen})), defaulted, ignored)


def _fused_parts(name: str) -> int:
    return next((parts for module, parts in FUSED.items() if f".{module}." in name), 1)


@torch.no_grad()
def place(target: Tensor, tensor: Tensor, slot: Slot, width: int) -> tuple[int, ...] | None:
    """Copy a tensor into its slot, with zeros for dummy heads; where the shape is wrong, return the one needed."""
    parts = _fused_parts(slot.name)
    rows = target.unflatten(0, (parts, -1))
    chosen = rows if slot.part is None else rows[slot.part : slot.part + 1]
    given = tensor.unflatten(0, (len(chosen), -1)) if tensor.ndim and tensor.shape[0] % len(chosen) == 0 else None
    padded = list(chosen.shape)
    if ".attention." in slot.name:
        # a checkpoint without dummy heads has the bare width where the model has more
        axis = 2 if slot.name.endswith("proj.weight") else 1
        if given is not None and given.shape[axis:] and given.shape[axis] == width:
            padded[axis] = min(width, padded[axis])
    if given is None or list(given.shape) != padded:
        return tuple(chosen.flatten(0, 1).shape)
    if padded != list(chosen.shape):
        chosen.zero_()
    chosen[tuple(slice(size) for size in padded)].copy_(given)
    return None


def _set_defaults(model: nn.Module, names: Iterable[str]) -> None:
    config = model.config
    values = {
        "summary_idxs": torch.tensor(model.summary_positions, dtype=torch.int64),
        "input_conditioner.norm_mean": torch.tensor(config.norm_mean).view(-1, 1, 1),
        "input_conditioner.norm_std": torch.tensor(config.norm_std).view(-1, 1, 1),
    }
    for name in names:
        model.get_buffer(name).copy_(values[name])
