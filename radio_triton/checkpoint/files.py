"""Find a checkpoint and read it lazily: names, shapes and dtypes first, then one tensor at a time."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .folding import fold, group_keys, spectral_eps
from .keys import CheckpointError, clean, find_layout
from .pickles import read_pickle

INDEX = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".pth.tar", ".pth", ".pt", ".bin", ".ckpt")
_LARGEST_JSON = 64 << 20


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its shape, its dtype (None for one that torch lacks), and how to read it."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint under plain keys: `module.` removed, parametrized weights already folded.

    path: the file, or the index of its shards. config: the config.json beside it. args: what the training
    script was called with, from the file itself. metadata: strings that the file carries. outside: keys in
    shards that were not opened, because no part of the tower is in them. folded: plain keys that were
    parametrized.
    """

    path: Path
    paths: tuple[Path, ...]
    config: dict[str, Any] | None
    args: dict[str, Any] | None
    metadata: dict[str, str]
    entries: dict[str, Entry]
    outside: tuple[str, ...] = ()
    folded: tuple[str, ...] = ()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape by key."""
        return {key: entry.shape for key, entry in self.entries.items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype | None]:
        """Stored dtype by key."""
        return {key: entry.dtype for key, entry in self.entries.items()}

    @property
    def statement(self) -> dict[str, Any] | None:
        """What states the architecture: the args in the file, else its config.json."""
        return {"args": self.args} if self.args else self.config

    @property
    def stated_args(self) -> Mapping[str, Any]:
        """The arguments of the training script, wherever the checkpoint has them; empty where it has none."""
        source = self.statement or {}
        vision = source.get("vision_config")
        args = source.get("args") or (vision.get("args") if isinstance(vision, Mapping) else None)
        return args if isinstance(args, Mapping) else {}

    def read(self, key: str) -> Tensor:
        """One tensor, memory-mapped where nothing had to be computed."""
        try:
            return self.entries[key].read()
        except (SafetensorError, RuntimeError, OSError) as error:
            raise CheckpointError(f"{self.path}: {key} cannot be read: {error}") from error

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(key, tensor), one at a time."""
        for key in self.entries:
            yield key, self.read(key)


def open_weights(
    source: str | os.PathLike, *, revision: str | None = None, local_files_only: bool = False
) -> Weights:
    """The weights in a folder, a file (.safetensors, its index, .pth.tar, .pt), or under a Hugging Face id.

    revision, local_files_only: of a Hugging Face id. FileNotFoundError where there is nothing;
    CheckpointError where it cannot be read.
    """
    path = Path(source)
    if path.is_dir():
        path = choose_file(path)
    fetch: Callable[[str], Path] = partial(Path, path.parent)
    if not path.exists():
        from .hub import Repository

        repository = Repository(os.fspath(source), revision, local_files_only)
        path, fetch = repository.weights(), repository.file
    config = _read_config(path.parent / "config.json")
    if path.name.endswith(".index.json"):
        return _plain(_open_shards(path, fetch, config))
    entries, args, metadata = open_file(path)
    return _plain(Weights(path, (path,), config, args, metadata, entries))


