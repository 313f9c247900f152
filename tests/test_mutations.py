"""Valid checkpoints with a few bytes or values changed, tensor bytes apart: an equal model or a named error, soon
and in little memory.
"""

import argparse
import json
import resource
import shutil
import struct
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from checkpoints import LAYOUTS, args_of, gelu_model, state_of, torch_hub
from radio_triton import RadioModel

# facts of which the tensors say nothing: a config that says something else of them is another valid model
ONLY_STATED = {
    "num_attention_heads", "layer_norm_eps", "mlp_norm_eps", "layerscale_value", "scaled_layer_norm", "hidden_act",
    "cpe", "pos_align_corners", "position_grid", "num_cls_tokens", "num_registers", "separate_video_embedder",
    "video_temporal_patch_size",
}  # fmt: skip
STATISTICS = {"norm_mean", "norm_std", "summary_idxs"}
# what an example may take, beside what the process has
SECONDS, BYTES = 10, 1 << 30
LONGEST_MESSAGE = 6000

mutations = settings(
    max_examples=100,
    deadline=timedelta(seconds=SECONDS),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
JUNK = st.one_of(
    st.sampled_from(
        [None, True, False, 0, 1, -1, 2, 3, 10**20, -(10**20), 0.5, 1e308, float("nan"), float("inf")]
    ),
    st.sampled_from(["", "x", "2", "x" * 20_000, "float16", "float8_e4m3fn", "__class__", "radio", "gelu"]),
    st.sampled_from([[], [0], [1, 2], ["a"], [[]], {}, {"a": 1}, {"args": {}}, [{}] * 50, [10**20] * 3]),
    st.integers(-(2**70), 2**70),
    st.lists(st.integers(-3, 70), max_size=4),
    st.text(max_size=8),
)
EDITS = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True), st.integers(0, 255), st.sampled_from(["set", "insert", "delete"])
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def model() -> RadioModel:
    return gelu_model()


