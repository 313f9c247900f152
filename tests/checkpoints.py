"""One random tiny model, written in every layout that RADIO is found in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from loading import State, write_folder, write_pth, write_shards
from radio_triton import RadioConfig, RadioModel
from tiny import tiny_model

LANGUAGE = {
    "language_model.model.layers.0.self_attn.q_proj.weight": (8, 8),
    "language_model.model.embeddings.weight": (16, 8),
    "language_model.model.norm.weight": (8,),
    "language_model.encoder.norm.weight": (8,),
    "mlp1.0.weight": (128,),
    "mlp1.1.weight": (8, 128),
    "vision_projector.vision_final_layernorm.weight": (32,),
}
_REFERENCE = {
    "embeddings.patch_projection": "patch_generator.embedder",
    "embeddings.video_patch_projection": "patch_generator.video_embedder",
    "embeddings.position_embedding": "patch_generator.pos_embed",
    "embeddings.cls_register_token": "patch_generator.cls_token.token",
    "encoder.layer.": "blocks.",
    "encoder.norm.": "norm.",
    "attention.": "attn.",
    "mlp.gate_up_proj": "mlp.w12",
    "mlp.down_proj": "mlp.w3",
}
# q, k, v and the output projection in the native tree: today, and in the first 5.x
_NATIVE = {
    "native": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "native-old": ("attention.query", "attention.key", "attention.value", "output.dense"),
}


def gelu_model(**overrides: object) -> RadioModel:
    """3 + 2 prefix tokens, LayerScale, summary of tokens 0 and 1, statistics that are not the default."""
    mean = {"norm_mean": (0.5, 0.375, 0.25), "norm_std": (0.25, 0.1875, 0.3125)}
    return tiny_model(**{"layer_scale": True, **mean, **overrides}).eval()


def dino_model() -> RadioModel:
    """RADIO-g's trunk: SwiGLU, LayerScale, final norm, patch bias, 1 + 4 prefix tokens."""
    trunk = {"layer_scale": True, "use_swiglu_ffn": True, "final_norm": True, "patch_bias": True}
    tokens = {"num_cls_tokens": 1, "num_registers": 4, "summary_idxs": (0,)}
    sizes = {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 40, "patch_size": 14}
    return tiny_model(**trunk, **tokens, **sizes).eval()


def state_of(model: RadioModel) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def args_of(config: RadioConfig, **changes: Any) -> dict[str, Any]:
    """What the training script of this model would have been called with."""
    kwargs = {
        "embed_dim": config.hidden_size,
        "depth": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "patch_size": config.patch_size,
        "mlp_ratio": config.intermediate_size / config.hidden_size,
    }
    teachers = [{"name": name, "use_summary": name != "sam"} for name in ("clip", "dino_v2", "sam")]
    dino = config.use_swiglu_ffn
    return {
        "model": "dino_v2_g_student" if dino else "vit_tiny_patch16_224",
        "model_kwargs": {} if dino else kwargs,
        "cpe_max_size": config.max_resolution[0],
        "teachers": teachers,
        "cls_token_per_teacher": not dino,
        "cpe_num_registers": config.num_registers,
        "register_multiple": None,
        "spectral_reparam": False,
        "dtype": torch.float32,
        **changes,
    }


def remote_config(config: RadioConfig, **changes: Any) -> dict[str, Any]:
    """The config.json of a remote-code repository."""
    args = args_of(config, **changes)
    args["dtype"] = str(args["dtype"]).removeprefix("torch.") if args["dtype"] else None
    if config.video_temporal_patch_size > 1:
        args["video_temporal_patch_size"] = config.video_temporal_patch_size
    return {"args": args, "adaptor_names": None, "architectures": ["RADIOModel"]}


def native_config(config: RadioConfig) -> dict[str, Any]:
    """The config.json of Transformers' RadioModel."""
    names = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size", "num_cls_tokens",
        "num_registers", "norm_mean", "norm_std", "layer_norm_eps", "qkv_bias", "video_temporal_patch_size",
    )  # fmt: skip
    return {
        "model_type": "radio",
        "mlp_ratio": config.intermediate_size / config.hidden_size,
        "max_img_size": config.max_resolution[0],
        "summary_idxs": list(config.summary_idxs or ()),
        **{name: getattr(config, name) for name in names},
    }


def reference(
    state: State, trunk: str, beside: str, scale: str = ".grandma", statistics: bool = True
) -> State:
    """The reference's names. `scale` is how LayerScale is spelled after ls1, or in full after `blocks.0.`."""
    named = {}
    for name, tensor in state.items():
        if name.startswith(("summary_idxs", "input_conditioner.")):
            if statistics:
                named[beside + name] = tensor
            continue
        if ".layer_scale" in name and not scale.startswith("layer_scale"):
            name = name.replace("layer_scale", "ls").removesuffix(".lambda1") + scale
        for ours, theirs in _REFERENCE.items():
            name = name.replace(ours, theirs)
        named[trunk + name] = tensor
    return named


