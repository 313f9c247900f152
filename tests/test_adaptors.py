"""Adaptors and normalizers: golden files, every kind of head against a plain reading, names, files and bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import teachers
from checkpoints import reference, remote_config
from helpers import rel_error
from loading import raw_pairs, refused, write_folder
from radio_triton import RadioModel, RadioOutput, available_adaptors
from radio_triton.checkpoint import describe, open_weights
from radio_triton.checkpoint.convert import convert
from radio_triton.normalizers import IntermediateNormalizer
from teachers import EPS, KINDS, base, hub_state, plain_head, plain_map, write_hub
from tiny import pixels, plain_tokens

GOLDEN = Path(__file__).parent / "data" / "torchhub-adaptors"
LIMIT = 1e-4
SIZES = [(12, 20), (8, 8), (20, 4), (8, 8)]
ALL = list(KINDS)


@pytest.fixture(scope="module")
def golden() -> tuple[RadioModel, dict[str, Tensor]]:
    model = RadioModel.from_pretrained(GOLDEN / "checkpoint.pth.tar", adaptor_names=["clip", "sam"])
    return model, load_file(GOLDEN / "io.safetensors")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hub(tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="module")
def model(file: Path) -> RadioModel:
    return load(file, adaptor_names=ALL)


def load(path: Path, **options: Any) -> RadioModel:
    return RadioModel.from_pretrained(
        path,
        **{"video_temporal_patch_size": 2, "num_attention_heads": 2, "adaptor_block_eps": EPS, **options},
    )


@pytest.mark.parametrize("feature_fmt", ["NLC", "NCHW"])
@pytest.mark.parametrize("name", ["backbone", "clip", "sam"])
def test_golden(golden: tuple[RadioModel, dict[str, Tensor]], name: str, feature_fmt: str) -> None:
    model, io = golden
    output = model(io["pixel_values"], feature_fmt=feature_fmt)
    summary, features = output[name]
    want = f"adaptor.{name}.features" + (".NCHW" if feature_fmt == "NCHW" else "")
    assert rel_error(summary, io[f"adaptor.{name}.summary"]) < LIMIT
    assert rel_error(features, io[want]) < LIMIT
    assert set(output.adaptors) == {"clip", "sam"} and output["clip"] is output.adaptors["clip"]
    for image, part in zip(
        io[want], model(list(io["pixel_values"]), feature_fmt="NCHW").split(), strict=True
    ):
        rows = image.flatten(1).T if feature_fmt == "NCHW" else image
        assert rel_error(part[name].features, rows) < LIMIT


def test_golden_report(golden: tuple[RadioModel, dict[str, Tensor]]) -> None:
    report = golden[0].load_report
    assert not report.ignored
    assert set(report.loaded) | set(report.defaulted) == set(golden[0].state_dict())
    assert "adaptors.sam.feature.blocks.1.2.weight" in report.loaded
    some = RadioModel.from_pretrained(GOLDEN / "checkpoint.pth.tar", adaptor_names="clip").load_report
    assert some.reasons == {"part of adaptor sam": 28}


def plain(model: RadioModel, name: str, image: Tensor) -> tuple[Tensor, Tensor]:
    """Summary (OUT,) and map (OUT, u h, u w) of one image, from the trunk as tiny.py computes it, in float64."""
    wide = base().double()
    tokens = plain_tokens(wide, image.double())[0]
    normal = {key.rpartition(".")[2]: x.double() for key, x in teachers.normalizer().items()}
    patches = (tokens[wide.config.num_prefix_tokens :] - normal["mean"]) @ normal["tx"].T
    summary, feature, factor = KINDS[name]
    heads = teachers.heads_of(name)
    token = tokens[model.adaptors[name].spec.token][None]
    grid = (image.shape[1] // 4, image.shape[2] // 4)
    rows = plain_head(feature, heads["feature"], patches)
    return plain_head(summary, heads["summary"], token)[0], plain_map(rows, grid, factor)


@pytest.mark.parametrize("name", ALL)
def test_head_is_its_plain_formula(model: RadioModel, name: str) -> None:
    images = [pixels(3, *size, seed=i) for i, size in enumerate(SIZES)]
    mixed = model(images, feature_fmt="NCHW")[name]
    for i, image in enumerate(images):
        summary, features = plain(model, name, image)
        alone = model(image[None], feature_fmt="NCHW")[name]
        assert rel_error(alone.summary[0], summary) < 1e-5
        assert rel_error(alone.features[0], features) < 1e-5
        assert rel_error(mixed.summary[i], summary) < 1e-5
        assert rel_error(mixed.features[i], features) < 1e-5
        factor = KINDS[name][2]
        assert mixed.grid[i] == alone.grid == tuple(features.shape[1:])
        assert mixed.packing.grids[i] == (features.shape[1] // factor, features.shape[2] // factor)


def assert_near(got: RadioOutput, want: RadioOutput) -> None:
    for name in ("backbone", *ALL):
        assert got[name].grid == want[name].grid
        assert rel_error(got[name].summary, want[name].summary) < 1e-5
        assert rel_error(got[name].features, want[name].features) < 1e-5


def test_images_and_videos_in_one_pass_are_each_alone(model: RadioModel) -> None:
    items = [pixels(3, 8, 12), pixels(3, 3, 12, 8), pixels(3, 4, 4), pixels(2, 3, 8, 12)]
    outputs = model.encode(items)
    for item, output in zip(items, outputs, strict=True):
        alone = model.encode([item])[0]
        assert_near(output, alone)
        assert output["clip"].features.shape[:-1] == output.features.shape[:-1]
    frames = model(items[1], num_frames=3)
    assert frames["siglip2-g"].grid == (2, 6, 4) and frames["siglip2-g"].features.shape == (2, 24, 10)
    assert_near(outputs[1], frames)


@pytest.mark.parametrize("feature_fmt", ["NLC", "NCHW"])
def test_split_gives_the_same_from_every_form(model: RadioModel, feature_fmt: str) -> None:
    images = pixels(2, 3, 8, 12)
    want = model.encode(list(images))
    rows = images.unflatten(2, (2, 4)).unflatten(4, (3, 4)).permute(0, 2, 4, 1, 3, 5).reshape(1, -1, 48)
    forms = [model(images, feature_fmt=feature_fmt), model(list(images), feature_fmt=feature_fmt)]
    forms += [model(x, imgs_sizes=[(8, 12)] * 2, feature_fmt=feature_fmt) for x in (rows, rows[0])]
    for output in forms:
        for got, single in zip(output.split(), want, strict=True):
            assert_near(got, single)
            assert_near(got.split()[0], single)
    leading = () if feature_fmt == "NCHW" else (1,)
    first = forms[2]["siglip2-g"].features
    assert isinstance(first, list) if feature_fmt == "NCHW" else first.shape == (*leading, 48, 10)


def test_with_windows_and_intermediates(file: Path) -> None:
    model = load(file, adaptor_names=ALL, vitdet_window_size=2, vitdet_ragged=True, vitdet_num_windowed=1)
    images = [pixels(3, *size, seed=i) for i, size in enumerate(SIZES)]
    outputs = model(images).split()
    for image, output in zip(images, outputs, strict=True):
        assert_near(output, model([image]).split()[0])
    final, found = model.forward_intermediates(images, [1])
    for part, output in zip(final.split(), outputs, strict=True):
        assert_near(part, output)
    # the feature normalizer is of the final features alone
    token = outputs[0].last_hidden_state[model.num_summary_tokens]
    assert rel_error(found[0][0][:, 0, 0], token) < 1e-5
    assert rel_error(outputs[0].features[0], token) > 0.1


def test_nothing_of_the_trunk_changes(tmp_path: Path) -> None:
    """The attention head works in place, on a copy: without a normalizer its input would be the trunk's output."""
    state = {name: x for name, x in hub_state(base()).items() if "normalizer" not in name}
    file = write_hub(tmp_path, state=state)
    model = load(file, adaptor_names=ALL)
    x = pixels(1, 3, 8, 8)
    alone = load(file)(x)
    assert not load(file).adaptors
    with torch.inference_mode():
        output = model(x)
        assert torch.equal(output.features, alone.features)
        assert torch.equal(output.last_hidden_state, alone.last_hidden_state)


