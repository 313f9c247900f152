"""The work behind `radio-triton encode`: files in, one features file each out, in packed calls of a
bounded size."""

import hashlib
import io
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from radio_triton import __version__
from radio_triton.image import fit_image, read_image
from radio_triton.sources import Source, path_id
from radio_triton.storage import fingerprint, read_metadata, write_features

if TYPE_CHECKING:
    from radio_triton.model import RadioModel

A = TypeVar("A")
B = TypeVar("B")

SAME = ("source_sha256", "model_fingerprint", "options")  # what must be equal for an output to be kept


@dataclass
class Report:
    encoded: int = 0
    kept: int = 0
    shrunk: int = 0
    patches: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)  # (path, reason)


class Loaded(NamedTuple):
    source: Source
    metadata: dict[str, str]
    image: Tensor
    shrunk: bool


def encode_files(
    model: "RadioModel",
    sources: list[Source],
    out: Path,
    *,
    model_name: str,
    max_tokens: int,
    long_side: int | None = None,
    advance: Callable[[int], object] = lambda n: None,
) -> Report:
    """Encode every input into `out`/<name>.safetensors, skipping those already there, and say what happened.

    A call packs images while patches and prefix tokens stay within `max_tokens`; an image above that goes
    alone. Images are resized to the nearest supported size, after shrinking to `long_side` pixels (None: the
    longer side of the position table, the largest size the model knows positions for). `advance(n)` is called
    as n sources are done.
    """
    long_side = long_side or max(model.config.max_resolution)
    weight = next(model.parameters())
    options = {"dtype": str(weight.dtype).removeprefix("torch."), "long_side": long_side}
    common = {
        "model": model_name,
        "model_fingerprint": fingerprint(model),
        "options": json.dumps(options),
        "radio_triton": __version__,
    }
    report = Report()
    load_one = partial(
        load, out=out, common=common, nearest=model.get_nearest_supported_resolution, long_side=long_side
    )
    waiting = _to_encode(sources, prefetch(load_one, sources), report, advance)
    for batch in by_budget(waiting, partial(count_tokens, model), max_tokens):
        with torch.no_grad():
            outputs = model.encode([item.image.to(weight.device) for item in batch])
        for item, output in zip(batch, outputs, strict=True):
            summary, features = output
            metadata = item.metadata | {"grid": json.dumps(output.grid)}
            write_features(
                output_path(out, item.source), {"features": features, "summary": summary}, metadata
            )
            report.encoded += 1
            report.shrunk += item.shrunk
            report.patches += len(features)
        advance(len(batch))
    return report


def output_path(out: Path, source: Source) -> Path:
    return out / f"{source.name}.safetensors"


def belongs_to_another(out: Path, source: Source) -> bool:
    """Whether the output of this name was made from another file, of other content, by an earlier run."""
    metadata = read_metadata(output_path(out, source))
    if metadata is None or metadata.get("source_path_sha256") == path_id(source.path):
        return False
    try:
        return metadata.get("source_sha256") != hashlib.sha256(source.path.read_bytes()).hexdigest()
    except OSError:
        return True


def load(
    source: Source,
    out: Path,
    common: dict[str, str],
    nearest: Callable[[int, int], tuple[int, int]],
    long_side: int,
) -> Loaded | str | None:
    """Read one source. None where its output is there, made of the same content by the same model with the
    same options; the reason where it cannot be read."""
    try:
        content = source.path.read_bytes()
        metadata = common | {
            "source": os.fsencode(source.name).decode(errors="replace"),
            "source_sha256": hashlib.sha256(content).hexdigest(),
            "source_path_sha256": path_id(source.path),
        }
        present = read_metadata(output_path(out, source)) or {}
        if all(present.get(key) == metadata[key] for key in SAME):
            return None
        original = read_image(io.BytesIO(content))
    except ImportError:  # Pillow is missing: no file can be read
        raise
    except Exception as error:  # decoders raise anything on a broken file, and the others must go on
        return " ".join(str(error).split()) or type(error).__name__
    image = fit_image(original, nearest, long_side)
    metadata["original_size"] = json.dumps(original.shape[1:])
    metadata["encoded_size"] = json.dumps(image.shape[1:])
    return Loaded(source, metadata, image, shrunk=max(original.shape[1:]) > long_side)


def count_tokens(model: "RadioModel", item: Loaded) -> int:
    _, height, width = item.image.shape
    return height * width // model.config.patch_size**2 + model.config.num_prefix_tokens


def by_budget(items: Iterable[A], cost: Callable[[A], int], budget: int) -> Iterator[list[A]]:
    """Runs of items, in order, whose costs sum to at most `budget`; an item above it makes a run of its
    own."""
    batch: list[A] = []
    used = 0
    for item in items:
        needed = cost(item)
        if batch and used + needed > budget:
            yield batch
            batch, used = [], 0
        batch.append(item)
        used += needed
    if batch:
        yield batch


def prefetch(function: Callable[[A], B], items: Iterable[A], workers: int = 4) -> Iterator[B]:
    """function(item) for each item, in order, worked out by threads at most 2 * workers items ahead."""
    with ThreadPoolExecutor(workers) as pool:
        pending: deque[Future[B]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _to_encode(
    sources: Iterable[Source],
    loaded: Iterable[Loaded | str | None],
    report: Report,
    advance: Callable[[int], object],
) -> Iterator[Loaded]:
    for source, result in zip(sources, loaded, strict=True):
        if isinstance(result, Loaded):
            yield result
            continue
        if result is None:
            report.kept += 1
        else:
            report.failed.append((str(source.path), result))
        advance(1)
