"""ViTDet windows: in most blocks, patches attend only inside their window; a window is a shorter sequence.

Class and register tokens skip windowed blocks, attention and MLP alike, as in the reference: they keep what the
last global block gave them. Patches move to window order and back only where the kind of block changes.
"""

import warnings
from collections.abc import Collection, Iterator
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .config import RadioConfig
from .ops import Sequences, compute_dtype, prepare
from .packing import Grid, Packing

if TYPE_CHECKING:
    from .layers import Encoder


def windowed_blocks(config: RadioConfig) -> list[bool]:
    """Whether each block is windowed.

    Every period-th block and the last are global; the period is `vitdet_num_windowed` + 1 or, where that is not
    given, depth // `vitdet_num_global`, as in the reference. Without windows all blocks are global.
    """
    depth = config.num_hidden_layers
    if config.vitdet_window_size is None:
        return [False] * depth
    if config.vitdet_num_windowed is not None:
        period = config.vitdet_num_windowed + 1
    else:
        period = max(depth // config.vitdet_num_global, 1)
    return [i % period != period - 1 and i != depth - 1 for i in range(depth)]


def warn_if_unsupported(config: RadioConfig) -> None:
    """Warn where windows are asked of a version that was not trained for them."""
    if config.vitdet_window_size is not None and not config.vitdet_supported:
        warnings.warn(
            f"vitdet_window_size={config.vitdet_window_size} on a version that was not trained with windows: features "
            "may be poor; vitdet_supported=True says that you know",
            stacklevel=3,
        )


class Windows:
    """The windows of one packing, of `size` x `size` patches or, at ragged edges, fewer.

    `inside` (P,): rows of the stream in window order. `prefix` (S * G,): rows of the class and register tokens.
    `back` (T,): where in [prefix rows, window rows] each row of the stream is. All int64, on the device.
    """

    def __init__(self, packing: Packing, size: int) -> None:
        cells = [_cells(grid, size) for grid in packing.grids]
        starts = packing.starts()
        parts = [order + start + packing.prefix for start, (order, _) in zip(starts, cells, strict=True)]
        inside = torch.cat(parts)
        prefix = (
            torch.tensor(starts, device="cpu")[:, None] + torch.arange(packing.prefix, device="cpu")
        ).flatten()
        back = torch.cat((prefix, inside)).argsort()
        self.inside, self.prefix, self.back = (x.to(packing.device) for x in (inside, prefix, back))
        grids = [grid for _, windows in cells for grid in windows]
        self.packing = Packing(grids, prefix=0, device=packing.device)


@cache
def _cells(grid: Grid, size: int) -> tuple[Tensor, tuple[Grid, ...]]:
    """Patches of a grid in window order, and the grid of each window."""
    places = torch.arange(grid[0] * grid[1], device="cpu").view(grid)
    windows = [cell for band in places.split(size, 0) for cell in band.split(size, 1)]
    return torch.cat([cell.flatten() for cell in windows]), tuple(
        (len(cell), cell.shape[1]) for cell in windows
    )


def walk(
    encoder: "Encoder",
    x: Tensor,
    packing: Packing,
    sequences: Sequences,
    config: RadioConfig,
    stops: Collection[int],
) -> Iterator[tuple[int, Tensor]]:
    """Run the blocks up to the last of `stops`; yield (block, stream) after each of them.

    The stream (T, C) is in the packing's order, before any final norm; the next step may overwrite it.
    """
    windowed = windowed_blocks(config)
    windows = (
        Windows(packing, config.vitdet_window_size) if config.vitdet_window_size and any(windowed) else None
    )
    inner = None
    if windows is not None:
        dtype = compute_dtype(next(encoder.parameters()))
        inner = prepare(windows.packing, config.attention_width, config.head_dim, dtype)
    prefix: Tensor | None = None
    first = 0
    while first <= max(stops):
        last = _end(windowed, first, stops)
        if windows is not None and windowed[first] and prefix is None:
            prefix, x = x[windows.prefix], x[windows.inside]
        elif windows is not None and not windowed[first] and prefix is not None:
            x, prefix = torch.cat((prefix, x))[windows.back], None
        x = encoder.blocks(x, inner if prefix is not None and inner is not None else sequences, first, last)
        if last - 1 in stops:
            whole = x if prefix is None or windows is None else torch.cat((prefix, x))[windows.back]
            yield last - 1, whole
        first = last


def _end(windowed: list[bool], first: int, stops: Collection[int]) -> int:
    """The end of the run of blocks from `first` on that are of one kind and that no stop interrupts."""
    last = first + 1
    while last < len(windowed) and windowed[last] == windowed[first] and last - 1 not in stops:
        last += 1
    return last
