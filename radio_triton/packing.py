"""Packing: sequences of tokens laid end to end, and where each one begins.

Everything here is built on the host from sizes that the host knows, once a call; the device gets copies and
is never read.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Grid = tuple[int, int]


def _host(values: list, dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU, whatever the default device is."""
    return torch.tensor(values, dtype=dtype, device="cpu")


@dataclass(frozen=True)
class Item:
    """What was passed as one thing: an image is one sequence, a video `count` sequences of one grid."""

    first: int
    count: int
    is_video: bool


class Packing:
    """S sequences in one stream of T tokens, each `prefix` class and register tokens, then h * w patches.

    Images come before tubelets, each kind in the caller's order, because they are projected separately;
    `items` keeps the order in which the caller passed them.

    Attributes: `grids` [(h, w)] in patches, `lengths` tokens of each sequence, `max_seqlen`, `tokens` (T),
    `patches` (P), `image_patches` (those that are images'), `items`; `cu_seqlens` (S + 1,) int32 and
    `grid_table` (S, 2) int32 on `device`, `cu_seqlens_cpu` and `grid_table_cpu` on the host.
    """

    def __init__(
        self,
        images: Iterable[Grid],
        tubelets: Iterable[Grid] = (),
        *,
        prefix: int,
        items: Iterable[Item] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        images = [(int(h), int(w)) for h, w in images]
        self.grids: list[Grid] = images + [(int(h), int(w)) for h, w in tubelets]
        for h, w in self.grids:
            if h < 1 or w < 1:
                raise ValueError(
                    f"a sequence of {h} x {w} patches has none: every grid must be at least 1 x 1"
                )
        self.prefix = prefix
        self.device = torch.device(device)
        self.lengths = [prefix + h * w for h, w in self.grids]
        self.max_seqlen = max(self.lengths, default=0)
        self.tokens = sum(self.lengths)
        self.patches = self.tokens - prefix * len(self.grids)
        self.image_patches = sum(h * w for h, w in images)
        self.items = list(items) if items is not None else [Item(i, 1, False) for i in range(len(self.grids))]
        self.cu_seqlens_cpu = _host([0, *self.lengths], torch.int32).cumsum(0, dtype=torch.int32)
        self.grid_table_cpu = _host(self.grids, torch.int32).view(-1, 2)
        self.cu_seqlens = self._on_device(self.cu_seqlens_cpu)
        self.grid_table = self._on_device(self.grid_table_cpu)
        self._work_lists: dict[tuple[int, int | None], Tensor] = {}

    def __len__(self) -> int:
        return len(self.grids)

    def __repr__(self) -> str:
        more = "..." if len(self) > 4 else ""
        return f"Packing({len(self)} sequences, {self.tokens} tokens, grids={self.grids[:4]}{more})"

    def starts(self) -> list[int]:
        """First token of each sequence."""
        return self.cu_seqlens_cpu[:-1].tolist()

    def token_rows(self, positions: Iterable[int]) -> Tensor:
        """Rows of the stream that hold these positions of every sequence: (S * len(positions),) int64."""
        rows = self.cu_seqlens_cpu[:-1, None].long() + _host(list(positions), torch.int64)
        return self._on_device(rows.flatten())

    @cached_property
    def patch_rows(self) -> Tensor:
        """Rows of the stream that hold patches: (P,) int64, on the device."""
        counts = _host(self.lengths, torch.int64) - self.prefix
        skipped = self.prefix * torch.arange(1, len(self) + 1, device="cpu").repeat_interleave(counts)
        return self._on_device(torch.arange(self.patches, device="cpu") + skipped)

    def work_list(self, block_m: int, padded_to: int | None = None) -> Tensor:
        """A kernel's programs: (n, 2) int32 rows (sequence, block of `block_m` tokens), on the device.

        Longest sequences come first, so that the last programs to start are short ones. `padded_to` rows of
        -1 make lists of one size for a CUDA graph; the kernel's programs of such a row exit at once.
        """
        if (block_m, padded_to) not in self._work_lists:
            self._work_lists[block_m, padded_to] = self._on_device(self._build_work_list(block_m, padded_to))
        return self._work_lists[block_m, padded_to]

    def _build_work_list(self, block_m: int, padded_to: int | None) -> Tensor:
        lengths = _host(self.lengths, torch.int64)
        order = lengths.argsort(descending=True, stable=True)
        blocks = (lengths[order] + block_m - 1) // block_m
        sequence = order.repeat_interleave(blocks)
        block = torch.arange(len(sequence), device="cpu") - (blocks.cumsum(0) - blocks).repeat_interleave(
            blocks
        )
        work = torch.stack((sequence, block), dim=1).to(torch.int32)
        if padded_to is None:
            return work
        if padded_to < len(work):
            raise ValueError(f"a work list of {len(work)} items does not fit in {padded_to}")
        return torch.cat((work, work.new_full((padded_to - len(work), 2), -1)))

    def _on_device(self, x: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return x.pin_memory().to(self.device, non_blocking=True)
        return x.to(self.device)
