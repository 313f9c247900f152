"""What the tests of saved, converted and inspected checkpoints share."""

from pathlib import Path

import torch
from click.testing import CliRunner, Result
from torch import Tensor

from radio_triton import RadioModel
from radio_triton.cli import main
from tiny import pixels, tiny_model


def model_of(dtype: torch.dtype = torch.float32, **fields: object) -> RadioModel:
    """A tiny model whose dummy heads, if any, are zero."""
    model = tiny_model(**fields).eval().requires_grad_(False)
    model._init_weights() if fields.get("num_dummy_heads") else None
    return model.to(dtype)


def tokens(model: RadioModel) -> Tensor:
    """All tokens of an image that is not square and, where the model takes tubelets, of a video."""
    channels, patch = model.config.num_channels, model.config.patch_size
    items = [pixels(channels, 3 * patch, 5 * patch)]
    if model.config.video_projection:
        items.append(pixels(3, channels, 3 * patch, 5 * patch))
    return torch.cat([output.last_hidden_state.flatten(0, -2) for output in model.encode(items)])


def saved(path: Path, **fields: object) -> Path:
    model_of(**fields).save_pretrained(path)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(each) for each in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
