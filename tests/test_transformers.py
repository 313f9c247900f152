"""The model against Transformers' RadioModel, live, on random weights: dense, not square, packed, video; fp32
and bf16."""

import pytest
import torch
from torch import Tensor, nn
from transformers import RadioConfig as TransformersConfig
from transformers import RadioModel as TransformersModel

from helpers import rel_error
from radio_triton import RadioConfig, RadioModel

GEOMETRY = {
    "B": {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "mlp_ratio": 4.0,
        "num_cls_tokens": 4,
        "num_registers": 4,
    },
    "L": {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "mlp_ratio": 4.0,
        "num_cls_tokens": 4,
        "num_registers": 4,
    },
    "SO400M": {"hidden_size": 1152, "num_attention_heads": 16, "mlp_ratio": 4304 / 1152},
    "H": {"hidden_size": 1280, "num_attention_heads": 16, "mlp_ratio": 4.0},
}
SIZES = [(64, 64), (48, 112), (160, 32)]
LIMIT = 1e-5


def pair(name: str, **options: object) -> tuple[RadioModel, nn.Module]:
    """Ours and theirs with the same random weights, of ordinary scale so that every part of the block
    matters."""
    config = TransformersConfig(**GEOMETRY[name], num_hidden_layers=2, max_img_size=256, **options)
    theirs = TransformersModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.05)
        for layer in theirs.encoder.layer:
            for norm in (layer.norm1, layer.norm2):
                norm.weight.add_(1)
            for scale in (layer.layer_scale1, layer.layer_scale2):
                scale.lambda1.add_(0.5)
    ours = RadioModel(RadioConfig.from_hf(config).replace(layer_scale=True)).eval()
    ours.load_weights(theirs.state_dict().items())
    return ours, theirs


def patches(images: list[Tensor], patch: int = 16) -> Tensor:
    """The packed patches (P, 3 * p^2) that Transformers takes."""
    rows = [
        x.unfold(1, patch, patch).unfold(2, patch, patch).permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)
        for x in images
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("name", GEOMETRY)
@torch.no_grad()
def test_dense(name: str) -> None:
    ours, theirs = pair(name)
    for height, width in SIZES:
        x = torch.rand(2, 3, height, width)
        got, want = ours(x), theirs(x)
        assert rel_error(got.summary, want.summary) <= LIMIT
        assert rel_error(got.features, want.features) <= LIMIT
        assert rel_error(got.last_hidden_state, want.last_hidden_state) <= LIMIT


@pytest.mark.parametrize("name", GEOMETRY)
@torch.no_grad()
def test_packed(name: str) -> None:
    ours, theirs = pair(name)
    images = [torch.rand(3, height, width) for height, width in SIZES]
    grids = torch.tensor([(height // 16, width // 16) for height, width in SIZES])
    got, want = (model(patches(images), image_grid_hw=grids) for model in (ours, theirs))
    assert rel_error(got.summary, want.summary) <= LIMIT
    assert rel_error(got.features, want.features) <= LIMIT
    assert rel_error(got.last_hidden_state, want.last_hidden_state) <= LIMIT
    listed = ours(images)
    assert torch.equal(listed.features, got.features)


@torch.no_grad()
def test_stacked_video() -> None:
    ours, theirs = pair("B", video_temporal_patch_size=2)
    # theirs cannot normalise six channels: both get pixels as they are
    ours.make_preprocessor_external()
    theirs.make_preprocessor_external()
    x = torch.randn(3, 6, 48, 112)
    got, want = ours(x), theirs(x)
    assert rel_error(got.summary, want.summary) <= LIMIT
    assert rel_error(got.features, want.features) <= LIMIT
    frames = x.reshape(6, 3, 48, 112)
    assert torch.equal(ours(frames, num_frames=6).features, got.features)


@torch.no_grad()
def test_swiglu() -> None:
    ours, theirs = pair("B", use_swiglu_ffn=True)
    x = torch.rand(1, 3, 64, 96)
    assert rel_error(ours(x).features, theirs(x).features) <= LIMIT


@pytest.mark.parametrize("name", GEOMETRY)
@torch.no_grad()
def test_bf16_is_not_further_from_the_truth_than_transformers(name: str) -> None:
    ours, theirs = pair(name)
    x = [torch.rand(2, 3, height, width) for height, width in SIZES]
    x = [image.bfloat16().float() for image in x]
    ours.to(torch.bfloat16)
    theirs.to(torch.bfloat16)
    truth = RadioModel(ours.config, dtype=torch.float64).eval()
    truth.load_state_dict(ours.state_dict())
    want = torch.cat([truth(image.double()).last_hidden_state.flatten(0, 1) for image in x])
    # theirs rounds the pixel statistics and the normalised pixels to bf16; feed both the same normalised
    # pixels
    errors = []
    for model in (ours, theirs):
        got = torch.cat([model(image.bfloat16()).last_hidden_state.flatten(0, 1) for image in x])
        errors.append(rel_error(got, want))
    assert errors[0] <= errors[1], errors
