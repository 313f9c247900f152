"""Time varlen_attention on the GPU at hand, beside what else there is, and write each row as it comes.

    python -m bench.gpu_attention PART [--out FILE] [--dry]

PART: correctness, ceilings, host, others or tiles. Rows go to bench/results/<gpu>.jsonl: times in
microseconds, TFLOP/s of useful work, 4 * sum(L^2) * H * D, without padding. `bench/gpu.sh` runs all parts, each
within its own time. --dry walks the same code with tiny sizes on a CPU, under TRITON_INTERPRET=1: its times
mean nothing.
"""

import argparse
import json
import re
import subprocess
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from radio_triton.kernels import varlen_attention as attention

ROOT = Path(__file__).resolve().parents[1]
HEADS = 16
# 16 x 16 pixel patches and 10 prefix tokens: 1034 is a picture of 512 x 512, 4106 one of 1024 x 1024
BATCHES = {
    "16x1034": [1034] * 16,
    "2x4106": [4106] * 2,
    "mix": [1034] * 8 + [4106] * 2 + [266] * 8 + [586] * 6 + [2314] * 4 + [1546] * 4,
}
TILES = [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2), (128, 64, 4, 2)]


def said(*command: str) -> str:
    """The first line that a command prints; nothing where there is no such command."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.partition("\n")[0]


@cache
def machine() -> dict[str, str]:
    """What a row needs to be compared with another."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": said("git", "describe", "--always", "--dirty"),
    }


