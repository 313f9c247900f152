"""Files that are not what they seem: a named error, nothing run, nothing half loaded, bounded memory."""

import argparse
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints import (
    LAYOUTS,
    State,
    args_of,
    gelu_model,
    reference,
    state_of,
    torch_hub,
    write_pth,
)
from loading import refused, same
from radio_triton import RadioModel


@pytest.fixture(scope="module")
def model() -> RadioModel:
    return gelu_model()


@pytest.fixture
def state(model: RadioModel) -> State:
    """The model under the names of a remote-code file."""
    return reference(state_of(model), "radio_model.model.", "radio_model.")


class Attack:
    """Unpickling this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("place", ["args", "state_dict", "bare"])
def test_pickle_that_runs_code(place: str, state: State, tmp_path: Path) -> None:
    mark, file = tmp_path / "mark", tmp_path / "evil.pth.tar"
    content: dict[str, Any] = {"state_dict": state, "args": argparse.Namespace(model="vit_tiny_patch16_224")}
    content[place] = Attack(mark)
    if place == "bare":
        file.write_bytes(pickle.dumps(content["bare"], protocol=2))
        refused(file, "bare pickle, or from a torch before 1.6")
    else:
        torch.save(content, file)
        refused(file, r"asks for (posix|nt) system, which is no tensor.*Nothing was run")
    assert not mark.exists()


def rezip(path: Path, compression: int, change: Callable[[str, bytes], bytes]) -> None:
    """Write a zip file anew."""
    with zipfile.ZipFile(path) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, data in parts.items():
            new.writestr(name, change(name, data))


def test_zip_bomb(model: RadioModel, tmp_path: Path) -> None:
    path = LAYOUTS["hub"][0](model, tmp_path)
    rezip(path, zipfile.ZIP_DEFLATED, lambda name, data: bytes(50 << 20) if name.endswith("data/0") else data)
    assert path.stat().st_size < 1 << 20
    refused(path, "is compressed or claims more than it holds")


def test_file_without_checksums(model: RadioModel, tmp_path: Path) -> None:
    """torch can save without them, and reads such files."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = LAYOUTS["hub"][0](model, tmp_path)
    finally:
        torch.serialization.set_crc32_options(before)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is not None
    assert same(RadioModel.from_pretrained(path), model)


def test_zip_that_torch_did_not_write(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pth.tar", "w") as archive:
        archive.writestr("readme.txt", "hello")
    refused(tmp_path, "not one of torch.save")


@pytest.mark.parametrize("part", [0.02, 0.5, 0.98])
@pytest.mark.parametrize("layout", ["hub", "remote"])
def test_truncated(layout: str, part: float, model: RadioModel, tmp_path: Path) -> None:
    path = LAYOUTS[layout][0](model, tmp_path)
    file = path if path.is_file() else path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * part)])
    refused(path, "truncated or corrupt|not a readable safetensors file")


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "neither a safetensors file nor one of torch.save"),
        (b"hello, this is no checkpoint", "neither a safetensors file nor one of torch.save"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (struct.pack("<Q", 1 << 62) + b"{}", "not a readable safetensors file"),
        (struct.pack("<Q", 1 << 30) + b"{" + b" " * 100, "not a readable safetensors file"),
        (struct.pack("<Q", 9) + b"{not json", "not a readable safetensors file"),
        (struct.pack("<Q", 2) + b"{}", "no RADIO tower found"),
    ],
    ids=["empty", "text", "lfs", "header-2^62", "header-2^30", "no-json", "no-tensors"],
)
def test_wrong_bytes(data: bytes, match: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    refused(tmp_path, match)


def test_safetensors_header_that_claims_too_much(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 16]}
    header = json.dumps({"embeddings.patch_projection.weight": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    refused(tmp_path, "not a readable safetensors file")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(1 << 20, 1 << 20),
        torch.zeros(8, 8).to_sparse(),
        torch.zeros(8, 8, device="meta"),
    ],
    ids=["expanded", "sparse", "meta"],
)
def test_pickled_tensor_that_is_not_there(tensor: Tensor, model: RadioModel, tmp_path: Path) -> None:
    state = torch_hub(state_of(model)) | {"base_model.patch_generator.embedder.weight": tensor}
    refused(
        write_pth(tmp_path, state, args_of(model.config)), "is no dense tensor|asks for torch._utils _rebuild"
    )


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ([1, 2], "holds a list: expected a dictionary"),
        ({"state_dict": {}, "epoch": 1}, "holds no tensors"),
        ({"state_dict": [torch.zeros(1)]}, "must map names to tensors, got list"),
        ({"state_dict": {"x": torch.zeros(1)}, "args": "none"}, "args of type str"),
    ],
)
def test_pickle_of_something_else(content: object, match: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.pt")
    refused(tmp_path, match)


@pytest.mark.parametrize("text", ["{", "[1]", "\x00", '{"args": 3}', "{}", '{"a": ' * 100_000])
def test_bad_config(text: str, model: RadioModel, tmp_path: Path) -> None:
    folder = LAYOUTS["remote"][0](model, tmp_path)
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"not valid JSON|expected an object|RADIO config"):
        RadioModel.from_pretrained(folder)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..\\x.safetensors", "x.pt", ".."]
)
def test_index_may_not_leave_its_folder(name: str, model: RadioModel, tmp_path: Path) -> None:
    folder = LAYOUTS["sharded"][0](model, tmp_path / "model")
    (tmp_path / "x.safetensors").write_bytes((folder / "model-00001-of-00003.safetensors").read_bytes())
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"][next(iter(table["weight_map"]))] = name
    index.write_text(json.dumps(table))
    refused(folder, r"a shard must be a .safetensors file in the same folder")


def test_shard_that_is_missing(model: RadioModel, tmp_path: Path) -> None:
    folder = LAYOUTS["sharded"][0](model, tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, "names model-00002-of-00003.safetensors, which is not there")


def test_shards_that_disagree_with_the_index(model: RadioModel, tmp_path: Path) -> None:
    folder = LAYOUTS["sharded"][0](model, tmp_path)
    first, second = (folder / f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
    kept = second.read_bytes()
    second.write_bytes(first.read_bytes())
    refused(folder, "which another shard holds too")
    save_file({"other": torch.zeros(1)}, second)
    refused(folder, r"names \d+ tensors that its shards do not hold")
    second.write_bytes(kept)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    refused(folder, "has no weight_map")


def test_unpickler_is_the_restricted_one(
    model: RadioModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = LAYOUTS["hub"][0](model, tmp_path)
    real, seen = torch.load, []
    monkeypatch.setattr(
        torch, "load", lambda *args, **options: seen.append(options) or real(*args, **options)
    )
    RadioModel.from_pretrained(path)
    assert [(o["weights_only"], o["mmap"]) for o in seen] == [(True, True)]
    assert argparse.Namespace not in torch.serialization.get_safe_globals()


def test_pickle_names_are_checked_without_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that torch's unpickler would let through, and that could ask for any amount of memory."""
    buffer = io.BytesIO()
    torch.save({"state_dict": {"x": torch.zeros(1)}, "args": bytearray(8)}, buffer)
    (tmp_path / "x.pt").write_bytes(buffer.getvalue())
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpickled"))
    refused(tmp_path, "asks for (__builtin__|builtins) bytearray")