def torch_hub(state: State, **options: Any) -> State:
    """The names of a .pth.tar, which holds no summary indices."""
    named = reference(state, "base_model.", "", **options)
    del named["summary_idxs"]
    return named


def native(state: State, spelling: str = "native") -> State:
    """The names of Transformers' RadioModel, q, k and v apart."""
    *qkv, out = _NATIVE[spelling]
    named = {}
    for name, tensor in state.items():
        if ".attention.qkv." in name:
            for theirs, rows in zip(qkv, tensor.chunk(3), strict=True):
                named[name.replace("attention.qkv", f"attention.{theirs}")] = rows.clone()
        else:
            named[name.replace("attention.proj", f"attention.{out}")] = tensor
    return named


def nested(state: State, prefix: str) -> State:
    """A tower in a vision-language model."""
    language = {name: torch.randn(shape) for name, shape in LANGUAGE.items()}
    return language | {prefix + name: tensor for name, tensor in state.items()}


def damp(state: State) -> State:
    """Every matrix of the trunk under DAMP, which stores the weight itself."""
    suffix = ".parametrizations.weight.original"
    return {
        k.removesuffix(".weight") + suffix if v.ndim == 2 and k.endswith(".weight") else k: v
        for k, v in state.items()
    }


def spectral(
    state: State, scale_shape: tuple[int, ...] = (1, 1), version: int | None = 2, values: bool = True
) -> State:
    """Matrices of the blocks under spectral normalisation, such that folding gives `state`; u and v have not
    converged.

    values: whether the values' rows of qkv are normalised too.
    """
    out = {}
    for name, weight in state.items():
        module = name.removesuffix(".weight")
        if weight.ndim != 2 or not name.endswith(".weight") or "blocks." not in name:
            out[name] = weight
            continue
        chunks = {"qkv": 3, "w12": 2}.get(module.rpartition(".")[2], 1)
        prefix = f"{module}.parametrizations.weight"
        original = 2 * weight
        for i, block in enumerate(weight.chunk(chunks)):
            if i == 2 and not values:
                original.chunk(3)[2].copy_(block)
                continue
            part = f"{prefix}.0." + (f"parts.{i}." if chunks > 1 else "")
            out |= {part + leaf: value for leaf, value in _normalised(block, scale_shape, version).items()}
        out[f"{prefix}.original"] = original
    return out


def _normalised(block: Tensor, scale_shape: tuple[int, ...], version: int | None) -> State:
    """scale, _u, _v for which twice this block folds to the block."""
    matrix = 2 * block.double()
    u, v = (normalize(torch.randn(size, dtype=torch.float64), dim=0) for size in matrix.shape)
    next_u = normalize(matrix @ v, dim=0)
    next_v = normalize(matrix.T @ next_u, dim=0)
    gain = (next_u @ matrix @ next_v + 1e-6) / 2
    scale = (gain - 0.05).expm1().log() if version == 2 else gain
    # only the first column counts
    scales = torch.full(scale_shape, 7.0)
    scales[0, 0] = scale
    found = {"scale": scales, "_u": u.float(), "_v": v.float()}
    return found | ({"_sn_version": torch.tensor(version)} if version else {})


def _remote(model: RadioModel, folder: Path, scale: str = ".grandma", prefix: str = "") -> Path:
    tensors = reference(state_of(model), f"{prefix}radio_model.model.", f"{prefix}radio_model.", scale)
    tensors[f"{prefix}radio_model.model.reg_token"] = torch.randn(1, 4, 32)
    return write_folder(folder, tensors, remote_config(model.config))


def _hub(model: RadioModel, folder: Path, change: Callable[[State], State] = dict, **args: Any) -> Path:
    return write_pth(folder, change(torch_hub(state_of(model))), args_of(model.config, **args))


def _wrapped(state: State) -> State:
    """As DistributedDataParallel and torch.compile leave names."""
    return {
        f"module.{name.replace('.blocks.', '._orig_mod.blocks.')}": tensor for name, tensor in state.items()
    }


def _gamma(state: State) -> State:
    return {name.replace(".grandma", ".gamma"): tensor for name, tensor in state.items()}


def _heads(state: State) -> State:
    beside = {
        "_heads.0.fc1.weight": (8, 32), "_feature_projections.0.final.0.weight": (8,),
        "_heads.sam.fc1.weight": (8, 32),
    }  # fmt: skip
    return state | {name: torch.randn(shape) for name, shape in beside.items()}


