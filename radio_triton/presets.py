"""What is known of RADIO's trunks and of every released version, with the evidence for it.

Tags in `Preset.evidence`: [C] the public reference's code, [R] its README, [G] its issues, [N] the classes in
Transformers, [T] NVIDIA TAO's backbone, [X] public code that opened the real file.

What none of them states, or where two disagree, is in `Preset.unknown`: it comes from the checkpoint or from
the caller, never from the name of a version. Nothing here was checked against released weights.
`pos_align_corners` is False everywhere, as in the reference for all versions since 2025-06-28.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Preset:
    """One released version: `fields` are RadioConfig's, `unknown` names those that nothing public states."""

    name: str
    hub_id: str | None
    fields: Mapping[str, Any]
    unknown: tuple[str, ...]
    evidence: str


# timm's ViT: what a trunk has unless it says otherwise
_PLAIN = {
    "num_channels": 3, "qkv_bias": True, "layer_norm_eps": 1e-6, "hidden_act": "gelu",
    "qk_normalization": False, "layer_scale": False, "layerscale_value": 1.0, "use_swiglu_ffn": False,
    "mlp_norm": False, "mlp_norm_eps": 1e-5, "final_norm": False, "patch_bias": False,
    "scaled_layer_norm": False,
}  # fmt: skip
_DINO = {"layer_scale": True, "final_norm": True, "patch_bias": True}


def _trunk(width: int, depth: int, heads: int, patch: int = 16, **other: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads}
    return sizes | {"intermediate_size": 4 * width, "patch_size": patch} | _PLAIN | other


# trunk geometry by the name that a checkpoint's args.model carries
ARCHS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch14_224": _trunk(192, 12, 3, 14),
    "vit_tiny_patch16_224": _trunk(192, 12, 3),
    "vit_small_patch14_224": _trunk(384, 12, 6, 14),
    "vit_small_patch16_224": _trunk(384, 12, 6),
    "vit_base_patch14_224": _trunk(768, 12, 12, 14),
    "vit_base_patch16_224": _trunk(768, 12, 12),
    "vit_base_patch16_v2_224": _trunk(768, 12, 12, layer_scale=True, layerscale_value=1e-5),
    "vit_large_patch14_224": _trunk(1024, 24, 16, 14),
    "vit_large_patch16_224": _trunk(1024, 24, 16),
    "vit_large_patch16_v2_224": _trunk(1024, 24, 16, layer_scale=True, layerscale_value=1e-5),
    "vit_huge_patch14_224": _trunk(1280, 32, 16, 14),
    "vit_huge_patch16_224": _trunk(1280, 32, 16),
    "vit_huge_patch16_224_mlpnorm": _trunk(1280, 32, 16, mlp_norm=True),
    "vit_so400m_patch16_224": _trunk(1152, 27, 16, intermediate_size=4304),
    "vit_so400m_v2_patch16_224": _trunk(1152, 27, 16, intermediate_size=4320),
    "vit_giant_patch16_224": _trunk(1536, 40, 24),
    "vit_bigG_patch14_224": _trunk(1664, 48, 16, 14, layer_scale=True, layerscale_value=1e-6),
    "dino_v2_l_student": _trunk(1024, 24, 16, 14, **_DINO),
    "dino_v2_g_student": _trunk(1536, 40, 24, 14, **_DINO, use_swiglu_ffn=True, intermediate_size=4096),
}

# words in an architecture's or a version's name -> why it is not this model
REFUSED = {
    "eradio": "E-RADIO is a hybrid of convolutions and windowed attention, not a ViT",
    "e-radio": "E-RADIO is a hybrid of convolutions and windowed attention, not a ViT",
    "radio1d": "RADIO1D is an encoder and decoder that merges and splits patches",
    "navit": "NaViT students rotate queries and keys (RoPE) instead of adding a position table",
    "hybrid": "it joins two trunks",
    "xpos": "its attention encodes positions by xPos instead of adding a position table",
    "dyt": "it replaces LayerNorm by DyT",
    "paligemma": "it wraps PaliGemma's vision tower",
}

