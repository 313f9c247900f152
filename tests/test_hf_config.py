"""RadioConfig.from_hf: each published form of config.json, and the trunks that args.model may name."""

import copy
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from radio_triton.config import RadioConfig
from radio_triton.presets import ARCHS, heads_for_width

CONFIGS = Path(__file__).parent / "data" / "configs"


def load(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def remote(model: str = "vit_huge_patch16_224", **args: Any) -> dict[str, Any]:
    """A remote-code config of three teachers, two of which have a summary."""
    teachers = [{"name": "clip"}, {"name": "dino_v2"}, {"name": "sam", "use_summary": False}]
    common = {
        "cpe_max_size": 2048,
        "teachers": teachers,
        "cls_token_per_teacher": True,
        "register_multiple": 10,
    }
    return {"args": {"model": model, "model_kwargs": {}, **common, **args}}


def count_parameters(c: RadioConfig) -> int:
    """Numbers in the tower's weights, layer by layer."""
    width, hidden, (rows, columns) = c.hidden_size, c.intermediate_size, c.position_grid
    patches = c.num_channels * c.patch_size**2
    embeddings = (patches + c.patch_bias + rows * columns + c.num_prefix_tokens) * width
    embeddings += c.video_projection * c.video_temporal_patch_size * patches * width
    attention = width * 3 * width + c.qkv_bias * 3 * width + width * width + width
    mlp = (
        (1 + c.use_swiglu_ffn) * (width * hidden + hidden) + hidden * width + width + c.mlp_norm * 2 * hidden
    )
    layer = attention + mlp + (4 + 2 * c.layer_scale) * width
    return embeddings + c.num_hidden_layers * layer + c.final_norm * 2 * width


VLLM = {"num_hidden_layers": 2, "position_grid": (8, 8), "video_temporal_patch_size": 2}


@pytest.mark.parametrize(
    ("name", "sizes", "rest"),
    [
        ("vllm-qknorm", (160, 2, 320), {"qk_normalization": True, "summary_idxs": (0, 2)}),
        ("vllm-dummyheads", (96, 4, 192), {"qk_normalization": True}),
        ("vllm-plain-t4", (144, 2, 288), {"video_temporal_patch_size": 4, "summary_idxs": None}),
        ("vllm-noncpe", (64, 4, 192), {"cpe": False}),
    ],
)
def test_reads_vllm_configs(name: str, sizes: tuple[int, ...], rest: dict[str, Any]) -> None:
    widths = dict(zip(("hidden_size", "num_attention_heads", "intermediate_size"), sizes, strict=True))
    assert RadioConfig.from_hf(load(name)) == RadioConfig(**{**VLLM, **widths, **rest})


@pytest.mark.parametrize(
    ("sizes", "grid", "cpe"),
    [
        ({"max_img_size": 2048}, (128, 128), True),
        ({"max_img_size": 224}, (14, 14), False),
        # 215 rounds up to 224
        ({"max_img_size": 215}, (14, 14), False),
        ({"max_img_size": [96, 160], "image_size": [96, 160]}, (6, 10), False),
        ({"max_img_size": [96, 160], "image_size": 160}, (6, 10), True),
        ({"max_img_size": 2048, "patch_size": 14}, (147, 147), True),
    ],
)
def test_vllm_table_and_crop_mode(sizes: dict[str, Any], grid: tuple[int, int], cpe: bool) -> None:
    config = RadioConfig.from_hf({"model_type": "radio", "qk_normalization": False, **sizes})
    assert (config.position_grid, config.cpe) == (grid, cpe)


def test_transformers_rounds_the_table_down_and_always_resizes() -> None:
    small = RadioConfig.from_hf({"model_type": "radio", "max_img_size": 224, "image_size": 224})
    assert (small.position_grid, small.cpe) == ((14, 14), True)
    odd = RadioConfig.from_hf({"model_type": "radio", "max_img_size": 2048, "patch_size": 14})
    assert odd.position_grid == (146, 146)
    wide = RadioConfig.from_hf({"model_type": "radio", "max_img_size": [96, 160]})
    assert wide.position_grid == (6, 10)


def test_reads_an_older_vllm_config() -> None:
    old = {
        **remote(cpe_max_size=1024)["args"],
        "model_type": "radio",
        "model_name": "vit_base_patch16_224",
        "image_size": 224,
        "norm_type": "layer_norm",
        "qk_normalization": False,
    }
    assert RadioConfig.from_hf(old) == RadioConfig.from_hf(remote("vit_base_patch16_224", cpe_max_size=1024))
    with pytest.raises(ValueError, match="norm_type 'rms_norm' is not supported"):
        RadioConfig.from_hf({**old, "norm_type": "rms_norm"})


HF_VARIANTS: list[dict[str, Any]] = [
    {},
    {
        "hidden_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "mlp_ratio": 3.5,
        "max_img_size": 200,
    },
    {"hidden_size": 96, "num_hidden_layers": 1, "use_swiglu_ffn": True, "mlp_ratio": 3.3, "qkv_bias": False},
    {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "video_temporal_patch_size": 3,
        "patch_size": 8,
        "num_registers": 0,
    },
    {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_cls_tokens": 5,
        "summary_idxs": [4, 0, 4],
        "layerscale_value": 0.1,
    },
]


@pytest.mark.parametrize("options", HF_VARIANTS, ids=["default", "ratio", "swiglu", "video", "layerscale"])
def test_agrees_with_transformers_itself(options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.RadioConfig(**options)
    config = RadioConfig.from_hf(theirs)
    assert config == RadioConfig.from_hf(json.loads(json.dumps(theirs.to_dict())))
    with torch.device("meta"):
        model = transformers.RadioModel(theirs)
    # Transformers keeps an identity LayerScale in every model
    identity = 0 if config.layer_scale else 2 * config.hidden_size * config.num_hidden_layers
    assert count_parameters(config) + identity == sum(p.numel() for p in model.parameters())
    assert config.layer_scale == (options.get("layerscale_value", 1.0) != 1.0)
    assert config.num_prefix_tokens == theirs.num_summary_tokens
    assert list(config.summary_idxs) == theirs.summary_idxs
    assert list(config.norm_mean) == theirs.norm_mean


def test_reads_the_vision_config_of_a_vision_language_model() -> None:
    native = {
        "model_type": "NemotronH",
        "vision_config": {"model_type": "radio", "video_temporal_patch_size": 2},
    }
    assert RadioConfig.from_hf(native) == RadioConfig.preset("nemotron-3-nano-omni")
    legacy = {"model_type": "NemotronH", "vision_config": load("legacy-vit")}
    assert RadioConfig.from_hf(legacy) == RadioConfig.from_hf(load("legacy-vit"))


LEGACY = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256, "position_grid": (8, 8)}


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("legacy-vit", {"num_hidden_layers": 3}),
        ("legacy-mlpnorm", {"num_hidden_layers": 2, "mlp_norm": True}),
        ("legacy-layerscale", {"num_hidden_layers": 2, "layer_scale": True, "layerscale_value": 1e-5}),
    ],
)
def test_reads_remote_code_configs(name: str, want: dict[str, Any]) -> None:
    source = load(name)
    before = copy.deepcopy(source)
    assert RadioConfig.from_hf(source) == RadioConfig(**{**LEGACY, **want})
    assert source == before


