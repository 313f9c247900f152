"""RadioConfig: every fact that decides the shape and the arithmetic of a RADIO tower, in a frozen dataclass.

`RadioConfig.preset` takes the facts from the table of released versions, `from_hf` from a config.json. What
only the keys of a checkpoint show (LayerScale, the norm in the MLP, SwiGLU, the final norm, the sides of the
position table) is a prior there, which the loader corrects from the file.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radio_triton import presets as _presets
from radio_triton.hf_config import hf_fields, integer, number, pair, sequence

OPENAI_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "num_channels", "patch_size", "video_temporal_patch_size", "num_cls_tokens", "vitdet_num_global",
)  # fmt: skip
_FLAGS = (
    "video_projection", "separate_video_embedder", "qkv_bias", "qk_normalization", "layer_scale",
    "use_swiglu_ffn", "mlp_norm", "final_norm", "scaled_layer_norm", "patch_bias", "cpe", "vitdet_ragged",
    "vitdet_supported",
    "pos_align_corners",
)  # fmt: skip


@dataclass(frozen=True)
class RadioConfig:
    """The defaults are C-RADIOv4-H's. TypeError for a wrong kind of value, ValueError for a wrong value."""

    hidden_size: int = 1280
    num_hidden_layers: int = 32
    num_attention_heads: int = 16
    # with use_swiglu_ffn: the width of the gate, so that gate_up_proj has twice as many rows
    intermediate_size: int = 5120
    num_channels: int = 3
    patch_size: int = 16
    # frames in a tubelet; None becomes 1
    video_temporal_patch_size: int = 1
    # whether tubelets have a projection of their own; None becomes video_temporal_patch_size > 1
    video_projection: bool | None = None
    separate_video_embedder: bool = True
    qkv_bias: bool = True
    layer_norm_eps: float = 1e-6
    hidden_act: str = "gelu"
    # RMSNorm of q and of k, over all heads together
    qk_normalization: bool = False
    # heads of zeros, so that the heads divide by a number of ranks
    num_dummy_heads: int = 0
    layer_scale: bool = False
    # what LayerScale starts from, where there is one
    layerscale_value: float = 1.0
    use_swiglu_ffn: bool = False
    # LayerNorm inside the MLP, after GELU
    mlp_norm: bool = False
    mlp_norm_eps: float = 1e-5
    final_norm: bool = False
    # norm1 and norm2 of block i are divided by sqrt(i + 1); loading the reference's files folds that in
    scaled_layer_norm: bool = False
    patch_bias: bool = False
    # False: crop the position table instead of resizing it
    cpe: bool = True
    # (rows, columns) of the position table; an integer makes it square
    position_grid: tuple[int, int] = (128, 128)
    pos_align_corners: bool = False
    num_cls_tokens: int = 3
    num_registers: int = 7
    # the class tokens that make the summary, order and repeats kept; None is all of them, () none
    summary_idxs: tuple[int, ...] | None = (0, 1)
    norm_mean: tuple[float, ...] = OPENAI_CLIP_MEAN
    norm_std: tuple[float, ...] = OPENAI_CLIP_STD
    # ViTDet: sides of the windows in patches, None for none
    vitdet_window_size: int | None = None
    # windowed blocks between two global ones; None spreads vitdet_num_global global blocks evenly
    vitdet_num_windowed: int | None = None
    vitdet_num_global: int = 4
    # True: images need not divide into windows, those at the edges are smaller
    vitdet_ragged: bool = False
    # whether the version was trained for windows
    vitdet_supported: bool = True

    def __post_init__(self) -> None:
        if self.video_temporal_patch_size is None:
            self._set("video_temporal_patch_size", 1)
        for name in _SIZES:
            self._set(name, integer(name, getattr(self, name), least=1))
        for name in ("num_dummy_heads", "num_registers"):
            self._set(name, integer(name, getattr(self, name)))
        for name in ("layer_norm_eps", "mlp_norm_eps"):
            self._set(name, number(name, getattr(self, name), positive=True))
        self._set("layerscale_value", number("layerscale_value", self.layerscale_value))
        self._set("position_grid", pair("position_grid", self.position_grid))
        for name in ("norm_mean", "norm_std"):
            values = sequence(name, getattr(self, name))
            self._set(name, tuple(number(name, value, positive=name == "norm_std") for value in values))
        if self.summary_idxs is not None:
            indices = sequence("summary_idxs", self.summary_idxs)
            self._set("summary_idxs", tuple(integer("summary_idxs", index) for index in indices))
        for name, least in (("vitdet_window_size", 1), ("vitdet_num_windowed", 0)):
            if getattr(self, name) is not None:
                self._set(name, integer(name, getattr(self, name), least))
        if self.video_projection is None:
            self._set("video_projection", self.video_temporal_patch_size > 1)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        self._check_tower()
        self._check_input_and_summary()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_tower(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads"
                f" {self.num_attention_heads}"
            )
        if self.hidden_act not in (("gelu", "silu") if self.use_swiglu_ffn else ("gelu",)):
            raise ValueError(
                f"hidden_act {self.hidden_act!r} is not supported: the MLP of every RADIO uses 'gelu', the"
                " exact erf form, and 'silu' is accepted only with use_swiglu_ffn=True"
            )
        if self.use_swiglu_ffn and self.mlp_norm:
            raise ValueError(
                "mlp_norm=True belongs to the GELU MLP: it is not supported with use_swiglu_ffn=True"
            )

    def _check_input_and_summary(self) -> None:
        for name in ("norm_mean", "norm_std"):
            if (count := len(getattr(self, name))) != self.num_channels:
                raise ValueError(
                    f"{name} has {count} values: give one for each of {self.num_channels} channels"
                )
        frames = self.video_temporal_patch_size
        if frames > 1 and not self.separate_video_embedder:
            raise ValueError(
                f"separate_video_embedder=False with video_temporal_patch_size={frames} is not supported:"
                " tubelets need a projection of their own; set separate_video_embedder=True, or"
                " video_temporal_patch_size=1"
            )
        if frames == 1 and self.video_projection:
            raise ValueError("video_projection=True needs a video_temporal_patch_size of at least 2, got 1")
        for index in self.summary_idxs or ():
            if index >= self.num_cls_tokens:
                raise ValueError(
                    f"summary_idxs {self.summary_idxs} names class token {index}, but num_cls_tokens is"
                    f" {self.num_cls_tokens}: indices start at 0"
                )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def attention_width(self) -> int:
        """Columns of each of q, k and v, dummy heads included."""
        return (self.num_attention_heads + self.num_dummy_heads) * self.head_dim

    @property
    def num_prefix_tokens(self) -> int:
        return self.num_cls_tokens + self.num_registers

    @property
    def summary_size(self) -> int:
        """S, how many class tokens make the summary, which is S · hidden_size wide."""
        return self.num_cls_tokens if self.summary_idxs is None else len(self.summary_idxs)

    @property
    def max_resolution(self) -> tuple[int, int]:
        """(height, width) in pixels of the image for which the position table is used as it is."""
        return self.position_grid[0] * self.patch_size, self.position_grid[1] * self.patch_size

    @property
    def resolution_step(self) -> int:
        """Height and width of an image are multiples of this many pixels: of a patch, or of a window."""
        whole_windows = self.vitdet_window_size is not None and not self.vitdet_ragged
        return self.patch_size * (self.vitdet_window_size or 1) if whole_windows else self.patch_size

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON; `RadioConfig(**d)` and `RadioConfig.from_hf(d)` read them back."""
        return dataclasses.asdict(self)

    def replace(self, **overrides: Any) -> "RadioConfig":
        """A copy with other values; ValueError for a name that is no field."""
        return type(self)(**_override(self.to_dict(), overrides))

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "RadioConfig":
        """The configuration of a released version, by torch.hub key or hub id; `presets()` lists them.

        ValueError where nothing public states some fact of that version, unless `overrides` gives it.
        """
        preset = _presets.get_preset(name)
        fields = _override(dict(preset.fields), overrides)
        if missing := [field for field in preset.unknown if field not in overrides]:
            raise ValueError(
                f"nothing public states {', '.join(missing)} of {preset.name}: load the checkpoint with"
                f" from_pretrained, which reads them, or pass {', '.join(f'{field}=…' for field in missing)}"
            )
        return cls(**fields)

    @staticmethod
    def presets() -> tuple[str, ...]:
        """The names of the released versions, in order of release; `presets.get_preset` has the evidence."""
        return tuple(preset.name for preset in _presets.PRESETS)

    @classmethod
    def from_hf(cls, source: Any, **overrides: Any) -> "RadioConfig":
        """Read a config.json (as a dict) or a config object of Transformers.

        source: the native form (`model_type: radio`, Transformers' or vLLM's), the remote-code form (`args`),
        a vision-language model's with either of them as `vision_config`, or what `to_dict()` gave.
        overrides: fields of RadioConfig, which win over the source's.
        """
        source = source.to_dict() if hasattr(source, "to_dict") else source
        if not isinstance(source, Mapping):
            raise TypeError(f"from_hf takes a dict or a config object, got {type(source).__name__}")
        if "position_grid" in source:
            own = {key: value for key, value in source.items() if key not in _NOT_FIELDS}
            return cls(**_override(_override({}, own), overrides))
        return cls(**_override(hf_fields(source), overrides))


# what our own config.json has besides: of adaptors and normalizers see checkpoint/heads.py
_NOT_FIELDS = (
    "model_type", "architectures", "adaptor_names", "adaptor_configs", "feature_normalizer_config",
    "inter_feature_normalizer_config",
)  # fmt: skip
_FIELDS = tuple(field.name for field in dataclasses.fields(RadioConfig))


def _override(fields: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    for name in overrides:
        if name not in _FIELDS:
            close = difflib.get_close_matches(name, _FIELDS, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"the fields are {', '.join(_FIELDS)}"
            raise ValueError(f"RadioConfig has no field {name!r}; {hint}")
    merged = {**fields, **overrides}
    # another tubelet length decides anew whether tubelets have a projection
    if "video_temporal_patch_size" in overrides and "video_projection" not in overrides:
        merged["video_projection"] = None
    return merged
