"""Gradients: those of the plain model, through every call form, and whatever is frozen."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from helpers import rel_error
from radio_triton import RadioModel
from tiny import FP64, VARIANTS, frozen, pixels, plain_tokens, tiny_model

IMAGES = [pixels(3, 8, 12), pixels(3, 16, 4, seed=1), pixels(3, 8, 12, seed=2)]
VIDEO = pixels(5, 3, 8, 12, seed=3)

# the items that the call encodes, and what the call gives for each
FORMS: dict[str, tuple[list[Tensor], Callable[[RadioModel, list[Tensor]], list[Tensor]]]] = {
    "dense": ([IMAGES[0], IMAGES[2]], lambda m, x: [*m(torch.stack(x)).last_hidden_state]),
    "packed": (IMAGES, lambda m, x: [one.last_hidden_state for one in m(x).split()]),
    "video": ([VIDEO], lambda m, x: [m(x[0], num_frames=5).last_hidden_state]),
    "mixed": ([IMAGES[1], VIDEO, IMAGES[0]], lambda m, x: [one.last_hidden_state for one in m.encode(x)]),
}


def scalar(outputs: list[Tensor]) -> Tensor:
    """A sum in which every element has another weight, the same for the same shapes."""
    return sum((x * torch.linspace(-1, 1, x.numel()).to(x).view(x.shape)).sum() for x in outputs)


def gradients(model: RadioModel, call: Callable[[RadioModel], list[Tensor]]) -> dict[str, Tensor | None]:
    model.zero_grad()
    scalar(call(model)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_are_those_of_the_plain_model(name: str, form: str) -> None:
    items, call = FORMS[form]
    model = tiny_model(**VARIANTS[name], dtype=torch.float64)
    ours, theirs = ([x.double().requires_grad_() for x in items] for _ in range(2))
    got = gradients(model, lambda m: call(m, ours))
    want = gradients(model, lambda m: [out for x in theirs for out in [plain_tokens(m, x)]])
    unused = {key for key, value in want.items() if value is None}
    videos = model.config.video_temporal_patch_size > 1
    assert {key.split(".")[1] for key in unused} == {
        "dense": {"video_patch_projection"} if videos else set(),
        "packed": {"video_patch_projection"} if videos else set(),
        "video": {"patch_projection"} if videos else set(),
        "mixed": set(),
    }[form]
    for key, value in want.items():
        if value is None:
            assert got[key] is None
        # the gradient of k's bias is zero in exact arithmetic: a softmax does not see it
        elif key.endswith("qkv.bias"):
            assert float((got[key] - value).norm() / got[key].norm()) < FP64
        else:
            assert rel_error(got[key], value) < FP64, key
    for mine, plain in zip(ours, theirs, strict=True):
        assert rel_error(mine.grad, plain.grad) < FP64


@pytest.mark.parametrize("name", ["scaled", "qknorm"])
def test_gradients_are_finite_differences(name: str) -> None:
    model, x = tiny_model(**VARIANTS[name], dtype=torch.float64), [IMAGES[1].double(), VIDEO[:3].double()]

    def loss() -> Tensor:
        return scalar([one.features for one in model.encode(x)])

    loss().backward()
    step = 1e-5
    for key, parameter in model.named_parameters():
        direction = torch.randn_like(parameter)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * step * direction
                values.append(loss())
                parameter -= sign * step * direction
        slope = float(values[0] - values[1]) / (2 * step)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        # central differences: an error of step^2, and the rounding of the loss divided by the step
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-5, abs=1e-5), key


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stream", [None, torch.float32])
def test_in_place_is_functional_bit_for_bit(
    name: str, dtype: torch.dtype, stream: torch.dtype | None
) -> None:
    model = tiny_model(**VARIANTS[name], dtype=dtype)
    model.residual_dtype = stream
    items = [*IMAGES, VIDEO]
    wanted = [one.last_hidden_state for one in model.encode(items)]
    assert all(x.requires_grad for x in wanted)
    with torch.no_grad():
        quiet = model.encode(items)
    without = model.requires_grad_(False).encode(items)
    for want, got, frozen_ in zip(wanted, quiet, without, strict=True):
        assert torch.equal(got.last_hidden_state, want)
        assert torch.equal(frozen_.last_hidden_state, want)
        assert not frozen_.last_hidden_state.requires_grad


@pytest.mark.parametrize("name", VARIANTS)
def test_in_place_is_functional_under_autocast(name: str) -> None:
    model = tiny_model(**VARIANTS[name])
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model.encode([*IMAGES, VIDEO])
        with torch.no_grad():
            quiet = model.encode([*IMAGES, VIDEO])
    for want, got in zip(wanted, quiet, strict=True):
        assert torch.equal(got.last_hidden_state, want.last_hidden_state)


@pytest.mark.parametrize("name", VARIANTS)
def test_one_parameter_trained_alone_has_the_same_gradient(name: str) -> None:
    # nothing that backward needs may be overwritten, wherever the part without gradients ends
    items, call = FORMS["mixed"]
    model = tiny_model(**VARIANTS[name])
    together = {key: grad.clone() for key, grad in gradients(model, lambda m: call(m, items)).items()}
    for key, parameter in model.named_parameters():
        model.requires_grad_(False)
        parameter.requires_grad_()
        alone = gradients(model, lambda m: call(m, items))
        assert torch.equal(alone.pop(key), together[key]), key
        assert all(grad is None for grad in alone.values())


def test_pixels_alone_have_a_gradient() -> None:
    model, x = frozen("qknorm", torch.float64), IMAGES[0].double()[None].requires_grad_()
    output = model(x)
    scalar([output.summary, output.features]).backward()
    other = x.detach().clone().requires_grad_()
    want = plain_tokens(model, other[0])
    scalar([want[:, :2].flatten(1), want[:, 5:]]).backward()
    assert rel_error(x.grad, other.grad) < FP64


@pytest.mark.parametrize("name", ["scaled", "qknorm", "swiglu"])
@pytest.mark.parametrize("mode", ["bf16", "fp32 stream", "autocast"])
def test_gradients_in_low_precision(name: str, mode: str) -> None:
    items, call = FORMS["mixed"]
    model = tiny_model(**VARIANTS[name], dtype=torch.float32 if mode == "autocast" else torch.bfloat16)
    wide = copy.deepcopy(model).double()
    want = gradients(wide, lambda m: [plain_tokens(m, x.double()) for x in items])
    baseline = gradients(model, lambda m: [plain_tokens(m, x) for x in items])
    if mode == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            baseline = gradients(model, lambda m: [plain_tokens(m, x) for x in items])
    baseline = {key: grad.clone() for key, grad in baseline.items()}
    model.residual_dtype = torch.float32 if mode == "fp32 stream" else None
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        got = gradients(model, lambda m: call(m, items))
    total = {"ours": 0.0, "plain": 0.0}
    for key, value in want.items():
        assert got[key].dtype == model.dtype
        total["ours"] += float((got[key].double() - value).square().sum() / value.square().sum())
        total["plain"] += float((baseline[key].double() - value).square().sum() / value.square().sum())
    # summed over all parameters, so that no single lucky rounding decides
    assert total["ours"] <= 4 * total["plain"]


def test_activation_checkpointing() -> None:
    model = tiny_model(**VARIANTS["qknorm"])
    want = {
        k: g if g is None else g.clone() for k, g in gradients(model, lambda m: [m(IMAGES).features]).items()
    }
    got = gradients(model, lambda m: [checkpoint(lambda: m(IMAGES).features, use_reentrant=False)])
    for key, value in want.items():
        assert (value is None and got[key] is None) or torch.equal(got[key], value), key


def test_a_few_steps_of_training_lower_the_loss() -> None:
    model, target = tiny_model(**VARIANTS["scaled"]), pixels(18, 32, seed=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = (model(IMAGES).features[:16] - target[:16]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
