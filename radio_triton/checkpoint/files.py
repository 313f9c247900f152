"""Find a checkpoint and read it lazily: names, shapes and dtypes first, then one tensor at a time."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .keys import CheckpointError


@dataclass(frozen=True)
class Weights:
    """One safetensors file: `shapes` and `dtypes` by key, and the config.json beside it, if any."""

    path: Path
    config: dict[str, Any] | None
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]

    def read(self, key: str) -> Tensor:
        """One tensor."""
        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(key)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        with safe_open(self.path, framework="pt") as file:
            for key in self.shapes:
                yield key, file.get_tensor(key)


def open_weights(source: str | os.PathLike) -> Weights:
    """The weights in a folder (model.safetensors with its config.json) or in a .safetensors file.

    FileNotFoundError where there is nothing; CheckpointError where it cannot be read.
    """
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: pass a folder with model.safetensors and config.json, or a file")
    if path.is_dir():
        files = [path / "model.safetensors"] if (path / "model.safetensors").exists() else []
        files = files or sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            raise CheckpointError(
                f"{path} has {len(files)} .safetensors files ({', '.join(f.name for f in files[:4])}): "
                "expected one, or pass the file itself"
            )
        path = files[0]
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path} is not a .safetensors file")
    shapes, dtypes = read_header(path)
    return Weights(path, _read_config(path.parent / "config.json"), shapes, dtypes)


def read_header(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
    """Shapes and dtypes of a safetensors file, without reading a tensor."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}
            shapes = {key: tuple(part.get_shape()) for key, part in slices.items()}
            return shapes, {key: _DTYPES[part.get_dtype()] for key, part in slices.items()}
    except (SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _read_config(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
