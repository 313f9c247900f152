"""A config.json, in each of the forms that RADIO is published in, as fields of RadioConfig.

The values stay as the file has them, except where a rule derives them; RadioConfig checks them all.
"""

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from radio_triton.presets import arch_fields, vitdet_fields

# keys that only vLLM's native form has: it knows a mode without CPE, Transformers always resizes
_VLLM_KEYS = ("qk_normalization", "intermediate_size", "separate_video_embedder")
# native keys that are fields of RadioConfig under the same name
_NATIVE_FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_channels",
    "patch_size", "video_temporal_patch_size", "separate_video_embedder", "qkv_bias", "layer_norm_eps",
    "hidden_act", "qk_normalization", "layerscale_value", "use_swiglu_ffn", "num_cls_tokens",
    "num_registers", "summary_idxs", "norm_mean", "norm_std",
)  # fmt: skip

# entries of args.model_kwargs, by what becomes of them
_KWARG_FIELDS = {
    "embed_dim": "hidden_size",
    "depth": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "patch_size": "patch_size",
    "qkv_bias": "qkv_bias",
}
_KWARGS_KNOWN = {
    *_KWARG_FIELDS, "mlp_ratio", "init_values", "img_size", "weight_init", "fix_init", "return_full_features",
    "num_classes", "global_pool", "reg_tokens", "no_embed_class", "dynamic_img_size", "dynamic_img_pad",
    "strict_img_size", "drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate",
    "drop_path_rate", "scaled_ln",
}  # fmt: skip
_KWARGS_REFUSED = {
    "qk_norm": "it is timm's LayerNorm of each head, and qk_normalization here an RMSNorm over all heads",
}


