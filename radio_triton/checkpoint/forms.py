"""The forms that a checkpoint can be written in: what config.json says in each, and how the tensors are
named.

Whether a form can hold a model is found by reading the form's config back: a field that comes back different
is one that the form has no word for.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..config import RadioConfig
from ..presets import ARCHS

FORMS = ("native", "legacy", "fused")

# fields in words, for the sentence that says what a form cannot hold
_WORDS = {
    "qk_normalization": "QK-norm",
    "mlp_norm": "a LayerNorm in the MLP",
    "final_norm": "a final norm",
    "patch_bias": "a bias in the patch projection",
    "layer_scale": "LayerScale",
    "use_swiglu_ffn": "a SwiGLU MLP",
    "cpe": "positions that are cropped, not resized",
    "pos_align_corners": "positions resized with align_corners",
    "position_grid": "a position table that is not square",
    "video_projection": "tubelets without a projection of their own",
}
# fields that tensors of every form hold, or that only a new model needs
_STORED = {"norm_mean", "norm_std", "layerscale_value", "num_dummy_heads"}
# what the reference counts tokens and reads heads from: a source's own values are better than made-up ones
_KEPT_ARGS = (
    "teachers", "cls_token_per_teacher", "register_multiple", "cpe_num_registers", "mlp_version",
    "spatial_mlp_version",
)  # fmt: skip
_KWARGS = {
    "hidden_size": "embed_dim",
    "num_hidden_layers": "depth",
    "num_attention_heads": "num_heads",
    "patch_size": "patch_size",
    "qkv_bias": "qkv_bias",
}
_LEGACY = (
    ("embeddings.patch_projection", "patch_generator.embedder"),
    ("embeddings.video_patch_projection", "patch_generator.video_embedder"),
    ("embeddings.position_embedding", "patch_generator.pos_embed"),
    ("embeddings.cls_register_token", "patch_generator.cls_token.token"),
    ("encoder.layer.", "blocks."),
    ("encoder.norm.", "norm."),
    (".attention.", ".attn."),
    ("layer_scale1.lambda1", "ls1.grandma"),
    ("layer_scale2.lambda1", "ls2.grandma"),
    ("mlp.gate_up_proj", "mlp.w12"),
    ("mlp.down_proj", "mlp.w3"),
)


def form_config(
    form: str, config: RadioConfig, dtype: torch.dtype, args: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """config.json in a form; `args` are the source's and matter only to the legacy form."""
    if form == "native":
        return _native_config(config, dtype)
    if form == "legacy":
        return _legacy_config(config, dtype, args or {})
    return {"model_type": "radio_triton", **config.to_dict()}


def cannot_hold(config: RadioConfig, written: Mapping[str, Any]) -> list[str]:
    """What of a config is lost when `written` is read back, in words; empty where nothing is."""
    mine, read = config.to_dict(), RadioConfig.from_hf(written).to_dict()
    if config.summary_idxs is None:
        mine["summary_idxs"] = tuple(range(config.num_cls_tokens))
    unused = set(_STORED) if "args" in written else {*_STORED, "layer_scale"}  # its keys show LayerScale
    unused |= set() if config.mlp_norm else {"mlp_norm_eps"}
    unused |= {"hidden_act"} if config.use_swiglu_ffn else set()
    unused |= {"separate_video_embedder"} if config.video_temporal_patch_size == 1 else set()
    # without windows, nothing reads how they would be arranged
    unused |= (
        {name for name in mine if name.startswith("vitdet_")} if config.vitdet_window_size is None else set()
    )
    lost = [name for name in mine if name not in unused and mine[name] != read[name]]
    return [_WORDS.get(name, f"{name}={mine[name]}") for name in lost]


def _native_config(config: RadioConfig, dtype: torch.dtype) -> dict[str, Any]:
    """`model_type: radio` as Transformers has it."""
    same = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "hidden_act", "layer_norm_eps",
        "use_swiglu_ffn", "qkv_bias", "num_channels", "patch_size", "num_cls_tokens", "num_registers",
        "norm_mean", "norm_std",
    )  # fmt: skip
    frames = config.video_temporal_patch_size
    summary = range(config.num_cls_tokens) if config.summary_idxs is None else config.summary_idxs
    hidden = config.intermediate_size
    # Transformers' SwiGLU keeps two thirds of hidden_size * mlp_ratio, rounded up to a multiple of 8
    product = hidden * 3 // 2 if config.use_swiglu_ffn else hidden
    return {
        "architectures": ["RadioModel"],
        "model_type": "radio",
        "dtype": str(dtype).removeprefix("torch."),
        **{name: getattr(config, name) for name in same},
        "mlp_ratio": mlp_ratio(config.hidden_size, product),
        # Transformers has a LayerScale in every model, and sets a missing one to this
        "layerscale_value": config.layerscale_value if config.layer_scale else 1.0,
        "max_img_size": config.max_resolution[0],
        "video_temporal_patch_size": frames if frames > 1 else None,
        "summary_idxs": list(summary),
    }


