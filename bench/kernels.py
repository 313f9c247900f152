"""Race every kernel: how far from the metal, and against whom.

    python -m bench.kernels [op ...] [--file mine.py] [--tower H] [--case "16 x 512^2"] [--dtype bf16] [--json]

Each contestant is first checked on the inputs it will be timed with: its error against float64 may be at most
twice that of the eager form in the same dtype. What is wrong is refused, not timed, and the exit code is 1.
--file adds functions of your own: one named as the op and with its arguments (`bench/cases.py`) joins the race.
Times are medians in microseconds; GB/s or TFLOP/s are of the useful work, and "share" is of what a copy or a
matrix product reached in the same run. On a GPU memory is cold in L2 and kernels under 100 us are replayed from
a graph. On a CPU the ops are their eager forms: the same code twice, at small sizes, to try things out.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import cases, measure
from bench.cases import CASES, Case, Shape
from bench.rivals import rivals

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LIMIT = 2.0


def error(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest relative error of the outputs, in the 2-norm."""
    if [x.shape for x in got] != [x.shape for x in want]:
        raise ValueError(
            f"its shapes are {[tuple(x.shape) for x in got]}, not {[tuple(x.shape) for x in want]}"
        )
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))


class Race:
    """One op, shape and dtype: the truth, what is allowed, and the contestants."""

    def __init__(self, case: Case, shape: Shape, dtype: torch.dtype, device: str) -> None:
        self.case, self.shape, self.dtype, self.device = case, shape, dtype, device
        self.truth = cases.truth(case, self.arguments())
        self.eager = self._computed(case.eager)
        self.allowed = LIMIT * error(self.eager, self.truth)

    def arguments(self, seed: int = 0) -> tuple:
        return cases.arguments(self.case, self.shape, self.dtype, self.device, seed)

    def _computed(self, function: Callable) -> list[Tensor]:
        return cases.run(function, self.arguments())

    def objection(self, function: Callable) -> str:
        """Why this must not be timed; nothing where it may."""
        got = self._computed(function)
        if [x.dtype for x in got] != [x.dtype for x in self.eager]:
            return f"its dtypes are {[x.dtype for x in got]}, not {[x.dtype for x in self.eager]}"
        found = error(got, self.truth)
        # a NaN compares false
        return "" if found <= self.allowed else f"error {found:.2g}, allowed {self.allowed:.2g}"

    def timed(self, function: Callable, budget: float) -> dict[str, Any]:
        """Times, and rates of the useful work."""
        moved, flops = self.case.moved(self.shape, self.dtype.itemsize), self.case.flops(self.shape)
        sets = [self.arguments(i) for i in range(measure.copies_beyond_cache(moved, self.device))]
        calls = [lambda args=args: function(*args) for args in sets]
        found = measure.quantiles(calls, self.device, budget, self.case.captures)
        if self.device == "cuda":
            found["host_us"] = measure.host_us(calls[0])
        return found | {
            "gbs": float(f"{moved / found['median_us'] / 1e3:.4g}"),
            "tflops": float(f"{flops / found['median_us'] / 1e6:.4g}"),
        }


def load(file: Path) -> dict[str, Callable]:
    """The functions of a user's file that are named as an op."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.exists():
        raise ValueError(f"--file {file}: no such Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {name: getattr(module, name) for name in CASES if callable(getattr(module, name, None))}
    if not found:
        raise ValueError(f"{file} defines none of the ops, as a function of that name: {', '.join(CASES)}")
    return found


def contestants(race: Race, mine: dict[str, Callable], options: argparse.Namespace) -> dict[str, Callable]:
    """Ours first, then the user's own, then everyone else; --dry has our kernel interpreted."""
    ours = race.case.launcher if options.dry else race.case.ours
    others = rivals(race.case, race.shape, race.arguments(), race.device, options.compile)
    own = {options.file.name: mine[race.case.op]} if race.case.op in mine else {}
    return {"ours": ours} | own | others


def ran(race: Race, function: Callable, budget: float) -> dict[str, Any]:
    """The numbers of one contestant, or why there are none."""
    try:
        objection = race.objection(function)
        return {"refused": objection} if objection else race.timed(function, budget)
    except Exception as problem:
        return {"error": f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}"}