class Bench:
    """Where to run, how large, and where rows go."""

    def __init__(self, dry: bool, out: Path | None) -> None:
        self.dry = dry
        self.device = "cpu" if dry else "cuda"
        name = re.sub(r"\W+", "-", machine()["gpu"].lower())
        self.out = out or ROOT / "bench" / "results" / f"{name}.jsonl"
        self.heads = 1 if dry else HEADS
        self.batches = {"2x70": [70, 70], "mix": [9, 65]} if dry else BATCHES

    def write(self, part: str, **row: Any) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.out.open("a") as file:
            file.write(json.dumps({"part": part, "dry": self.dry, **machine(), **row}) + "\n")
        print(part, *(f"{key}={value}" for key, value in row.items()), flush=True)

    def quantiles(self, call: Callable[[], Any]) -> dict[str, float]:
        """Median, 20th and 80th percentile in microseconds, with a cold L2."""
        if self.dry:
            begin = time.perf_counter()
            call()
            times = [(time.perf_counter() - begin) * 1e3] * 3
        else:
            times = triton.testing.do_bench(call, warmup=25, rep=100, quantiles=[0.5, 0.2, 0.8])
        return {name: round(ms * 1e3, 2) for name, ms in zip(("median", "p20", "p80"), times, strict=True)}

    def timed(self, part: str, call: Callable[[], Any], flops: float = 0, moved: int = 0, **row: Any) -> None:
        """One row, with the rate of `flops` or of bytes `moved`; what cannot run here becomes its reason."""
        try:
            found = self.quantiles(call)
        except Exception as error:
            self.write(part, **row, error=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            return
        name, rate = ("tflops", flops / 1e6) if flops else ("gbytes_per_s", moved / 1e3)
        self.write(part, **row, **found, **{name: round(rate / found["median"], 1)})

    def inputs(self, lengths: list[int], size: int) -> tuple[Tensor, Tensor]:
        """A (T, 3, H, D) buffer, the same at each call; cu_seqlens on the host."""
        torch.manual_seed(0)
        qkv = torch.randn(sum(lengths), 3, self.heads, size, device=self.device)
        # the interpreter's bf16 is wrong
        qkv = qkv.to(torch.float16 if self.dry else torch.bfloat16)
        return qkv, torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)

    def ours(self, lengths: list[int], size: int, block_m: int | None = None) -> Callable[[], Tensor]:
        """The kernel as a call without arguments, its work list made beforehand."""
        qkv, cu_seqlens = self.inputs(lengths, size)
        if block_m is None:
            capability = attention.device_capability(qkv.device)
            block_m = attention.block_m(size, qkv.dtype, capability, self.heads, lengths)
        order = sorted(range(len(lengths)), key=lambda s: -lengths[s])
        work = [(s, block) for s in order for block in range(-(-lengths[s] // block_m))]
        args = (cu_seqlens.to(self.device), cu_seqlens, torch.tensor(work, dtype=torch.int32).to(self.device))
        return lambda: attention.varlen_attention_triton(*qkv.unbind(1), *args, block_m, size**-0.5)

    def flops(self, lengths: list[int], size: int) -> float:
        return 4.0 * sum(n * n for n in lengths) * self.heads * size


def correctness(bench: Bench) -> None:
    """Relative error against fp64: at most twice that of SDPA in the same dtype, or this fails."""
    failed = False
    for size in (80, 72, 64, 128):
        for name, lengths in bench.batches.items():
            got = bench.ours(lengths, size)()
            qkv, cu_seqlens = bench.inputs(lengths, size)
            rest = (cu_seqlens, cu_seqlens, None, 0, size**-0.5)
            truth = attention.varlen_attention_eager(*qkv.double().unbind(1), *rest)
            eager = attention.varlen_attention_eager(*qkv.unbind(1), *rest)
            error, theirs = (float((x.double() - truth).norm() / truth.norm()) for x in (got, eager))
            bench.write("correctness", shape=name, head_dim=size, error=error, sdpa_error=theirs)
            # a NaN compares false
            failed |= not error <= 2 * theirs
    if failed:
        raise SystemExit("the kernel is wrong here: its times would mean nothing")


def ceilings(bench: Bench) -> None:
    """What copies and matrix products reach here, in the same run."""
    n, m = (64, 64) if bench.dry else (8192, 16544)
    x = torch.randn(n * n * 8, device=bench.device).bfloat16()
    bench.timed("ceilings", x.clone, moved=2 * x.nbytes, shape=f"copy {x.nbytes} bytes")
    for rows, depth, columns in ((n, n, n), (m, 1280, 3840), (m, 1280, 5120), (m, 5120, 1280)):
        a = torch.randn(rows, depth, device=bench.device).bfloat16()
        b = torch.randn(columns, depth, device=bench.device).bfloat16()
        flops, shape = 2.0 * rows * depth * columns, f"gemm {rows}x{depth}x{columns}"
        bench.timed("ceilings", partial(F.linear, a, b), flops=flops, shape=shape)


def host(bench: Bench) -> None:
    """What a launch costs the host, with TMA maps and without: the price of maps where a batch is small."""
    can_map, calls = attention._can_map, 3 if bench.dry else 300
    for tma in (True, False):
        attention._can_map = can_map if tma else lambda x: False
        call = bench.ours([9] if bench.dry else [1034], 80)
        call()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        launch = (time.perf_counter() - begin) / calls * 1e6
        bench.write("host", shape="1x1034", head_dim=80, tma=tma, launch=round(launch, 1))
    attention._can_map = can_map


def rivals(bench: Bench, lengths: list[int], size: int) -> dict[str, Callable[[], Tensor]]:
    """SDPA's fused backends where the batch is dense, and torch's own varlen attention."""
    qkv, cu_seqlens = bench.inputs(lengths, size)
    cu, longest = cu_seqlens.to(bench.device), max(lengths)

    def sdpa(backend: SDPBackend) -> Tensor:
        q, k, v = qkv.unflatten(0, (len(lengths), -1)).permute(2, 0, 3, 1, 4).unbind(0)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    def packed() -> Tensor:
        # not in every torch that we support
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(*qkv.unbind(1), cu, cu, longest, longest)

    found: dict[str, Callable[[], Tensor]] = {"torch varlen_attn": packed}
    if len(set(lengths)) == 1:
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            found[f"sdpa {backend.name.lower()}"] = partial(sdpa, backend)
    return found


def others(bench: Bench) -> None:
    """Ours as `_config` has it, and what torch offers for the same batch."""
    for size in (80, 72, 64, 128):
        for name, lengths in bench.batches.items():
            calls = {"ours": bench.ours(lengths, size)} | rivals(bench, lengths, size)
            for config, call in calls.items():
                flops = bench.flops(lengths, size)
                bench.timed("others", call, flops=flops, shape=name, head_dim=size, config=config)


def tiles(bench: Bench) -> None:
    """Every tile, by TMA maps and by pointers: the numbers from which `_config` is chosen."""
    config, sizes = attention._config, (72,) if bench.dry else (80, 72, 64)
    for size in sizes:
        for block_m, block_n, warps, stages in TILES[:1] if bench.dry else TILES:
            for tma in (True, False):
                chosen = attention.Config(block_n, warps, stages, tma)
                attention._config = lambda *_, chosen=chosen: chosen
                label = f"{block_m}x{block_n} w{warps} s{stages} {'tma' if tma else 'pointers'}"
                for name, lengths in bench.batches.items():
                    call, flops = bench.ours(lengths, size, block_m), bench.flops(lengths, size)
                    bench.timed("tiles", call, flops=flops, shape=name, head_dim=size, config=label)
    attention._config = config


PARTS = {part.__name__: part for part in (correctness, ceilings, host, others, tiles)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.gpu_attention", description="Time attention on a GPU.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, help="instead of bench/results/<gpu>.jsonl")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on the CPU, interpreted")
    selected = parser.parse_args()
    if not selected.dry and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --dry walks through the script without one")
    PARTS[selected.part](Bench(selected.dry, selected.out))


if __name__ == "__main__":
    main()