def test_dtypes(file: Path) -> None:
    exact, half = (load(file, adaptor_names=ALL, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert half.feature_normalizer.mean.dtype == half.feature_normalizer.tx.dtype == torch.float32
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    x = pixels(2, 3, 8, 12)
    want, got = exact(x), half(x)
    assert got.features.dtype == got.summary.dtype == torch.bfloat16
    for name in ALL:
        assert got[name].features.dtype == got[name].summary.dtype == torch.float32
        assert rel_error(got[name].features, want[name].features) < 0.05
    moved = exact.to(torch.float16)
    assert moved.feature_normalizer.tx.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        auto = load(file, adaptor_names=ALL)(x)
    assert auto["siglip2-g"].features.dtype == torch.float32
    assert 0 < rel_error(auto["siglip2-g"].features, want["siglip2-g"].features) < 0.05


def test_gradients_reach_every_head(file: Path) -> None:
    model = load(file, adaptor_names=ALL, trainable=True)
    output = model([pixels(3, 8, 8), pixels(3, 4, 12)])
    sum(x.square().mean() for out in output.adaptors.values() for x in out).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    missing = [name for name, g in grads.items() if g is None or not bool(g.any())]
    # videos are not in this batch; a bias of k changes no softmax
    assert {name for name in missing if "video" not in name} == set()


def test_block_eps_is_a_parameter(file: Path, model: RadioModel) -> None:
    """timm's Block changed it between the versions that trained and that run the reference."""
    other = load(file, adaptor_names="siglip2-g", adaptor_block_eps=100.0)
    plainly = RadioModel.from_pretrained(
        file, adaptor_names="siglip2-g", video_temporal_patch_size=2, num_attention_heads=2
    )
    assert plainly.adaptors["siglip2-g"].spec.block_eps == 1e-6
    x = pixels(1, 3, 8, 8)
    a, b = (m(x)["siglip2-g"] for m in (model, other))
    assert torch.equal(a.summary, b.summary) and rel_error(a.features, b.features) > 1e-3


def test_heads_by_name_and_teachers_of_one_name(file: Path, model: RadioModel, tmp_path: Path) -> None:
    named = load(write_hub(tmp_path / "named", by_name=True), adaptor_names=ALL)
    assert all(torch.equal(x, named.state_dict()[name]) for name, x in model.state_dict().items())
    # clip twice, at two resolutions: the reference takes the first
    state = hub_state(base()) | {"_heads.3.fc1.weight": torch.zeros(2, 2)}
    twice = write_hub(tmp_path / "twice", state=state, teachers=[*teachers.teachers(), {"name": "clip"}])
    assert available_adaptors(twice) == ALL
    again = load(twice, adaptor_names="clip", num_cls_tokens=3, num_registers=2)
    assert torch.equal(again.adaptors["clip"].summary.fc1.weight, model.adaptors["clip"].summary.fc1.weight)
    assert again.load_report.ignored["_heads.3.fc1.weight"] == "part of adaptor clip"


def test_teacher_tokens(file: Path, model: RadioModel, tmp_path: Path) -> None:
    assert [model.adaptors[name].spec.token for name in ALL] == [0, 1, 2]
    slot = load(write_hub(tmp_path / "slot", teachers=teachers.teachers(token_slot=4)), adaptor_names=ALL)
    assert slot.adaptors["siglip2-g"].spec.token == 4 and slot.num_cls_tokens == 5
    x = pixels(1, 3, 8, 8)
    head, register = slot.adaptors["siglip2-g"].summary, slot(x).last_hidden_state[:, 4]
    assert torch.equal(slot(x)["siglip2-g"].summary, head(register))
    one = {"cls_token_per_teacher": False, "cpe_num_registers": 4}
    shared = load(write_hub(tmp_path / "one", **one), adaptor_names=ALL)
    assert [shared.adaptors[name].spec.token for name in ALL] == [0, 0, 0]
    beyond = write_hub(tmp_path / "beyond", teachers=teachers.teachers(token_slot=5))
    refused(beyond, "siglip2-g reads token 5, but the model has 5 class and register", adaptor_names=ALL,
            num_attention_heads=2)  # fmt: skip


def remote(folder: Path, **entries: Any) -> Path:
    """A remote-code folder with the heads that its class can hold."""
    model = base()
    state = reference(model.state_dict(), "radio_model.model.", "radio_model.")
    for part, theirs in (("summary", "head_mlp"), ("feature", "feat_mlp")):
        head = teachers.heads_of("dino_v3_7b")[part]
        state |= {f"radio_model.adaptors.dino_v3_7b.{theirs}.{leaf}": x for leaf, x in head.items()}
    state |= {f"radio_model.{name.removeprefix('_')}": x for name, x in teachers.normalizer().items()}
    config = {**remote_config(model.config), **entries}
    return write_folder(folder, state, config)


def test_remote_code_folder(model: RadioModel, tmp_path: Path) -> None:
    entry = {"feature": {"upsample_factor": 3}, "summary": {}, "head_idx": 2}
    path = remote(tmp_path / "a", adaptor_configs={"dino_v3_7b": entry}, preferred_resolution=[512, 512])
    assert available_adaptors(path) == ["dino_v3_7b"]
    loaded = load(path, adaptor_names=["DINO_v3"])
    assert loaded.preferred_resolution == (512, 512) and loaded.preferred_resolution.height == 512
    x = pixels(1, 3, 8, 12)
    assert torch.equal(loaded(x)["dino_v3_7b"].features, model(x)["dino_v3_7b"].features)
    assert torch.equal(loaded(x)["dino_v3_7b"].summary, model(x)["dino_v3_7b"].summary)
    bad = remote(tmp_path / "b", adaptor_configs={"dino_v3_7b": {"feature": {"upsample_factor": 4}}})
    refused(bad, "90 outputs are no whole number for an upsampling of 4", adaptor_names="dino_v3_7b",
            num_attention_heads=2)  # fmt: skip


def test_streaming_into_a_model_that_has_them(model: RadioModel, file: Path) -> None:
    for order in (list, reversed):
        other = load(file, adaptor_names=ALL)
        for tensor in other.state_dict().values():
            tensor.zero_()
        other.load_weights(iter(order(raw_pairs(file))))
        assert all(torch.equal(x, other.state_dict()[name]) for name, x in model.state_dict().items())
    trunk = [(key, x) for key, x in raw_pairs(file) if "_heads.1." not in key]
    with pytest.raises(ValueError, match=r"missing: adaptors\.siglip2-g\.summary\.fc1\.bias"):
        other.load_weights(iter(trunk))
    bare = base()
    bare.load_weights(iter(raw_pairs(file)))
    assert bare.load_report.reasons["part of the feature normalizer"] == 2


def test_save_and_convert_keep_them(model: RadioModel, file: Path, tmp_path: Path) -> None:
    said = model.save_pretrained(tmp_path / "saved")
    assert "cannot hold adaptors and a feature normalizer" in said
    options = {"video_temporal_patch_size": 2, "num_attention_heads": 2, "adaptor_names": ALL}
    convert(file, tmp_path / "fused", "fused", adaptor_block_eps=EPS, **options)
    x = pixels(1, 3, 8, 8)
    for folder in ("saved", "fused"):
        assert sorted(available_adaptors(tmp_path / folder)) == sorted(ALL)
        again = RadioModel.from_pretrained(tmp_path / folder, adaptor_names=ALL)
        for name in ALL:
            spec = again.adaptors[name].spec
            assert (spec.token, spec.upsample, spec.block_eps) == (ALL.index(name), KINDS[name][2], EPS)
            assert torch.equal(again(x)[name].features, model(x)[name].features)
    with pytest.raises(ValueError, match="cannot hold the attention in adaptor siglip2-g"):
        convert(file, tmp_path / "legacy", "legacy", **options)
    with pytest.raises(ValueError, match="Transformers' RadioModel cannot hold a feature normalizer"):
        convert(file, tmp_path / "native", "native", **{**options, "adaptor_names": None})
    options["adaptor_names"] = ["clip", "dino_v3_7b"]
    convert(file, tmp_path / "legacy", "legacy", **options)
    written = json.loads((tmp_path / "legacy" / "config.json").read_text())
    assert written["adaptor_configs"]["dino_v3_7b"]["feature"]["upsample_factor"] == 3
    assert written["feature_normalizer_config"] == {"embed_dim": 128}
    again = RadioModel.from_pretrained(tmp_path / "legacy", adaptor_names="dino_v3_7b", num_attention_heads=2)
    assert torch.equal(again(x)["dino_v3_7b"].summary, model(x)["dino_v3_7b"].summary)


def test_names_are_forgiven(file: Path) -> None:
    for asked, found in {
        "CLIP": "clip", "dino_v3": "dino_v3_7b", "DINOv3": "dino_v3_7b", "SigLIP2": "siglip2-g",
        "siglip2_G": "siglip2-g", "dino_v3_7b": "dino_v3_7b",
    }.items():  # fmt: skip
        assert list(load(file, adaptor_names=asked).adaptors) == [found]
    both = load(file, adaptor_names=("dino_v3", "clip", "CLIP"))
    assert list(both.adaptors) == ["dino_v3_7b", "clip"]


def test_names_are_never_guessed(file: Path, tmp_path: Path) -> None:
    message = refused(file, "has no adaptor 'sam'", adaptor_names=["clip", "sam"], num_attention_heads=2)
    assert message.endswith("its adaptors are clip, siglip2-g, dino_v3_7b")
    # a name that is more exact than the file's is another tower
    names = [{**t, "name": {"siglip2-g": "siglip2", "clip": "Sig-LIP2"}.get(t["name"], t["name"])}
             for t in teachers.teachers()]  # fmt: skip
    other = write_hub(tmp_path, teachers=names)
    refused(other, "no adaptor 'siglip2-g'", adaptor_names="siglip2-g", num_attention_heads=2)
    refused(other, "'SIGLIP2' could be Sig-LIP2 or siglip2: pass one", adaptor_names="SIGLIP2",
            num_attention_heads=2)  # fmt: skip
    assert list(load(other, adaptor_names="siglip2").adaptors) == ["siglip2"]
    for bad in (3, ["clip", None], {"clip": 1}.values()):
        with pytest.raises(TypeError, match="adaptor_names is a name or a list of names"):
            load(file, adaptor_names=bad)


def test_without_weights_the_error_says_where_they_are(tmp_path: Path) -> None:
    golden = refused(GOLDEN / "checkpoint.pth.tar", "no weights of adaptor 'DINO'", adaptor_names="DINO")
    assert "though dino taught this model; its adaptors are clip, sam. NVIDIA publishes the heads" in golden
    bare = GOLDEN.parent / "legacy-vit"
    assert available_adaptors(bare) == []
    assert ".pth.tar that torch.hub.load" in refused(
        bare, "has no adaptor 'x': it holds none", adaptor_names="x"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_heads.0.fc2.weight": None}, "clip, summary head: it is none of the known MLPs"),
        ({"_heads.0.norm.bias": None}, r"missing: adaptors.clip.summary.norm.bias"),
        ({"_heads.0.fc2.bias": torch.zeros(3)}, r"_heads.0.fc2.bias \(3,\) where \(10,\) is needed"),
        ({"_heads.0.extra.weight": torch.zeros(3)}, r"unknown: _heads.0.extra.weight"),
        ({"_heads.0.fc1.weight": torch.zeros(24, 7)}, "takes width 7, the trunk has 128"),
        ({"_heads.clip.fc1.weight": torch.zeros(24, 128)}, "given twice: adaptors.clip.summary.fc1.weight"),
        ({"_heads.0.fc1.weight": torch.zeros(24, 128).long()}, r"cannot be used: _heads.0.fc1.weight \(torch.int64\)"),
        ({"_feature_normalizer.tx": None}, "missing: feature_normalizer.tx"),
        ({"_intermediate_feature_normalizer.alphas": torch.ones(1)}, "is for 1 blocks, the trunk has 2"),
        ({"_intermediate_feature_normalizer.alphas": torch.ones(2)}, "missing: intermediate_normalizer.means"),
    ],
)  # fmt: skip
def test_heads_that_do_not_fit(change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    state = {**hub_state(base()), **change}
    path = write_hub(tmp_path, state={name: x for name, x in state.items() if x is not None})
    refused(path, message, adaptor_names="clip", num_attention_heads=2)


def test_available_adaptors_reads_no_weights(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> Tensor:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("radio_triton.checkpoint.files.Weights.read", read)
    assert available_adaptors(file) == ALL
    assert available_adaptors(GOLDEN / "checkpoint.pth.tar") == ["clip", "sam"]
    with pytest.raises(FileNotFoundError):
        available_adaptors(file.parent / "nothing here")


def test_describe_names_normalizers() -> None:
    tower = describe(open_weights(GOLDEN.parent / "torchhub-intermediates" / "checkpoint.pth.tar"))
    assert tower.normalizers == ("intermediate feature normalizer",)
    assert tower.beside.intermediate == (6, False) and not tower.beside.features


@pytest.mark.parametrize("per_layer", [False, True])
def test_intermediate_normalizer(per_layer: bool, tmp_path: Path) -> None:
    x = torch.randn(3, 5, 128, dtype=torch.float64)
    rotation = torch.randn(2, 128, 128) if per_layer else torch.randn(128, 128)
    values = {"alphas": torch.randn(2), "means": torch.randn(2, 128), "rotation": rotation}
    state = hub_state(base()) | {f"_intermediate_feature_normalizer.{k}": v for k, v in values.items()}
    found = load(write_hub(tmp_path, state=state)).to(torch.bfloat16).intermediate_normalizer
    assert isinstance(found, IntermediateNormalizer)
    for name, value in values.items():
        assert torch.equal(getattr(found, name), value)
    matrix = (rotation[1] if per_layer else rotation).double()
    assert (
        rel_error(found.rotate(found.center(x, 1), 1), (x - values["means"][1].double()) @ matrix.T) < 1e-12
    )