def test_reads_the_args_of_a_torch_hub_file() -> None:
    args = load("legacy-vit")["args"] | {"register_multiple": None, "cpe_num_registers": 4}
    config = RadioConfig.from_hf({"args": Namespace(**args)}, num_hidden_layers=2)
    assert (config.num_cls_tokens, config.num_registers, config.num_hidden_layers) == (3, 4, 2)


@pytest.mark.parametrize(
    ("num_cls", "multiple", "registers"),
    [
        (4, 4, 4),
        (8, 8, 8),
        (3, 10, 7),
        (4, 8, 4),
        (4, 10, 6),
        (4, 16, 12),
        (3, 16, 13),
        (1, 8, 7),
        (3, None, 0),
        (3, 0, 0),
    ],
)
def test_register_rule(num_cls: int, multiple: int | None, registers: int) -> None:
    teachers = [{"name": f"teacher {i}"} for i in range(num_cls)]
    config = RadioConfig.from_hf(remote(teachers=teachers, register_multiple=multiple, cpe_num_registers=0))
    assert (config.num_cls_tokens, config.num_registers) == (num_cls, registers)
    explicit = RadioConfig.from_hf(remote(teachers=teachers, register_multiple=multiple, cpe_num_registers=5))
    assert explicit.num_registers == 5


