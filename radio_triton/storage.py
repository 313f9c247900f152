"""Features files: safetensors with one item (`features`, `summary`) or many (`<name>.features`, …), written
whole or not at all.

Metadata of one item: `grid` and `encoded_size`, `original_size` as JSON [h, w] (a video's grid is [t, h, w]);
of many: `items`, a JSON object of those by name.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

if TYPE_CHECKING:
    from radio_triton.model import RadioModel


class Item(NamedTuple):
    name: str
    features: Tensor  # (N, C), a video's (t, N, C)
    grid: tuple[int, ...]  # (h, w), a video's (t, h, w)
    size: tuple[int, int]  # (H, W), pixels as encoded


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path in the folder of `path`, moved over it if the block succeeds, removed if it does
    not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{uuid.uuid4().hex}.tmp"
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_features(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors of any device under their names; the metadata are strings."""
    # clones, since outputs of a packed call are views of one buffer
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    with replacing(path) as temporary:
        temporary.write_bytes(save(tensors, metadata))  # save_file would make it private to the user


def read_metadata(path: Path) -> dict[str, str] | None:
    """The metadata of a safetensors file; None where there is no such file or it is not whole."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return None


def read_features(path: Path) -> list[Item]:
    """The items of a features file. Raises ValueError for a file of another kind."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "items" in metadata:
                named = {
                    name: (f"{name}.features", facts) for name, facts in json.loads(metadata["items"]).items()
                }
            else:
                facts = {key: json.loads(metadata[key]) for key in ("grid", "encoded_size")}
                named = {path.name.removesuffix(".safetensors"): ("features", facts)}
            return [
                Item(name, file.get_tensor(key), tuple(facts["grid"]), tuple(facts["encoded_size"]))
                for name, (key, facts) in named.items()
            ]
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"not a features file as radio-triton encode writes them ({error})") from error


def fingerprint(model: "RadioModel") -> str:
    """sha256 over the config and every weight and buffer: names, dtypes, shapes and bytes, whatever the
    device."""
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
