"""A checkpoint here against NVIDIA's own class, or where that cannot be had against Transformers' RadioModel.

    python -m bench.parity nvidia/C-RADIOv4-H [--oracle nvidia|transformers] [--dtype fp32 --dtype bf16]
                           [--size 512x512 …] [--device cuda] [--revision R] [--local-files-only] [--json FILE]

The source is whatever from_pretrained takes. NVIDIA's class is the remote code of a repository or folder, or
torch.hub's for a .pth.tar. That runs Python code from elsewhere: by itself only for ids under nvidia/, else with
--trust-remote-code. Each row is of one dtype and one way of calling: `dense` is one image at a time, `packed` all
of them in one call of ours, against theirs one at a time. `difference` is ours from theirs, the two errors are from
theirs in fp32 (all relative). Agreement means: in fp32 a difference of at most 1e-4, else our error at most a tenth
above theirs. Exit code 0 where all rows agree, 1 where one does not, 2 where nothing could be compared.
"""

import argparse
import gc
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from radio_triton import RadioModel
from radio_triton.checkpoint import Tower, Weights, describe, open_weights
from radio_triton.checkpoint.files import PICKLE_SUFFIXES
from radio_triton.checkpoint.forms import cannot_hold, form_config, form_tensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = ("512x512", "256x640", "720x400")
LIMIT = 1e-4
# two evaluations of one formula that round differently: either may be a little nearer to the truth
CHANCE = 1.1
Row = dict[str, Any]
Outputs = dict[str, Tensor]
HEAD = f"{'call':7} {'dtype':5} {'output':8} {'difference':>11} {'our error':>10} {'their error':>12}"


class Unavailable(Exception):
    """An oracle that cannot be had; the message says why."""


@dataclass(frozen=True)
class Oracle:
    """`name` says what ran; `load` gives the model in fp32, which returns (summary, features) first."""

    name: str
    load: Callable[[], nn.Module]


def nvidia(source: str, weights: Weights, options: argparse.Namespace) -> Oracle:
    """NVIDIA's own class."""
    theirs = source.lower().startswith("nvidia/") and not Path(source).exists()
    if not (theirs or options.trust_remote_code):
        raise Unavailable(
            "it runs Python code that is not part of this package: allow it with --trust-remote-code"
        )
    if weights.path.name.endswith(PICKLE_SUFFIXES):
        return Oracle("NVlabs/RADIO through torch.hub", lambda: from_torch_hub(weights.path))
    if "AutoModel" not in ((weights.config or {}).get("auto_map") or {}):
        raise Unavailable("config.json names no remote code (auto_map)")
    places = {"revision": options.revision, "local_files_only": options.local_files_only}
    return Oracle(f"the remote code of {source}", lambda: from_remote_code(source, places))


def from_torch_hub(path: Path) -> nn.Module:
    hub: Any = torch.hub.load(
        "NVlabs/RADIO",
        "radio_model",
        version=str(path),
        trust_repo=True,
        skip_validation=True,
        progress=False,
    )
    return hub


def from_remote_code(source: str, places: dict[str, Any]) -> nn.Module:
    from transformers import AutoModel

    return AutoModel.from_pretrained(source, trust_remote_code=True, **places)


def by_transformers(weights: Weights, tower: Tower, folder: Path) -> Oracle:
    """Transformers' RadioModel, which reads a copy of the tower alone, under its own mapping of names."""
    written = form_config("native", tower.config, torch.float32)
    if lost := cannot_hold(tower.config, written):
        raise Unavailable(f"it cannot hold {', '.join(lost)}")
    save_file(dict(tower_tensors(weights, tower)), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(written))
    return Oracle("Transformers' RadioModel", lambda: from_transformers(folder, tower.config.layer_scale))


def tower_tensors(weights: Weights, tower: Tower) -> Iterator[tuple[str, Tensor]]:
    """The tower's tensors with the prefixes and the LayerScale that Transformers knows."""
    trunk, beside = tower.layout.trunk, tower.layout.beside
    reference = tower.layout.is_reference
    for key in tower.slots:
        tensor = weights.read(key).contiguous()
        if key.startswith(trunk):
            name = ("radio_model.model." if reference else "") + key.removeprefix(trunk)
        else:
            name = ("radio_model." if reference else "") + key.removeprefix(beside)
        name = re.sub(r"\.(?:ls|layer_scale)([12])(?:\.\w+)?$", r".layer_scale\1.lambda1", name)
        if tower.layout.name == "fused":
            yield from ((part, x.contiguous()) for part, x in form_tensors("native", [(name, tensor)], {}))
        else:
            yield name, tensor


def from_transformers(folder: Path, layer_scale: bool) -> nn.Module:
    from transformers import RadioModel as TransformersModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, info = TransformersModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    # it has a LayerScale of ones in every model, and makes the summary's indices from the config
    free = ("summary_idxs", "norm_mean", "norm_std", *(() if layer_scale else (".lambda1",)))
    odd = [*info["unexpected_keys"], *info["mismatched_keys"]]
    odd += [key for key in info["missing_keys"] if not key.endswith(free)]
    if odd:
        raise Unavailable(f"it does not read {len(odd)} of the tensors, such as {odd[0]}")
    return model