def mlp_ratio(width: int, hidden: int) -> float:
    """The ratio for which int(width * ratio) is `hidden`, whatever the rounding."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


def _legacy_config(config: RadioConfig, dtype: torch.dtype, source: Mapping[str, Any]) -> dict[str, Any]:
    """The remote-code form, by the trunk that says most of the config with the fewest model_kwargs."""
    kept = {name: source[name] for name in _KEPT_ARGS if name in source}
    forms = [_args_form(config, dtype, arch, tokens) for arch in ARCHS for tokens in (kept, {})]

    def rank(form: dict[str, Any]) -> tuple[int, int]:
        return len(cannot_hold(config, form)), len(form["args"]["model_kwargs"])

    return min(forms, key=rank)


def _args_form(
    config: RadioConfig, dtype: torch.dtype, arch: str, tokens: Mapping[str, Any]
) -> dict[str, Any]:
    summary = range(config.num_cls_tokens) if config.summary_idxs is None else config.summary_idxs
    teachers = [{"name": f"teacher{i}", "use_summary": i in summary} for i in range(config.num_cls_tokens)]
    args = {
        "model": arch,
        # the reference's DINOv2 wrapper takes none
        "model_kwargs": {} if arch.startswith("dino_v2") else _model_kwargs(config, ARCHS[arch]),
        "model_norm": config.final_norm,
        "in_chans": None if config.num_channels == 3 else config.num_channels,
        "cpe_max_size": config.max_resolution[0],
        "teachers": teachers,
        "cls_token_per_teacher": True,
        "register_multiple": None,
        "cpe_num_registers": config.num_registers or None,
        "dtype": str(dtype).removeprefix("torch."),
        "spectral_reparam": False,
        "spectral_heads": False,
        **dict.fromkeys(("input_size", "bn_momentum", "bn_eps", "drop_block", "gp"), None),
        **dict.fromkeys(("drop", "drop_path"), 0.0),
        "num_classes": 0, "pretrained": False, "torchscript": False, "initial_checkpoint": "",
        **tokens,
    }  # fmt: skip
    size = list(config.max_resolution)
    form: dict[str, Any] = {"args": args, "patch_size": config.patch_size, "max_resolution": max(size)}
    form |= {"adaptor_names": None, "adaptor_configs": {}, "architectures": ["RADIOModel"]}
    if config.video_temporal_patch_size > 1:
        form["video_temporal_patch_size"] = config.video_temporal_patch_size
    return form


def _model_kwargs(config: RadioConfig, arch: Mapping[str, Any]) -> dict[str, Any]:
    kwargs = {name: getattr(config, field) for field, name in _KWARGS.items()}
    kwargs = {name: kwargs[name] for field, name in _KWARGS.items() if kwargs[name] != arch[field]}
    ratio = arch["intermediate_size"] / arch["hidden_size"]
    if int(config.hidden_size * ratio) != config.intermediate_size:
        kwargs["mlp_ratio"] = mlp_ratio(config.hidden_size, config.intermediate_size)
    if config.layer_scale != arch["layer_scale"]:
        kwargs["init_values"] = (config.layerscale_value or 1.0) if config.layer_scale else None
    if not config.cpe:
        kwargs["img_size"] = config.max_resolution[0]
    return kwargs


def form_tensors(
    form: str, state: Iterable[tuple[str, Tensor]], written: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Our (name, tensor) pairs under a form's names; the native form splits fused projections into views."""
    trunk = "radio_model.model."
    if form == "legacy" and written["args"]["model"].startswith("dino_v2"):
        trunk += "inner."
    for name, tensor in state:
        if form == "native":
            yield from _native_tensors(name, tensor)
        elif form == "legacy":
            yield _legacy_name(name, trunk), tensor
        else:
            yield name, tensor


def _native_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if ".attention.qkv." in name:
        for letter, rows in zip("qkv", tensor.chunk(3), strict=True):
            yield name.replace(".qkv.", f".{letter}_proj."), rows
    elif ".gate_up_proj." in name:
        for word, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield name.replace("gate_up", word), rows
    else:
        yield name.replace(".attention.proj.", ".attention.o_proj."), tensor


def _legacy_name(name: str, trunk: str) -> str:
    if name.startswith(("summary_idxs", "input_conditioner.", "feature_normalizer.")):
        return f"radio_model.{name}"
    if name.startswith("intermediate_normalizer."):
        return f"radio_model.inter_feature_{name.removeprefix('intermediate_')}"
    if name.startswith("adaptors."):
        return f"radio_model.{name}".replace(".summary.", ".head_mlp.", 1).replace(
            ".feature.", ".feat_mlp.", 1
        )
    for ours, theirs in _LEGACY:
        name = name.replace(ours, theirs)
    return trunk + name
