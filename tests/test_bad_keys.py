"""Keys, shapes and configs that do not fit: one error that names all of them."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints import (
    LAYOUTS,
    State,
    args_of,
    dino_model,
    gelu_model,
    native,
    native_config,
    nested,
    reference,
    remote_config,
    state_of,
    torch_hub,
    write_folder,
    write_inner,
    write_pth,
)
from loading import BLOCK, refused, same
from radio_triton import RadioModel
from radio_triton.checkpoint import CheckpointError, open_weights


@pytest.fixture(scope="module")
def model() -> RadioModel:
    return gelu_model()


@pytest.fixture
def state(model: RadioModel) -> State:
    """The model under the names of a remote-code file."""
    return reference(state_of(model), "radio_model.model.", "radio_model.")


def test_all_wrong_keys_in_one_error(model: RadioModel, state: State, tmp_path: Path) -> None:
    del state[f"{BLOCK}attn.proj.weight"], state[f"{BLOCK}norm2.bias"]
    state[f"{BLOCK}mlp.fc1.bias"] = torch.zeros(65)
    state[f"{BLOCK}attn.rope.freqs"] = torch.zeros(3)
    text = refused(write_folder(tmp_path, state, remote_config(model.config)), "does not fit the model")
    assert "1 unknown: radio_model.model.blocks.0.attn.rope.freqs" in text
    assert "1 that do not fit: radio_model.model.blocks.0.mlp.fc1.bias (65,) where (64,) is needed" in text
    assert "2 missing: encoder.layer.0.attention.proj.weight, encoder.layer.0.norm2.bias" in text


def test_at_most_twenty_are_shown(model: RadioModel, state: State, tmp_path: Path) -> None:
    extra = {f"radio_model.model.extra.{i:02}": torch.zeros(1) for i in range(31)}
    text = refused(write_folder(tmp_path, state | extra, remote_config(model.config)), "31 unknown")
    assert "extra.19 and 11 more" in text and "extra.20" not in text


@pytest.mark.parametrize("wrong", ["missing", "unknown", "shape", "dtype", "twice"])
def test_streamed_keys_that_do_not_fit(wrong: str, model: RadioModel, state: State) -> None:
    key = f"{BLOCK}attn.proj.weight"
    pairs = list(state.items())
    if wrong == "missing":
        pairs.remove(next(pair for pair in pairs if pair[0] == key))
    elif wrong == "unknown":
        pairs.insert(0, (f"{BLOCK}attn.other.weight", torch.zeros(32, 32)))
    elif wrong == "twice":
        pairs.append((f"module.{key}", state[key]))
    else:
        value = torch.zeros(32, 31) if wrong == "shape" else torch.zeros(32, 32, dtype=torch.int8)
        pairs = [(name, value if name == key else x) for name, x in pairs]
    match = {"shape": r"\(32, 31\) where \(32, 32\)", "dtype": "torch.int8", "twice": "1 given twice"}
    fresh = RadioModel(model.config)
    with pytest.raises(CheckpointError, match=match.get(wrong, f"1 {wrong}")):
        fresh.load_weights(iter(pairs))
    assert fresh.load_report is None


def test_streaming_nothing_that_matches(model: RadioModel) -> None:
    fresh = RadioModel(model.config)
    with pytest.raises(CheckpointError, match=r"no RADIO tower found.*got 7 keys"):
        fresh.load_weights(iter(nested({}, "").items()))
    with pytest.raises(CheckpointError, match="no RADIO tower found"):
        fresh.load_weights(iter(()))


def test_streaming_keeps_no_tensor(model: RadioModel, state: State) -> None:
    """Each matrix is gone before the next is asked for."""
    alive: list[weakref.ref[Tensor]] = []

    def pairs() -> Any:
        for name, tensor in nested(state, "vision_model.").items():
            if sum(ref() is not None for ref in alive) > 1:
                raise AssertionError(f"a tensor before {name} is still held")
            copy = tensor.clone()
            if tensor.ndim == 2 and name.startswith("vision_model."):
                alive.append(weakref.ref(copy))
            yield name, copy

    fresh = RadioModel(model.config)
    fresh.load_weights(pairs())
    assert same(fresh, model)


def test_streaming_another_summary(model: RadioModel, state: State) -> None:
    other = RadioModel(model.config.replace(summary_idxs=(0, 2)))
    with pytest.raises(CheckpointError, match=r"summary_idxs \[0, 1\] where the model has \[0, 2\]"):
        other.load_weights(iter(state.items()))


def test_streaming_into_a_model_on_the_meta_device(model: RadioModel, state: State) -> None:
    fresh = RadioModel(model.config, device="meta")
    fresh.load_weights(iter(state.items()))
    assert same(fresh, model)
    assert all(p.requires_grad for p in fresh.parameters())


def test_two_towers(model: RadioModel, state: State, tmp_path: Path) -> None:
    pairs = state | {f"teacher.{name}": x.clone() for name, x in state.items()}
    refused(write_folder(tmp_path, pairs, remote_config(model.config)), "2 towers, under")
    with pytest.raises(
        CheckpointError, match=r"two towers, under 'radio_model.model.' and 'teacher.radio_model.model.'"
    ):
        RadioModel(model.config).load_weights(iter(pairs.items()))


def test_same_parameter_twice(model: RadioModel, state: State, tmp_path: Path) -> None:
    state[f"{BLOCK}ls1.gamma"] = state[f"{BLOCK}ls1.grandma"].clone()
    text = refused(write_folder(tmp_path, state, remote_config(model.config)), "1 given twice")
    assert f"encoder.layer.0.layer_scale1.lambda1 ({BLOCK}ls1.gamma, {BLOCK}ls1.grandma)" in text


def test_same_key_under_a_wrapper(model: RadioModel, tmp_path: Path) -> None:
    state = torch_hub(state_of(model))
    state["module.base_model.blocks.0.norm1.bias"] = state["base_model.blocks.0.norm1.bias"].clone()
    refused(write_pth(tmp_path, state, args_of(model.config)), "blocks.0.norm1.bias twice")


@pytest.mark.parametrize("other", ["native-old", "fused"])
def test_mixed_spellings(other: str, model: RadioModel, tmp_path: Path) -> None:
    mine, theirs = (
        native(state_of(model)),
        state_of(model) if other == "fused" else native(state_of(model), other),
    )
    mixed = {k: v for k, v in mine.items() if ".layer.1." not in k} | {
        k: v for k, v in theirs.items() if ".layer.1." in k
    }
    refused(write_folder(tmp_path, mixed, native_config(model.config)), "mixes spellings of attention")
    with pytest.raises(CheckpointError, match="mixes spellings of attention"):
        RadioModel(model.config).load_weights(iter(mixed.items()))


@pytest.mark.parametrize(
    ("key", "shape", "match"),
    [
        (f"{BLOCK}attn.q_norm.weight", (16,), "timm's LayerNorm of each head"),
        (
            "radio_model.model.patch_generator.patch_normalizer.weight",
            (32,),
            "a norm of the embedded patches",
        ),
        (f"{BLOCK}attn.qkv.parametrizations.weight.1.scale", (1,), "only spectral and DAMP parametrizations"),
        (
            f"{BLOCK}attn.qkv.parametrizations.weight.0.scale",
            (1,),
            "parametrizations.weight.original is missing",
        ),
    ],
)
def test_refused_by_name(
    key: str, shape: tuple[int, ...], match: str, model: RadioModel, state: State, tmp_path: Path
) -> None:
    state[key] = torch.zeros(shape)
    refused(write_folder(tmp_path, state, remote_config(model.config)), match)


FAMILIES = {
    "E-RADIO": [
        "patch_embed.conv_down.0.conv.weight",
        "levels.0.blocks.cv1.conv.weight",
        "high_res_neck.x.weight",
    ],
    "RADIO1D": [
        "patch_generator.embedder.weight",
        "_iter_count",
        "downscale_blocks.0.reduction.weight",
        "decoder.filler_tokens",
    ],
    "hybrid": [
        "vit.patch_generator.embedder.weight",
        "conv.stem.0.weight",
        "vit_to_conv_fusion.fwd.0.weight",
    ],
    "NaViT": ["patch_embed.proj.weight", "cls_token", "blocks.0.attn.qkv.weight"],
    "timm ViT": ["patch_embed.proj.weight", "pos_embed", "cls_token", "blocks.0.attn.qkv.weight"],
    "DyT": ["patch_generator.embedder.weight", "blocks.0.norm1.alpha"],
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefix", ["base_model.", "radio_model.model."])
def test_relatives_of_radio(family: str, prefix: str, tmp_path: Path) -> None:
    save_file({prefix + key: torch.zeros(4, 4) for key in FAMILIES[family]}, tmp_path / "model.safetensors")
    refused(tmp_path, family)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"embed_dim": 64}, "hidden_size is 64, but 32 in the weights"),
        ({"depth": 5}, "num_hidden_layers is 5, but 2 in the weights.*pass num_hidden_layers=2"),
        ({"mlp_ratio": 4}, "intermediate_size is 128, but 64 in the weights"),
        ({"patch_size": 2}, "patch_size is 2, but 4 in the weights"),
        ({"qkv_bias": False}, "qkv_bias is False, but True in the weights"),
        (
            {"embed_dim": 64, "depth": 5, "mlp_ratio": 2},
            "hidden_size is 64.*intermediate_size is 128.*num_hidden_layers is 5",
        ),
    ],
)
def test_contradictions(change: dict[str, Any], match: str, model: RadioModel, tmp_path: Path) -> None:
    args = args_of(model.config)
    args["model_kwargs"] |= change
    refused(write_pth(tmp_path, torch_hub(state_of(model)), args), match)


def test_contradictions_of_tokens_and_video(model: RadioModel, state: State, tmp_path: Path) -> None:
    config = remote_config(model.config, cpe_num_registers=7)
    refused(
        write_folder(tmp_path, state, config),
        "3 class tokens and 7 registers, but 5 prefix tokens in the weights",
    )
    loaded = RadioModel.from_pretrained(tmp_path, num_cls_tokens=4)
    assert (loaded.config.num_cls_tokens, loaded.config.num_registers) == (4, 1)
    refused(tmp_path, "4 class tokens and 3 registers do not make the 5", num_cls_tokens=4, num_registers=3)
    video = gelu_model(video_temporal_patch_size=2)
    state = reference(state_of(video), "radio_model.model.", "radio_model.")
    config = remote_config(video.config, video_temporal_patch_size=4)
    config["args"]["video_temporal_patch_size"] = 4
    refused(
        write_folder(tmp_path / "video", state, config),
        "video_temporal_patch_size is 4, but 2 in the weights",
    )


def test_contradiction_that_the_caller_settles(model: RadioModel, state: State, tmp_path: Path) -> None:
    config = remote_config(model.config)
    config["args"]["model_kwargs"] |= {"embed_dim": 64, "num_heads": 4}
    folder = write_folder(tmp_path, state, config)
    refused(folder, "Where the weights are right, pass hidden_size=32, intermediate_size=64")
    settled = RadioModel.from_pretrained(folder, hidden_size=32, intermediate_size=64, num_attention_heads=2)
    assert same(settled, model)
    refused(folder, "hidden_size is 48, but 32", hidden_size=48, intermediate_size=64)


def test_dino_trunk_takes_its_size_from_the_weights(tmp_path: Path) -> None:
    model = dino_model()
    path = write_inner(model, tmp_path)
    assert RadioModel.from_pretrained(path).config.hidden_size == 64
    state = dict(open_weights(path))
    bad = write_pth(tmp_path / "bad", state, args_of(model.config, model_kwargs={"embed_dim": 128}))
    refused(bad, "hidden_size is 128, but 64 in the weights")


@pytest.mark.parametrize("count", [0, 3, 2.0])
def test_wrong_number_of_blocks(count: Any, model: RadioModel, tmp_path: Path) -> None:
    refused(
        LAYOUTS["remote"][0](model, tmp_path),
        "asks for the first blocks of 2: pass 1 to 2",
        num_hidden_layers=count,
    )


@pytest.mark.parametrize(("old", "new", "match"), [
    ("blocks.1.", "blocks.3.", "has block 3, but not block 1, 2"),
    ("blocks.1.", "blocks.9999.", "has block 9999, but not block 1, 2, 3"),
    ("blocks.1.", "blocks.99999999999.", r"num_hidden_layers is 2, but 1 in the weights"),
    ("blocks.", "blocks.00", r"no transformer blocks"),
])  # fmt: skip
def test_blocks_with_gaps(
    old: str, new: str, match: str, model: RadioModel, state: State, tmp_path: Path
) -> None:
    renamed = {name.replace(old, new): x for name, x in state.items()}
    refused(write_folder(tmp_path, renamed, remote_config(model.config)), match)


@pytest.mark.parametrize(
    "value",
    [torch.zeros(32, 32, dtype=torch.int8), torch.zeros(32, 32).to(torch.float8_e4m3fn), torch.zeros(0, 32)],
)
def test_quantised_or_empty(value: Tensor, model: RadioModel, state: State, tmp_path: Path) -> None:
    state[f"{BLOCK}attn.proj.weight"] = value
    refused(
        write_folder(tmp_path, state, remote_config(model.config)), f"cannot be used: {BLOCK}attn.proj.weight"
    )


def test_quantised_language_model_is_no_matter(model: RadioModel, state: State, tmp_path: Path) -> None:
    tensors = nested(state, "vision_model.")
    tensors["language_model.w"] = torch.zeros(4, 4).to(torch.float8_e4m3fn)
    folder = write_folder(tmp_path, tensors, {"vision_config": remote_config(model.config)})
    assert same(RadioModel.from_pretrained(folder), model)


def test_position_table_that_is_not_square(tmp_path: Path) -> None:
    model = gelu_model(position_grid=(6, 9))
    folder = write_folder(tmp_path, state_of(model), native_config(model.config))
    refused(folder, r"54 rows, .*pass position_grid=\(rows, columns\)")
    assert same(RadioModel.from_pretrained(folder, position_grid=(6, 9)), model)
    refused(folder, r"position_grid=\(5, 9\) does not fit the 54 rows", position_grid=(5, 9))
