"""Convert a checkpoint into another form, and prove that it computes the same before the result gets its
name.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..model import RadioModel
from .card import Licence, fetch_licence, find_licence
from .files import open_weights
from .keys import CheckpointError
from .save import staged, write_folder

# |after - before| / |before| over all tokens; what folding LayerScale may cost by rounding proj and fc2 anew
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def convert(
    source: str | os.PathLike,
    folder: str | os.PathLike,
    form: str,
    *,
    dtype: torch.dtype | None = None,
    fold_layer_scale: bool = False,
    license: str | None = None,
    overwrite: bool = False,
    **options: Any,
) -> list[str]:
    """Write `source`, whatever `from_pretrained` takes, into a folder in a form: native, legacy or fused.

    dtype: None keeps the source's. fold_layer_scale: multiply LayerScale into the layers before it, in fp32
    or better. options: those of `from_pretrained`. Returns sentences that say what was done. FileExistsError
    where the folder exists and `overwrite` is False; CheckpointError where the result does not compute the
    same, and then nothing is left; ValueError where the form cannot hold the model.
    """
    folder = Path(folder)
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} exists: pass overwrite=True (--force) to replace the model in it")
    places: dict[str, Any] = {
        name: options[name] for name in ("revision", "local_files_only") if name in options
    }
    with staged(folder) as temporary:
        before = RadioModel.from_pretrained(source, dtype=dtype, strict_finite=True, **options)
        outputs = proof_outputs(before)
        model = folded(source, before, options) if fold_layer_scale else before
        said = [write_folder(model, temporary, form=form, **origin(source, license, places))]
        said.append(prove(outputs, model, temporary))
    if before.load_report.ignored:
        reasons = ", ".join(f"{count} {why}" for why, count in before.load_report.reasons.items())
        said.append(f"Keys left out: {reasons}.")
    return said


def origin(source: str | os.PathLike, license: str | None, places: Mapping[str, Any]) -> dict[str, Any]:
    """What of a checkpoint goes along: the arguments of its training script, where it has them, and its
    licence.
    """
    weights = open_weights(source, **places)
    stated = (weights.config or {}).get("args")
    args = weights.args or (stated if isinstance(stated, Mapping) else {})
    if license:
        return {"args": args, "licence": Licence(license)}
    fetch_licence(source, **places)
    return {"args": args, "licence": find_licence(weights.path, weights.metadata)}


def folded(source: str | os.PathLike, model: RadioModel, options: Mapping[str, Any]) -> RadioModel:
    """The model with LayerScale in proj and fc2 (down_proj): from exact weights, rounded once."""
    exact = torch.float64 if model.dtype == torch.float64 else torch.float32
    wide = RadioModel.from_pretrained(source, dtype=exact, **options)
    fold(wide)
    return wide.to(model.dtype)


@torch.no_grad()
def fold(model: RadioModel) -> None:
    """Multiply each LayerScale into the weight and bias of the layer before it, and remove it."""
    layer: Any
    for layer in model.encoder.layer:
        last = layer.mlp.down_proj if model.config.use_swiglu_ffn else layer.mlp.fc2
        for scale, linear in ((layer.layer_scale1, layer.attention.proj), (layer.layer_scale2, last)):
            if scale is not None:
                linear.weight.mul_(scale.lambda1[:, None])
                linear.bias.mul_(scale.lambda1)
        layer.layer_scale1 = layer.layer_scale2 = None
    model.config = model.config.replace(layer_scale=False, layerscale_value=1.0)


@torch.inference_mode()
def proof_outputs(model: RadioModel) -> list[Tensor]:
    """All tokens that a model makes of a random image, not square, and of a random video where it takes
    tubelets.
    """
    config, generator = model.config, torch.Generator().manual_seed(0)
    height, width = 3 * config.patch_size, 5 * config.patch_size
    items = [torch.rand(config.num_channels, height, width, generator=generator)]
    if config.video_projection:
        frames = config.video_temporal_patch_size + 1
        items.append(torch.rand(frames, config.num_channels, height, width, generator=generator))
    tokens = [output.last_hidden_state.clone() for output in model.encode(items)]
    if not all(bool(x.isfinite().all()) for x in tokens):
        raise CheckpointError(
            f"in {model.dtype} the model makes NaN or Inf of random pixels, so nothing can be proved: "
            "convert to another dtype"
        )
    return tokens


def prove(before: list[Tensor], written: RadioModel, folder: Path) -> str:
    """Load a folder and compare its parameters with those written and its outputs with those before; says how
    near.

    CheckpointError where they differ.
    """
    loaded = RadioModel.from_pretrained(
        folder, num_dummy_heads=written.config.num_dummy_heads, adaptor_names=list(written.adaptors)
    )
    theirs = loaded.state_dict()
    odd = [name for name, x in written.state_dict().items() if not same(x, theirs.get(name))]
    if odd:
        raise CheckpointError(
            f"{len(odd)} parameters read back differently, such as {odd[0]}: nothing was kept"
        )
    limit, pairs = TOLERANCE[written.dtype], zip(before, proof_outputs(loaded), strict=True)
    error = max(float((b.double() - a.double()).norm() / a.double().norm()) for a, b in pairs)
    if not error <= limit:
        raise CheckpointError(
            f"the outputs differ by {error:.2g} of their norm, where {limit:.0e} is allowed in "
            f"{written.dtype}: nothing was kept"
        )
    return (
        f"Read back, every parameter is equal; on random pixels the outputs differ by {error:.2g} of their "
        f"norm ({limit:.0e} is allowed in {str(written.dtype).removeprefix('torch.')})."
    )


def same(a: Tensor, b: Tensor | None) -> bool:
    """Equal in dtype, shape and every value."""
    return b is not None and a.dtype == b.dtype and torch.equal(a, b)