def _ema(model: RadioModel, folder: Path) -> Path:
    state = torch_hub(state_of(model))
    zeros = {name: tensor * 0 for name, tensor in state.items()}
    return write_pth(folder, zeros, args_of(model.config, spectral_reparam=True), ema=state)


def write_inner(model: RadioModel, folder: Path) -> Path:
    """RADIO-g's .pth.tar, with the stray tensors that it holds."""
    state = reference(state_of(model), "base_model.inner.", "")
    del state["summary_idxs"]
    width = model.config.hidden_size
    stray = {f"base_model.input_conditioner.norm_{kind}": torch.ones(3, 1, 1) for kind in ("mean", "std")}
    state |= {"base_model.inner.mask_token": torch.randn(1, width), **stray}
    return write_pth(folder, state, args_of(model.config))


def _native(model: RadioModel, folder: Path, spelling: str = "native", prefix: str = "") -> Path:
    named = {prefix + name: tensor for name, tensor in native(state_of(model), spelling).items()}
    return write_folder(folder, named, native_config(model.config))


def _saved_by_transformers(model: RadioModel, folder: Path) -> Path:
    state = reference(state_of(model), "radio_model.model.", "radio_model.", "layer_scale")
    return write_folder(folder, state, native_config(model.config))


def _vlm(model: RadioModel, folder: Path) -> Path:
    state = reference(state_of(model), "radio_model.model.", "radio_model.")
    config = {"model_type": "NemotronH_Nano_VL_V2", "vision_config": remote_config(model.config)}
    return write_shards(folder, nested(state, "vision_model."), config)


def _native_in_vlm(model: RadioModel, folder: Path) -> Path:
    config = {"model_type": "some_vlm", "vision_config": native_config(model.config)}
    return write_folder(folder, nested(native(state_of(model)), "model.vision_tower."), config)


def _fused(model: RadioModel, folder: Path) -> Path:
    config = native_config(model.config) | {"qk_normalization": False, "image_size": 8}
    return write_folder(folder, state_of(model), config)


def _hf_model(model: RadioModel, folder: Path) -> Path:
    state = nested(native(state_of(model)), "vision_model.radio_model.hf_model.")
    return write_folder(folder, state, {"vision_config": remote_config(model.config)})


def _sharded(model: RadioModel, folder: Path) -> Path:
    state = reference(state_of(model), "radio_model.model.", "radio_model.")
    return write_shards(folder, state, remote_config(model.config))


# name -> writer for `gelu_model()`, and the layout's name in the report
LAYOUTS: dict[str, tuple[Callable[[RadioModel, Path], Path], str]] = {
    "hub": (_hub, "torch.hub"),
    "hub-gamma": (lambda m, f: _hub(m, f, _gamma), "torch.hub"),
    "hub-ema": (_ema, "torch.hub"),
    "hub-damp": (lambda m, f: _hub(m, f, damp), "torch.hub"),
    "hub-wrapped": (lambda m, f: _hub(m, f, _wrapped), "torch.hub"),
    "hub-heads": (lambda m, f: _hub(m, f, _heads), "torch.hub"),
    "remote": (_remote, "remote-code"),
    "remote-gamma": (lambda m, f: _remote(m, f, ".gamma"), "remote-code"),
    "remote-weight": (lambda m, f: _remote(m, f, ".weight"), "remote-code"),
    "remote-bare": (lambda m, f: _remote(m, f, ""), "remote-code"),
    "remote-in-vlm": (lambda m, f: _remote(m, f, prefix="vision_model."), "remote-code"),
    "saved-by-transformers": (_saved_by_transformers, "remote-code"),
    "native": (_native, "native"),
    "native-old": (lambda m, f: _native(m, f, "native-old"), "native (attention.query)"),
    "native-in-vlm": (_native_in_vlm, "native"),
    "radio_model": (lambda m, f: _native(m, f, prefix="radio_model."), "native"),
    "hf_model": (_hf_model, "native"),
    "fused": (_fused, "fused"),
    "sharded": (_sharded, "remote-code"),
    "sharded-vlm": (_vlm, "remote-code"),
}


def _spectral(wrap: Callable[[State], State] = dict, **options: Any) -> Callable[[RadioModel, Path], Path]:
    return lambda m, f: _hub(m, f, lambda s: wrap(spectral(s, **options)), spectral_reparam=True)


# these agree within rounding
SPECTRAL = {
    "spectral": _spectral(),
    "spectral-wide-scale": _spectral(scale_shape=(1, 4)),
    "spectral-v1": _spectral(version=None),
    "spectral-values-plain": _spectral(values=False),
    "spectral-wrapped": _spectral(_wrapped),
}
