"""Load a checkpoint into a new model: architecture, then every name and shape, then one tensor at a time."""

import os
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..nvidia_api import read_preferred
from .architecture import Tower, describe
from .files import Weights, open_weights
from .fill import Filler, LoadReport, shorten
from .keys import STATISTICS, CheckpointError

if TYPE_CHECKING:
    from ..model import RadioModel

FOLDED_HINT = "; where LayerScale is folded into proj and fc2 of the file, pass layer_scale_folded=True"


def load_model(
    cls: type["RadioModel"],
    source: str | os.PathLike,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    trainable: bool = False,
    residual_dtype: torch.dtype | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    strict_finite: bool = False,
    fold_layer_scale: bool = False,
    adaptor_names: str | Iterable[str] | None = None,
    adaptor_block_eps: float | None = None,
    **overrides: Any,
) -> "RadioModel":
    """Read a checkpoint in any layout: a folder, a file (.safetensors, .pth.tar, .pt), or a Hugging Face id.

    dtype: of the parameters; None keeps `args.dtype`, else the file's own. device: None is the CPU.
    trainable: leave the parameters trainable. revision, local_files_only: of a Hugging Face id.
    strict_finite: raise for NaN and infinite weights, which are otherwise warned about.
    fold_layer_scale: multiply LayerScale into the weights before it, once, instead of at each forward pass.
    adaptor_names: those to load, see `heads.available_adaptors`; in any case, known aliases too. Normalizers are
    loaded wherever the file has them. adaptor_block_eps: see `AdaptorSpec.block_eps`; None is 1e-6.
    overrides: any RadioConfig field; num_hidden_layers=n loads the first n blocks. The model comes in eval
    mode. Raises CheckpointError (a ValueError) for what does not fit, FileNotFoundError, ValueError for an
    unknown override.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating point dtype such as torch.bfloat16, got {dtype!r}")
    weights = open_weights(source, revision=revision, local_files_only=local_files_only)
    tower = describe(weights, adaptor_names=adaptor_names, adaptor_block_eps=adaptor_block_eps, **overrides)
    model = build(cls, weights, tower, dtype, residual_dtype)
    kept = model.dtype
    if fold_layer_scale:
        # from exact weights, rounded once
        model.to(torch.promote_types(kept, torch.float32))
    filler = Filler(model, device)
    absent = check(filler, weights, tower)
    fill(filler, weights, tower)
    if fold_layer_scale:
        from .convert import fold

        fold(model)
        model.to(kept)
    report_not_finite(filler, str(weights.path), strict_finite)
    model.load_report = LoadReport(
        str(weights.path), tower.layout.name, filler.loaded(), absent, tower.ignored
    )
    return model.requires_grad_(trainable).eval()


def build(
    cls: type["RadioModel"],
    weights: Weights,
    tower: Tower,
    dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
) -> "RadioModel":
    """The model without memory, on the meta device."""
    try:
        model = cls(tower.config, dtype=dtype or tower.dtype, device="meta", residual_dtype=residual_dtype)
        tower.beside.attach(model)
        model.preferred_resolution = read_preferred(weights.config)
        return model
    except (RuntimeError, OverflowError) as error:
        # sizes whose product does not fit 64 bits
        raise CheckpointError(f"{weights.path} describes a model that cannot be built: {error}") from error


def check(filler: Filler, weights: Weights, tower: Tower) -> tuple[str, ...]:
    """Names of statistics that the file lacks; CheckpointError that lists all keys that are unknown, missing
    or do not fit.
    """
    for key, slot in tower.slots.items():
        filler.check(key, slot, weights.entries[key].shape)
    filler.problems.unknown += tower.unknown
    absent = filler.absent()
    filler.problems.missing = [name for name in absent if name not in STATISTICS]
    filler.problems.raise_if_any(str(weights.path))
    return tuple(name for name in absent if name in STATISTICS)


def fill(filler: Filler, weights: Weights, tower: Tower) -> None:
    """Read every tensor into its place."""
    scaled = tower.config.scaled_layer_norm and tower.layout.is_reference
    for key, slot in tower.slots.items():
        if slot.name not in STATISTICS:
            filler.put(key, slot, weights.read(key), scaled)
    # the config has them from the file, where the file has them
    filler.set_statistics(STATISTICS)


def report_not_finite(filler: Filler, source: str, strict: bool) -> None:
    """Warn of NaN and infinite weights, or raise CheckpointError."""
    if not filler.not_finite:
        return
    keys, dtype = filler.not_finite, filler.model.dtype
    text = f"{source}: {len(keys)} tensors hold NaN or infinity as {dtype}: {shorten(keys)}"
    if strict:
        raise CheckpointError(text)
    # the caller of from_pretrained or load_weights
    warnings.warn(text, stacklevel=4)
