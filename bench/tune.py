"""Sweep one kernel's tiles and print the table that its `_config` should hold, with the evidence.

    python -m bench.tune OP [--tower H SO400M B] [--case ...] [--dtype bf16] [--json] [--dry]

Every candidate is checked as in bench.kernels before it is timed. The table has, for each width or head size,
the best candidate by the geometric mean over the cases, and what the present `_config` takes. Nothing is
changed: a person writes the winner into `_config`, with this evidence beside it. --dry walks through with tiny
sizes on a CPU, interpreted: its times mean nothing.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from bench import cases, measure
from bench.cases import CASES, Shape
from bench.kernels import DTYPES, Race, ran, share
from radio_triton.kernels import activation, patchify, position, qk_norm, residual, varlen_attention

Row = dict[str, Any]
CURRENT = "as it is"


@dataclass(frozen=True)
class Sweep:
    """`candidates(shape)`: label -> what replaces names of `module` while it is timed. `key(shape)`: by what
    `_config` chooses."""

    module: ModuleType
    candidates: Callable[[Shape], dict[str, dict[str, Any]]]
    key: Callable[[Shape], str]


# (block_m, block_n, warps, stages)
TILES = [
    (128, 64, 8, 2),
    (128, 64, 8, 3),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (128, 128, 8, 2),
    (128, 64, 4, 2),
    (64, 32, 4, 2),
]


def _attention(shape: Shape) -> dict[str, dict[str, Any]]:
    found = {}
    for block_m, block_n, warps, stages in TILES:
        for tma in (True, False):
            config = varlen_attention.Config(block_n, warps, stages, tma)
            label = f"{block_m}x{block_n} w{warps} s{stages} {'tma' if tma else 'pointers'}"
            found[label] = {"_config": lambda *_, c=config: c, "block_m": lambda *_, m=block_m: m}
    return found


def _power(channels: int) -> int:
    return 1 << (channels - 1).bit_length()


def _rows(module: ModuleType) -> Callable[[Shape], dict[str, dict[str, Any]]]:
    """Kernels that hold a whole row: only the warps are free."""

    def candidates(shape: Shape) -> dict[str, dict[str, Any]]:
        block = _power(shape.tower.width)
        configs = [module.Config(block, warps) for warps in (1, 2, 4, 8, 16) if block >= 32 * warps]
        return {f"{c.block} w{c.num_warps}": {"_config": lambda *_, c=c: c} for c in configs}

    return candidates


def _activation(shape: Shape) -> dict[str, dict[str, Any]]:
    blocks = (512, 1024, 2048, 4096) if shape.tower.inner >= 512 else (32, 64)
    configs = [
        activation.Config(block, warps) for block in blocks for warps in (1, 2, 4, 8) if block >= 32 * warps
    ]
    return {f"{c.block} w{c.num_warps}": {"_config": lambda *_, c=c: c} for c in configs}


def _patchify(shape: Shape) -> dict[str, dict[str, Any]]:
    configs = [patchify.Config(16, columns, warps) for columns in (4, 8, 16) for warps in (2, 4, 8)]
    return {f"16x16x{c.block_x} w{c.num_warps}": {"_config": lambda *_, c=c: c} for c in configs}


def _embed(shape: Shape) -> dict[str, dict[str, Any]]:
    found = {}
    for columns in (64, 128, 256):
        for warps in (2, 4, 8):
            change = {"BLOCK_C": columns, "_num_warps": lambda *_, w=warps: w}
            found[f"{position.BLOCK_T}x{columns} w{warps}"] = change
    return found


def _by_width(shape: Shape) -> str:
    return f"C {shape.tower.width}"


SWEEPS = {
    "varlen_attention": Sweep(varlen_attention, _attention, lambda s: f"D {s.tower.head_dim}"),
    "layerscale_residual_norm": Sweep(residual, _rows(residual), _by_width),
    "layerscale_residual": Sweep(residual, _rows(residual), _by_width),
    "layer_norm": Sweep(residual, _rows(residual), _by_width),
    "qk_rms_norm_": Sweep(qk_norm, _rows(qk_norm), _by_width),
    "gelu": Sweep(activation, _activation, lambda s: f"I {s.tower.inner}"),
    "swiglu": Sweep(activation, _activation, lambda s: f"I {s.tower.inner}"),
    "embed_tokens": Sweep(position, _embed, _by_width),
    "patchify": Sweep(patchify, _patchify, lambda s: f"p {cases.PATCH}"),
    "patchify_list": Sweep(patchify, _patchify, lambda s: f"p {cases.PATCH}"),
}


def sweep(
    op: str, shapes: list[Shape], dtype: str, device: str, options: argparse.Namespace
) -> Iterator[Row]:
    """One row for each candidate of each shape, the present choice first."""
    case, plan = CASES[op], SWEEPS[op]
    for shape in filter(case.fits, shapes):
        race = Race(case, shape, DTYPES[dtype], device)
        ceilings = measure.ceilings(device, DTYPES[dtype], options.dry)
        for label, changes in ({CURRENT: {}} | plan.candidates(shape)).items():
            row = {"op": op, "case": shape.case, "dtype": dtype, "key": plan.key(shape), "config": label}
            with patch.multiple(plan.module, **changes) if changes else nullcontext():
                row |= ran(race, case.launcher, options.budget)
            yield row | {"share": share(race, row, ceilings)}


def best(rows: list[Row]) -> Iterator[Row]:
    """For each key the candidate with the least geometric mean over the cases that all of its rivals ran."""
    by_key: dict[tuple, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if "median_us" in row:
            by_key[row["op"], row["dtype"], row["key"]][row["config"]][row["case"]] = row["median_us"]
    for (op, dtype, key), configs in by_key.items():
        whole = max(map(len, configs.values()))
        means = {
            label: math.exp(sum(map(math.log, times.values())) / whole)
            for label, times in configs.items()
            if len(times) == whole
        }
        label = min(means, key=lambda name: means[name])
        found = {"op": op, "dtype": dtype, "key": key, "config": label, "us": round(means[label], 2)}
        yield found | {"now_us": round(means[CURRENT], 2) if CURRENT in means else None, "cases": whole}


def line(row: Row) -> str:
    head = f"{row['op']:25}{row['case']:22}{row['dtype']:5}{row['key']:8}{row['config']:26}"
    if problem := row.get("refused") or row.get("error"):
        return head + problem
    return f"{head}{row['median_us']:11.1f} us{row['tflops']:9.2f} TFLOP/s{row['gbs']:9.1f} GB/s"


def parse(arguments: list[str] | None, device: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.tune", description=__doc__.partition("\n")[0])
    parser.add_argument("op", choices=SWEEPS)
    parser.add_argument("--tower", nargs="+", choices=cases.TOWERS, default=["H", "SO400M", "B"])
    default = ["1 x 512^2", "16 x 512^2", "2 x 1024^2", "mix of 32"]
    parser.add_argument("--case", nargs="+", choices=cases.WORKLOADS, default=default)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--budget", type=float, default=0.1, help="seconds for each candidate")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on the CPU, interpreted")
    measure.add_json_option(parser)
    options = parser.parse_args(arguments)
    if device == "cpu" and not options.dry:
        parser.error(
            "there is no CUDA device here, and tiles are chosen by time; --dry walks through without one, and "
            "`python -m bench.static` shows what the compiler makes of a tile"
        )
    if options.dry:
        options.tower, options.case, options.dtype = ["tiny"], ["tiny", "tiny dense"], ["fp32"]
    return options


def main(arguments: list[str] | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = parse(arguments, device)
    results, found = measure.Results(options.json, device, options.dry), []
    shapes = cases.shapes(options.tower, options.case)
    with torch.inference_mode():
        for dtype in options.dtype:
            for row in sweep(options.op, shapes, dtype, device, options):
                found.append(results.add("tune", **row))
                print(line(row), flush=True)
    facts = measure.machine(device)
    print(
        f"\nbest on {facts['machine']}, triton {facts['triton']}{', but dry: no evidence' if options.dry else ''}"
    )
    for row in best(found):
        now = f"now {row['now_us']}" if row["now_us"] else "the present choice did not run"
        print(
            f"{row['op']} {row['key']} {row['dtype']}: {row['config']}  {row['us']} us, {now} us, {row['cases']} cases"
        )


if __name__ == "__main__":
    main()
