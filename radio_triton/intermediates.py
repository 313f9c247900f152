"""Features after chosen blocks, with the reference's arguments, for every call form, with windows or without.

    sparse    out_i = alpha_i * N_i(x_i)
    dense     the mean over the blocks j of a group (previous index, i] of alpha_j * N_j(x_j), pre-alpha, or of
              N_j(x_j), times the mean alpha, post-alpha (Dense Connector); the group's last rotation serves all
    N_j(x)    (x - means_j) @ rotation_j^T on patches, where the checkpoint has an intermediate feature normalizer

Class and register tokens pass through N unchanged, with alpha 1.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import inputs
from .packing import Packing
from .windows import walk

if TYPE_CHECKING:
    from .model import RadioModel, RadioOutput

ACCEPTED = {
    "output_fmt": ("NCHW", "NLC"),
    "aggregation": ("sparse", "dense"),
    "norm_alpha_scheme": ("post-alpha", "pre-alpha", "none"),
}


def forward_intermediates(
    model: "RadioModel",
    x: Any,
    indices: int | Iterable[int] | None = None,
    return_prefix_tokens: bool = False,
    norm: bool = False,
    stop_early: bool = False,
    output_fmt: str = "NCHW",
    intermediates_only: bool = False,
    aggregation: str = "sparse",
    norm_alpha_scheme: str = "post-alpha",
    **sizes: Any,
) -> Any:
    """Encode `x` (any call form of `RadioModel.forward`, with its `imgs_sizes=` and the like as `sizes`).

    indices: the last n blocks, or block numbers, negative ones from the end, in any order and with repeats; None
    is every block. norm: apply the final norm to what is returned, where the model has one. stop_early: compute no
    block after the last that is needed. aggregation: "sparse" or "dense"; norm_alpha_scheme: "post-alpha",
    "pre-alpha" or "none", which leaves the intermediate feature normalizer out.

    Returns (final, intermediates), or intermediates alone with `intermediates_only`. `final` is what `forward` gives
    or, with `stop_early`, the same from the last block that was computed. Intermediates come in the order of
    `indices`: (B, C, h, w) or (B, N, C) of a dense batch; of mixed sizes a list of (C, h, w), or (P, C). With
    `return_prefix_tokens` each is a RadioOutput instead, with its own summary and last_hidden_state.

    ValueError names an index, format, aggregation or scheme that does not exist.
    """
    _check_options(output_fmt=output_fmt, aggregation=aggregation, norm_alpha_scheme=norm_alpha_scheme)
    depth = model.config.num_hidden_layers
    wanted = resolve(indices, depth)
    names = ("imgs_sizes", "image_grid_hw", "num_frames")
    request = inputs.read(model.config, x, *(sizes.pop(name, None) for name in names))
    if sizes:
        raise TypeError(
            f"forward_intermediates got unknown arguments {sorted(sizes)}; sizes are {', '.join(names)}"
        )
    embedded, packing, sequences = model._embed(request)
    collector = Collector(model, packing, wanted, aggregation == "dense", norm_alpha_scheme)
    end = max(wanted) if stop_early or intermediates_only else depth - 1
    stops = {*collector.blocks, end}
    for block, stream in walk(model.encoder, embedded, packing, sequences, model.config, stops):
        collector.take(block, stream)
    found = collector.found
    if norm:
        found = {block: model.encoder.final_norm(y) for block, y in found.items()}
    outputs = {block: model._arrange(y, packing, request.form, output_fmt) for block, y in found.items()}
    chosen = [outputs[block] if return_prefix_tokens else _maps(outputs[block]) for block in wanted]
    if intermediates_only:
        return chosen
    return model._output(model.encoder.final_norm(stream), packing, request.form, "NLC"), chosen


def _check_options(**options: str) -> None:
    for name, given in options.items():
        if given not in ACCEPTED[name]:
            raise ValueError(f"{name} is one of {', '.join(ACCEPTED[name])}, got {given!r}")


def resolve(indices: int | Iterable[int] | None, depth: int) -> list[int]:
    """Block numbers from 0, in the caller's order."""
    if indices is None:
        return list(range(depth))
    if isinstance(indices, int):
        if not 0 < indices <= depth:
            raise ValueError(
                f"indices={indices} means the last {indices} blocks: give 1 to {depth}, or a list of blocks"
            )
        return list(range(depth - indices, depth))
    blocks = list(indices)
    if not blocks:
        raise ValueError("indices is empty: name at least one block")
    for block in blocks:
        if not isinstance(block, int) or not -depth <= block < depth:
            raise ValueError(
                f"there is no block {block!r}: the model has {depth}, 0 to {depth - 1} or -{depth} to -1"
            )
    return [block % depth for block in blocks]


class Collector:
    """Keeps what was asked for, as streams (T, C), while the blocks run: nothing else outlives its block."""

    def __init__(
        self, model: "RadioModel", packing: Packing, wanted: list[int], dense: bool, scheme: str
    ) -> None:
        self.packing, self.dense, self.scheme = packing, dense, scheme
        self.normalizer = model.intermediate_normalizer if scheme != "none" else None
        self.wanted = sorted(set(wanted))
        self.blocks = range(self.wanted[-1] + 1) if dense else self.wanted
        self.found: dict[int, Tensor] = {}
        self.group: list[int] = []
        self.total: Tensor | None = None

    def take(self, block: int, stream: Tensor) -> None:
        """The stream after a block, which the next block may overwrite."""
        if block not in self.blocks:
            return
        self.group.append(block)
        y = self._centered(block, stream)
        self.total = y if self.total is None else self.total.add_(y)
        if block in self.wanted:
            self.found[block] = self._finished(block)
            self.group, self.total = [], None

    def _centered(self, block: int, stream: Tensor) -> Tensor:
        """A copy, its patches less their mean, times alpha where that comes first."""
        y = stream.clone()
        if self.normalizer is not None:
            rows = self.packing.patch_rows
            alpha = self.normalizer.alphas[block] if self.dense and self.scheme == "pre-alpha" else 1
            y[rows] = (self.normalizer.center(y[rows], block) * alpha).to(y.dtype)
        return y

    def _finished(self, block: int) -> Tensor:
        """The mean over the group, its patches rotated, and times alpha where that comes last."""
        assert self.total is not None
        y = self.total / len(self.group)
        if self.normalizer is not None:
            before = self.dense and self.scheme == "pre-alpha"
            alpha = 1 if before else self.normalizer.alphas[self.group].mean()
            rows = self.packing.patch_rows
            y[rows] = (self.normalizer.rotate(y[rows], block) * alpha).to(y.dtype)
        return y


def _maps(output: "RadioOutput") -> Any:
    """The features alone, in memory of their own order: the reference's maps are contiguous."""
    features = output.features
    return features.contiguous() if isinstance(features, Tensor) else [x.contiguous() for x in features]
