"""A tiny model with heads of every kind, as files, and the heads once more, written plainly for one image."""

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoints import args_of, torch_hub
from loading import State, write_pth
from radio_triton import RadioModel
from tiny import tiny_model

# 16 heads of 8 in the attention head
WIDTH, HIDDEN, OUT, EPS = 128, 24, 10, 1e-5
NORMS = ("norm", "norm1", "norm2", "inner.1", "pre_norm.0", "final.0", "mlp.final.0", "blocks.0.0")
# the teacher's name -> (summary head, feature head, upsampling)
KINDS = {"clip": ("v1", "v1", 1), "siglip2-g": ("v2", "attn", 2), "dino_v3_7b": ("v2-pre", "v2-pre", 3)}


def base() -> RadioModel:
    return tiny_model(hidden_size=WIDTH, intermediate_size=64, video_temporal_patch_size=2).eval()


def mlp_shapes(kind: str, output: int, prefix: str = "") -> dict[str, tuple[int, ...]]:
    linears = {"fc1": (HIDDEN, WIDTH)}
    norms = {}
    if kind == "v1":
        linears |= {"inner.0": (HIDDEN, HIDDEN), "fc2": (output, HIDDEN)}
        norms = {"norm": HIDDEN, "inner.1": HIDDEN}
    else:
        linears |= {"final.2": (output, HIDDEN)}
        norms = {"final.0": HIDDEN}
        if kind == "v2-pre":
            linears["blocks.0.2"] = (HIDDEN, HIDDEN)
            norms |= {"pre_norm.0": WIDTH, "blocks.0.0": HIDDEN}
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}{name}.weight": size for name, size in linears.items()}
    shapes |= {f"{prefix}{name}.bias": size[:1] for name, size in linears.items()}
    return shapes | {
        f"{prefix}{name}.{leaf}": (n,) for name, n in norms.items() for leaf in ("weight", "bias")
    }


def head_shapes(kind: str, output: int) -> dict[str, tuple[int, ...]]:
    if kind != "attn":
        return mlp_shapes(kind, output)
    shapes = mlp_shapes("v2", output, "mlp.")
    for i in range(2):
        linears = {"attn.proj": (WIDTH, WIDTH), "mlp.fc1": (4 * WIDTH, WIDTH), "mlp.fc2": (WIDTH, 4 * WIDTH)}
        block: dict[str, tuple[int, ...]] = {f"{name}.weight": size for name, size in linears.items()}
        block |= {f"{name}.bias": size[:1] for name, size in linears.items()}
        block |= {f"{name}.{leaf}": (WIDTH,) for name in ("norm1", "norm2") for leaf in ("weight", "bias")}
        block |= {"attn.qkv.weight": (3 * WIDTH, WIDTH), "ls1.gamma": (WIDTH,), "ls2.gamma": (WIDTH,)}
        shapes |= {f"blocks.{i}.{name}": size for name, size in block.items()}
    return shapes


def head_state(kind: str, output: int, seed: int) -> State:
    """Weights of a size that keeps activations near 1."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in head_shapes(kind, output).items():
        value = torch.randn(shape, generator=generator) / math.sqrt(shape[-1] if len(shape) > 1 else 10)
        is_norm = name.rpartition(".")[0].endswith(NORMS) and name.endswith("weight") and len(shape) == 1
        state[name] = value + 1 if is_norm else value
    return state


def heads_of(name: str) -> dict[str, State]:
    summary, feature, factor = KINDS[name]
    seed = 10 * list(KINDS).index(name)
    return {
        "summary": head_state(summary, OUT, seed),
        "feature": head_state(feature, OUT * factor**2, seed + 1),
    }


def normalizer() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "_feature_normalizer.mean": torch.randn(WIDTH, generator=generator),
        "_feature_normalizer.tx": torch.randn(WIDTH, WIDTH, generator=generator) / math.sqrt(WIDTH),
    }


def hub_state(model: RadioModel, by_name: bool = False) -> State:
    """The tensors of a .pth.tar: heads by the teacher's index, or by its name, and a feature normalizer."""
    state = torch_hub(model.state_dict()) | normalizer()
    groups = {"summary": "_heads", "feature": "_feature_projections"}
    for i, name in enumerate(KINDS):
        for part, head in heads_of(name).items():
            state |= {f"{groups[part]}.{name if by_name else i}.{leaf}": x for leaf, x in head.items()}
    return state


def teachers(**more: Any) -> list[dict[str, Any]]:
    """What the training script was told; `more` goes to siglip2-g's teacher."""
    named = [{"name": name, "type": name, "fd_upsample_factor": KINDS[name][2]} for name in KINDS]
    named[1] |= more
    return named


def write_hub(folder: Path, *, by_name: bool = False, state: State | None = None, **changes: Any) -> Path:
    model = base()
    args = args_of(model.config, **{"teachers": teachers(), "video_temporal_patch_size": 2, **changes})
    return write_pth(folder, hub_state(model, by_name) if state is None else state, args)


def plain_head(kind: str, head: State, x: Tensor) -> Tensor:
    """One head on tokens (N, C) of one image, in float64."""
    w = {name: tensor.double() for name, tensor in head.items()}

    def linear(name: str, y: Tensor) -> Tensor:
        return y @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(()))

    def norm(name: str, y: Tensor) -> Tensor:
        y = y - y.mean(-1, keepdim=True)
        return y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    if kind == "v1":
        x = norm("norm", linear("fc1", x)).relu()
        return linear("fc2", norm("inner.1", linear("inner.0", x)).relu())
    prefix = "mlp." if kind == "attn" else ""
    for i in range(2) if kind == "attn" else ():
        q, k, v = (
            linear(f"blocks.{i}.attn.qkv", norm(f"blocks.{i}.norm1", x)).unflatten(-1, (3, 16, -1)).unbind(1)
        )
        q, k, v = (y.transpose(0, 1) for y in (q, k, v))
        y = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
        x = x + w[f"blocks.{i}.ls1.gamma"] * linear(f"blocks.{i}.attn.proj", y.transpose(0, 1).flatten(1))
        y = F.gelu(linear(f"blocks.{i}.mlp.fc1", norm(f"blocks.{i}.norm2", x)))
        x = x + w[f"blocks.{i}.ls2.gamma"] * linear(f"blocks.{i}.mlp.fc2", y)
    if kind == "v2-pre":
        x = F.gelu(norm("pre_norm.0", x))
    x = linear(f"{prefix}fc1", x)
    if kind == "v2-pre":
        x = x + linear("blocks.0.2", F.gelu(norm("blocks.0.0", x)))
    return linear(f"{prefix}final.2", F.gelu(norm(f"{prefix}final.0", x)))


def plain_map(rows: Tensor, grid: tuple[int, int], factor: int) -> Tensor:
    """Rows (N, factor^2 * C) as a map (C, h * factor, w * factor), an element at a time."""
    h, w = grid
    out = rows.new_empty(rows.shape[1] // factor**2, h * factor, w * factor)
    for i, row in enumerate(rows):
        for j, values in enumerate(row.unflatten(0, (factor**2, -1))):
            out[:, i // w * factor + j // factor, i % w * factor + j % factor] = values
    return out
