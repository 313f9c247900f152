"""The built-in model: its formula computes what it says, and so it segments."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from radio_triton import demo_model as demo
from radio_triton.model import RadioModel

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module", params=DTYPES, ids=["fp32", "bf16"])
def model(request: pytest.FixtureRequest) -> RadioModel:
    return demo.demo_model(dtype=request.param)


@pytest.fixture(scope="module")
def fp32_model() -> RadioModel:
    return demo.demo_model()


def noisy(colours: Tensor, labels: Tensor) -> Tensor:
    """A picture (1, 3, 8 h, 8 w): every patch has the colour (n, 3) of its label (h, w), and some noise."""
    pixels = colours[labels].permute(2, 0, 1).repeat_interleave(8, dim=1).repeat_interleave(8, dim=2)
    generator = torch.Generator().manual_seed(0)
    return (pixels + 0.02 * torch.randn(pixels.shape, generator=generator)).clamp(0, 1)[None]


def colours_picture() -> tuple[Tensor, Tensor]:
    """Four flat regions, one of them in the middle of another, 12 x 20 patches."""
    labels = torch.zeros(12, 20, dtype=torch.int64)
    labels[:5, 8:], labels[5:, 12:], labels[4:10, 3:7] = 1, 2, 3
    colours = torch.tensor([[0.5, 0.5, 0.5], [0.8, 0.3, 0.2], [0.2, 0.3, 0.7], [0.9, 0.9, 0.8]])
    return noisy(colours, labels), labels


def place_picture() -> tuple[Tensor, Tensor]:
    """Two regions of one colour at the ends of a tall picture, 30 x 8 patches."""
    labels = torch.tensor([0, 1, 2]).repeat_interleave(10)[:, None].expand(30, 8)
    return noisy(torch.tensor([[0.4, 0.5, 0.4], [0.9, 0.6, 0.3], [0.4, 0.5, 0.4]]), labels), labels


def texture_picture() -> tuple[Tensor, Tensor]:
    """Two regions of one mean colour, the right one striped, out of step between patches, 10 x 16."""
    labels = (torch.arange(16) >= 8).long().expand(10, 16)
    pixels = noisy(torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]), labels)
    phase = (torch.arange(10)[:, None] + torch.arange(16)) % 2 * math.pi
    x = torch.arange(8).repeat(16) + 0.5
    stripes = torch.cos(2 * math.pi * x / 8 + phase.repeat_interleave(8, dim=1))
    stripes = (0.4 * stripes * labels.repeat_interleave(8, dim=1)).repeat_interleave(8, dim=0)
    return (pixels + stripes).clamp(0, 1), labels


PICTURES = {"colours": colours_picture, "place": place_picture, "texture": texture_picture}


def shuffled(picture: Tensor) -> Tensor:
    """The same patches in other places."""
    patches = F.unfold(picture, 8, stride=8)
    order = torch.randperm(patches.shape[-1], generator=torch.Generator().manual_seed(0))
    return F.fold(patches[..., order], picture.shape[-2:], 8, stride=8)


def segments(features: Tensor, labels: Tensor) -> bool:
    """Whether any two patches (N, C) of one label are closer than any two patches of different labels."""
    distance = torch.cdist(features.double(), features.double())
    same = labels.flatten()[:, None] == labels.flatten()
    return bool(distance[same].max() < distance[~same].min())


def record(model: RadioModel, picture: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The stream (T, C) after the embedding and after every block, and the qkv (T, 3, C) of every block."""
    streams, qkvs = [], []
    layers = model.encoder.layer
    # the stream is overwritten in place by the next block
    hooks = [model.embeddings.register_forward_hook(lambda *a: streams.append(a[-1].clone()))]
    for layer in layers:
        qkv = layer.attention.qkv
        hooks.append(layer.register_forward_hook(lambda *a: streams.append(a[-1][0].clone())))
        hooks.append(qkv.register_forward_hook(lambda *a: qkvs.append(a[-1].unflatten(-1, (3, -1)))))
    try:
        model(picture.to(next(model.parameters()).dtype))
    finally:
        for hook in hooks:
            hook.remove()
    assert len(streams) == 1 + demo.BLOCKS
    return streams, qkvs