def test_summary_rule() -> None:
    hidden = [{"name": "sam", "use_summary": False}, {"name": "clip"}, {"name": "dino", "use_summary": True}]
    assert RadioConfig.from_hf(remote(teachers=hidden)).summary_idxs == (1, 2)
    shared = RadioConfig.from_hf(remote(teachers=hidden, cls_token_per_teacher=False))
    assert (shared.num_cls_tokens, shared.num_registers, shared.summary_idxs) == (1, 9, (0,))


def test_repeated_teacher_names_share_a_token_and_may_reach_into_the_registers() -> None:
    twice = [{"name": "clip"}, {"name": "clip"}, {"name": "dino"}, {"name": "dino"}]
    config = RadioConfig.from_hf(remote(teachers=twice))
    # two names and eight registers, of which the summary reads tokens 0 and 2
    assert config.summary_idxs == (0, 2)
    assert (config.num_cls_tokens, config.num_prefix_tokens) == (3, 10)


def test_model_kwargs_override_the_trunk() -> None:
    kwargs = {
        "embed_dim": 96, "depth": 5, "num_heads": 6, "mlp_ratio": 2.5, "patch_size": 8, "qkv_bias": False,
        "init_values": 0.01, "weight_init": "skip", "return_full_features": True, "class_token": True,
    }  # fmt: skip
    config = RadioConfig.from_hf(remote(model_kwargs=kwargs, model_norm=True, cpe_max_size=100))
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (96, 5, 6)
    assert (config.intermediate_size, config.patch_size, config.qkv_bias) == (240, 8, False)
    assert (config.layer_scale, config.layerscale_value, config.final_norm) == (True, 0.01, True)
    # 12.5 patches round to even, as in the reference
    assert config.position_grid == (12, 12)
    plain = RadioConfig.from_hf(remote("vit_base_patch16_v2_224", model_kwargs={"init_values": None}))
    assert not plain.layer_scale


@pytest.mark.parametrize(
    ("args", "cpe"),
    [
        ({}, True),
        ({"cpe_max_size": 224}, False),
        ({"cpe_max_size": 220}, False),
        ({"cpe_max_size": 512, "model_kwargs": {"img_size": 512}}, False),
        ({"cpe_max_size": 224, "model_kwargs": {"img_size": [224, 256]}}, True),
        ({"model": "dino_v2_g_student", "cpe_max_size": 224}, True),
    ],
)
def test_crop_mode_of_remote_code(args: dict[str, Any], cpe: bool) -> None:
    assert RadioConfig.from_hf(remote(**args)).cpe == cpe


def test_dino_trunk_keeps_five_tokens_and_ignores_model_kwargs() -> None:
    config = RadioConfig.from_hf(remote("dino_v2_g_student", cpe_max_size=1792, model_kwargs={"depth": 3}))
    want = RadioConfig.preset("radio_v2.5-g", norm_mean=config.norm_mean, norm_std=config.norm_std)
    # the schedule of windows is the version's, which this config does not name
    assert config.replace(vitdet_num_global=8) == want
    named = {**remote("dino_v2_g_student", cpe_max_size=1792), "version": "radio_v2.5-g"}
    assert RadioConfig.from_hf(named) == want


def test_input_channels_and_video_of_remote_code() -> None:
    four = {"norm_mean": (0.5,) * 4, "norm_std": (0.5,) * 4}
    assert RadioConfig.from_hf(remote(input_size=[4, 512, 512]), **four).num_channels == 4
    assert RadioConfig.from_hf(remote(input_size=[4, 512, 512], in_chans=3)).num_channels == 3
    video = RadioConfig.from_hf({**remote(), "video_temporal_patch_size": 2})
    assert (video.video_temporal_patch_size, video.video_projection) == (2, True)


