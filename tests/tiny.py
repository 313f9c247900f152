"""Tiny models with random weights, and the same model written plainly, an item at a time."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from radio_triton import RadioConfig, RadioModel

PATCH, WIDTH = 4, 32
# two float64 evaluations of one formula differ by a few hundred roundings at most
FP64 = 1000 * torch.finfo(torch.float64).eps
# every branch of the tower is in one of them
VARIANTS = {
    "scaled": {"layer_scale": True, "layerscale_value": 0.5},
    "qknorm": {
        "qk_normalization": True,
        "num_dummy_heads": 2,
        "layer_scale": True,
        "video_temporal_patch_size": 2,
    },
    "swiglu": {"use_swiglu_ffn": True, "final_norm": True, "cpe": False, "video_temporal_patch_size": 4},
    "mlpnorm": {"mlp_norm": True, "patch_bias": True, "qkv_bias": False, "position_grid": (6, 9)},
    "corners": {
        "pos_align_corners": True,
        "summary_idxs": None,
        "video_temporal_patch_size": 2,
        "patch_bias": True,
    },
}


def tiny_config(**overrides: object) -> RadioConfig:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return RadioConfig(
        **{**sizes, "patch_size": PATCH, "position_grid": (8, 8), "num_registers": 2, **overrides}
    )


def tiny_model(*, dtype: torch.dtype = torch.float32, **overrides: object) -> RadioModel:
    """Weights of the size that keeps activations near 1, so that every part matters."""
    model = RadioModel(tiny_config(**overrides))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(value + 1 if "norm" in name and name.endswith("weight") else value)
    return model.to(dtype)


def frozen(name: str = "scaled", dtype: torch.dtype = torch.float32, **overrides: object) -> RadioModel:
    """A variant that needs no gradient, and so works in place."""
    return tiny_model(**{**VARIANTS[name], **overrides}, dtype=dtype).requires_grad_(False)


def pixels(*shape: int, seed: int = 0) -> Tensor:
    """Pixels in [0, 1), the same for the same seed."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def plain_tokens(model: RadioModel, item: Tensor) -> Tensor:
    """All tokens (t, L, C) of an image (c, H, W), t = 1, or of a video (F, c, H, W)."""
    config, weights = model.config, dict(model.named_parameters())
    x = _plain_embed(model, weights, item)
    x = torch.cat((weights["embeddings.cls_register_token"].expand(len(x), -1, -1), x), dim=1)
    for i in range(config.num_hidden_layers):
        layer = {
            name.split(".", 3)[3]: w for name, w in weights.items() if name.startswith(f"encoder.layer.{i}.")
        }
        normed = _layer_norm(x, layer["norm1.weight"], layer["norm1.bias"], config.layer_norm_eps)
        x = x + layer.get("layer_scale1.lambda1", 1) * _plain_attention(config, layer, normed)
        normed = _layer_norm(x, layer["norm2.weight"], layer["norm2.bias"], config.layer_norm_eps)
        x = x + layer.get("layer_scale2.lambda1", 1) * _plain_mlp(config, layer, normed)
    if config.final_norm:
        x = _layer_norm(
            x, weights["encoder.norm.weight"], weights["encoder.norm.bias"], config.layer_norm_eps
        )
    return x


def _plain_embed(model: RadioModel, weights: dict[str, Tensor], item: Tensor) -> Tensor:
    config, conditioner = model.config, model.input_conditioner
    frames = item.to(model.dtype) if item.ndim == 4 else item[None].to(model.dtype)
    tubelet = config.video_temporal_patch_size if item.ndim == 4 else 1
    name = "embeddings.video_patch_projection" if tubelet > 1 else "embeddings.patch_projection"
    frames = (frames - conditioner.norm_mean) / conditioner.norm_std
    frames = torch.cat((frames, *[frames[-1:]] * (-len(frames) % tubelet)))
    # a projection of patches is a convolution with stride p
    weight = weights[f"{name}.weight"].unflatten(1, (-1, config.patch_size, config.patch_size))
    frames = frames.reshape(-1, weight.shape[1], *frames.shape[2:]).to(model.dtype)
    x = F.conv2d(frames, weight, weights.get(f"{name}.bias"), stride=config.patch_size)
    table = weights["embeddings.position_embedding"].mT.unflatten(2, config.position_grid)
    return (x + _plain_positions(config, table, *x.shape[2:])).flatten(2).mT


def _plain_positions(config: RadioConfig, table: Tensor, h: int, w: int) -> Tensor:
    if (h, w) == config.position_grid:
        return table
    if not config.cpe:
        table = table[:, :, :h, :w]
    size = (max(h, w), max(h, w)) if config.cpe else (h, w)
    return F.interpolate(table, size, mode="bilinear", align_corners=config.pos_align_corners)[:, :, :h, :w]


def _plain_attention(config: RadioConfig, layer: dict[str, Tensor], x: Tensor) -> Tensor:
    q, k, v = F.linear(x, layer["attention.qkv.weight"], layer.get("attention.qkv.bias")).chunk(3, dim=-1)
    if config.qk_normalization:
        real = config.hidden_size
        q, k = (
            y / (y[..., :real].square().mean(-1, keepdim=True) + config.layer_norm_eps).sqrt() for y in (q, k)
        )
        q, k = q * layer["attention.q_norm.weight"], k * layer["attention.k_norm.weight"]
    q, k, v = (y.unflatten(-1, (-1, config.head_dim)).transpose(1, 2) for y in (q, k, v))
    out = (q @ k.mT / math.sqrt(config.head_dim)).softmax(-1) @ v
    return F.linear(
        out.transpose(1, 2).flatten(2), layer["attention.proj.weight"], layer["attention.proj.bias"]
    )


def _plain_mlp(config: RadioConfig, layer: dict[str, Tensor], x: Tensor) -> Tensor:
    if config.use_swiglu_ffn:
        gate, up = F.linear(x, layer["mlp.gate_up_proj.weight"], layer["mlp.gate_up_proj.bias"]).chunk(
            2, dim=-1
        )
        x, last = gate / (1 + (-gate).exp()) * up, "mlp.down_proj"
    else:
        x = F.linear(x, layer["mlp.fc1.weight"], layer["mlp.fc1.bias"])
        x, last = x / 2 * (1 + (x / math.sqrt(2)).erf()), "mlp.fc2"
    if config.mlp_norm:
        x = _layer_norm(x, layer["mlp.norm.weight"], layer["mlp.norm.bias"], config.mlp_norm_eps)
    return F.linear(x, layer[f"{last}.weight"], layer[f"{last}.bias"])


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias
