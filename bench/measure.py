"""What every benchmark shares: the machine, how a call is timed, and where rows go.

A row is one line of JSON: what was measured (IDENTITY), the numbers, the machine and the command. A row with
the identity of an older one replaces it, so that a results file holds the latest of everything.
"""

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
IDENTITY = ("part", "machine", "dry", "version", "layers", "op", "case", "dtype", "who", "config", "batch")
Call = Callable[[], Any]
# a replay of a graph shows the kernel alone; above this, launching costs nothing that shows
GRAPH_BELOW_US = 100.0


def said(*command: str) -> str:
    """The first line that a command prints; nothing where there is no such command."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.partition("\n")[0]


def processor() -> str:
    """The CPU's name, its cores and what it multiplies matrices with."""
    name, flags = platform.processor() or platform.machine(), set()
    if Path("/proc/cpuinfo").exists():
        facts = dict(re.findall(r"^(model name|flags)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M))
        name, flags = facts.get("model name", name), set(facts.get("flags", "").split())
    units = [unit for unit in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if unit in flags]
    return f"{name}, {os.cpu_count()} cores" + (f", {units[0]}" if units else "")


@cache
def machine(device: str) -> dict[str, Any]:
    """What a row needs to be compared with another."""
    facts = {
        "machine": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "commit": said("git", "describe", "--always", "--dirty"),
        "command": f"python -m {module_name()} {shlex.join(sys.argv[1:])}".strip(),
    }
    if device == "cuda":
        facts["driver"] = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return facts


def module_name() -> str:
    """What was run, as `python -m` takes it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else Path(sys.argv[0]).name


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


class Results:
    """Prints rows and, where a file is given, keeps them there."""

    def __init__(self, file: str | Path | None, device: str, dry: bool = False) -> None:
        self.device, self.dry = device, dry
        self.file = self._default() if file == "" else Path(file) if file else None

    def _default(self) -> Path:
        kind = re.sub(r"\W+", "-", torch.cuda.get_device_name().lower()) if self.device == "cuda" else "cpu"
        return RESULTS / f"{kind}.jsonl"

    def add(self, part: str, **row: Any) -> dict[str, Any]:
        """Keep one row, as soon as it is there: a run that is cut short still counts."""
        row = {"part": part, "dry": self.dry, **row, **machine(self.device)}
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            kept = [old for old in read(self.file) if identity(old) != identity(row)]
            new = self.file.with_suffix(".new")
            new.write_text("".join(json.dumps(r) + "\n" for r in [*kept, row]))
            new.replace(self.file)
        return row


def identity(row: dict[str, Any]) -> tuple:
    return tuple(row.get(key) for key in IDENTITY)


def read(*files: Path) -> list[dict[str, Any]]:
    """The rows of results files; one that does not exist has none."""
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def add_json_option(parser: Any) -> None:
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const="", help="keep rows; default file: bench/results/<machine>"
    )


def quantiles(calls: Sequence[Call], device: str, budget: float = 0.3, graph: bool = True) -> dict[str, Any]:
    """Median, 20th and 80th percentile in microseconds of calls that do the same to different memory."""
    times, replayed = _on_gpu(calls, budget, graph) if device == "cuda" else (_on_cpu(calls, budget), False)
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    found = {"median_us": cuts[4], "p20_us": cuts[1], "p80_us": cuts[7]}
    return {key: round(us, 2) for key, us in found.items()} | {"samples": len(times), "graph": replayed}


def _on_cpu(calls: Sequence[Call], budget: float) -> list[float]:
    times: list[float] = []
    calls[0]()
    while len(times) < 5 or (sum(times) < budget * 1e6 and len(times) < 1000):
        begun = time.perf_counter()
        calls[len(times) % len(calls)]()
        times.append((time.perf_counter() - begun) * 1e6)
    return times


def _on_gpu(calls: Sequence[Call], budget: float, graph: bool) -> tuple[list[float], bool]:
    for call in calls:
        call()
    estimate = _events(calls * 3)
    repeats = int(min(max(budget * 1e6 / statistics.median(estimate), 10), 500))
    if graph and statistics.median(estimate) < GRAPH_BELOW_US:
        return _replayed(calls, repeats), True
    return _events([calls[i % len(calls)] for i in range(repeats)]), False


def _events(calls: Sequence[Call]) -> list[float]:
    """Each call between two events; the host runs ahead of the GPU."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    torch.cuda.synchronize()
    # the GPU waits, so that the first calls are queued when it begins
    torch.cuda._sleep(2_000_000)
    marks[0].record()
    for call, mark in zip(calls, marks[1:], strict=True):
        call()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)]


def host_us(call: Call) -> float:
    """Until a call returns, without waiting for the GPU: the median of 50."""
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        times.append((time.perf_counter() - begun) * 1e6)
    return round(statistics.median(times), 1)


def _replayed(calls: Sequence[Call], repeats: int) -> list[float]:
    """Times of a graph of 20 calls, divided by 20."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for i in range(20):
            calls[i % len(calls)]()
    captured.replay()
    return [us / 20 for us in _events([captured.replay] * max(repeats // 20, 10))]


def copies_beyond_cache(nbytes: int, device: str) -> int:
    """How many sets of buffers of so many bytes do not fit into twice the L2 cache, so that each use is cold."""
    if device != "cuda":
        return 1
    cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, min(-(-2 * cache_bytes // max(nbytes, 1)) + 1, 64))


@cache
def ceilings(device: str, dtype: torch.dtype, small: bool = False) -> dict[str, float]:
    """What a copy and a matrix product reach here, in this process: GB/s and TFLOP/s."""
    # a copy far larger than any cache; a product as large as pays
    elements, side = (1 << 16, 128) if small else (1 << 31, 8192) if device == "cuda" else (1 << 26, 2048)
    x = torch.randn(elements // 2, device=device).to(dtype)
    y = torch.empty_like(x)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    copy = quantiles([lambda: y.copy_(x)], device)["median_us"]
    product = quantiles([lambda: torch.mm(a, b)], device)["median_us"]
    return {"copy_gbs": 2 * x.nbytes / copy / 1e3, "mm_tflops": 2 * side**3 / product / 1e6}


def peak_bytes(call: Call, device: str) -> int:
    """The most memory that one call held at a time, beyond what was held before it; it was called before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - held
    return _peak_on_cpu(call)


def _peak_on_cpu(call: Call) -> int:
    """From the allocator's own events, those inside an operation included."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def importable(package: str) -> bool:
    return find_spec(package) is not None


def nbytes(values: Any) -> int:
    """Bytes of all tensors in nested lists."""
    if isinstance(values, Tensor):
        return values.nbytes
    return sum(map(nbytes, values)) if isinstance(values, (list, tuple)) else 0