BAD_SOURCES = [
    ({"model_type": "vit", "hidden_size": 768}, "not a RADIO config .model_type 'vit'"),
    ({}, "not a RADIO config"),
    ({"model_type": "radio", "hidden_act": "quick_gelu"}, "'quick_gelu'"),
    ({"model_type": "radio", "head_dim": 64}, "head_dim 64"),
    ({"model_type": "radio", "patch_size": 0}, "patch_size must be at least 1"),
    ({"model_type": "radio", "mlp_ratio": -1.0}, "mlp_ratio must be a finite positive"),
    ({"position_grid": 4, "hidden": 3}, "no field 'hidden'"),
    (remote(cpe_max_size=None), "cpe_max_size is null.*plain timm ViT"),
    (remote(model=None), "args.model is missing"),
    (remote("vit_base_patch32_224"), "unknown trunk 'vit_base_patch32_224'.*vit_base_patch16_224"),
    (remote("eradio_large_fullres_ws16"), "E-RADIO is a hybrid"),
    (remote("radio1d_huge_patch16_224"), "RADIO1D"),
    (remote("navit_base"), "RoPE"),
    (remote("hybrid_large"), "two trunks"),
    (remote("vit_huge_patch16_xpos"), "xPos"),
    (remote("vit_large_dyt_patch16_224"), "DyT"),
    (remote(model_kwargs={"qk_norm": True}), "'qk_norm'.*LayerNorm of each head"),
    (remote(model_kwargs={"class_token": False}), "'class_token'"),
    (remote(model_kwargs={"act_layer": "silu"}), "'act_layer'.*arithmetic"),
    (remote(teachers=[]), "num_cls_tokens must be at least 1"),
]


@pytest.mark.parametrize(("source", "message"), BAD_SOURCES)
def test_refuses_configs(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RadioConfig.from_hf(source)


def test_kwargs_that_change_nothing_are_accepted() -> None:
    kwargs = {"qk_norm": False, "scaled_ln": False, "act_layer": None}
    assert RadioConfig.from_hf(remote(model_kwargs=kwargs)) == RadioConfig()


def test_scaled_layer_norm_is_a_field() -> None:
    config = RadioConfig.from_hf(remote("vit_giant_patch16_224", model_kwargs={"scaled_ln": True}))
    assert config.scaled_layer_norm
    assert not RadioConfig.from_hf(remote("vit_giant_patch16_224")).scaled_layer_norm


def test_from_hf_refuses_what_is_no_config() -> None:
    with pytest.raises(TypeError, match="dict or a config object, got str"):
        RadioConfig.from_hf("nvidia/C-RADIOv4-H")


# millions of parameters, counted on the reference with a table of 2048 pixels and 8 prefix tokens
MILLIONS = {
    "vit_base_patch16_224": 98.23,
    "vit_base_patch16_v2_224": 98.25,
    "vit_large_patch16_224": 319.88,
    "vit_large_patch16_v2_224": 319.93,
    "vit_huge_patch14_224": 637.64,
    "vit_huge_patch16_224": 651.64,
    "vit_huge_patch16_224_mlpnorm": 651.97,
    "vit_so400m_patch16_224": 431.23,
    "vit_so400m_v2_patch16_224": 432.23,
    "vit_giant_patch16_224": 1159.6,
    "vit_bigG_patch14_224": 1632.5,
    "dino_v2_g_student": 1159.5,
}


@pytest.mark.parametrize("name", MILLIONS)
def test_trunk_sizes(name: str) -> None:
    grid = {"vit_huge_patch14_224": 75, "vit_bigG_patch14_224": 146}.get(name, 128)
    config = RadioConfig(**ARCHS[name], position_grid=grid, num_cls_tokens=4, num_registers=4)
    # the larger ones are known to one decimal
    tolerance = 0.06 if MILLIONS[name] > 1000 else 0.01
    assert count_parameters(config) / 1e6 == pytest.approx(MILLIONS[name], abs=tolerance)


@pytest.mark.parametrize("name", ARCHS)
def test_trunks_survive_from_hf(name: str) -> None:
    config = RadioConfig.from_hf(remote(name))
    assert {field: getattr(config, field) for field in ARCHS[name]} == ARCHS[name]


@pytest.mark.parametrize(
    ("width", "heads"), [(768, 12), (1024, 16), (1152, 16), (1280, 16), (1536, 24), (1664, 16)]
)
def test_heads_for_width(width: int, heads: int) -> None:
    assert heads_for_width(width) == heads
    with pytest.raises(ValueError, match=r"width 96.*pass num_attention_heads"):
        heads_for_width(96)