def hf_fields(source: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of RadioConfig from a native or remote-code config; ValueError where it is neither."""
    kind = source.get("model_type")
    if source.get("args"):
        return _from_args(source)
    if kind == "radio" or (not kind and "hidden_size" in source):
        return _from_native(source)
    if source.get("vision_config"):
        return hf_fields(source["vision_config"])
    raise ValueError(
        f"not a RADIO config (model_type {kind!r}): expected model_type 'radio', a remote-code config with"
        " args, or either of them under vision_config"
    )


def _from_native(source: Mapping[str, Any]) -> dict[str, Any]:
    """`model_type: radio`, Transformers' or vLLM's, whose older form has `model_name` and `teachers`."""
    if source.get("norm_type", "layer_norm") != "layer_norm":
        raise ValueError(f"norm_type {source['norm_type']!r} is not supported: every RADIO uses 'layer_norm'")
    vllm = any(key in source for key in _VLLM_KEYS)
    fields = arch_fields(source["model_name"]) if source.get("model_name") else {}
    fields |= {key: source[key] for key in _NATIVE_FIELDS if source.get(key) is not None}
    if "teachers" in source and "num_cls_tokens" not in source:
        fields |= _tokens(source)
    elif vllm:
        fields["summary_idxs"] = source.get("summary_idxs")
    width = integer("hidden_size", fields.get("hidden_size", 1280), 1)
    if "intermediate_size" not in fields:
        hidden = int(width * number("mlp_ratio", source.get("mlp_ratio", 4.0), positive=True))
        gated = (int(hidden * 2 / 3) + 7) // 8 * 8
        fields["intermediate_size"] = gated if fields.get("use_swiglu_ffn") else hidden
    if source.get("head_dim") not in (None, width // fields.get("num_attention_heads", 16)):
        raise ValueError(
            f"head_dim {source['head_dim']} is not supported: it must be hidden_size over the heads"
        )
    fields.setdefault("layer_scale", fields.get("layerscale_value", 1.0) != 1.0)
    patch = integer("patch_size", fields.get("patch_size", 16), 1)
    table = pair("max_img_size", source.get("max_img_size") or source.get("cpe_max_size") or 2048)
    image = pair("image_size", source.get("image_size") or 224)
    grid = tuple(-(-side // patch) if vllm else side // patch for side in table)
    cpe = not vllm or tuple(side * patch for side in grid) != image
    return fields | {"position_grid": grid, "cpe": cpe}


def _from_args(source: Mapping[str, Any]) -> dict[str, Any]:
    """A remote-code config: `args` is what the training script was called with, a dict or a Namespace."""
    args = source["args"] if isinstance(source["args"], Mapping) else vars(source["args"])
    if not args.get("model"):
        raise ValueError("args.model is missing: it names the trunk, for example 'vit_huge_patch16_224'")
    fields = arch_fields(args["model"])
    if not args.get("cpe_max_size"):
        raise ValueError(
            "args.cpe_max_size is null: the trunk is a plain timm ViT (pos_embed, cls_token,"
            " patch_embed.proj) without RADIO's patch generator; load it with timm"
        )
    dino = args["model"].startswith("dino_v2")
    # the reference's DINOv2 wrapper takes no model_kwargs, keeps its norm and always splits off 1 + 4 tokens
    kwargs = {} if dino else args.get("model_kwargs") or {}
    _apply_kwargs(fields, kwargs)
    fields |= {"num_cls_tokens": 1, "num_registers": 4, "summary_idxs": (0,)} if dino else _tokens(args)
    fields["final_norm"] = dino or bool(args.get("model_norm"))
    if args.get("in_chans") or args.get("input_size"):
        fields["num_channels"] = args.get("in_chans") or args["input_size"][0]
    for name in ("video_temporal_patch_size", "separate_video_embedder"):
        if (value := source.get(name, args.get(name))) is not None:
            fields[name] = value
    patch = integer("patch_size", fields["patch_size"], 1)
    grid = tuple(round(side / patch) for side in pair("cpe_max_size", args["cpe_max_size"]))
    # args.input_size only counts channels in the reference: the trunk keeps its own image size
    image = pair("img_size", kwargs.get("img_size") or 224)
    cpe = dino or tuple(side * patch for side in grid) != image
    windows = vitdet_fields(source.get("version"))
    return fields | windows | {"position_grid": grid, "cpe": cpe}


def _apply_kwargs(fields: dict[str, Any], kwargs: Mapping[str, Any]) -> None:
    for key, value in kwargs.items():
        # timm's own value, spelled out, is no reason to refuse
        default = key in ("class_token", "proj_bias")
        if key not in _KWARGS_KNOWN and value is not None and value != default:
            reason = _KWARGS_REFUSED.get(key, "it may change the arithmetic of the trunk")
            raise ValueError(f"args.model_kwargs[{key!r}] = {value!r} is not supported: {reason}")
    ratio = kwargs.get("mlp_ratio") or fields["intermediate_size"] / fields["hidden_size"]
    fields |= {field: kwargs[key] for key, field in _KWARG_FIELDS.items() if kwargs.get(key) is not None}
    if not fields["use_swiglu_ffn"]:
        fields["intermediate_size"] = int(fields["hidden_size"] * ratio)
    fields["scaled_layer_norm"] = bool(kwargs.get("scaled_ln"))
    if "init_values" in kwargs:
        fields["layer_scale"] = bool(kwargs["init_values"])
        fields["layerscale_value"] = kwargs["init_values"] or 1.0


def _tokens(args: Mapping[str, Any]) -> dict[str, Any]:
    """Class tokens, registers and summary by the rules of the reference's torch.hub loader."""
    num_cls = 1
    summary: tuple[int, ...] = (0,)
    if args.get("cls_token_per_teacher"):
        teachers = list(args.get("teachers") or ())
        num_cls = len({teacher["name"] for teacher in teachers})
        first: dict[str, int] = {}
        for i, teacher in enumerate(teachers):
            if teacher.get("use_summary", True):
                first.setdefault(teacher["name"], i)
        summary = tuple(sorted(first.values()))
    multiple = args.get("register_multiple")
    # class tokens that divide evenly get a whole multiple of registers, as in the reference
    registers = args.get("cpe_num_registers") or (multiple - num_cls % multiple if multiple else 0)
    # indices count teachers, not distinct names: with repeated names they may reach into the registers
    reach = max(num_cls, 1 + max(summary, default=-1))
    return {"num_cls_tokens": reach, "num_registers": num_cls + registers - reach, "summary_idxs": summary}


def integer(name: str, value: Any, least: int = 0) -> int:
    """`value` as an int of at least `least`; TypeError for what is no integer (a bool included)."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if (whole := operator.index(value)) < least:
        raise ValueError(f"{name} must be at least {least}, got {whole}")
    return whole


def number(name: str, value: Any, positive: bool = False) -> float:
    """`value` as a finite float."""
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or (positive and value <= 0):
        raise ValueError(f"{name} must be a finite{' positive' if positive else ''} number, got {value!r}")
    return float(value)


def sequence(name: str, value: Any) -> tuple[Any, ...]:
    """`value` as a tuple; TypeError for a single number or a string."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of numbers, got {value!r}")
    return tuple(value)


def pair(name: str, value: Any) -> tuple[int, int]:
    """An integer, or two of them (height, width), as two positive integers."""
    sides = (value, value) if isinstance(value, int) else sequence(name, value)
    if len(sides) != 2:
        raise ValueError(f"{name} must be an integer or a pair of them (height, width), got {value!r}")
    return integer(name, sides[0], 1), integer(name, sides[1], 1)
