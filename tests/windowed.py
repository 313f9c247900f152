"""A plain reading of ViTDet, to compare with: one image, one block after the other, masks instead of packings."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from radio_triton import RadioModel
from radio_triton.windows import windowed_blocks


def blocks_of(model: RadioModel, image: Tensor) -> list[Tensor]:
    """The stream (L, C) of one image (3, H, W) after each block."""
    config = model.config
    size, prefix = config.vitdet_window_size, config.num_prefix_tokens
    h, w = (side // config.patch_size for side in image.shape[1:])
    y, x_ = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    window = (y // size * (w + 1) + x_ // size).flatten()
    same = window[:, None] == window[None, :]
    x, _, _ = model._embed(model_inputs(model, image))
    streams = []
    for layer, windowed in zip(model.encoder.layer, windowed_blocks(config), strict=True):
        x = torch.cat((x[:prefix], block(layer, x[prefix:], same))) if windowed else block(layer, x, None)
        streams.append(x)
    return streams


def model_inputs(model: RadioModel, image: Tensor):
    from radio_triton import inputs

    return inputs.read_images(model.config, [image])


def block(layer: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    attention = layer.attention
    q, k, v = attention.qkv(layer.norm1(x)).unflatten(-1, (3, -1, attention.head_dim)).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1).flatten(1)
    x = x + attention.proj(out)
    return x + layer.mlp.fc2(F.gelu(layer.mlp.fc1(layer.norm2(x))))
