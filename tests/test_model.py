"""RadioModel: the call forms give one another's values, and the output has the shapes it says."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import rel_error
from radio_triton import RadioModel, RadioOutput, ops
from tiny import FP64, PATCH, VARIANTS, WIDTH, frozen, pixels, plain_tokens


def patch_rows(images: list[Tensor]) -> Tensor:
    """(P, c * p^2), rows in the order (c, y, x)."""
    return torch.cat([F.unfold(x[None], PATCH, stride=PATCH)[0].T for x in images])


def mixed_items() -> list[Tensor]:
    shapes = [(3, 12, 20), (5, 3, 16, 8), (3, 32, 32), (3, 44, 40), (2, 3, 24, 36), (1, 3, 4, 4)]
    return [pixels(*shape, seed=i).double() for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_item_is_the_plain_model(name: str) -> None:
    model, items = frozen(name, torch.float64), mixed_items()
    prefix = model.config.num_prefix_tokens
    for got, item in zip(model.encode(items), items, strict=True):
        want = plain_tokens(model, item)
        summary, features = want[:, list(model.summary_positions)].flatten(1), want[:, prefix:]
        if item.ndim == 3:
            want, summary, features = want[0], summary[0], features[0]
        assert rel_error(got.last_hidden_state, want) < FP64
        assert rel_error(got.summary, summary) < FP64
        assert rel_error(got.features, features) < FP64
        assert got.grid == (
            *([len(want)] if item.ndim == 4 else []),
            item.shape[-2] // PATCH,
            item.shape[-1] // PATCH,
        )


def test_four_channels() -> None:
    statistics = {"norm_mean": (0.1, 0.2, 0.3, 0.4), "norm_std": (0.5, 0.6, 0.7, 0.8)}
    model = frozen(dtype=torch.float64, num_channels=4, **statistics)
    x = pixels(2, 4, 8, 12).double()
    assert rel_error(model(x).last_hidden_state, plain_tokens(model, x)) < FP64


FORMS: dict[str, Callable[[RadioModel, Tensor], RadioOutput]] = {
    "list": lambda m, x: m([*x]),
    "tuple": lambda m, x: m(tuple(x)),
    "imgs_sizes": lambda m, x: m(patch_rows([*x]), imgs_sizes=[tuple(x.shape[2:])] * len(x)),
    "imgs_sizes, batch of 1": lambda m, x: m(
        patch_rows([*x])[None], imgs_sizes=[tuple(x.shape[2:])] * len(x)
    ),
    "image_grid_hw": lambda m, x: m(patch_rows([*x]), image_grid_hw=torch.tensor([[2, 3]] * len(x))),
    "strided": lambda m, x: m(x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)),
    "frames of a video": lambda m, x: m(x, num_frames=len(x)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_call_forms_agree(form: str, dtype: torch.dtype) -> None:
    model, x = frozen(dtype=dtype), pixels(4, 3, 8, 12)
    want, got = model(x), FORMS[form](model, x)
    assert want.summary.shape == (4, 2 * WIDTH)
    assert want.features.shape == (4, 6, WIDTH)
    assert want.last_hidden_state.shape == (4, 5 + 6, WIDTH)
    assert want.grid == (2, 3)
    assert want.summary.dtype == want.features.dtype == dtype
    shape = {
        "imgs_sizes, batch of 1": (1, 24, WIDTH),
        "strided": (4, 6, WIDTH),
        "frames of a video": (4, 6, WIDTH),
    }
    assert got.features.shape == shape.get(form, (24, WIDTH))
    assert got.grid == {"strided": (2, 3), "frames of a video": (4, 2, 3)}.get(form, [(2, 3)] * 4)
    # as many rows in each product, so the same bits
    assert torch.equal(got.summary, want.summary)
    assert torch.equal(got.features.flatten(), want.features.flatten())
    assert torch.equal(got.last_hidden_state.flatten(), want.last_hidden_state.flatten())


def test_sizes_of_many_images() -> None:
    model = frozen()
    images = [pixels(3, h, w, seed=h) for h, w in ((8, 12), (16, 4), (4, 20))]
    sizes = [tuple(x.shape[1:]) for x in images]
    want = model(images)
    assert want.grid == [(2, 3), (4, 1), (1, 5)]
    assert want.summary.shape == (3, 2 * WIDTH)
    for got in (
        model(patch_rows(images), imgs_sizes=sizes),
        model(patch_rows(images)[None], imgs_sizes=torch.tensor(sizes)),
        model(patch_rows(images), image_grid_hw=[(2, 3), (4, 1), (1, 5)]),
    ):
        assert torch.equal(got.summary, want.summary)
        assert torch.equal(got.features.view(-1, WIDTH), want.features)
    for got, split in zip(model.encode(images), want.split(), strict=True):
        assert torch.equal(got.features, split.features)
        assert torch.equal(got.summary, split.summary)


@pytest.mark.parametrize("name", ["qknorm", "swiglu"])
def test_video_forms_agree(name: str) -> None:
    model = frozen(name)
    tubelet = model.config.video_temporal_patch_size
    frames = pixels(2 * tubelet, 3, 8, 12)
    want = model(frames, num_frames=2 * tubelet)
    assert want.summary.shape == (2, 2 * WIDTH)
    assert want.features.shape == (2, 6, WIDTH)
    assert want.grid == (2, 2, 3)
    stacked = model(frames.view(2, tubelet * 3, 8, 12))
    assert stacked.grid == (2, 3)
    item = model.encode([frames])[0]
    assert item.grid == (2, 2, 3)
    for got in (stacked, item, *want.split()):
        assert torch.equal(got.summary, want.summary)
        assert torch.equal(got.features, want.features)
    # without num_frames they are images, through the other projection
    assert model(frames).features.shape == (2 * tubelet, 6, WIDTH)
    short = model(frames[:-1], num_frames=2 * tubelet - 1)
    assert short.grid == (2, 2, 3)
    assert rel_error(short.features, want.features) > 1e-3


@pytest.mark.parametrize("form", ["dense", "packed", "video"])
def test_nchw_is_the_map_of_features(form: str) -> None:
    model, x = frozen("qknorm"), pixels(4, 3, 8, 12)
    images = [pixels(3, 8, 12), pixels(3, 16, 4)]
    call = {
        "dense": lambda **o: model(x, **o),
        "packed": lambda **o: model(images, **o),
        "video": lambda **o: model(x, num_frames=4, **o),
    }[form]
    maps, rows = call(feature_fmt="NCHW").features, call().features
    if form == "packed":
        assert [tuple(one.shape) for one in maps] == [(WIDTH, 2, 3), (WIDTH, 4, 1)]
        assert torch.equal(torch.cat([one.flatten(1).T for one in maps]), rows)
    else:
        assert maps.shape == (4 if form == "dense" else 2, WIDTH, 2, 3)
        assert torch.equal(maps[1, :, 1, 2], rows[1, 5])
        assert torch.equal(maps.flatten(2).mT, rows)


def test_output_unpacks_and_answers_to_the_reference_names() -> None:
    output = frozen()(pixels(2, 3, 8, 12))
    summary, features = output
    assert summary is output.summary is output[0] is output["backbone"].summary
    assert features is output.features is output[1] is output["backbone"].features
    assert output.adaptors == {}
    with pytest.raises(KeyError, match=r"no output 'clip': there are \['backbone'\]"):
        output["clip"]
    output.adaptors["clip"] = other = frozen()(pixels(1, 3, 4, 4))
    assert output["clip"] is other


def test_split_gives_one_output_for_each_thing_passed() -> None:
    model, x = frozen("qknorm"), pixels(3, 3, 8, 12)
    output = model(x)
    for i, one in enumerate(output.split()):
        assert one.summary.equal(output.summary[i])
        assert one.features.equal(output.features[i])
        assert one.grid == (2, 3)
        assert one.split()[0].features.equal(one.features)
    video = model(x, num_frames=3).split()
    assert [one.grid for one in video] == [(2, 2, 3)]
    assert video[0].summary.shape == (2, 2 * WIDTH)


@pytest.mark.parametrize("idxs", [None, (), (0,), (2, 0), (1, 1, 2)])
def test_summary_idxs(idxs: tuple[int, ...] | None) -> None:
    model, images = frozen(summary_idxs=idxs), [pixels(3, 8, 12), pixels(3, 8, 12, seed=1)]
    chosen = list(range(3)) if idxs is None else list(idxs)
    assert model.summary_idxs.tolist() == chosen
    outputs = [
        model(torch.stack(images)),
        model(images),
        model(patch_rows(images), image_grid_hw=[(2, 3)] * 2),
    ]
    tokens = outputs[0].last_hidden_state
    want = torch.stack([torch.cat([x[i] for i in chosen] or [x[0, :0]]) for x in tokens])
    assert want.shape == (2, len(chosen) * WIDTH)
    for output in outputs:
        assert torch.equal(output.summary, want)
        assert torch.equal(output.features.reshape(2, 6, WIDTH), tokens[:, 5:])
    assert torch.equal(torch.stack([one.summary for one in model.encode(images)]), want)
    assert model.encode([torch.stack(images)])[0].summary.shape == want.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_as_exact_as_floats(dtype: torch.dtype) -> None:
    model = frozen(dtype=dtype)
    x = torch.randint(0, 256, (2, 3, 8, 12), dtype=torch.uint8)
    want = plain_tokens(copy.deepcopy(model).double(), x.double() / 255)
    baseline = rel_error(model(x / 255).last_hidden_state, want)
    assert rel_error(model(x).last_hidden_state, want) <= 2 * baseline
    assert torch.equal(model.encode([x])[0].features, model(x).features)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixels_are_normalised_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    model, x, seen = frozen(dtype=dtype), pixels(2, 3, 8, 12), []
    model.embeddings.patch_projection.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(x)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (model.config.norm_mean, model.config.norm_std))
    assert torch.equal(seen[0], patch_rows([*((x - mean) / std)]).to(dtype))


def test_external_preprocessor() -> None:
    model, x = frozen(), pixels(2, 3, 8, 12)
    want = model(x)
    conditioner = model.make_preprocessor_external()
    assert conditioner is model.make_preprocessor_external()
    assert conditioner.norm_mean.flatten().tolist() == pytest.approx(model.config.norm_mean)
    assert "input_conditioner.norm_mean" in model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(conditioner(x)).features, want.features)
    as_bytes = (255 * x).byte()
    assert torch.equal(conditioner(as_bytes), conditioner(as_bytes / 255))
    assert conditioner(x.bfloat16()).dtype == torch.bfloat16
    assert not torch.equal(model(x).features, want.features)
    assert copy.deepcopy(model).normalizes is False


def test_pixels_are_only_read() -> None:
    model = frozen("qknorm")
    model.make_preprocessor_external()
    image, video = pixels(3, 8, 12), pixels(3, 3, 8, 12)
    before = image.clone(), video.clone()
    model.encode([image, video])
    model(patch_rows([image]), image_grid_hw=[(2, 3)])
    assert torch.equal(image, before[0])
    assert torch.equal(video, before[1])


def ramp(low: float, high: float, *shape: int) -> Tensor:
    return torch.linspace(low, high, torch.Size(shape).numel()).view(shape)


WARNED: dict[str, tuple[Callable[[RadioModel], object], str]] = {
    "normalised": (lambda m: m(ramp(-2, 2.5, 1, 3, 8, 8)), "-2 to 2.5"),
    "0 to 255": (lambda m: m(ramp(0, 255, 1, 3, 8, 8)), "0 to 255"),
    "second image": (lambda m: m([pixels(3, 8, 8), ramp(-1, 0, 3, 8, 8)]), "-1 to "),
    "second item": (lambda m: m.encode([ramp(0, 1, 2, 3, 8, 8), ramp(0, 1.5, 2, 3, 8, 8)]), "0 to 1.5"),
    "image and video": (lambda m: m.encode([ramp(0, 2, 3, 8, 8), ramp(0, 2, 2, 3, 8, 8)]), "0 to 2"),
    "patches": (lambda m: m(ramp(-0.5, 0.5, 2, 48), imgs_sizes=[(4, 8)]), "-0.5 to 0.5"),
}


@pytest.mark.parametrize("case", WARNED)
def test_normalised_pixels_are_warned_about_once(case: str) -> None:
    call, range_ = WARNED[case]
    with pytest.warns(
        UserWarning, match=f"pixels range from {range_}.*normalised already.*divide by 255"
    ) as caught:
        call(frozen("qknorm"))
    assert len(caught) == 1


@pytest.mark.parametrize("case", ["normalised", "0 to 255", "patches", "image and video"])
def test_the_warning_points_at_the_call(case: str) -> None:
    # Python shows a warning once for each line that it points at
    with pytest.warns(UserWarning, match="pixels range from") as caught:
        WARNED[case][0](frozen("qknorm"))
    assert caught[0].filename == __file__


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.15, 1.15), (0, 255)])
def test_plain_pixels_are_not_warned_about(low: float, high: float) -> None:
    x = ramp(low, high, 1, 3, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frozen()(x.byte() if high == 255 else x)


def test_the_host_copy_of_cu_seqlens_is_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # a CUDA device would have to be waited for
    model, x = frozen("qknorm"), [pixels(3, 8, 12), pixels(3, 4, 4)]
    want, prepare, wrong = model(x).features, ops.prepare, torch.full((3,), -7, dtype=torch.int32)
    monkeypatch.setattr(ops, "prepare", lambda *args: prepare(*args)._replace(cu_seqlens=wrong))
    assert torch.equal(model(x).features, want)
