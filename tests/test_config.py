"""RadioConfig: what it accepts, refuses, derives and writes."""

import dataclasses
import json
from typing import Any

import pytest
import torch

from radio_triton.config import OPENAI_CLIP_MEAN, RadioConfig


def test_defaults_are_the_default_release() -> None:
    assert RadioConfig() == RadioConfig.preset("c-radio_v4-h")
    assert RadioConfig().norm_mean == OPENAI_CLIP_MEAN


def test_derived_values() -> None:
    config = RadioConfig(num_dummy_heads=2, position_grid=(20, 30), summary_idxs=(2, 0, 2))
    assert (config.head_dim, config.attention_width) == (80, 18 * 80)
    assert (config.num_prefix_tokens, config.summary_size, config.max_resolution) == (10, 3, (320, 480))
    assert RadioConfig(summary_idxs=None).summary_size == 3
    assert RadioConfig(summary_idxs=()).summary_size == 0


def test_values_from_json_are_normalised() -> None:
    config = RadioConfig(
        position_grid=[4, 6],
        summary_idxs=[1, 1],
        norm_mean=[0, 0, 0],
        norm_std=[1, 1, 1],
        video_temporal_patch_size=None,
    )
    assert (config.position_grid, config.summary_idxs) == ((4, 6), (1, 1))
    assert (config.norm_mean, config.norm_std) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    assert config.video_temporal_patch_size == 1
    assert RadioConfig(position_grid=5).position_grid == (5, 5)
    assert RadioConfig(summary_idxs=torch.tensor([0, 2])).summary_idxs == (0, 2)
    assert type(RadioConfig(hidden_size=torch.tensor(1280)).hidden_size) is int


def test_is_immutable_and_hashable() -> None:
    config = RadioConfig(summary_idxs=[0, 1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 768
    assert {config: 1}[RadioConfig()] == 1


@pytest.mark.parametrize(
    "config",
    [
        RadioConfig(),
        RadioConfig(summary_idxs=None, position_grid=(3, 5), video_temporal_patch_size=2, cpe=False),
        RadioConfig(
            video_temporal_patch_size=2, video_projection=False, num_dummy_heads=1, qk_normalization=True
        ),
        RadioConfig.preset("c-radio_v3-l"),
    ],
    ids=["default", "crop", "dummy", "layer-scale"],
)
def test_round_trip_through_json(config: RadioConfig) -> None:
    read = json.loads(json.dumps(config.to_dict()))
    assert RadioConfig(**read) == config
    assert RadioConfig.from_hf(read) == config
    assert RadioConfig.from_hf({**read, "model_type": "radio"}, num_registers=3) == config.replace(
        num_registers=3
    )


def test_video_projection_follows_the_tubelet_length() -> None:
    assert not RadioConfig().video_projection
    assert RadioConfig().replace(video_temporal_patch_size=2).video_projection
    assert not RadioConfig(video_temporal_patch_size=4).replace(video_temporal_patch_size=1).video_projection
    assert (
        not RadioConfig(video_temporal_patch_size=2, video_projection=False)
        .replace(cpe=False)
        .video_projection
    )


BAD_VALUES = [
    ({"num_attention_heads": 12}, "hidden_size 1280 is not a multiple of num_attention_heads 12"),
    ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
    ({"num_registers": -1}, "num_registers must be at least 0"),
    ({"num_cls_tokens": 0, "summary_idxs": ()}, "num_cls_tokens must be at least 1"),
    ({"num_cls_tokens": 1}, "names class token 1, but num_cls_tokens is 1"),
    ({"summary_idxs": (-1,)}, "summary_idxs must be at least 0"),
    ({"hidden_act": "gelu_pytorch_tanh"}, "'gelu_pytorch_tanh' is not supported.*erf"),
    ({"hidden_act": "silu"}, "'silu' is not supported"),
    ({"use_swiglu_ffn": True, "mlp_norm": True}, "mlp_norm=True"),
    ({"video_temporal_patch_size": 2, "separate_video_embedder": False}, "separate_video_embedder=False"),
    ({"video_projection": True}, "video_temporal_patch_size of at least 2"),
    ({"position_grid": (4, 0)}, "position_grid must be at least 1, got 0"),
    ({"position_grid": (4, 5, 6)}, "position_grid must be an integer or a pair"),
    ({"norm_std": (1, 1, 0)}, "norm_std must be a finite positive number"),
    ({"norm_mean": (0, 0, float("nan"))}, "norm_mean must be a finite number"),
    ({"num_channels": 4}, "norm_mean has 3 values: give one for each of 4 channels"),
    ({"layer_norm_eps": 0.0}, "layer_norm_eps must be a finite positive number"),
    ({"mlp_norm_eps": -1e-5}, "mlp_norm_eps must be a finite positive number"),
]
BAD_KINDS = [
    ({"hidden_size": "1280"}, "hidden_size must be an integer, got '1280'"),
    ({"hidden_size": 1280.0}, "hidden_size must be an integer"),
    ({"num_registers": True}, "num_registers must be an integer"),
    ({"position_grid": 12.5}, "position_grid must be a list"),
    ({"summary_idxs": 0}, "summary_idxs must be a list"),
    ({"norm_mean": "abc"}, "norm_mean must be a list"),
    ({"layer_norm_eps": "1e-6"}, "layer_norm_eps must be a number"),
    ({"cpe": 1}, "cpe must be True or False, got 1"),
]


@pytest.mark.parametrize(("values", "message"), BAD_VALUES)
def test_refuses_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RadioConfig(**values)


@pytest.mark.parametrize(("values", "message"), BAD_KINDS)
def test_refuses_kinds(values: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        RadioConfig(**values)


def test_silu_names_the_gate_of_swiglu() -> None:
    assert RadioConfig(use_swiglu_ffn=True, hidden_act="silu").use_swiglu_ffn


@pytest.mark.parametrize("change", ["replace", "from_hf", "preset"])
def test_unknown_overrides_are_refused_with_a_suggestion(change: str) -> None:
    make = {
        "replace": RadioConfig().replace,
        "from_hf": lambda **kw: RadioConfig.from_hf({"model_type": "radio"}, **kw),
        "preset": lambda **kw: RadioConfig.preset("radio_v1", **kw),
    }[change]
    with pytest.raises(ValueError, match="no field 'num_register'; did you mean 'num_registers'"):
        make(num_register=4)
    with pytest.raises(ValueError, match="no field 'xyz'; the fields are hidden_size"):
        make(xyz=1)
