"""RadioModel, the whole flow: pixels -> patch rows -> embeddings -> encoder -> summary and features."""

import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from . import inputs, ops
from .config import RadioConfig
from .inputs import Frames, Inputs
from .layers import Attention, Encoder, InputConditioner, PatchEmbeddings
from .normalizers import FeatureNormalizer, IntermediateNormalizer
from .nvidia_api import NvidiaApi
from .ops import Sequences
from .packing import Item, Packing
from .windows import walk, warn_if_unsupported


@dataclass
class RadioOutput:
    """`summary, features = output`; also `output["backbone"]` and `output[adaptor]`, as the reference's dict.

    summary: (S, k * C), the selected class tokens of each sequence, end to end.
    features: patch tokens, (S, N, C) for a dense batch, (P, C) or (1, P, C) packed; with feature_fmt="NCHW"
    (S, C, h, w), packed a list of (C, h, w).
    last_hidden_state: all tokens, (S, L, C) dense, (T, C) packed.
    grid: (h, w) in patches, (t, h, w) for a video, a list of (h, w) packed.
    """

    summary: Tensor
    features: Tensor | list[Tensor]
    last_hidden_state: Tensor
    packing: Packing
    grid: tuple[int, ...] | list[tuple[int, int]]
    summary_idxs: tuple[int, ...]
    adaptors: dict[str, "RadioOutput"] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.summary, self.features))

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, int):
            return (self.summary, self.features)[key]
        if key == "backbone":
            return self
        if key not in self.adaptors:
            raise KeyError(f"no output {key!r}: there are {['backbone', *self.adaptors]}")
        return self.adaptors[key]

    def split(self) -> list["RadioOutput"]:
        """One output for each thing passed: (k * C,) and (N, C) of an image, (t, …) of a video."""
        packing = self.packing
        stream = self.last_hidden_state.reshape(packing.tokens, -1)
        # an adaptor's grid may be finer than the packing's
        grids = self.grid if isinstance(self.grid, list) else [self.grid[-2:]] * len(packing)
        rows, starts = self._rows(), [0, *accumulate(h * w for h, w in grids)]
        outputs = []
        for item in packing.items:
            first, last = item.first, item.first + item.count
            tokens = stream[packing.cu_seqlens_cpu[first] : packing.cu_seqlens_cpu[last]]
            features = rows[starts[first] : starts[last]]
            outputs.append(self._item(item, tokens, features, (grids[first][0], grids[first][1])))
        for name, adaptor in self.adaptors.items():
            for output, part in zip(outputs, adaptor.split(), strict=True):
                output.adaptors[name] = part
        return outputs

    def _rows(self) -> Tensor:
        """The features of all sequences, end to end, in whatever format they are: (P, C)."""
        if isinstance(self.features, list):
            return torch.cat([x.flatten(1).T for x in self.features])
        return (
            self.features.flatten(2).mT.flatten(0, 1)
            if self.features.ndim == 4
            else self.features.flatten(0, -2)
        )

    def _item(self, item: Item, tokens: Tensor, features: Tensor, grid: tuple[int, int]) -> "RadioOutput":
        packing = Packing(
            [self.packing.grids[item.first]] * item.count,
            prefix=self.packing.prefix,
            items=[Item(0, item.count, item.is_video)],
        )
        summary = self.summary if self.summary.ndim == 2 else self.summary[None]
        summary = summary[item.first : item.first + item.count]
        tokens, features = (x.unflatten(0, (item.count, -1)) for x in (tokens, features))
        if item.is_video:
            return RadioOutput(summary, features, tokens, packing, (item.count, *grid), self.summary_idxs)
        return RadioOutput(summary[0], features[0], tokens[0], packing, grid, self.summary_idxs)