def find_oracle(
    weights: Weights, tower: Tower, folder: Path, options: argparse.Namespace
) -> tuple[Oracle, nn.Module]:
    """The first that works, loaded, of those asked for; Unavailable with every reason where none does."""
    ways: dict[str, Callable[[], Oracle]] = {
        "nvidia": lambda: nvidia(options.source, weights, options),
        "transformers": lambda: by_transformers(weights, tower, folder),
    }
    reasons = []
    for name in [options.oracle] if options.oracle else ways:
        try:
            oracle = ways[name]()
            return oracle, oracle.load().eval().requires_grad_(False)
        except Exception as error:
            # remote code can fail in any way; what it says is shown
            text = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            reasons.append(f"{name}: {text}")
            print(f"not against {reasons[-1]}", file=sys.stderr)
    raise Unavailable(f"nothing to compare with ({'; '.join(reasons)})")


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Another dtype of an oracle, which keeps its statistics in fp32 and casts after normalising."""
    kept = {name: x.clone() for name, x in model.named_buffers() if name.endswith(("norm_mean", "norm_std"))}
    model.to(dtype)
    for name, value in kept.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], value)
        # the reference's conditioner has the dtype of its output as an attribute
        if getattr(owner, "dtype", None) in DTYPES.values():
            owner.dtype = dtype
    return model


def make_images(model: RadioModel, sizes: list[str]) -> list[Tensor]:
    """Smooth pictures with some noise, (3, H, W) in [0, 1], in values that every dtype here holds."""
    generator, images = torch.Generator().manual_seed(0), []
    for size in sizes:
        height, width = model.get_nearest_supported_resolution(*map(int, size.split("x")))
        coarse = torch.rand(1, 3, max(height // 48, 1), max(width // 48, 1), generator=generator)
        smooth = F.interpolate(coarse, (height, width), mode="bilinear")[0]
        noisy = 0.9 * smooth + 0.1 * torch.rand(smooth.shape, generator=generator)
        # bf16 has eight bits
        images.append((noisy * 128).round() / 128)
    return images


def outputs(pairs: Iterable[tuple[Tensor, Tensor]]) -> Outputs:
    """Summary, features, and both together, of every image end to end, in float64 on the CPU."""
    found = [[x.double().flatten().cpu() for x in pair] for pair in pairs]
    summary, features = (torch.cat(part) for part in zip(*found, strict=True))
    return {"summary": summary, "features": features, "all": torch.cat((summary, features))}


@torch.inference_mode()
def theirs(model: nn.Module, images: list[Tensor], device: str, dtype: torch.dtype) -> Outputs:
    """One image at a time."""

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for image in images:
            out = model(image[None].to(device, dtype))
            yield (out.summary, out.features) if hasattr(out, "summary") else tuple(out)[:2]

    return outputs(pairs())


@torch.inference_mode()
def ours(model: RadioModel, images: list[Tensor], dtype: torch.dtype) -> dict[str, Outputs]:
    """By way of calling."""
    images = [image.to(model.device, dtype) for image in images]
    return {
        "dense": outputs(tuple(model(image[None])) for image in images),
        "packed": outputs([tuple(out) for out in model(images).split()]),
    }


def distance(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|."""
    return float((a - b).norm() / b.norm())


def compare(
    oracle: Oracle, first: nn.Module, images: list[Tensor], options: argparse.Namespace
) -> Iterator[Row]:
    """A row for every dtype, way of calling and output. first: the oracle's model, loaded already."""
    device = options.device
    truth = theirs(cast(first.to(device), torch.float32), images, device, torch.float32)
    del first
    for name in options.dtype or ("fp32", "bf16"):
        dtype, want = DTYPES[name], truth
        if dtype != torch.float32:
            want = theirs(cast(oracle.load().eval().to(device), dtype), images, device, dtype)
        model = load(options, dtype)
        for call, got in ours(model, images, dtype).items():
            for output, a in got.items():
                b, t = want[output], truth[output]
                row = {
                    "difference": distance(a, b),
                    "our_error": distance(a, t),
                    "their_error": distance(b, t),
                }
                yield {"call": call, "dtype": name, "output": output, **row}
        del model
        gc.collect()


def agrees(row: Row) -> bool:
    """The rule of the docstring."""
    if row["dtype"] == "fp32":
        return row["difference"] <= LIMIT
    # the summary alone is few numbers
    return row["output"] != "all" or row["our_error"] <= CHANCE * row["their_error"]


def line(row: Row) -> str:
    numbers = f"{row['difference']:11.2e} {row['our_error']:10.2e} {row['their_error']:12.2e}"
    return (
        f"{row['call']:7} {row['dtype']:5} {row['output']:8} {numbers}{'' if agrees(row) else '  DISAGREES'}"
    )


def load(options: argparse.Namespace, dtype: torch.dtype) -> RadioModel:
    places = {"revision": options.revision, "local_files_only": options.local_files_only}
    return RadioModel.from_pretrained(options.source, dtype=dtype, device=options.device, **places)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.parity", description=__doc__.splitlines()[0])
    parser.add_argument("source", help="a hub id, a folder, or a file")
    parser.add_argument(
        "--oracle", choices=("nvidia", "transformers"), help="default: the first that can be had"
    )
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: fp32 and bf16")
    parser.add_argument(
        "--size", action="append", help=f"height x width in pixels; default: {', '.join(SIZES)}"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--revision")
    parser.add_argument("--local-files-only", action="store_true")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            places = {"revision": options.revision, "local_files_only": options.local_files_only}
            weights = open_weights(options.source, **places)
            tower = describe(weights)
            images = make_images(RadioModel(tower.config, device="meta"), options.size or list(SIZES))
            oracle, model = find_oracle(weights, tower, Path(folder), options)
        except (ValueError, OSError, Unavailable) as error:
            print(f"cannot compare {options.source}: {error}", file=sys.stderr)
            return 2
        print(f"{options.source}: radio_triton against {oracle.name}, {len(images)} images, {options.device}")
        print(HEAD)
        for row in compare(oracle, model, images, options):
            rows.append(row)
            print(line(row), flush=True)
    if options.json:
        found = {"source": options.source, "oracle": oracle.name, "device": options.device, "rows": rows}
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(map(agrees, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