def open_file(path: Path) -> tuple[dict[str, Entry], dict[str, Any] | None, dict[str, str]]:
    """Entries, args and metadata of one file, told apart by its first bytes."""
    with open(path, "rb") as file:
        head = file.read(64)
    if head.startswith(b"PK\x03\x04"):
        tensors, args, facts = read_pickle(path)
        return (
            {key: Entry(tuple(t.shape), t.dtype, partial(_same, t)) for key, t in tensors.items()},
            args,
            facts,
        )
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the file: run `git lfs pull` where it lies")
    if head.startswith(b"\x80") and head[1:2] <= b"\x05":
        raise CheckpointError(
            f"{path} is a bare pickle, or from a torch before 1.6: read it with "
            "torch.load(weights_only=True) and save it again"
        )
    if head[8:9] != b"{":
        raise CheckpointError(
            f"{path} is neither a safetensors file nor one of torch.save ({len(head)} bytes: {head[:8]!r}…)"
        )
    return _open_safetensors(path)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _open_safetensors(path: Path) -> tuple[dict[str, Entry], None, dict[str, str]]:
    try:
        file = safe_open(path, framework="pt")
        entries = {}
        for key in file.keys():  # noqa: SIM118
            part = file.get_slice(key)
            entries[key] = Entry(
                tuple(part.get_shape()), _DTYPES.get(part.get_dtype()), partial(file.get_tensor, key)
            )
        return entries, None, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _open_shards(index: Path, fetch: Callable[[str], Path], config: dict[str, Any] | None) -> Weights:
    """The shards that hold part of the tower; `fetch` gives the path of a shard by its name."""
    table = _read_table(index)
    keys = [clean(key).replace(".parametrizations.weight.original", ".weight") for key in table]
    beside = find_layout(keys).beside
    wanted = {name for key, name in table.items() if clean(key).startswith(beside)}
    entries: dict[str, Entry] = {}
    metadata: dict[str, str] = {}
    paths = tuple(fetch(name) for name in sorted(wanted))
    for path in paths:
        if not path.exists():
            raise CheckpointError(f"{index} names {path.name}, which is not there: the folder is incomplete")
        found, _, facts = open_file(path)
        if twice := sorted(found.keys() & entries.keys()):
            raise CheckpointError(f"{path} holds {twice[0]}, which another shard holds too")
        entries |= found
        metadata |= facts
    if lost := sorted(key for key, name in table.items() if name in wanted and key not in entries):
        raise CheckpointError(
            f"{index} names {len(lost)} tensors that its shards do not hold, such as {lost[:4]}"
        )
    outside = tuple(key for key, name in table.items() if name not in wanted)
    return Weights(index, paths, config, None, metadata, entries, outside)


def _read_table(index: Path) -> dict[str, str]:
    """Key -> name of the shard, which lies beside the index."""
    table = _read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise CheckpointError(f"{index} has no weight_map of keys to file names")
    for name in set(table.values()):
        # a name with a folder in it could point anywhere
        if name != Path(name).name or "\\" in name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} names {name!r}: a shard must be a .safetensors file in the same folder"
            )
    return table


def _plain(weights: Weights) -> Weights:
    """The same under plain keys."""
    named: dict[str, Entry] = {}
    for key, entry in weights.entries.items():
        if clean(key) in named:
            raise CheckpointError(
                f"{weights.path} holds {clean(key)} twice, once under a prefix such as module.: keep one"
            )
        named[clean(key)] = entry
    groups = group_keys(named)
    plain = {key: entry for key, entry in named.items() if ".parametrizations." not in key}
    eps = spectral_eps(weights.stated_args)
    for key, roles in groups.items():
        if key in plain:
            raise CheckpointError(f"{weights.path} holds {key} both plain and parametrized: keep one")
        source = named[roles[None, "original"]]
        read = partial(fold, key, roles, lambda name: named[name].read(), eps)
        plain[key] = Entry(source.shape, source.dtype, read)
    return replace(weights, entries=plain, folded=tuple(groups))


def choose_file(folder: Path) -> Path:
    """The weights of a folder: model.safetensors, its index, or the only file that could be weights."""
    for name in ("model.safetensors", INDEX):
        if (folder / name).exists():
            return folder / name
    for suffixes in ((".safetensors",), PICKLE_SUFFIXES):
        files = sorted(file for file in folder.iterdir() if file.name.endswith(suffixes) and file.is_file())
        if len(files) > 1:
            raise CheckpointError(
                f"{folder} has {len(files)} files that may be the weights "
                f"({', '.join(f.name for f in files[:4])}): pass one"
            )
        if files:
            return files[0]
    raise FileNotFoundError(
        f"{folder} has no weights: expected model.safetensors, {INDEX}, one other .safetensors file, or "
        f"one of {', '.join(PICKLE_SUFFIXES)}"
    )


def _read_config(path: Path) -> dict[str, Any] | None:
    return _read_json(path) if path.exists() else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise CheckpointError(f"{path} is larger than any config or index")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}: expected an object")
    return content
