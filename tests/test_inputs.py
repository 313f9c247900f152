"""Bad input gets one error: what was given, what is accepted, how to get there. Nothing is changed."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from radio_triton import RadioModel
from radio_triton.inputs import nearest_resolution
from tiny import pixels, tiny_config, tiny_model

# patches are 4 x 4, a row has 48 values
image, video, batch = pixels(3, 8, 12), pixels(4, 3, 8, 12), pixels(2, 3, 8, 12)
rows = pixels(6, 48)
nan, inf = float("nan"), float("inf")
pairs = r"list of \(height, width\) pairs of integers, or an \(n, 2\) tensor"
to_tensor = r"radio_triton.image.to_tensor converts PIL images and \(H, W, c\) arrays"
one_kind = "bring all to one dtype and device"
elsewhere = "the pixels are on {}, the model on {}: move one with .to()"

Call = Callable[[RadioModel], object]
Errors = type[Exception] | tuple[type[Exception], ...]
VALUE_ERRORS: dict[str, tuple[Call, str]] = {
    "height": (lambda m: m(pixels(1, 3, 9, 12)), "9 x 12, not a multiple of .* 4: .* 8 x 12, the nearest"),
    "width": (lambda m: m(pixels(1, 3, 8, 15)), "8 x 15, not a multiple of .* 4: .* 8 x 16, the nearest"),
    "too small": (lambda m: m(pixels(1, 3, 1, 12)), "1 x 12, not a multiple .* to 4 x 12, the nearest"),
    "in a list": (lambda m: m([image, pixels(3, 9, 12)]), "image 1 is 9 x 12, .* to 8 x 12, the nearest"),
    "item": (lambda m: m.encode([image, pixels(2, 3, 8, 9)]), "item 1 is 8 x 9, .* to 8 x 8, the nearest"),
    "video": (lambda m: m(pixels(2, 3, 8, 9), num_frames=2), "the video is 8 x 9, .* to 8 x 8"),
    "no images": (lambda m: m(batch[:0]), r"no pixels: \(0, 3, 8, 12\)"),
    "no height": (lambda m: m(batch[:, :, :0]), r"no pixels: \(2, 3, 0, 12\)"),
    "no width": (lambda m: m([image, image[..., :0]]), r"image 1 has no pixels: \(3, 8, 0\)"),
    "no frames": (lambda m: m.encode([image, video[:0]]), r"item 1 has no pixels: \(0, 3, 8, 12\)"),
    "4 channels": (lambda m: m(pixels(2, 4, 8, 12)), r"needs 3 channels.* got \(2, 4, 8, 12\)"),
    "1 channel": (lambda m: m([pixels(1, 8, 12)]), r"image 0 needs 3 channels.* got \(1, 8, 12\)"),
    "stacked": (lambda m: m(pixels(2, 6, 8, 12)), r"needs 3 channels.* got \(2, 6, 8, 12\)"),
    "video channels": (lambda m: m(pixels(2, 4, 8, 12), num_frames=2), "the video needs 3 channels"),
    "BHWC": (lambda m: m(pixels(2, 8, 12, 3)), r"got \(2, 8, 12, 3\).*permute\(0, 3, 1, 2\)"),
    "HWC": (lambda m: m(pixels(8, 12, 3)), r"got \(8, 12, 3\).*x.permute\(2, 0, 1\)\[None\]"),
    "list of HWC": (lambda m: m([pixels(8, 12, 3)]), r"image 0 .*got \(8, 12, 3\).*permute\(2, 0, 1\)"),
    "HWC item": (lambda m: m.encode([pixels(8, 12, 3)]), r"item 0 .*got \(8, 12, 3\).*permute\(2, 0, 1\)"),
    "FHWC item": (lambda m: m.encode([pixels(5, 8, 12, 3)]), r"\(5, 8, 12, 3\).*permute\(0, 3, 1, 2\)"),
    "one image": (lambda m: m(image), r"one image \(3, 8, 12\): pass x\[None\], or \[x\]"),
    "one plane": (lambda m: m(image[0]), r"images \(B, 3, H, W\), .* or patches, got \(8, 12\)"),
    "5-D": (lambda m: m(batch[None]), r"images \(B, 3, H, W\), .* got \(1, 2, 3, 8, 12\)"),
    "batch in a list": (lambda m: m([batch]), r"image 0 must be \(c, H, W\) .* got \(2, 3, 8, 12\)"),
    "plane item": (lambda m: m.encode([image[0]]), r"\(c, H, W\) or \(F, c, H, W\) .* got \(8, 12\)"),
    "empty list": (lambda m: m([]), "empty list: pass at least one image"),
    "empty tuple": (lambda m: m(()), "empty list: pass at least one image"),
    "no items": (lambda m: m.encode([]), "empty list: pass at least one item"),
    "4-D encode": (lambda m: m.encode(batch), r"tensor \(2, 3, 8, 12\): .*batch of images.*one video"),
    "3-D encode": (lambda m: m.encode(image), r"encode takes a list .* one tensor \(3, 8, 12\)"),
    "dtypes": (lambda m: m([image, image.half()]), f"image 1 is torch.float16 .*float32 .*{one_kind}"),
    "item dtypes": (lambda m: m.encode([video, image.byte()]), f"item 1 is torch.uint8 .*{one_kind}"),
    "devices": (lambda m: m([image, image.to("meta")]), f"image 1 is .* on meta, .* cpu: {one_kind}"),
    "device": (lambda m: m(batch.to("meta")), elsewhere.format("meta", "cpu")),
    "list device": (lambda m: m([image.to("meta")]), elsewhere.format("meta", "cpu")),
    "item device": (lambda m: m.encode([video.to("meta")]), elsewhere.format("meta", "cpu")),
    "row device": (lambda m: m(rows.to("meta"), imgs_sizes=[(8, 12)]), elsewhere.format("meta", "cpu")),
    "no sizes": (lambda m: m(rows), r"patches \(6, 48\) without sizes: pass imgs_sizes.* or image_grid_hw"),
    "3-D, no sizes": (lambda m: m(rows[None]), r"patches \(1, 6, 48\) without sizes: pass imgs_sizes"),
    "batch of rows": (
        lambda m: m(rows.expand(2, 6, 48), imgs_sizes=[(8, 12)]),
        r"batch 1, got \(2, 6, 48\): lay the images end to end",
    ),
    "row size": (lambda m: m(rows[:, 1:], imgs_sizes=[(8, 12)]), r"\(P, 48\) or .*3 x 4\^2, got \(6, 47\)"),
    "images": (lambda m: m(batch, imgs_sizes=[(8, 12)] * 2), r"\(P, 48\) .* got \(2, 3, 8, 12\)"),
    "too few": (lambda m: m(rows, imgs_sizes=[(8, 8)]), r"add up to 4 patches, but 6 .*\(2, 2\)"),
    "too many": (lambda m: m(rows, image_grid_hw=[(2, 3), (1, 1)]), "add up to 7 patches, but 6 were"),
    "no rows": (lambda m: m(rows[:0], imgs_sizes=[(4, 4)]), "add up to 1 patches, but 0 were passed"),
    "both sizes": (
        lambda m: m(rows, imgs_sizes=[(8, 12)], image_grid_hw=[(2, 3)]),
        "both imgs_sizes and image_grid_hw: pass one",
    ),
    "no size": (lambda m: m(rows, imgs_sizes=[]), "imgs_sizes is empty: pass the size of each image"),
    "empty grid": (lambda m: m(rows, image_grid_hw=torch.empty(0, 2)), "image_grid_hw is empty"),
    "pixels of a size": (
        lambda m: m(rows, imgs_sizes=[(8, 12), (9, 8)]),
        r"imgs_sizes\[1\] = \(9, 8\) is not a positive multiple of 4: the nearest is \(8, 8\)",
    ),
    "negative": (lambda m: m(rows, imgs_sizes=[(-8, -12)]), r"\(-8, -12\) is not a positive multiple of 4"),
    "zero grid": (lambda m: m(rows, image_grid_hw=[(0, 3)]), r"image_grid_hw\[0\] = \(0, 3\) is not a pos"),
    "one pair": (lambda m: m(rows, imgs_sizes=(8, 12)), rf"imgs_sizes is a {pairs}, got \(8, 12\)"),
    "1-D tensor": (lambda m: m(rows, image_grid_hw=torch.tensor([2, 3])), f"image_grid_hw is a {pairs}"),
    "0-D tensor": (lambda m: m(rows, image_grid_hw=torch.tensor(6)), f"image_grid_hw is a {pairs}, got"),
    "triples": (lambda m: m(rows, image_grid_hw=[(1, 2, 3)]), rf"{pairs}, got \[\(1, 2, 3\)\]"),
    "fraction": (lambda m: m(rows, imgs_sizes=[(8.5, 12)]), rf"{pairs}, got \[\(8.5, 12\)\]"),
    "text": (lambda m: m(rows, imgs_sizes="8x12"), f"{pairs}, got '8x12'"),
    "text side": (lambda m: m(rows, imgs_sizes=[("a", 12)]), rf"{pairs}, got \[\('a', 12\)\]"),
    "None side": (lambda m: m(rows, imgs_sizes=[(None, 12)]), rf"{pairs}, got \[\(None, 12\)\]"),
    "nan side": (lambda m: m(rows, imgs_sizes=[(nan, 12)]), rf"{pairs}, got \[\(nan, 12\)\]"),
    "inf side": (lambda m: m(rows, imgs_sizes=[(inf, 12)]), rf"{pairs}, got \[\(inf, 12\)\]"),
    "numpy sizes": (lambda m: m(rows, image_grid_hw=np.array([[2, 4]])), "add up to 8 patches|is a list of"),
    "frames, sizes": (
        lambda m: m(video, num_frames=4, imgs_sizes=[(8, 12)]),
        r"num_frames is for the frames .*one video, imgs_sizes for packed patches: pass one",
    ),
    "frames, grid": (lambda m: m(video, num_frames=4, image_grid_hw=[(2, 3)]), "image_grid_hw for packed"),
    "list, sizes": (lambda m: m([image], imgs_sizes=[(8, 12)]), "knows its sizes: drop imgs_sizes"),
    "list, grid": (lambda m: m([image], image_grid_hw=[(2, 3)]), "knows its sizes: drop image_grid_hw"),
    "list, frames": (lambda m: m([image], num_frames=1), "drop num_frames"),
    "num_frames": (lambda m: m(video, num_frames=3), r"num_frames=3, but 4 frames .*\(4, 3, 8, 12\)"),
    "no num_frames": (lambda m: m(video[:0], num_frames=0), r"no pixels: \(0, 3, 8, 12\)"),
    "format": (lambda m: m(batch, feature_fmt="NHWC"), 'is "NLC" or "NCHW", got \'NHWC\''),
}
TYPE_ERRORS: dict[str, tuple[Call, str]] = {
    "None": (lambda m: m(None), "must be a torch.Tensor.* got builtins.NoneType"),
    "path": (lambda m: m("photo.jpg"), "must be a torch.Tensor.* got builtins.str"),
    "numpy": (lambda m: m(batch.numpy()), f"torch.Tensor.* got numpy.ndarray: {to_tensor}"),
    "PIL": (lambda m: m(Image.new("RGB", (8, 8))), f"torch.Tensor.* got PIL.Image.Image: {to_tensor}"),
    "PIL list": (lambda m: m([Image.new("RGB", (8, 8))]), f"image 0 .* PIL.Image.Image: {to_tensor}"),
    "PIL item": (lambda m: m.encode([Image.new("L", (8, 8))]), f"item 0 .* PIL.Image.Image: {to_tensor}"),
    "numpy item": (lambda m: m.encode([image, image.numpy()]), f"item 1 .* numpy.ndarray: {to_tensor}"),
    "nested": (lambda m: m.encode([[image]]), "item 0 must be a torch.Tensor.* got builtins.list"),
    "generator": (lambda m: m.encode(x for x in batch), "expected a list of items, got generator"),
    "dict": (lambda m: m.encode({"a": image}), "expected a list of items, got dict"),
    "int64": (lambda m: m(batch.long()), "must be uint8 or floating point, got torch.int64"),
    "bool": (lambda m: m([image > 0]), "image 0 must be uint8 or floating point, got torch.bool"),
    "complex": (lambda m: m(batch + 0j), "must be uint8 or floating point, got torch.complex64"),
    "float8": (lambda m: m(batch.to(torch.float8_e4m3fn)), "floating point.*got torch.float8_e4m3fn"),
    "keyword": (lambda m: m(batch, image_sizes=[(8, 12)]), "unexpected keyword argument 'image_sizes'"),
    "second argument": (lambda m: m(rows, [(8, 12)]), "positional argument"),
    "dtype": (lambda m: RadioModel(m.config, dtype=torch.int64), "floating point.*torch.int64"),
    "config": (lambda m: RadioModel({"hidden_size": 32}), "RadioConfig.* got (a )?dict"),
}

# what is wrong may be called the type or the value
EITHER: dict[str, tuple[Call, str]] = {
    "sparse": (lambda m: m(batch.to_sparse()), "sparse"),
    "frames as text": (lambda m: m(video, num_frames="4"), "num_frames.*'4'"),
    "frames as float": (lambda m: m(video, num_frames=4.0), r"num_frames.*4\.0"),
    "stream dtype": (
        lambda m: RadioModel(m.config, residual_dtype=torch.int64),
        "residual_dtype.*torch.int64",
    ),
}
CASES = [
    pytest.param(call, error, text, id=name)
    for error, table in (
        (ValueError, VALUE_ERRORS),
        (TypeError, TYPE_ERRORS),
        ((TypeError, ValueError), EITHER),
    )
    for name, (call, text) in table.items()
]

NO_VIDEO: dict[str, tuple[Call, str]] = {
    "stacked": (lambda m: m(pixels(2, 6, 8, 12)), "groups 2 frames.*no video projection.*as images"),
    "frames": (lambda m: m(video, num_frames=4), r"no video projection .*as images, \[\*frames\]"),
    "item": (lambda m: m.encode([image, video]), "video_patch_projection"),
    "channels": (lambda m: m(pixels(2, 9, 8, 12)), r"needs 3 .*got \(2, 9, 8, 12\)"),
}


@pytest.fixture(scope="module")
def model() -> RadioModel:
    return tiny_model(layer_scale=True).requires_grad_(False)


@pytest.fixture(scope="module")
def model_without_video() -> RadioModel:
    return tiny_model(video_temporal_patch_size=2, video_projection=False).requires_grad_(False)


def check(model: RadioModel, call: Call, error: Errors, text: str) -> None:
    """`call` raises one error with this text, runs no part of the model, and leaves it as it was."""
    state = {name: x.clone() for name, x in model.state_dict().items()}
    settings = (model.normalizes, model.residual_dtype, model.training, model.config)
    ran: list[torch.nn.Module] = []
    hook = model.embeddings.register_forward_pre_hook(lambda module, _: ran.append(module))
    try:
        with pytest.raises(error, match=text) as caught:
            call(model)
    finally:
        hook.remove()
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    assert len(str(caught.value)) < 400
    assert not ran
    assert (model.normalizes, model.residual_dtype, model.training, model.config) == settings
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(("call", "error", "text"), CASES)
def test_bad_input(model: RadioModel, call: Call, error: Errors, text: str) -> None:
    check(model, call, error, text)


@pytest.mark.parametrize(("call", "text"), NO_VIDEO.values(), ids=NO_VIDEO)
def test_a_model_without_video_projection(model_without_video: RadioModel, call: Call, text: str) -> None:
    check(model_without_video, call, ValueError, text)
    # what the error recommends works
    assert len(model_without_video([*video]).summary) == 4


def test_a_video_needs_a_projection_of_its_own() -> None:
    with pytest.raises(ValueError, match="separate_video_embedder=False with video_temporal_patch_size=2"):
        tiny_config(video_temporal_patch_size=2, separate_video_embedder=False)


@pytest.mark.parametrize("form", ["dense", "list", "item", "video", "patches"])
def test_bytes_are_refused_once_normalisation_is_external(form: str) -> None:
    model = tiny_model()
    model.make_preprocessor_external()
    calls: dict[str, Call] = {
        "dense": lambda m: m((255 * batch).byte()),
        "list": lambda m: m([(255 * image).byte()]),
        "item": lambda m: m.encode([(255 * image).byte()]),
        "video": lambda m: m.encode([(255 * video).byte()]),
        "patches": lambda m: m((255 * rows).byte(), imgs_sizes=[(8, 12)]),
    }
    check(model, calls[form], ValueError, "make_preprocessor_external.*pass normalised floats, not uint8")


@pytest.mark.parametrize(
    "sizes",
    [
        [(8, 12)],
        ((8, 12),),
        [[8, 12]],
        [torch.Size((8, 12))],
        torch.tensor([[8, 12]]),
        torch.tensor([[8.0, 12.0]]),
        [tuple(np.array([8, 12]))],
        [(8.0, 12.0)],
    ],
    ids=[
        "list",
        "tuple",
        "lists",
        "Size",
        "integer tensor",
        "float tensor",
        "numpy integers",
        "whole floats",
    ],
)
def test_sizes_in_every_spelling(model: RadioModel, sizes: object) -> None:
    assert model(rows, imgs_sizes=sizes).grid == [(2, 3)]


# halves go to the even multiple: 24 / 16 = 1.5 -> 2, 40 / 16 = 2.5 -> 2
@pytest.mark.parametrize(
    ("given", "nearest"),
    [(24, 32), (40, 32), (56, 64), (72, 64), (8, 16), (1, 16), (23, 16), (25, 32), (16, 16), (333, 336)],
)
def test_nearest_supported_resolution(given: int, nearest: int) -> None:
    assert nearest_resolution(16, given, 160) == (nearest, 160)
    assert nearest_resolution(16, 160, given) == (160, nearest)


def test_the_model_takes_the_resolution_it_recommends(model: RadioModel) -> None:
    assert model.get_nearest_supported_resolution(10, 15) == (8, 16)
    h, w = model.get_nearest_supported_resolution(1, 23)
    features: Tensor = model(pixels(1, 3, h, w)).features
    assert features.shape == (1, 1 * 6, 32)