_HEADS = {768: 12, 1024: 16, 1152: 16, 1280: 16, 1536: 24, 1664: 16}


def heads_for_width(width: int) -> int:
    """The number of heads of a released trunk of that width: the shapes in a checkpoint do not show it."""
    if width not in _HEADS:
        known = ", ".join(str(known_width) for known_width in _HEADS)
        raise ValueError(
            f"a checkpoint of width {width} does not show its number of heads: pass num_attention_heads=…"
            f" (known for widths {known})"
        )
    return _HEADS[width]


def arch_fields(name: str) -> dict[str, Any]:
    """RadioConfig fields of the trunk that args.model names; ValueError says why one is not supported."""
    name = name.partition(".")[0]
    _refuse(name)
    if name not in ARCHS:
        raise ValueError(f"unknown trunk {name!r} in args.model; known: {', '.join(ARCHS)}")
    return dict(ARCHS[name])


def get_preset(name: str) -> Preset:
    """The entry for a torch.hub key ("c-radio_v4-h") or a hub id ("nvidia/C-RADIOv4-H"), in any case."""
    names = {alias.lower(): preset for preset in PRESETS for alias in (preset.name, preset.hub_id) if alias}
    if preset := names.get(name.lower()):
        return preset
    _refuse(name)
    close = difflib.get_close_matches(name.lower(), names, 1)
    hint = f"did you mean {names[close[0]].name!r}?" if close else "RadioConfig.presets() lists the names"
    raise ValueError(f"no preset is called {name!r}; {hint}")


def vitdet_fields(version: str | None) -> dict[str, Any]:
    """How the version that a config names arranges ViTDet's windows; nothing where it is not known."""
    known = (preset for preset in PRESETS if preset.name == version)
    return {
        key: value for preset in known for key, value in preset.fields.items() if key.startswith("vitdet_")
    }


def _refuse(name: str) -> None:
    for word, reason in REFUSED.items():
        if word in name.lower():
            raise ValueError(f"{name!r} is not supported: {reason}")


def _preset(
    name: str,
    hub_id: str | None,
    arch: str,
    tokens: tuple[Any, ...] | None,
    evidence: str,
    unknown: tuple[str, ...] = (),
    grid: int = 128,
    **other: Any,
) -> Preset:
    fields = ARCHS[arch] | {"cpe": True, "position_grid": (grid, grid), "pos_align_corners": False} | other
    if tokens is None:
        unknown = _TOKENS + unknown
    else:
        fields |= dict(zip(_TOKENS, tokens, strict=True))
    known = {field: value for field, value in fields.items() if field not in unknown}
    return Preset(name, hub_id, MappingProxyType(known), unknown, evidence)


_TOKENS = ("num_cls_tokens", "num_registers", "summary_idxs")
_FOUR = (4, 4, (0, 1, 2))
_TEN = (3, 7, (0, 1))
_GIANT = ("intermediate_size", "use_swiglu_ffn", "layer_scale", "scaled_layer_norm")

