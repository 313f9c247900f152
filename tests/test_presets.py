"""The table of releases: what it says, what it leaves open, and by which names it goes."""

import dataclasses
from typing import Any

import pytest

from radio_triton.config import RadioConfig
from radio_triton.presets import PRESETS, Preset, get_preset

TOKENS = {"num_cls_tokens": 4, "num_registers": 4, "summary_idxs": (0, 1, 2)}
# name, patch, grid, head size, layers, hidden width of the MLP, class tokens, registers, summary
SHAPES = [
    ("radio_v1", 14, 75, 80, 32, 5120, None),
    ("radio_v2", 16, 128, 80, 32, 5120, None),
    ("radio_v2.1", 16, 128, 80, 32, 5120, None),
    ("radio_v2.5-b", 16, 128, 64, 12, 3072, (4, 4, (0, 1, 2))),
    ("radio_v2.5-l", 16, 128, 64, 24, 4096, None),
    ("radio_v2.5-h", 16, 128, 80, 32, 5120, None),
    ("radio_v2.5-h-norm", 16, 128, 80, 32, 5120, None),
    ("radio_v2.5-g", 14, 128, 64, 40, 4096, (1, 4, (0,))),
    ("C-RADIO", 16, 128, 80, 32, 5120, None),
    ("C-RADIOv2-B", 16, 128, 64, 12, 3072, (4, 4, (0, 1, 2))),
    ("C-RADIOv2-L", 16, 128, 64, 24, 4096, (4, 4, (0, 1, 2))),
    ("C-RADIOv2-H", 16, 128, 80, 32, 5120, (4, 4, (0, 1, 2))),
    ("c-radio_v2-g", 16, 128, 64, 40, None, None),
    ("c-radio_v2-vlm-h", 16, 128, 80, 32, 5120, None),
    ("c-radio_v3-b", 16, 128, 64, 12, 3072, (4, 4, (0, 1, 2))),
    ("c-radio_v3-l", 16, 128, 64, 24, 4096, (4, 4, (0, 1, 2))),
    ("c-radio_v3-h", 16, 128, 80, 32, 5120, (4, 4, (0, 1, 2))),
    ("c-radio_v3-g", 16, 128, 64, 40, None, None),
    ("c-radio_v4-so400m", 16, 128, 72, 27, 4304, (3, 7, (0, 1))),
    ("c-radio_v4-h", 16, 128, 80, 32, 5120, (3, 7, (0, 1))),
    ("nemotron-parse", 16, 128, 80, 32, 5120, (4, 4, (0, 1, 2))),
    ("nemotron-3-nano-omni", 16, 128, 80, 32, 5120, (3, 7, (0, 1))),
]
# what a caller may pass where a preset leaves it open
OPEN = TOKENS | {
    "mlp_norm": False, "layer_scale": True, "use_swiglu_ffn": False, "intermediate_size": 6144,
    "norm_mean": (0.5,) * 3, "norm_std": (0.5,) * 3, "scaled_layer_norm": False,
}  # fmt: skip


def test_presets_lists_every_release() -> None:
    assert RadioConfig.presets() == tuple(name for name, *_ in SHAPES)


@pytest.mark.parametrize(("name", "patch", "grid", "head_dim", "layers", "hidden", "tokens"), SHAPES)
def test_presets(
    name: str, patch: int, grid: int, head_dim: int, layers: int, hidden: int | None, tokens: Any
) -> None:
    preset = get_preset(name)
    config = RadioConfig.preset(name, **{field: OPEN[field] for field in preset.unknown})
    assert (config.patch_size, config.position_grid, config.cpe) == (patch, (grid, grid), True)
    assert (config.head_dim, config.num_hidden_layers) == (head_dim, layers)
    assert preset.fields.get("intermediate_size") == hidden
    known = tuple(preset.fields.get(field) for field in ("num_cls_tokens", "num_registers", "summary_idxs"))
    assert tokens is None or known == tokens
    assert (None in known) == (tokens is None)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_preset_states_or_disowns_every_fact(preset: Preset) -> None:
    # no fact of the architecture may come from RadioConfig's defaults, which are another release's
    free = {"video_temporal_patch_size", "video_projection", "separate_video_embedder", "num_dummy_heads"}
    facts = {field.name for field in dataclasses.fields(RadioConfig)} - free - {"norm_mean", "norm_std"}
    # windows are a way to run a model, not a fact of its weights
    facts = {name for name in facts if not name.startswith("vitdet_")}
    assert facts <= set(preset.fields) | set(preset.unknown)
    assert not set(preset.fields) & set(preset.unknown)
    assert any(tag in preset.evidence for tag in ("[C]", "[T]", "[X]"))
    with pytest.raises(TypeError):
        preset.fields["hidden_size"] = 1


@pytest.mark.parametrize("preset", [p for p in PRESETS if p.unknown], ids=lambda preset: preset.name)
def test_presets_do_not_guess(preset: Preset) -> None:
    given = {field: OPEN[field] for field in preset.unknown}
    for field in preset.unknown:
        rest = {other: value for other, value in given.items() if other != field}
        with pytest.raises(
            ValueError, match=f"nothing public states {field} of .*from_pretrained.* pass {field}=…$"
        ):
            RadioConfig.preset(preset.name, **rest)
    config = RadioConfig.preset(preset.name, **given)
    assert {field: getattr(config, field) for field in given} == given


def test_swiglu_preset() -> None:
    config = RadioConfig.preset("nvidia/RADIO-g", norm_mean=(0.5,) * 3, norm_std=(0.5,) * 3)
    assert config.use_swiglu_ffn and config.layer_scale and config.final_norm and config.patch_bias
    assert config.max_resolution == (1792, 1792)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("nvidia/C-RADIOv4-H", "c-radio_v4-h"),
        ("NVIDIA/c-radiov3-b", "c-radio_v3-b"),
        ("RADIO_V2.5-B", "radio_v2.5-b"),
    ],
)
def test_presets_go_by_hub_id_in_any_case(alias: str, name: str) -> None:
    assert RadioConfig.preset(alias) == RadioConfig.preset(name)


def test_preset_overrides_win() -> None:
    config = RadioConfig.preset("c-radio_v4-h", num_hidden_layers=4, video_temporal_patch_size=2)
    assert (config.num_hidden_layers, config.video_projection) == (4, True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("e-radio_v2", "'e-radio_v2' is not supported: E-RADIO is a hybrid"),
        ("nvidia/E-RADIO", "E-RADIO is a hybrid"),
        ("c-radio_v4h", "no preset is called 'c-radio_v4h'; did you mean 'c-radio_v4-h'"),
        ("resnet50", r"presets\(\) lists the names"),
    ],
)
def test_unknown_presets(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RadioConfig.preset(name)
