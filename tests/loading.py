"""Checkpoints on disk, and loading as several tests check it."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from radio_triton import RadioModel
from radio_triton.checkpoint import CheckpointError

State = dict[str, Tensor]
# the first block of a remote-code file
BLOCK = "radio_model.model.blocks.0."


def same(a: RadioModel, b: RadioModel) -> bool:
    """Whether two models have the same parameters and statistics, bit for bit."""
    return all(torch.equal(x, b.state_dict()[name]) for name, x in a.state_dict().items())


def refused(source: object, match: str, **options: Any) -> str:
    """The message of the CheckpointError that loading gives; it fits on a screen."""
    with pytest.raises(CheckpointError, match=match) as caught:
        RadioModel.from_pretrained(source, **options)
    assert len(str(caught.value)) < 6000
    return str(caught.value)


def raw_pairs(source: Path) -> list[tuple[str, Tensor]]:
    """All (name, tensor) of what the writers above wrote, as a caller of load_weights would have them."""
    if source.name.endswith(".pth.tar"):
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(source, weights_only=True)
        return list(content.get("state_dict_ema", content["state_dict"]).items())
    return [pair for file in sorted(source.glob("*.safetensors")) for pair in load_file(file).items()]


def write_folder(folder: Path, tensors: State, config: dict[str, Any] | None) -> Path:
    """model.safetensors with config.json; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_shards(folder: Path, tensors: State, config: dict[str, Any], count: int = 3) -> Path:
    """Shards with their index, tensors dealt out in turn; returns the folder."""
    write_folder(folder, tensors, config)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    table = {key: names[i % count] for i, key in enumerate(tensors)}
    for name in names:
        save_file({key: tensors[key].contiguous() for key in tensors if table[key] == name}, folder / name)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return folder


def write_pth(folder: Path, tensors: State, args: dict[str, Any], ema: State | None = None) -> Path:
    """A .pth.tar as the training script saves it; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"arch": args["model"], "epoch": 3, "args": argparse.Namespace(**args)}
    if ema is not None:
        content["state_dict_ema"] = ema
    torch.save(content | {"state_dict": tensors}, folder / "checkpoint.pth.tar")
    return folder / "checkpoint.pth.tar"
