"""Checkpoints of torch.save: screened first, then unpickled by torch's restricted unpickler only."""

import argparse
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .keys import CheckpointError

# what a pickle may name: tensors, their storages and dtypes, ordinary containers, and the training script's
# arguments
_DTYPES = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
_ALLOWED = {
    "collections OrderedDict",
    "argparse Namespace",
    "torch Size",
    "torch device",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "torch.nn.parameter Parameter",
    "torch.storage UntypedStorage",
    "builtins set",
    "__builtin__ set",
} | {f"torch {name}" for name in dir(torch) if name in _DTYPES or name.endswith("Storage")}
# the header before an entry of a zip file: its signature, and the lengths of its two last fields
_LOCAL_HEADER = "<4s22xHH"
# the flag of an entry whose name is not in cp437
_UTF8 = 0x800
# a state dict of names and shapes is far smaller
_LARGEST_PICKLE = 256 << 20


def read_pickle(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None, dict[str, str]]:
    """The tensors of a torch.save file (memory-mapped), its `args` as a dictionary, and facts such as epoch,
    as strings.

    `state_dict_ema` comes before `state_dict`; a file may also be the state dict itself. CheckpointError
    where it cannot be read, names anything but tensors and plain values, or is compressed.
    """
    _screen(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        # torch has no common error for a file that it cannot read
        raise CheckpointError(f"{path} cannot be read as a torch checkpoint: {_brief(error)}") from error
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__}: expected a dictionary with a state_dict"
        )
    names = [name for name in ("state_dict_ema", "state_dict") if content.get(name) is not None]
    # training without EMA may leave an empty dictionary
    name = next((name for name in names if not isinstance(content[name], Mapping) or content[name]), None)
    state = content[name] if name else content
    facts = {
        key: str(content[key])
        for key in ("arch", "epoch", "version")
        if isinstance(content.get(key), (str, int))
    }
    args = content.get("args") if name else None
    args = vars(args) if isinstance(args, argparse.Namespace) else args
    if not isinstance(args, Mapping | None):
        raise CheckpointError(
            f"{path} has args of type {type(args).__name__}: expected a Namespace or a dictionary"
        )
    return _tensors(path, state), dict(args) if args else None, facts | ({"weights": name} if name else {})


def _screen(path: Path) -> None:
    """Look at the archive without unpickling: nothing is compressed, and all names are on the list."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception as error:
        raise CheckpointError(f"{path} is truncated or corrupt: {_brief(error)}") from error
    packed = next((e.filename for e in entries if e.compress_type != zipfile.ZIP_STORED), None)
    if packed or sum(e.file_size for e in entries) > path.stat().st_size:
        raise CheckpointError(
            f"{path} is compressed or claims more than it holds ({packed}): torch.save does neither"
        )
    pickles = [e for e in entries if e.filename.endswith("/data.pkl") or e.filename == "data.pkl"]
    if len(pickles) != 1 or pickles[0].file_size > _LARGEST_PICKLE:
        raise CheckpointError(f"{path} is a zip file, but not one of torch.save: expected one data.pkl")
    try:
        content = _read_stored(path, entries, pickles[0])
        names = _names(content)
    except Exception as error:
        raise CheckpointError(f"{path} is truncated or corrupt: {_brief(error)}") from error
    if bad := sorted(names - _ALLOWED):
        raise CheckpointError(
            f"{path} is refused: its pickle asks for {', '.join(bad[:4])}, which is no tensor or plain "
            "value. Nothing was run. Save the tensors alone, as safetensors"
        )


def _read_stored(path: Path, entries: list[zipfile.ZipInfo], wanted: zipfile.ZipInfo) -> bytes:
    """The bytes of an entry. Not by zipfile: it refuses files that torch wrote without checksums.

    ValueError where the bytes have another checksum, or any entry's own header is not as it should be: torch
    looks at neither, and would read other bytes for a tensor's.
    """
    content = b""
    with open(path, "rb") as file:
        for entry in entries:
            file.seek(entry.header_offset)
            signature, name, extra = struct.unpack(_LOCAL_HEADER, file.read(struct.calcsize(_LOCAL_HEADER)))
            found, fields = file.read(name), file.read(extra)
            while len(fields) >= 4:
                # an identifier, a length, and as many bytes
                fields = fields[4:][int.from_bytes(fields[2:4], "little") :]
            own = entry.orig_filename.encode("utf-8" if entry.flag_bits & _UTF8 else "cp437")
            if signature != b"PK\x03\x04" or found != own or fields:
                raise ValueError(f"{entry.filename} is not where the directory says")
            if entry is wanted:
                content = file.read(entry.file_size)
    # without checksums torch writes 0
    if wanted.CRC and zlib.crc32(content) != wanted.CRC:
        raise ValueError(f"the checksum of {wanted.filename} is wrong")
    return content


def _names(pickle: bytes) -> set[str]:
    """The globals that a pickle names, as "module name"."""
    names = set()
    for opcode, argument, _ in pickletools.genops(pickle):
        if opcode.name in ("GLOBAL", "INST"):
            names.add(str(argument))
        elif opcode.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
            names.add(opcode.name)
    return names


def _tensors(path: Path, state: Any) -> dict[str, Tensor]:
    """The tensors of a state dict; every one dense, on the CPU, and within its storage."""
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise CheckpointError(f"{path}: the state dict must map names to tensors, got {type(state).__name__}")
    tensors = {key: value.detach() for key, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(
            f"{path} holds no tensors: it has the entries {[str(key)[:40] for key in state][:8]}"
        )
    for key, tensor in tensors.items():
        dense = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        if not dense or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise CheckpointError(
                f"{path}: {key} {tuple(tensor.shape)} is no dense tensor that the file holds in full"
            )
    return tensors


def _brief(error: BaseException) -> str:
    """The first line of an error, or its type."""
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