@pytest.mark.parametrize("name", PICTURES)
def test_patches_of_one_region_end_closer_to_each_other_than_to_another_region(model: RadioModel, name: str):
    picture, labels = PICTURES[name]()
    picture = picture.to(next(model.parameters()).dtype)
    assert segments(model(picture).features[0], labels)
    assert not segments(model(shuffled(picture)).features[0], labels)


def test_the_blocks_are_mean_shift_on_a_sphere(fp32_model: RadioModel):
    streams, _ = record(fp32_model, colours_picture()[0])
    f = streams[1][4:, :32].double()  # after block 0, patches only
    for stream in streams[2:]:
        on_sphere = demo.K * F.normalize(f, dim=-1)
        kernel = torch.exp(-torch.cdist(on_sphere, on_sphere).square() / 2)
        f = f + demo.STEP * (kernel @ on_sphere) / kernel.sum(dim=-1, keepdim=True)
        f = f - demo.STEP * demo.K * F.normalize(f, dim=-1)
        torch.testing.assert_close(stream[4:], torch.cat([f, -f], dim=-1).float(), rtol=0, atol=2e-3)


def test_block_0_turns_signed_texture_into_its_energy(fp32_model: RadioModel):
    streams, _ = record(fp32_model, texture_picture()[0])
    before, after = (stream[4:, :32].double() for stream in streams[:2])
    on_sphere = demo.K * F.normalize(before, dim=-1)
    expected = before.clone()
    expected[:, demo.TEXTURE] -= on_sphere[:, demo.TEXTURE]
    expected[:, demo.ENERGY] += on_sphere[:, demo.TEXTURE].abs().sum(dim=-1)
    torch.testing.assert_close(after[:, demo.TEXTURE], expected[:, demo.TEXTURE], rtol=0, atol=1e-4)
    assert (after[:, demo.ENERGY] - expected[:, demo.ENERGY]).abs().max() < 0.5
    left, right = after[:, demo.ENERGY].view(10, 2, 8).mean(dim=(0, 2))
    assert right > 4 * left


@pytest.mark.parametrize(("h", "w"), [(64, 64), (5, 5), (7, 30), (12, 3), (1, 1)])
def test_every_patch_knows_its_place(fp32_model: RadioModel, h: int, w: int):
    grey = torch.tensor(fp32_model.config.norm_mean)[:, None, None].expand(1, 3, 8 * h, 8 * w)
    patches = record(fp32_model, grey)[0][0][4:, :32]
    rows, columns = torch.meshgrid(torch.arange(h) + 0.5, torch.arange(w) + 0.5, indexing="ij")
    places = (torch.stack([rows, columns], dim=-1) / max(h, w) - 0.5) / demo.PLACE_UNIT
    expected = torch.zeros(h * w, 32)
    expected[:, demo.PLACE], expected[:, demo.CONSTANT] = places.flatten(0, 1), demo.K
    torch.testing.assert_close(patches, expected, rtol=0, atol=1e-5)


def test_colour_slots_hold_opponent_colours_and_a_flat_patch_has_no_texture(fp32_model: RadioModel):
    red, green, blue = colour = torch.tensor([0.7, 0.2, 0.4])
    patch = record(fp32_model, colour[:, None, None].expand(1, 3, 8, 8))[0][0][4, :32]
    mean = torch.tensor(fp32_model.config.norm_mean)
    opponents = torch.stack([colour.mean() - mean.mean(), red - green, (red + green) / 2 - blue])
    opponents[1:] -= torch.stack([mean[0] - mean[1], (mean[0] + mean[1]) / 2 - mean[2]])
    torch.testing.assert_close(patch[demo.COLOUR], opponents / demo.COLOUR_UNIT)
    assert patch[demo.TEXTURE].abs().max() < 1e-4


