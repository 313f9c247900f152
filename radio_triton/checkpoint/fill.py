"""Put tensors into a model, each parameter made in its final dtype when its first tensor arrives."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .keys import CheckpointError, Slot

SHOWN = 20


@dataclass(frozen=True)
class LoadReport:
    """What a load did: the layout, our parameters that were set or kept from the config, and keys left aside
    with a reason.
    """

    source: str
    layout: str
    loaded: tuple[str, ...]
    defaulted: tuple[str, ...]
    ignored: dict[str, str]

    @property
    def reasons(self) -> dict[str, int]:
        """How many keys were ignored, by reason."""
        found = list(self.ignored.values())
        return {reason: found.count(reason) for reason in dict.fromkeys(found)}

    def __str__(self) -> str:
        reasons = "; ".join(f"{count} {reason}" for reason, count in list(self.reasons.items())[:SHOWN])
        return (
            f"{self.source}: {self.layout} layout, {len(self.loaded)} parameters loaded, "
            f"{len(self.defaulted)} from the config ({shorten(self.defaulted) or 'none'}), {len(self.ignored)} keys "
            f"ignored{f' ({reasons})' if reasons else ''}"
        )


def shorten(names: Iterable[str]) -> str:
    """The first twenty names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


@dataclass
class Problems:
    """What does not fit, gathered so that one error shows all of it."""

    unknown: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def raise_if_any(self, source: str, hint: str = "") -> None:
        """CheckpointError that lists up to twenty keys of each kind."""
        kinds = {
            "unknown": self.unknown,
            "that do not fit": self.wrong,
            "given twice": self.twice,
            "missing": self.missing,
        }
        texts = [f"{len(keys)} {kind}: {shorten(keys)}" for kind, keys in kinds.items() if keys]
        if texts:
            raise CheckpointError(f"{source} does not fit the model; {'; '.join(texts)}{hint}")


class Filler:
    """Fills a model, which may be on the meta device. `device` is for parameters that have no memory yet."""

    def __init__(self, model: Any, device: torch.device | str | None = None) -> None:
        self.model, self.device = model, device
        self.names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
        self.problems = Problems()
        self.not_finite: list[str] = []
        self.owners: dict[tuple[str, int], str] = {}

    def fits(self, slot: Slot, shape: tuple[int, ...]) -> bool:
        """Whether the model has the slot, and a tensor of this shape fits it."""
        target = self._target(slot.name)
        return target is not None and window(target, slot, shape, self.model.config.hidden_size) is not None

    def check(self, key: str, slot: Slot, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape fits its slot, which no other has taken; what is wrong is noted."""
        target = self._target(slot.name)
        if target is None:
            self.problems.unknown.append(key)
            return False
        parts = range(slot.parts) if slot.part is None else (slot.part,)
        taken = [self.owners[slot.name, part] for part in parts if (slot.name, part) in self.owners]
        if taken:
            self.problems.twice.append(f"{slot.name} ({taken[0]}, {key})")
            return False
        self.owners |= {(slot.name, part): key for part in parts}
        if window(target, slot, shape, self.model.config.hidden_size) is None:
            needed = tuple(rows(target, slot).flatten(0, 1).shape)
            self.problems.wrong.append(f"{key} {shape} where {needed} is needed")
            return False
        return True

    @torch.no_grad()
    def put(self, key: str, slot: Slot, tensor: Tensor, scaled: bool = False) -> None:
        """Copy a tensor that was checked into its slot; `scaled` divides the norms of block i by sqrt(i + 1)."""
        if slot.name == "summary_idxs" and tuple(tensor.tolist()) != self.model.summary_positions:
            self.problems.wrong.append(
                f"{key} {tensor.tolist()} where the model has {list(self.model.summary_positions)}"
            )
            return
        target = self._materialise(slot.name)
        whole = rows(target, slot)
        view = window(target, slot, tuple(tensor.shape), self.model.config.hidden_size)
        if view is None:
            raise CheckpointError(f"{key} has shape {tuple(tensor.shape)}, not the one its file announced")
        if view.shape != whole.shape:
            # dummy heads are zero
            whole.zero_()
        if scaled and slot.block is not None and slot.name.rpartition(".")[0].endswith((".norm1", ".norm2")):
            tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) / (slot.block + 1) ** 0.5
        view.copy_(tensor.reshape(view.shape))
        if view.is_floating_point() and not all(end.isfinite() for end in view.aminmax()):
            self.not_finite.append(key)

    def default(self, name: str, value: Tensor) -> None:
        """Set a parameter that no tensor was given for."""
        self._materialise(name).data.copy_(value)

    def absent(self) -> list[str]:
        """Our parameters of which no tensor, or not every part, was given."""
        return sorted(
            n for n in self.names if any((n, part) not in self.owners for part in range(Slot(n).parts))
        )

    def set_statistics(self, names: Iterable[str]) -> None:
        """Statistics that the file lacks, as the config has them."""
        config = self.model.config
        values = {
            "summary_idxs": torch.tensor(self.model.summary_positions, dtype=torch.int64),
            "input_conditioner.norm_mean": torch.tensor(config.norm_mean).view(-1, 1, 1),
            "input_conditioner.norm_std": torch.tensor(config.norm_std).view(-1, 1, 1),
        }
        for name in names:
            self.default(name, values[name])

    def loaded(self) -> tuple[str, ...]:
        """Our parameters that were given."""
        return tuple(sorted({name for name, _ in self.owners}))

    def _target(self, name: str) -> Tensor | None:
        if name not in self.names:
            return None
        module, _, leaf = name.rpartition(".")
        return getattr(self.model.get_submodule(module), leaf)

    def _materialise(self, name: str) -> Tensor:
        """The parameter or buffer; memory for it is allocated now, if it has none."""
        module_name, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(module_name)
        old = getattr(module, leaf)
        if not old.is_meta:
            return old
        new = torch.empty(old.shape, dtype=old.dtype, device=self.device or "cpu")
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        setattr(module, leaf, new)
        return new


def rows(target: Tensor, slot: Slot) -> Tensor:
    """A view of the row blocks of a parameter that a slot means: (blocks, rows, …)."""
    blocks = target.detach().unflatten(0, (slot.parts, -1))
    return blocks if slot.part is None else blocks[slot.part : slot.part + 1]


def window(target: Tensor, slot: Slot, shape: tuple[int, ...], width: int) -> Tensor | None:
    """The part of `rows` that a tensor of this shape fills: all, or what dummy heads leave; None where it
    does not fit.

    A checkpoint without dummy heads has the bare `width` where the model has more.
    """
    whole = rows(target, slot)
    count = len(whole)
    if not shape or shape[0] % count:
        return None
    given = [count, shape[0] // count, *shape[1:]]
    fits = list(whole.shape)
    axis = 2 if slot.name.endswith("proj.weight") else 1
    if ".attention." in slot.name and len(given) > axis and given[axis] == width:
        fits[axis] = min(width, fits[axis])
    return whole[tuple(slice(size) for size in fits)] if given == fits else None
