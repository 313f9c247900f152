"""Load (name, tensor) pairs as they come into a model that exists, the way vLLM's loaders hand them out."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .fill import Filler, LoadReport
from .folding import fold, group_keys, split_key
from .heads import is_beside, slot_in_model
from .keys import (
    STATISTICS,
    CheckpointError,
    Layout,
    Slot,
    check_spellings,
    clean,
    find_layout,
    guess_trunk,
    locate_in_trunk,
    make_layout,
    spelling_of,
)
from .load import FOLDED_HINT, report_not_finite

if TYPE_CHECKING:
    from ..model import RadioModel

_SOURCE = "the weights given"
# tensors up to this size wait until the tower is recognised
_SMALL = 1 << 16


def load_weights(
    model: "RadioModel",
    pairs: Iterable[tuple[str, Tensor]],
    *,
    layer_scale_folded: bool = False,
    strict_finite: bool = False,
) -> set[str]:
    """Stream (name, tensor) pairs of any layout into a model; returns our names of what was set.

    Each tensor is copied when it comes and not kept, except small ones before the tower is recognised and
    parametrized weights, whose parts may come in any order. Keys outside the tower, and of blocks that the
    model does not have, are ignored and counted in `model.load_report`.
    layer_scale_folded: the pairs have no LayerScale because it is folded into proj and fc2; the model's
    becomes one. strict_finite: raise for NaN and infinite weights, which are otherwise warned about.
    CheckpointError where no tower is found and for keys that are unknown, missing or wrongly shaped; what
    came before the error has been written, so load again before using the model.
    """
    model.load_report = None
    stream = _Stream(model)
    parametrized: dict[str, Tensor] = {}
    for key, tensor in pairs:
        if split_key(key := clean(key)):
            parametrized[key] = tensor
        else:
            stream.take(key, tensor)
    for plain, roles in group_keys(parametrized).items():
        stream.take(plain, fold(plain, roles, parametrized.__getitem__, 1e-6))
    model.load_report = stream.finish(layer_scale_folded)
    report_not_finite(stream.filler, _SOURCE, strict_finite)
    return set(model.load_report.loaded)


class _Stream:
    """What is known of a stream of pairs so far. The tower is recognised by the first tensor that fits one of
    its slots.
    """

    def __init__(self, model: "RadioModel") -> None:
        self.model, self.filler = model, Filler(model)
        self.layout: Layout | None = None
        self.early: list[tuple[str, Tensor]] = []
        self.strangers: dict[str, tuple[int, ...]] = {}
        self.spellings: dict[str, None] = {}
        self.ignored: dict[str, str] = {}

    def take(self, key: str, tensor: Tensor) -> None:
        """Put a tensor where it belongs."""
        if self.layout is None:
            self.layout = self._recognise(key, tensor)
            if self.layout is None and (tensor.numel() <= _SMALL or is_beside(key, self.model)):
                self.early.append((key, tensor))
            elif self.layout is None:
                self.strangers[key] = tuple(tensor.shape)
            else:
                early, self.early = self.early, []
                for pair in [*early, (key, tensor)]:
                    self._place(self.layout, *pair)
        else:
            self._place(self.layout, key, tensor)

    def _recognise(self, key: str, tensor: Tensor) -> Layout | None:
        """The layout that this key belongs to, where the tensor fits the slot that it names."""
        trunk = guess_trunk(key)
        if trunk is None:
            return None
        rest = key.removeprefix(trunk)
        try:
            slot = locate_in_trunk(rest)
        except CheckpointError:
            # a key like those we refuse, perhaps of another network
            return None
        if not isinstance(slot, Slot) or not self.filler.fits(slot, tuple(tensor.shape)):
            return None
        native = rest.startswith(("embeddings.", "encoder."))
        return make_layout(trunk, "attention.q_proj." if native else "attn.qkv.")

    def _place(self, layout: Layout, key: str, tensor: Tensor) -> None:
        slot = slot_in_model(key, layout, self.model) or layout.locate(key)
        if not layout.owns(key) or (slot is None and not key.startswith(layout.trunk)):
            other = self._recognise(key, tensor)
            if other:
                raise CheckpointError(
                    f"{_SOURCE} hold two towers, under {layout.trunk!r} and {other.trunk!r}: pass one"
                )
        if not layout.owns(key):
            self.ignored[key] = "outside the tower"
        elif isinstance(slot, str):
            self.ignored[key] = slot
        elif slot is None:
            self.filler.problems.unknown.append(key)
        elif (slot.block or 0) >= self.model.config.num_hidden_layers:
            self.ignored[key] = f"of a block after the first {self.model.config.num_hidden_layers}"
        elif (
            slot.name.endswith(".lambda1") and not self.model.config.layer_scale and bool((tensor == 1).all())
        ):
            # Transformers keeps a LayerScale of ones in every model
            self.ignored[key] = "a LayerScale of ones is the identity"
        else:
            self._put(layout, key, slot, tensor)

    def _put(self, layout: Layout, key: str, slot: Slot, tensor: Tensor) -> None:
        if spelling := spelling_of(key):
            self.spellings[spelling] = None
            check_spellings(self.spellings)
        floats = tensor.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        if floats == (slot.name == "summary_idxs"):
            self.filler.problems.wrong.append(f"{key} of dtype {tensor.dtype}")
        elif self.filler.check(key, slot, tuple(tensor.shape)):
            self.filler.put(key, slot, tensor, self.model.config.scaled_layer_norm and layout.is_reference)

    def finish(self, layer_scale_folded: bool) -> LoadReport:
        """The report; CheckpointError that lists everything that does not fit."""
        layout = self.layout or find_layout([*self.strangers, *(key for key, _ in self.early)])
        for key, tensor in self.early:
            self._place(layout, key, tensor)
        for key, shape in self.strangers.items():
            slot = layout.locate(key) if layout.owns(key) else "outside the tower"
            if isinstance(slot, Slot):
                self.filler.check(key, slot, shape)
            elif slot is None:
                self.filler.problems.unknown.append(key)
            else:
                self.ignored[key] = slot
        absent = self.filler.absent()
        scales = [name for name in absent if name.endswith(".lambda1")]
        # all or none: a file that lacks some of them is incomplete
        folded = len(scales) == 2 * self.model.config.num_hidden_layers
        defaulted = [
            name
            for name in absent
            if name in STATISTICS or (folded and layer_scale_folded and name in scales)
        ]
        self.filler.problems.missing = [name for name in absent if name not in defaulted]
        self.filler.problems.raise_if_any(_SOURCE, FOLDED_HINT if folded and not layer_scale_folded else "")
        for name in set(defaulted).intersection(scales):
            self.filler.default(name, torch.ones(()))
        self.filler.set_statistics(name for name in defaulted if name in STATISTICS)
        name = (
            make_layout(layout.trunk, next(iter(self.spellings), "attn.qkv.")).name
            if self.spellings
            else layout.name
        )
        return LoadReport(_SOURCE, name, self.filler.loaded(), tuple(defaulted), self.ignored)