class RadioModel(NvidiaApi, nn.Module):
    """A RADIO tower. `RadioModel(config)` has random weights; `from_pretrained` reads a checkpoint.

    Args: `dtype` of the parameters; `residual_dtype`, of the stream between blocks and of the output: None is
    that of the parameters, torch.float32 halves the error of a bf16 model.
    """

    def __init__(
        self,
        config: RadioConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        residual_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, RadioConfig):
            raise TypeError(
                f"RadioModel takes a RadioConfig (RadioConfig.from_hf reads others), got {type(config).__name__}"
            )
        if residual_dtype is not None and not residual_dtype.is_floating_point:
            raise TypeError(f"residual_dtype must be floating point, got {residual_dtype}")
        self.config = config
        self.residual_dtype = residual_dtype
        self.normalizes = True
        self.load_report: Any = None
        # what stands beside the trunk in a checkpoint: see checkpoint/heads.py
        self.adaptors = nn.ModuleDict()
        self.feature_normalizer: FeatureNormalizer | None = None
        self.intermediate_normalizer: IntermediateNormalizer | None = None
        warn_if_unsupported(config)
        with torch.device(device):
            self.input_conditioner = InputConditioner(config)
            self.embeddings = PatchEmbeddings(config)
            self.encoder = Encoder(config)
            self.register_buffer("summary_idxs", torch.tensor(self.summary_positions, dtype=torch.int64))
        self.to(dtype)
        if torch.device(device).type != "meta":
            self._init_weights()

    @property
    def summary_positions(self) -> tuple[int, ...]:
        """Class tokens that make up the summary, in order."""
        idxs = self.config.summary_idxs
        return tuple(range(self.config.num_cls_tokens)) if idxs is None else idxs

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.embeddings.position_embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.embeddings.position_embedding.dtype

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike, **options: Any) -> "RadioModel":
        """Load a checkpoint: `radio_triton.checkpoint.load_model` names options, layouts and errors."""
        from . import checkpoint

        return checkpoint.load_model(cls, source, **options)

    def save_pretrained(self, folder: str | os.PathLike, *, license: str | None = None) -> str:
        """Write a folder that Transformers reads too, where it can: see `checkpoint.save.save_pretrained`."""
        from .checkpoint.save import save_pretrained

        return save_pretrained(self, folder, license=license)

    def load_weights(self, pairs: Iterable[tuple[str, Tensor]], **options: Any) -> set[str]:
        """Stream (name, tensor) pairs of any known layout: see `radio_triton.checkpoint.load_weights`."""
        from . import checkpoint

        return checkpoint.load_weights(self, pairs, **options)

    def forward(
        self,
        x: Tensor | list[Tensor],
        *,
        imgs_sizes: Any = None,
        image_grid_hw: Any = None,
        num_frames: int | None = None,
        feature_fmt: str = "NLC",
    ) -> RadioOutput:
        """Encode one of these; every other input is a ValueError or TypeError that says what is accepted.

        - images (B, c, H, W), float in [0, 1] or uint8;
        - a list of images (c, H, W) of any sizes;
        - packed patches (P, c * p^2) or (1, P, c * p^2), rows in the order (c, y, x), with `imgs_sizes`
          [(H, W)] in pixels or `image_grid_hw` (n, 2) in patches;
        - one video (F, c, H, W) with `num_frames=F`;
        - stacked tubelets (B, K * c, H, W), frame-major.

        feature_fmt: "NLC" or "NCHW".
        """
        if feature_fmt not in ("NLC", "NCHW"):
            raise ValueError(f'feature_fmt is "NLC" or "NCHW", got {feature_fmt!r}')
        request = inputs.read(self.config, x, imgs_sizes, image_grid_hw, num_frames)
        stream, packing = self._encode(request)
        return self._output(stream, packing, request.form, feature_fmt)

    def encode(self, items: list[Tensor]) -> list[RadioOutput]:
        """Any mix of images (c, H, W) and videos (F, c, H, W), in one packed pass: an output for each."""
        request = inputs.read_items(self.config, items)
        stream, packing = self._encode(request)
        return self._output(stream, packing, "packed", "NLC").split()

    def forward_intermediates(self, x: Any, indices: Any = None, *options: Any, **named: Any) -> Any:
        """Features after chosen blocks: see `radio_triton.intermediates.forward_intermediates`."""
        from .intermediates import forward_intermediates

        return forward_intermediates(self, x, indices, *options, **named)

    def _encode(self, request: Inputs) -> tuple[Tensor, Packing]:
        x, packing, sequences = self._embed(request)
        if self.config.vitdet_window_size is None:
            return self.encoder(x, sequences), packing
        end = self.config.num_hidden_layers - 1
        (_, x) = next(walk(self.encoder, x, packing, sequences, self.config, {end}))
        return self.encoder.final_norm(x), packing

    def _embed(self, request: Inputs) -> tuple[Tensor, Packing, Sequences]:
        packing = Packing(
            request.image_grids,
            request.tubelet_grids,
            prefix=self.config.num_prefix_tokens,
            items=request.items,
            device=self.device,
        )
        if self.normalizes:
            warn_if_normalized([*_as_list(request.images), *_as_list(request.videos)])
        image_rows = self._patch_rows(request.images, 1)
        video_rows = self._patch_rows(request.videos, self.config.video_temporal_patch_size)
        x = self.embeddings(image_rows, video_rows, packing, self.residual_dtype or self.dtype)
        dtype = ops.compute_dtype(self.embeddings.position_embedding)
        sequences = ops.prepare(packing, self.config.attention_width, self.config.head_dim, dtype)
        mark_dynamic(x, *sequences)
        return x, packing, sequences

    def _patch_rows(self, frames: Frames | None, tubelet: int) -> Tensor | None:
        if frames is None:
            return None
        first = frames if isinstance(frames, Tensor) else frames[0]
        if first.device != self.device:
            raise ValueError(
                f"the pixels are on {first.device}, the model on {self.device}: move one with .to()"
            )
        if not self.normalizes and first.dtype == torch.uint8:
            raise ValueError(
                "normalisation is external (make_preprocessor_external): pass normalised floats, not uint8"
            )
        mean = self.input_conditioner.norm_mean.flatten() if self.normalizes else None
        std = self.input_conditioner.norm_std.flatten() if self.normalizes else None
        return ops.patchify(frames, mean, std, self.config.patch_size, tubelet, self.dtype)

    def _output(self, stream: Tensor, packing: Packing, form: str, feature_fmt: str) -> RadioOutput:
        output = self._arrange(stream, packing, form, "NLC")
        if self.feature_normalizer is not None:
            output.features = self.feature_normalizer(output.features)
        output.adaptors = {name: adaptor(output) for name, adaptor in self.adaptors.items()}
        if feature_fmt == "NCHW":
            for part in (output, *output.adaptors.values()):
                part.features = as_maps(part.features, part.grid)
        return output

    def _arrange(self, stream: Tensor, packing: Packing, form: str, feature_fmt: str) -> RadioOutput:
        positions, prefix, grids = self.summary_positions, packing.prefix, packing.grids
        if form == "dense":
            tokens = stream.unflatten(0, (len(packing), -1))
            summary, features = tokens[:, list(positions)].flatten(1), tokens[:, prefix:]
            item = packing.items[0]
            grid = (item.count, *grids[0]) if item.is_video and len(packing.items) == 1 else grids[0]
            features = as_maps(features, grid) if feature_fmt == "NCHW" else features
            return RadioOutput(summary, features, tokens, packing, grid, positions)
        summary = stream[packing.token_rows(positions)].view(len(packing), -1)
        features = stream[packing.patch_rows]
        if form == "packed_batch":
            features = features[None]
        features = as_maps(features, grids) if feature_fmt == "NCHW" else features
        return RadioOutput(summary, features, stream, packing, grids, positions)

    def get_nearest_supported_resolution(self, height: int, width: int) -> tuple[int, int]:
        """The (height, width) nearest to this that the model takes."""
        return inputs.nearest_resolution(self.config.resolution_step, height, width)

    def make_preprocessor_external(self) -> InputConditioner:
        """From now on take pixels as normalised already; returns the module that would do it."""
        self.normalizes = False
        return self.input_conditioner

    def get_input_embeddings(self) -> nn.Module:
        """The embedding module, under Transformers' name."""
        return self.embeddings

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Positions and prefix tokens: normal, std 0.02. Dummy heads: zero, so that they change nothing."""
        nn.init.trunc_normal_(self.embeddings.position_embedding, std=0.02)
        nn.init.trunc_normal_(self.embeddings.cls_register_token, std=0.02)
        for module in self.encoder.modules():
            if isinstance(module, Attention):
                module.zero_dummy_heads()


def _as_list(frames: Frames | None) -> list[Tensor]:
    return [] if frames is None else [frames] if isinstance(frames, Tensor) else frames


def as_maps(features: Any, grid: tuple[int, ...] | list[tuple[int, int]]) -> Tensor | list[Tensor]:
    """Features in NLC as views: (S, C, h, w) of a dense batch, a list of (C, h, w) of a packed one."""
    if isinstance(grid, tuple):
        return features.unflatten(1, grid[-2:]).permute(0, 3, 1, 2)
    parts = features.flatten(0, -2).split([h * w for h, w in grid])
    return [part.unflatten(0, size).permute(2, 0, 1) for part, size in zip(parts, grid, strict=True)]


def mark_dynamic(*tensors: Any) -> None:
    """Tell torch.compile, where it is in use, that first dimensions vary: it compiles once for all counts."""
    if "torch._dynamo" in sys.modules and not torch.compiler.is_compiling():
        for x in tensors:
            if isinstance(x, Tensor):
                torch._dynamo.maybe_mark_dynamic(x, 0)


def warn_if_normalized(frames: list[Tensor]) -> None:
    """Warn where float pixels lie outside [-0.2, 1.2]; on the CPU only, where looking is free."""
    if frames[0].device.type != "cpu" or not frames[0].is_floating_point() or torch.compiler.is_compiling():
        return
    ranges = [x.detach().aminmax() for x in frames]
    low, high = min(x.min.item() for x in ranges), max(x.max.item() for x in ranges)
    if low < -0.2 or high > 1.2:
        warnings.warn(
            f"pixels range from {low:.3g} to {high:.3g}, which looks normalised already (or 0 to 255 as floats), and "
            "the model normalises pixels in [0, 1] itself: divide by 255, or call make_preprocessor_external() first",
            stacklevel=_callers_level(),
        )


def _callers_level() -> int:
    """The stack level, for warnings.warn in the calling function, of the first frame outside this package and torch."""
    ours = tuple(os.path.dirname(file) + os.sep for file in (__file__, torch.__file__))
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame, level = frame.f_back, level + 1
    return level