# fmt: off
PRESETS: tuple[Preset, ...] = (
    _preset("radio_v1", None, "vit_huge_patch14_224", None, "[C] patch and resolution", grid=75),
    _preset("radio_v2", None, "vit_huge_patch16_224", None,
            "[C][R] ViT-H/16, patch and resolution", ("mlp_norm",), vitdet_num_windowed=5),
    _preset("radio_v2.1", "nvidia/RADIO", "vit_huge_patch16_224", None,
            "[C][R] ViT-H/16, patch and resolution; weights in bf16", ("mlp_norm",), vitdet_num_windowed=5),
    _preset("radio_v2.5-b", "nvidia/RADIO-B", "vit_base_patch16_224", _FOUR,
            "[C] patch and resolution; [G] issue 80 prints the tokens"),
    _preset("radio_v2.5-l", "nvidia/RADIO-L", "vit_large_patch16_224", (None, None, (0, 1, 2)),
            "[C][R] ViT-L/16, patch and resolution; [T] summary", ("num_cls_tokens", "num_registers")),
    _preset("radio_v2.5-h", None, "vit_huge_patch16_224", None,
            "[C][R] ViT-H/16, patch and resolution; [T] the summary has three tokens", ("mlp_norm",)),
    _preset("radio_v2.5-h-norm", None, "vit_huge_patch16_224", None,
            "[C] as radio_v2.5-h, with feature normalizers in the file", ("mlp_norm",)),
    _preset("radio_v2.5-g", "nvidia/RADIO-g", "dino_v2_g_student", (1, 4, (0,)),
            "[C] patch, resolution and tokens; [R] trunk, DINOv2 ViT-g/14; the statistics may be ImageNet's",
            ("norm_mean", "norm_std"), vitdet_num_global=8),
    _preset("C-RADIO", "nvidia/C-RADIO", "vit_huge_patch16_224_mlpnorm", None,
            "[T] trunk; 16 prefix tokens, as 3 + 13 or as 4 + 12"),
    _preset("C-RADIOv2-B", "nvidia/C-RADIOv2-B", "vit_base_patch16_224", _FOUR, "[T] trunk and tokens"),
    _preset("C-RADIOv2-L", "nvidia/C-RADIOv2-L", "vit_large_patch16_224", _FOUR, "[T] trunk and tokens"),
    _preset("C-RADIOv2-H", "nvidia/C-RADIOv2-H", "vit_huge_patch16_224", _FOUR,
            "[T] trunk and tokens; [X] Nemotron-Parse's config has the same"),
    _preset("c-radio_v2-g", "nvidia/C-RADIOv2-g", "vit_giant_patch16_224", None,
            "[C] ViT-g/16, patch and resolution; scaled LayerNorms would leave no key", _GIANT,
            vitdet_num_global=8),
    _preset("c-radio_v2-vlm-h", "nvidia/C-RADIOv2-VLM-H", "vit_huge_patch16_224", None,
            "[C] ViT-H/16, patch and resolution; the tower of Llama-Nemotron-Nano-VL-8B",
            vitdet_num_global=8),
    _preset("c-radio_v3-b", "nvidia/C-RADIOv3-B", "vit_base_patch16_v2_224", _FOUR,
            "[C][R] patch and resolution; [T] LayerScale and tokens", vitdet_supported=False),
    _preset("c-radio_v3-l", "nvidia/C-RADIOv3-L", "vit_large_patch16_v2_224", _FOUR,
            "[C][R] patch and resolution; [T] tokens; [T], [G] issue 164: LayerScale", vitdet_supported=False),
    _preset("c-radio_v3-h", "nvidia/C-RADIOv3-H", "vit_huge_patch16_224", _FOUR,
            "[C][R] ViT-H/16, patch and resolution; [T] tokens; LayerScale in [T], none in another port",
            ("layer_scale",), vitdet_supported=False),
    _preset("c-radio_v3-g", "nvidia/C-RADIOv3-g", "vit_giant_patch16_224", None,
            "[C][R] ViT-g/16, patch and resolution; scaled LayerNorms would leave no key", _GIANT,
            vitdet_supported=False),
    _preset("c-radio_v4-so400m", "nvidia/C-RADIOv4-SO400M", "vit_so400m_patch16_224", _TEN,
            "[C] patch and resolution; [T][N] trunk, tokens; [X] 330 tensors: no LayerScale or final norm"),
    _preset("c-radio_v4-h", "nvidia/C-RADIOv4-H", "vit_huge_patch16_224", _TEN,
            "[C] patch and resolution; [T][X] trunk and tokens; [N] has it as its defaults"),
    _preset("nemotron-parse", None, "vit_huge_patch16_224", _FOUR,
            "[X] the recipe of C-RADIOv2-H; a neck outside RADIO follows it"),
    _preset("nemotron-3-nano-omni", "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16",
            "vit_huge_patch16_224", _TEN,
            "[N][X] as c-radio_v4-h, with tubelets of two frames; 10 prefix tokens, 3 + 7 in [N], 4 + 6 in"
            " [X], and the same summary", video_temporal_patch_size=2),
)
# fmt: on