@pytest.fixture(scope="module")
def sources(model: RadioModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with a checkpoint for each layout."""
    root = tmp_path_factory.mktemp("valid")
    for name in ("remote", "native", "hub", "sharded", "sharded-vlm"):
        LAYOUTS[name][0](model, root / name)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture
def copy(sources: dict[str, Path], tmp_path: Path) -> Any:
    """A fresh copy of one of them."""

    def make(name: str) -> Path:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        return shutil.copytree(sources[name], tmp_path / "copy")

    return make


@contextmanager
def bounded() -> Iterator[None]:
    """No more address space than a bound above what the process has."""
    if not sys.platform.startswith("linux"):
        yield
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def assert_equal_or_refused(source: Path, model: RadioModel, stated: bool = False) -> None:
    """`stated`: what the checkpoint states may have changed, and with it facts that tensors do not show."""
    try:
        with bounded():
            loaded = RadioModel.from_pretrained(source, dtype=torch.float32)
    except (ValueError, OSError) as error:
        assert 0 < len(str(error)) < LONGEST_MESSAGE, f"{len(str(error))} characters: {str(error)[:500]}"
        return
    open_fields = (ONLY_STATED if stated else set()) | (STATISTICS if loaded.load_report.defaulted else set())
    mine, other = loaded.config.to_dict(), model.config.to_dict()
    assert {name for name in mine if mine[name] != other[name]} <= open_fields
    want = dict(model.named_parameters())
    assert {name for name, _ in loaded.named_parameters()} == set(want)
    for name, parameter in loaded.named_parameters():
        scaled = loaded.config.scaled_layer_norm and ".norm" in name
        assert scaled or torch.equal(parameter, want[name]), name


def edit(content: bytes, edits: list[tuple[float, int, str]]) -> bytes:
    """Set, insert or delete single bytes, each at a part of the length."""
    changed = bytearray(content)
    for part, byte, how in edits:
        at = int(part * len(changed))
        if how == "insert":
            changed.insert(at, byte)
        elif how == "delete":
            del changed[at : at + 1]
        elif changed:
            changed[at] = byte
    return bytes(changed)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in a JSON value but itself."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for key, value in items for found in [(*path, key), *places(value, (*path, key))]]


def change(tree: Any, data: DataObject, junk: st.SearchStrategy[Any] = JUNK) -> None:
    """Replace, remove or rename one thing in a JSON value."""
    *parents, key = data.draw(st.sampled_from(places(tree)), label="place")
    for parent in parents:
        tree = tree[parent]
    how = data.draw(st.sampled_from(["replace", "remove", "rename"]), label="how")
    if how == "replace":
        # a later change may go into it
        tree[key] = deepcopy(data.draw(junk, label="value"))
    elif how == "remove" or isinstance(tree, list):
        del tree[key]
    else:
        others = st.one_of(
            st.text(max_size=12), st.sampled_from([f"{key}x", f"module.{key}", *map(str, tree)])
        )
        tree[data.draw(others, label="name")] = tree.pop(key)


@mutations
@given(edits=EDITS, cut=st.none() | st.floats(0, 1))
def test_bytes_of_a_safetensors_header(edits: Any, cut: float | None, model: RadioModel, copy: Any) -> None:
    file = copy("remote") / "model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    content = edit(content[:end], edits) + content[end:]
    file.write_bytes(content if cut is None else content[: int(cut * len(content))])
    assert_equal_or_refused(file.parent, model)


@mutations
@given(data=st.data())
def test_values_of_a_safetensors_header(data: DataObject, model: RadioModel, copy: Any) -> None:
    file = copy(data.draw(st.sampled_from(["remote", "native"]))) / "model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    kinds = st.sampled_from(["F16", "BF16", "F64", "I32", "U32", "F8_E4M3", "C64", "F4", "f32"])
    change(header, data, JUNK | kinds)
    head = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + content[end:])
    assert_equal_or_refused(file.parent, model)


@mutations
@given(data=st.data())
def test_values_of_a_config(data: DataObject, model: RadioModel, copy: Any) -> None:
    file = copy(data.draw(st.sampled_from(["remote", "native", "sharded-vlm"]))) / "config.json"
    config = json.loads(file.read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        if places(config):
            change(config, data)
    file.write_text(json.dumps(config))
    assert_equal_or_refused(file.parent, model, stated=True)


@mutations
@given(edits=EDITS, name=st.sampled_from(["remote", "native"]))
def test_bytes_of_a_config(edits: Any, name: str, model: RadioModel, copy: Any) -> None:
    file = copy(name) / "config.json"
    file.write_bytes(edit(file.read_bytes(), edits))
    assert_equal_or_refused(file.parent, model, stated=True)


@mutations
@given(data=st.data(), edits=EDITS)
def test_index_of_shards(data: DataObject, edits: Any, model: RadioModel, copy: Any) -> None:
    file = copy(data.draw(st.sampled_from(["sharded", "sharded-vlm"]))) / "model.safetensors.index.json"
    content = file.read_bytes()
    if data.draw(st.booleans(), label="bytes"):
        file.write_bytes(edit(content, edits))
    else:
        index = json.loads(content)
        names = st.sampled_from(
            ["../x.safetensors", "config.json", "/dev/zero", "model-00001-of-00003.safetensors"]
        )
        change(index, data, JUNK | names)
        file.write_text(json.dumps(index))
    assert_equal_or_refused(file.parent, model)


def spans(path: Path) -> dict[str, list[tuple[int, int]]]:
    """Where in a zip file its pickle, the header of each entry, and the directory are."""
    with zipfile.ZipFile(path) as archive:
        entries, start = archive.infolist(), archive.start_dir
    content, headers = path.read_bytes(), []
    for entry in entries:
        name, extra = struct.unpack_from("<HH", content, entry.header_offset + 26)
        headers.append((entry.header_offset, entry.header_offset + 30 + name + extra))
    # torch writes it first
    begin = headers[0][1]
    return {
        "pickle": [(begin, begin + entries[0].file_size)],
        "header": headers,
        "directory": [(start, len(content))],
    }


@mutations
@given(data=st.data(), edits=EDITS, cut=st.none() | st.floats(0, 1))
def test_bytes_of_a_pickled_checkpoint(
    data: DataObject, edits: Any, cut: float | None, model: RadioModel, copy: Any
) -> None:
    file = copy("hub") / "checkpoint.pth.tar"
    content = file.read_bytes()
    parts = spans(file)
    begin, end = data.draw(st.sampled_from(parts[data.draw(st.sampled_from(sorted(parts)))]), label="span")
    content = content[:begin] + edit(content[begin:end], edits) + content[end:]
    file.write_bytes(content if cut is None else content[: int(cut * len(content))])
    assert_equal_or_refused(file, model)


VALUES = JUNK | st.sampled_from(
    [
        torch.float16,
        torch.zeros(3),
        torch.zeros(0),
        torch.zeros(2, dtype=torch.int8),
        torch.ones(2, 2).T,
        (1,),
        1j,
    ]
)


@mutations
@given(data=st.data())
def test_values_of_a_pickled_checkpoint(data: DataObject, model: RadioModel, tmp_path: Path) -> None:
    args = args_of(model.config)
    content: dict[str, Any] = {
        "arch": "x",
        "epoch": 3,
        "args": args,
        "state_dict": torch_hub(state_of(model)),
    }
    change(content, data, VALUES)
    if isinstance(content.get("args"), dict) and data.draw(st.booleans(), label="Namespace"):
        content["args"] = argparse.Namespace(**content["args"])
    torch.save(content, tmp_path / "x.pth.tar")
    assert_equal_or_refused(tmp_path / "x.pth.tar", model, stated=True)