def share(race: Race, row: dict[str, Any], ceilings: dict[str, float]) -> float | None:
    """Of the ceiling that binds this op; none for what a CPU's caches hold from call to call."""
    compute = race.case.bound == "compute"
    rate, top = ("tflops", "mm_tflops") if compute else ("gbs", "copy_gbs")
    known = rate in row and (compute or race.device == "cuda")
    return round(row[rate] / ceilings[top], 4) if known else None


def rows(options: argparse.Namespace, device: str) -> Iterator[dict[str, Any]]:
    """One for each contestant of each race, as it comes."""
    mine = load(options.file) if options.file else {}
    for op in options.op or (list(mine) or list(CASES)):
        for dtype_name in options.dtype:
            dtype = DTYPES[dtype_name]
            for shape in cases.shapes(options.tower, options.case):
                if not CASES[op].fits(shape):
                    continue
                ceilings = measure.ceilings(device, dtype, options.dry or options.quick)
                race = Race(CASES[op], shape, dtype, device)
                for who, function in contestants(race, mine, options).items():
                    row = {"op": op, "case": shape.case, "dtype": dtype_name, "who": who}
                    row |= {"tokens": shape.tokens, "longest": max(shape.lengths)}
                    row |= {"head_dim": shape.tower.head_dim, "bound": race.case.bound}
                    row |= ran(race, function, options.budget)
                    yield row | ceilings | {"share": share(race, row, ceilings)}


def line(row: dict[str, Any]) -> str:
    head = f"{row['op']:25}{row['case']:22}{row['dtype']:6}{row['who']:20}"
    if problem := row.get("refused"):
        return f"{head} refused, it computes something else: {problem}"
    if problem := row.get("error"):
        return f"{head} {problem}"
    rate = f"{row['tflops']:9.2f} TFLOP/s" if row["bound"] == "compute" else f"{row['gbs']:9.1f} GB/s   "
    spread = f"{row['median_us']:11.1f} us ({row['p20_us']:.1f} to {row['p80_us']:.1f})"
    return f"{head}{spread:38}{rate}" + (f"{row['share']:6.0%}" if row["share"] else "")


def parse(arguments: list[str] | None, device: str) -> argparse.Namespace:
    gpu = device == "cuda"
    parser = argparse.ArgumentParser(prog="bench.kernels", description=__doc__.partition("\n")[0])
    parser.add_argument("op", nargs="*", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--file", type=Path, help="functions of your own, named as the ops")
    parser.add_argument("--tower", nargs="+", choices=cases.TOWERS, default=["H"] if gpu else ["B"])
    parser.add_argument(
        "--case", nargs="+", choices=cases.WORKLOADS, default=cases.ON_GPU if gpu else cases.ON_CPU
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16"] if gpu else ["fp32"])
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=gpu, help="race torch.compile"
    )
    parser.add_argument(
        "--budget", type=float, default=0.2 if gpu else 0.1, help="seconds for each contestant"
    )
    parser.add_argument("--quick", action="store_true", help="measure the ceilings on small tensors")
    parser.add_argument(
        "--dry", action="store_true", help="our kernels, interpreted on a CPU: times mean nothing"
    )
    measure.add_json_option(parser)
    options = parser.parse_args(arguments)
    if unknown := set(options.op) - set(CASES):
        parser.error(f"no op is called {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if options.dry:
        # the interpreter's bf16 is wrong
        options.tower, options.case, options.dtype = ["tiny"], ["tiny", "tiny dense"], ["fp32"]
    return options


def main(arguments: list[str] | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = parse(arguments, device)
    results = measure.Results(options.json, device, options.dry)
    facts = measure.machine(device)
    print(f"{facts['machine']}, {facts['threads']} threads, torch {facts['torch']}, triton {facts['triton']}")
    if device == "cpu":
        print("No GPU here: ours is the eager form, which the dispatcher picks on a CPU. No kernel is timed.")
    refused = False
    with torch.inference_mode():
        for row in rows(options, device):
            results.add("kernels", **row)
            print(line(row), flush=True)
            refused |= "refused" in row
    if refused:
        sys.exit("what computes something else was not timed")


if __name__ == "__main__":
    main()
