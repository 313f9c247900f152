"""End to end against Transformers' RadioModel: same weights, same inputs, one process, all in turn.

    python -m bench.encoder [--version NAME] [--layers N] [--dtype fp32 ...] [--against sdpa eager compiled]
                            [--part race flat host startup profile] [--repeats N] [--threads N] [--json]

race: dense, packed mix and video: milliseconds (a ratio above 1: we are faster), images and tokens a second,
peak activation memory, operations dispatched, relative difference of the features. flat: time for each token
from 1 to 128 images. host: what a forward costs without arithmetic. startup: import and first call, in fresh
processes. profile: where our time goes, by kind of operation. On a CPU a few layers of ViT-B are the default,
on a GPU the whole of C-RADIOv4-H.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from bench import counting, measure, models, startup

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PARTS = ("race", "flat", "host", "startup", "profile")
AGAINST = ("sdpa", "eager", "compiled")
Row = dict[str, Any]


class Bench:
    """What was asked for, and the models for it."""

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        self.options, self.device = options, device
        self.pair = cache(self._pair)

    def _pair(self, dtype: str, attention: str) -> tuple[nn.Module, nn.Module]:
        options = self.options
        return models.build(options.version, options.layers, DTYPES[dtype], self.device, attention)

    def contestants(self, dtype: str) -> dict[str, nn.Module]:
        """Ours, and Transformers' in each of its forms."""
        found = {"ours": self.pair(dtype, "sdpa")[0]}
        for form in self.options.against:
            theirs = self.pair(dtype, "eager" if form == "eager" else "sdpa")[1]
            found[f"transformers {form}"] = torch.compile(theirs) if form == "compiled" else theirs
        if "compiled" in self.options.against:
            # built anew: compiling is in place
            ours = self._pair(dtype, "sdpa")[0]
            ours.encoder.compile(fullgraph=True)
            found["ours compiled"] = ours
        return found

    def row(self, **fields: Any) -> Row:
        layers = self.options.layers or len(self.pair(self.options.dtype[0], "sdpa")[0].encoder.layer)
        return {"version": self.options.version, "layers": layers, **fields}

    def seconds(self, call: Callable[[], Any]) -> float:
        begun = time.perf_counter()
        call()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    def in_turn(self, calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
        """Milliseconds of each, measured in turn, so that what disturbs one disturbs all."""
        times: dict[str, list[float]] = {who: [] for who in calls}
        for call in calls.values():
            call()
        for _ in range(self.options.repeats):
            for who, call in calls.items():
                times[who].append(1e3 * self.seconds(call))
        return times


def race(bench: Bench) -> Iterator[Row]:
    """Every case of every dtype, one row for each contestant."""
    for dtype in bench.options.dtype:
        contestants = bench.contestants(dtype)
        for case, found in models.cases(bench.options.size, DTYPES[dtype], bench.device).items():
            outside = models.normalized_outside(*contestants.values()) if "video" in case else nullcontext()
            with outside:
                yield from _raced(bench, contestants, case, dtype, *found)


def _raced(
    bench: Bench,
    contestants: dict[str, nn.Module],
    case: str,
    dtype: str,
    images: int,
    tokens: int,
    call: models.Call,
) -> Iterator[Row]:
    calls = {who: partial(call, model) for who, model in contestants.items()}
    times = bench.in_turn(calls)
    runs = {who: _dispatched(call, who) for who, call in calls.items()}
    want = next(features for who, (features, _) in runs.items() if who != "ours")
    for who, (features, counted) in runs.items():
        median = statistics.median(times[who])
        yield bench.row(
            case=case, dtype=dtype, who=who, ms=round(median, 3),
            min_ms=round(min(times[who]), 3), max_ms=round(max(times[who]), 3),
            ratio=round(median / statistics.median(times["ours"]), 3),
            images_per_s=round(1e3 * images / median, 2), tokens_per_s=round(1e3 * tokens / median, 1),
            peak_bytes=measure.peak_bytes(calls[who], bench.device),
            difference=float((features - want).norm() / want.norm()), **counted,
        )  # fmt: skip


def _dispatched(call: Callable[[], Any], who: str) -> tuple[torch.Tensor, Row]:
    """The features of a run, and its counts; a compiled model dispatches what its compiler made, out of sight."""
    if "compiled" in who:
        return call().features.double().flatten(), {}
    with counting.Recorder() as recorder:
        out = call()
    totals = recorder.counts.totals()
    counted = {"operations": totals["calls"], "kernels": totals["kernels"], "gflop": totals["flops"] / 1e9}
    return out.features.double().flatten(), counted


def flat(bench: Bench) -> Iterator[Row]:
    """Images of one size in packed batches of 1 to 128: the time for each token must not grow."""
    dtype = bench.options.dtype[0]
    side = {"gpu": 14, "cpu": 4, "tiny": 2}[bench.options.size]
    ours, theirs = bench.pair(dtype, "sdpa")
    batches = [1, 4] if bench.options.size == "tiny" else [1, 2, 4, 8, 16, 32, 64, 128]
    for batch in batches:
        call = models.patches_of([(side, side)] * batch, 16, DTYPES[dtype], bench.device)
        times = bench.in_turn(
            {"ours": lambda call=call: call(ours), "transformers sdpa": lambda call=call: call(theirs)}
        )
        tokens = batch * (side * side + ours.config.num_prefix_tokens)
        for who, measured in times.items():
            median = statistics.median(measured)
            yield bench.row(
                case=f"packed, {side * 16}^2 each", dtype=dtype, who=who, batch=batch, tokens=tokens,
                ms=round(median, 3), us_per_token=round(1e3 * median / tokens, 3),
            )  # fmt: skip


def host(bench: Bench) -> Iterator[Row]:
    """On a GPU the time until a forward returns, without waiting; on a CPU a forward of width 32, one patch."""
    dtype, gpu = bench.options.dtype[0], bench.device == "cuda"
    layers = bench.row()["layers"]
    pair = bench.pair(dtype, "sdpa") if gpu else models.build("tiny", layers, DTYPES[dtype], bench.device)
    call = models.images_of(1, 32, DTYPES[dtype], bench.device)
    for who, model in zip(("ours", "transformers sdpa"), pair, strict=True):
        times = []
        for _ in range(3 + 10 * bench.options.repeats):
            begun = time.perf_counter()
            call(model)
            times.append(1e6 * (time.perf_counter() - begun))
            if gpu:
                torch.cuda.synchronize()
        yield bench.row(case="host", dtype=dtype, who=who, us=round(statistics.median(times[3:]), 1))


def startups(bench: Bench) -> Iterator[Row]:
    """Import and first call, in fresh processes; the median of two."""
    for who in ("ours", "transformers"):
        runs = [
            startup.in_process(who, bench.device) for _ in range(1 if bench.options.size == "tiny" else 2)
        ]
        medians = {key: round(statistics.median(run[key] for run in runs), 4) for key in runs[0]}
        yield {"case": "fresh process", "who": who, **medians}


KINDS = {"linear": counting.is_matmul, "attention": counting.is_attention}


def profiled(bench: Bench) -> Iterator[Row]:
    """Share of our time in linear layers, in attention and in all else, from torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.device == "cuda" else [])]
    for dtype in bench.options.dtype:
        ours = bench.pair(dtype, "sdpa")[0]
        for case, (_, _, call) in models.cases(bench.options.size, DTYPES[dtype], bench.device).items():
            with models.normalized_outside(ours) if "video" in case else nullcontext():
                call(ours)
                with profile(activities=activities) as profiler:
                    for _ in range(min(bench.options.repeats, 3)):
                        call(ours)
            spent: dict[str, float] = defaultdict(float)
            for event in profiler.key_averages():
                # a kernel's time is that of the operation that launched it; its own entry would count it twice
                if event.device_type != torch.autograd.DeviceType.CPU:
                    continue
                name = event.key.rpartition("::")[2]
                kind = next((kind for kind, test in KINDS.items() if test(name)), "other")
                spent[kind] += (
                    event.self_device_time_total if bench.device == "cuda" else event.self_cpu_time_total
                )
            total = sum(spent.values()) or 1.0
            shares = {kind: round(spent[kind] / total, 3) for kind in (*KINDS, "other")}
            yield bench.row(case=case, dtype=dtype, who="ours", **shares)


RUN = {"race": race, "flat": flat, "host": host, "startup": startups, "profile": profiled}


def line(part: str, row: Row) -> str:
    head = f"{part:8}{row.get('case', ''):24}{row.get('dtype', ''):5}{row['who']:21}"
    if part == "race":
        return (
            f"{head}{row['ms']:9.1f} ms  ratio {row['ratio']:5.2f}  {row['images_per_s']:8.1f} images/s  "
            f"{row['peak_bytes'] / 1e6:8.1f} MB  "
            f"{row.get('kernels', ''):>5} kernels  difference {row['difference']:.1e}"
        )
    keys = [key for key in row if key not in ("version", "layers", "case", "dtype", "who")]
    return head + "  ".join(f"{key} {row[key]}" for key in keys)


def parse(arguments: list[str] | None, device: str) -> argparse.Namespace:
    gpu = device == "cuda"
    parser = argparse.ArgumentParser(prog="bench.encoder", description=__doc__.partition("\n")[0])
    parser.add_argument("--version", default=models.DEFAULT[device], help="a preset's name, or tiny")
    parser.add_argument("--layers", type=int, default=0 if gpu else 2, help="0: all")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16"] if gpu else ["fp32", "bf16"])
    parser.add_argument(
        "--against", nargs="+", choices=AGAINST, default=list(AGAINST if gpu else AGAINST[:2])
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--size", choices=["gpu", "cpu", "tiny"], default="gpu" if gpu else "cpu")
    parser.add_argument("--repeats", type=int, default=10 if gpu else 3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    measure.add_json_option(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = parse(arguments, device)
    torch.set_num_threads(options.threads)
    results, facts = measure.Results(options.json, device), measure.machine(device)
    print(
        f"{options.version}, {options.layers or 'all'} layers, {facts['machine']}, {options.threads} threads, "
        f"torch {facts['torch']}, transformers {facts['transformers']}; medians of {options.repeats}"
    )
    bench = Bench(options, device)
    with torch.no_grad():
        for part in options.part:
            for row in RUN[part](bench):
                results.add(part, **row)
                print(line(part, row), flush=True)


if __name__ == "__main__":
    main()
