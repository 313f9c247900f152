"""The encoder compiles whole, once for every number and size of images, and gives what eager gives."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from radio_triton import RadioModel
from tiny import VARIANTS, frozen, pixels, tiny_model

COUNTS = (1, 2, 4, 7)
MIXES = ([(1, 1)], [(3, 5), (1, 1)], [(2, 3), (7, 1), (4, 4), (2, 2), (1, 9)])


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: RadioModel, **options: object) -> tuple[RadioModel, CompileCounterWithBackend]:
    """A copy with a compiled encoder, through AOTAutograd, and the counter of its compilations."""
    counter, model = CompileCounterWithBackend("aot_eager"), copy.deepcopy(model)
    model.encoder.compile(fullgraph=True, backend=counter, **options)
    return model, counter


def assert_equal(model: RadioModel, eager: RadioModel) -> None:
    for count in COUNTS:
        x = pixels(count, 3, 8, 12)
        assert torch.equal(model(x).last_hidden_state, eager(x).last_hidden_state), count
    for mix in MIXES:
        images = [pixels(3, 4 * h, 4 * w) for h, w in mix]
        assert torch.equal(model(images).last_hidden_state, eager(images).last_hidden_state), mix
        items = [*images, pixels(3, 3, 8, 12)]
        for got, want in zip(model.encode(items), eager.encode(items), strict=True):
            assert torch.equal(got.last_hidden_state, want.last_hidden_state)


@pytest.mark.parametrize("name", VARIANTS)
def test_one_compilation_for_every_number_and_size(name: str) -> None:
    eager = frozen(name)
    model, counter = compiled(eager)
    assert_equal(model, eager)
    assert counter.frame_count == 1


@pytest.mark.parametrize("first", [4, 1])
def test_whichever_number_comes_first(first: int) -> None:
    eager = frozen()
    model, counter = compiled(eager)
    model(pixels(first, 3, 8, 12))
    assert_equal(model, eager)
    assert counter.frame_count == 1


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "autocast", "fp32 stream"])
def test_one_compilation_in_every_mode(mode: str) -> None:
    context: AbstractContextManager = {
        "no_grad": torch.no_grad(),
        "inference_mode": torch.inference_mode(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "fp32 stream": nullcontext(),
    }[mode]
    eager = frozen("qknorm", torch.bfloat16 if mode == "fp32 stream" else torch.float32)
    eager.residual_dtype = torch.float32 if mode == "fp32 stream" else None
    model, counter = compiled(eager.requires_grad_(mode == "no_grad"))
    with context:
        assert_equal(model, eager)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", VARIANTS)
def test_one_compilation_with_gradients(name: str) -> None:
    eager = tiny_model(**VARIANTS[name])
    model, counter = compiled(eager)
    images = [[pixels(3, 4 * h, 4 * w) for h, w in mix] for mix in MIXES]
    for x in [*[pixels(count, 3, 8, 12) for count in COUNTS], *images]:
        for one in (model, eager):
            one.zero_grad()
            one(x).last_hidden_state.square().sum().backward()
        for (key, got), want in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert (got.grad is None) == (want.grad is None), key
            assert want.grad is None or torch.equal(got.grad, want.grad), key
    assert counter.frame_count == 1


def test_the_function_torch_compile_works_too() -> None:
    eager = frozen("qknorm")
    model, counter = copy.deepcopy(eager), CompileCounterWithBackend("aot_eager")
    model.encoder = torch.compile(model.encoder, fullgraph=True, backend=counter)
    assert_equal(model, eager)
    assert counter.frame_count == 1


def test_the_whole_model_may_be_compiled() -> None:
    # not in one graph: the sizes are read on the host
    eager = frozen("qknorm")
    model = torch.compile(eager, backend="aot_eager")
    for count in (1, 3):
        x = pixels(count, 3, 8, 12)
        assert torch.equal(model(x).last_hidden_state, eager(x).last_hidden_state)


def test_a_compiled_model_can_be_copied() -> None:
    model, _ = compiled(frozen())
    x = pixels(2, 3, 8, 12)
    want = model(x).features
    assert torch.equal(copy.deepcopy(model)(x).features, want)
