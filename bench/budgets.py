"""What compiled kernels may cost, for the pinned Triton; `python -m bench.static --check` holds it.

Other versions of Triton are recorded in kernels/README.md and not held to this.
"""

from collections.abc import Mapping, Sequence
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
    # masked loads and stores are 16 bytes a thread
    wide_accesses: bool = False
    # a word of the row's config
    config: str = ""

    def matches(self, row: dict[str, Any]) -> bool:
        fields = ("arch", "dtype", "head_dim")
        if self.kernel != row["kernel"] or self.config not in ("", *row["config"].split()):
            return False
        return all(row[f] in (getattr(self, f) or (row[f],)) for f in fields)


HALF = ("bf16", "fp16")
HOPPER = ("sm_90",)
ELEMENTWISE = (
    *(
        "patchify",
        "patchify_list",
        "embed_tokens",
        "layer_norm",
        "layerscale_residual",
        "layerscale_residual_norm",
    ),
    *("qk_rms_norm", "qk_square_sums", "qk_rms_scale", "gelu", "swiglu"),
)
PATCHIFY = ("patchify", "patchify_list")
# an SM has 65,536 registers for its 2048 threads
FULL = {"registers": 32}
BUDGETS = [
    Budget("varlen_attention", (), HALF, (), {"spill_bytes": 0, "local_loads": 0}, {"wide_loads": 1}, True),
    Budget("varlen_attention", (), (), (), {"narrow_loads": 0}, {"ctas_per_sm": 1}),
    Budget("varlen_attention", ("sm_89", "sm_120"), (), (), {"shared_bytes": KIB_99}),
    Budget("varlen_attention", HOPPER, HALF, (64, 72, 80), NONE, {"ctas_per_sm": 2}),
    *(Budget(name, at_most={"spill_bytes": 0, "local_loads": 0}) for name in ELEMENTWISE),
    *(
        Budget(
            name, HOPPER, at_most=FULL | {"narrow_loads": 0}, at_least={"wide_loads": 1}, wide_accesses=True
        )
        for name in ELEMENTWISE
        if name not in (*PATCHIFY, "embed_tokens", "qk_square_sums")
    ),
    # what it stores is two numbers a token
    Budget("qk_square_sums", HOPPER, at_most=FULL | {"narrow_loads": 0}, at_least={"wide_loads": 1}),
    # bf16 and fp16 to an fp32 stream take 40 registers: 1536 threads
    Budget("embed_tokens", HOPPER, HALF, (), {"registers": 40, "narrow_loads": 0}, NONE, wide_accesses=True),
    Budget("embed_tokens", HOPPER, ("fp32",), (), FULL, NONE, wide_accesses=True),
    # uint8 to fp32 is narrower, and so are rows of 14 pixels, which begin at any address
    *(Budget(name, HOPPER, HALF, (), FULL, NONE, wide_accesses=True, config="P16") for name in PATCHIFY),
    *(Budget(name, HOPPER, ("fp32",), (), {"registers": 40}, config="P16") for name in PATCHIFY),
    *(Budget(name, HOPPER, (), (), {"registers": 40}, config="P14") for name in PATCHIFY),
]


def exceeded(row: dict[str, Any], narrow: Sequence[str] = ()) -> list[str]:
    """What is wrong with a row of bench.static, in words; `narrow`: its accesses of less than 16 bytes."""
    problems = []
    for budget in (b for b in BUDGETS if b.matches(row)):
        problems += [f"{key} is {row[key]}, over {n}" for key, n in budget.at_most.items() if row[key] > n]
        problems += [f"{key} is {row[key]}, under {n}" for key, n in budget.at_least.items() if row[key] < n]
        problems += _tensor_cores(row) if budget.tensor_cores else []
        problems += [f"{access} is narrower than 16 bytes" for access in narrow if budget.wide_accesses]
    return problems


def _tensor_cores(row: dict[str, Any]) -> list[str]:
    wanted, found = MMA[row["arch"]], row["mma"]
    if not found or not all(name.startswith(wanted) for name in found):
        return [f"uses {found or 'no tensor cores'}, not {wanted} alone"]
    # where ptxas cannot schedule them, each wgmma has a wait of its own; a group of them needs one
    if wanted == "wgmma" and 2 * row["waits"] > sum(found.values()):
        return [f"{row['waits']} waits for {sum(found.values())} wgmma: they run one by one"]
    return []