def test_the_texture_filters_are_orthogonal_and_blind_to_flat_patches():
    filters = demo.cosines().flatten(1)
    torch.testing.assert_close(filters @ filters.T, torch.eye(14) / 64, rtol=0, atol=1e-7)
    torch.testing.assert_close(filters.sum(dim=1), torch.zeros(14), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", PICTURES)
def test_the_scale_stays_at_k(model: RadioModel, name: str):
    for stream in record(model, PICTURES[name]()[0])[0][1:]:
        norms = stream[4:, :32].float().norm(dim=-1)
        assert norms.min() > 0.85 * demo.K
        assert norms.max() < 1.25 * demo.K


@pytest.mark.parametrize("name", PICTURES)
def test_bf16_is_near_fp32(fp32_model: RadioModel, name: str):
    picture = PICTURES[name]()[0]
    expected = fp32_model(picture).features
    features = demo.demo_model(dtype=torch.bfloat16)(picture.bfloat16()).features
    assert features.dtype == torch.bfloat16
    assert features.isfinite().all()
    assert (features.float() - expected).norm() < 0.03 * expected.norm()


def test_fp16_does_not_overflow():
    half = demo.demo_model(dtype=torch.float16)
    streams, qkvs = record(half, texture_picture()[0])
    assert all(x.isfinite().all() for x in [*streams, *qkvs])


def test_the_mean_of_every_token_is_0(fp32_model: RadioModel):
    for stream in record(fp32_model, colours_picture()[0])[0]:
        torch.testing.assert_close(stream[:, 32:], -stream[:, :32], rtol=0, atol=1e-4)


def test_gelu_makes_any_linear_map_and_nearly_the_absolute_value():
    a = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    torch.testing.assert_close(F.gelu(a) - F.gelu(-a), a, rtol=0, atol=1e-15)
    n = torch.randn(50, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    take, odd, even = torch.randn(3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    fc1, fc2 = (x.double() for x in demo.mlp(take, odd, 0 * even))
    torch.testing.assert_close(F.gelu(n @ fc1.T) @ fc2.T, n @ take.T @ odd.T, rtol=0, atol=1e-4)
    fc1, fc2 = (x.double() for x in demo.mlp(torch.eye(64), 0 * odd, torch.eye(64)))
    assert (F.gelu(n @ fc1.T) @ fc2.T - n.abs()).abs().max() < 0.35 / 16


@pytest.mark.parametrize("name", PICTURES)
def test_patches_do_not_attend_to_prefix_tokens(model: RadioModel, name: str):
    _, qkvs = record(model, PICTURES[name]()[0])
    for qkv in qkvs[1:]:  # block 0 returns 0 wherever it looks
        q, k, _ = qkv.float().unbind(1)
        attention = torch.softmax(q @ k.T / math.sqrt(64), dim=-1)
        assert attention[4:, :4].sum(dim=-1).max() < 1e-3


def test_class_tokens_end_among_the_patches_of_their_own_picture(fp32_model: RadioModel):
    colours = torch.tensor([[0.7, 0.4, 0.3], [0.3, 0.4, 0.6]])
    summary, features = fp32_model(colours[:, :, None, None].expand(2, 3, 48, 64))
    classes = summary.view(2, 2, 64)
    for own, other in ((0, 1), (1, 0)):
        near, far = (torch.cdist(classes[own], features[i]).min() for i in (own, other))
        assert near < 0.25 * far


def test_the_weights_of_the_blocks_are_exact_in_half_precision():
    for name, weight in demo.demo_weights().items():
        if name.startswith("encoder"):
            assert torch.equal(weight, weight.bfloat16().float()), name
            assert torch.equal(weight, weight.half().float()), name


def test_it_has_625_k_parameters_and_they_are_frozen(fp32_model: RadioModel):
    assert sum(p.numel() for p in fp32_model.parameters()) == 624_576
    assert not any(p.requires_grad for p in fp32_model.parameters())
    assert not fp32_model.training


def test_two_builds_are_equal_and_draw_no_random_numbers(fp32_model: RadioModel):
    random_state = torch.get_rng_state()
    again = demo.demo_model().state_dict()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert again.keys() == fp32_model.state_dict().keys() == demo.demo_weights().keys()
    assert all(torch.equal(again[name], value) for name, value in fp32_model.state_dict().items())
    picture, _ = colours_picture()
    assert torch.equal(fp32_model(picture).features, demo.demo_model()(picture).features)
