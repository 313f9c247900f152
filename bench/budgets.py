"""What compiled kernels may cost, for the pinned Triton; `python -m bench.static --check` holds it.

Other versions of Triton are recorded in kernels/README.md and not held to this.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

TRITON = "3.7.1"
MMA = {"sm_80": "mma.sync", "sm_89": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05", "sm_120": "mma.sync"}
KIB_99 = 99 << 10
NONE: Mapping[str, int] = MappingProxyType({})


class Budget(NamedTuple):
    """Limits for the rows that match; an empty tuple matches every value."""

    kernel: str
    arch: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    head_dim: tuple[int, ...] = ()
    at_most: Mapping[str, int] = NONE
    at_least: Mapping[str, int] = NONE
    tensor_cores: bool = False

    def matches(self, row: dict[str, Any]) -> bool:
        fields = ("arch", "dtype", "head_dim")
        return self.kernel == row["kernel"] and all(row[f] in (getattr(self, f) or (row[f],)) for f in fields)


HALF = ("bf16", "fp16")
BUDGETS = [
    Budget("varlen_attention", (), HALF, (), {"spill_bytes": 0, "local_loads": 0}, {"wide_loads": 1}, True),
    Budget("varlen_attention", (), (), (), {"narrow_loads": 0}, {"ctas_per_sm": 1}),
    Budget("varlen_attention", ("sm_89", "sm_120"), (), (), {"shared_bytes": KIB_99}),
    Budget("varlen_attention", ("sm_90",), HALF, (64, 72, 80), NONE, {"ctas_per_sm": 2}),
]


def exceeded(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row of bench.static, in words."""
    problems = []
    for budget in (b for b in BUDGETS if b.matches(row)):
        problems += [f"{key} is {row[key]}, over {n}" for key, n in budget.at_most.items() if row[key] > n]
        problems += [f"{key} is {row[key]}, under {n}" for key, n in budget.at_least.items() if row[key] < n]
        problems += _tensor_cores(row) if budget.tensor_cores else []
    return problems


def _tensor_cores(row: dict[str, Any]) -> list[str]:
    wanted, found = MMA[row["arch"]], row["mma"]
    if not found or not all(name.startswith(wanted) for name in found):
        return [f"uses {found or 'no tensor cores'}, not {wanted} alone"]
    # where ptxas cannot schedule them, each wgmma has a wait of its own; a group of them needs one
    if wanted == "wgmma" and 2 * row["waits"] > sum(found.values()):
        return [f"{row['waits']} waits for {sum(found.values())} wgmma: they run one by one"]
    return []
