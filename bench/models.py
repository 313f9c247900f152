"""The two models that are compared, and how engines embed packed images one by one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import RadioConfig as TransformersConfig
from transformers import RadioModel as TransformersModel

from bench.cases import MIX, Grid
from radio_triton import RadioConfig, RadioModel
from radio_triton.packing import Packing

Call = Callable[[nn.Module], Any]
DEFAULT = {"cuda": "c-radio_v4-h", "cpu": "C-RADIOv2-B"}
TINY = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 128, "position_grid": 8}


def theirs_config(version: str, layers: int | None, attention: str) -> TransformersConfig:
    """Transformers' config of a released version, or of "tiny", with tubelets of two frames."""
    ours = RadioConfig.preset("c-radio_v4-h" if version == "tiny" else version)
    ours = ours.replace(**TINY) if version == "tiny" else ours
    rows, columns = ours.position_grid
    if rows != columns or ours.mlp_norm or ours.final_norm:
        raise ValueError(f"Transformers' RadioModel has no form of {version}: see its RadioConfig")
    config = TransformersConfig(
        hidden_size=ours.hidden_size,
        num_hidden_layers=layers or ours.num_hidden_layers,
        num_attention_heads=ours.num_attention_heads,
        mlp_ratio=ours.intermediate_size / ours.hidden_size,
        patch_size=ours.patch_size,
        max_img_size=rows * ours.patch_size,
        num_cls_tokens=ours.num_cls_tokens,
        num_registers=ours.num_registers,
        summary_idxs=list(ours.summary_idxs or ()),
        video_temporal_patch_size=2,
    )
    config._attn_implementation = attention
    return config


def build(
    version: str, layers: int | None, dtype: torch.dtype, device: str, attention: str = "sdpa"
) -> tuple[RadioModel, nn.Module]:
    """Ours and theirs with the same random weights; theirs multiplies by a LayerScale of ones, as it always does."""
    torch.manual_seed(0)
    config = theirs_config(version, layers, attention)
    theirs = TransformersModel(config).eval().to(dtype)
    ours = RadioModel(RadioConfig.from_hf(config), dtype=dtype).eval()
    ours.load_weights(theirs.state_dict().items())
    return ours.requires_grad_(False).to(device), theirs.requires_grad_(False).to(device)


def patches_of(grids: list[Grid], patch: int, dtype: torch.dtype, device: str) -> Call:
    """A call of either model on packed patches; the sizes stay on the host, where both read them."""
    rows = torch.rand(sum(h * w for h, w in grids), 3 * patch**2, dtype=dtype, device=device)
    sizes = torch.tensor(grids)
    return lambda model: model(rows, image_grid_hw=sizes)


def images_of(count: int, side: int, dtype: torch.dtype, device: str) -> Call:
    x = torch.rand(count, 3, side, side, dtype=dtype, device=device)
    return lambda model: model(x)


def video_of(tubelets: int, side: int, dtype: torch.dtype, device: str) -> Call:
    """Frame-major tubelets, normalised already: theirs cannot normalise six channels."""
    x = torch.randn(tubelets, 6, side, side, dtype=dtype, device=device)
    return lambda model: model(x)


# name -> (images, tokens without prefix, call)
Cases = dict[str, tuple[int, int, Call]]


def cases(size: str, dtype: torch.dtype, device: str) -> Cases:
    """What the encoders are timed on: "gpu", "cpu" or "tiny"."""
    where = (dtype, device)
    if size == "gpu":
        return {
            "dense 16 x 512^2": (16, 16 * 1024, images_of(16, 512, *where)),
            "dense 2 x 1024^2": (2, 2 * 4096, images_of(2, 1024, *where)),
            "packed mix of 32": (32, sum(h * w for h, w in MIX), patches_of(MIX, 16, *where)),
            "dense 1 x 512^2": (1, 1024, images_of(1, 512, *where)),
            "video 64 tubelets 512^2": (64, 64 * 1024, video_of(64, 512, *where)),
        }
    if size == "cpu":
        mix = [(14, 14), (20, 31), (32, 32), (8, 40)]
        return {
            "dense 4 x 224^2": (4, 4 * 196, images_of(4, 224, *where)),
            "dense 2 x 512^2": (2, 2 * 1024, images_of(2, 512, *where)),
            "packed mix of 4": (4, sum(h * w for h, w in mix), patches_of(mix, 16, *where)),
            "video 4 tubelets 224^2": (4, 4 * 196, video_of(4, 224, *where)),
        }
    return {
        "dense 2 x 32^2": (2, 2 * 4, images_of(2, 32, *where)),
        "packed mix of 2": (2, 9, patches_of([(2, 3), (1, 3)], 16, *where)),
        "video 2 tubelets 32^2": (2, 2 * 4, video_of(2, 32, *where)),
    }


@contextmanager
def normalized_outside(*models: nn.Module) -> Iterator[None]:
    """Within, pixels count as normalised already."""
    conditioners = [model.make_preprocessor_external() for model in models]
    yield
    # backwards: a model may be among them twice, once compiled. Theirs puts an identity in its place, ours has a switch
    for model, conditioner in reversed(list(zip(models, conditioners, strict=True))):
        model.input_conditioner = conditioner
        if hasattr(model, "normalizes"):
            model.normalizes = True


def embed_one_by_one(rows: Tensor, prefix: Tensor, table: Tensor, grids: list[Grid]) -> Tensor:
    """How engines embed packed images today, written from the description in DESIGN.md 4: for each image the
    table (Ry, Rx, C) is resized in fp32 to the square of its longer side, cropped, added, and the stream so far
    copied to append to it. rows (P, C) to (T, C)."""
    stream, first = rows.new_empty(0, rows.shape[1]), 0
    for h, w in grids:
        longest = max(h, w)
        plane = table.permute(2, 0, 1)[None].float()
        plane = F.interpolate(plane, size=(longest, longest), mode="bilinear", align_corners=False)
        position = plane.to(rows.dtype)[0, :, :h, :w].flatten(1).T
        stream = torch.cat((stream, prefix, rows[first : first + h * w] + position))
        first += h * w
    return stream


def embed_packed(rows: Tensor, prefix: Tensor, table: Tensor, grids: list[Grid]) -> Tensor:
    """The same by our op, on the device of rows."""
    from radio_triton import ops

    packing = Packing(grids, prefix=len(prefix), device=rows.device)
    return ops.embed_tokens([rows], prefix, table, packing, True, False, rows.dtype)
