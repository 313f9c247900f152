"""Compile every kernel offline, for GPUs that need not be here, and read what came out of the compiler.

    python -m bench.static [--json FILE] [--check] [--show KERNEL] [--kernel gelu ...] [--arch sm_90 ...]
                           [--dtype bf16 ...] [--head-dim 80 ...] [--without maps|alignment]

The launchers run on small CPU tensors while a recorder stands in for their jit function. It compiles what
would have been launched, through Triton's own specialisation: the same tile, the same hints about alignment.
--check holds the rows against bench/budgets.py and fails where one is exceeded; --show prints the disassembly
of the main loop; --without takes away what the kernel is built on, TMA maps or the knowledge that strides are
aligned, to see what it is worth. A row is evidence about the compiler, not a measurement of speed.

spill_bytes is the stack frame of a thread, which holds nothing but spills. wide_loads are 16 bytes a thread,
from global memory to registers or to shared memory, or TMA loads of a tile; narrow_loads are 1 or 2 bytes.
head_dim is that of attention; a row of an elementwise kernel stands for all widths that get the same binary.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget

from bench import budgets
from bench.static_cases import HEAD_DIMS, KERNELS, capability

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Sm(NamedTuple):
    """What one multiprocessor holds: bytes of shared memory, warps, programs."""

    shared: int
    warps: int
    programs: int


# CUDA C Programming Guide, "Compute Capabilities"; every one has 65,536 registers
ARCHS = {
    "sm_80": Sm(164 << 10, 64, 32),
    "sm_89": Sm(100 << 10, 48, 24),
    "sm_90": Sm(228 << 10, 64, 32),
    "sm_100": Sm(228 << 10, 64, 32),
    "sm_120": Sm(100 << 10, 48, 24),
}


class Driver:
    """Stands in for Triton's CUDA driver: it knows a target and nothing else."""

    def __init__(self, arch: str) -> None:
        self.number = int(arch.removeprefix("sm_"))

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels, and their target, for each device
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.number, 32)


class Recorder:
    """Stands in for a jit function: a launch compiles, and keeps the result."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.launches: list[tuple[Any, dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.launches.append((self.function.warmup(*args, grid=grid, **options), options))

        return launch


@contextlib.contextmanager
def offline(module: ModuleType, name: str, arch: str) -> Iterator[Recorder]:
    """Within, launches of `module.name` compile for `arch` and are recorded."""
    triton.runtime.driver.set_active(Driver(arch))
    recorder = Recorder(getattr(module, name))
    stand_ins = {name: recorder, "device_capability": lambda device: capability(arch)}
    with patch.multiple(module, create=True, **stand_ins):
        yield recorder


def disassemble(cubin: bytes) -> tuple[str, int, int]:
    """SASS, registers a thread, bytes of stack a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass, usage = (
            subprocess.run([TOOLS / tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for tool, flag in (("nvdisasm", "-c"), ("cuobjdump", "-res-usage"))
        )
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0]
    return sass, int(registers), int(stack)


def programs_per_sm(arch: str, registers: int, shared: int, warps: int) -> int:
    """How many programs of a kernel one multiprocessor holds at a time."""
    sm = ARCHS[arch]
    # a warp's registers are allocated in units of 256, and a program's shared memory has 1 KiB for the system
    by_registers = 65536 // (-(-registers * 32 // 256) * 256 * warps)
    return min(by_registers, sm.shared // (shared + 1024), sm.warps // warps, sm.programs)


def tensor_core_instructions(sass: str) -> dict[str, int]:
    """Their PTX names with the shape (m x n x k) and how often each stands in the code."""
    found: Counter[str] = Counter()
    for m, n, k in re.findall(r"\bHGMMA\.(\d+)x(\d+)x(\d+)", sass):
        found[f"wgmma.m{m}n{n}k{k}"] += 1
    for shape in re.findall(r"\bHMMA\.(\d+)", sass):
        found["mma.sync." + {"16816": "m16n8k16", "1688": "m16n8k8"}.get(shape, shape)] += 1
    if count := len(re.findall(r"\bUTC\w*MMA\b", sass)):
        found["tcgen05.mma"] = count
    return dict(sorted(found.items()))


def config(options: dict[str, Any]) -> str:
    """Block sizes, warps, stages and the switches that are on: "128x64 w8 s2 tma"; sizes that a kernel is
    compiled for stand first: "C5120 1024 w4 cheap".
    """
    sizes = [f"{name}{options[name]}" for name in ("C", "P") if name in options]
    blocks = "x".join(str(value) for name, value in options.items() if name.startswith("BLOCK"))
    stages = [f"s{options['num_stages']}"] if "num_stages" in options else []
    switches = [name.lower() for name, value in options.items() if value is True and name.isupper()]
    return " ".join([*sizes, blocks, f"w{options['num_warps']}", *stages, *switches])


def measure(compiled: Any, options: dict[str, Any], arch: str) -> dict[str, Any]:
    """What the compiler made of one launch."""
    sass, registers, stack = disassemble(compiled.asm["cubin"])
    shared = compiled.metadata.shared

    def count(pattern: str) -> int:
        return len(re.findall(pattern, sass))

    return {
        "config": config(options),
        "registers": registers,
        "spill_bytes": stack,
        "local_loads": count(r"\bLDL\b"),
        "shared_bytes": shared,
        "ctas_per_sm": programs_per_sm(arch, registers, shared, options["num_warps"]),
        "mma": tensor_core_instructions(sass),
        "wide_loads": count(r"\bLDG\.\S*128|\bLDGSTS\.\S*128|\bUTMALDG"),
        "narrow_loads": count(r"\bLDG\.\S*[US](?:8|16)\b"),
        "waits": count(r"\bWARPGROUP\.DEPBAR"),
        "triton": triton.__version__,
    }


def narrow_offsets(ttir: str) -> list[str]:
    """Products of two run-time 32-bit integers: a row times a stride that was not widened first."""
    products = re.findall(r"arith\.muli ((?:%[\w#]+(?:, )?){2}) : (?:tensor<[\dx]*)?i32", ttir)
    return [pair for pair in products if not re.search(r"%c(?:st|-?\d)", pair)]


def narrow_accesses(ptx: str) -> list[str]:
    """Masked loads and stores of less than 16 bytes a thread; scalars have no mask."""
    found = re.findall(r"@!?%\w+ (?:ld|st)\.global\S*", ptx)
    return [access for access in found if not re.search(r"v4\.b32|v2\.b64", access)]


def main_loop(sass: str) -> str:
    """The loop with the most tensor core (else: FMA) instructions, without encodings."""
    lines = [re.sub(r"\s*/\*.*?\*/\s*", "    ", line).rstrip() for line in sass.splitlines()]
    lines = [line for line in lines if line.startswith(".L") or line.endswith(";")]
    labels = {line.rstrip(":"): i for i, line in enumerate(lines) if line.startswith(".L")}
    loops = [
        lines[labels[label] : i + 1]
        for i, line in enumerate(lines)
        for label in re.findall(r"\bBRA\b.*?(\.L_\w+)", line)
        if labels.get(label, i) < i
    ]
    return "\n".join(max(loops, key=lambda loop: len(re.findall(r"MMA|FFMA", "\n".join(loop))), default=[]))


def rows(selected: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Any]]:
    """Row and compiled kernel for everything that was selected."""
    for name, case in KERNELS.items():
        if name not in selected.kernel or selected.show not in (None, name):
            continue
        for arch in selected.arch:
            for dtype in selected.dtype:
                for head_dim in selected.head_dim if case.by_head_size else [None]:
                    with offline(case.module, case.function, arch) as recorder:
                        case.call(DTYPES[dtype], head_dim, arch, selected.without)
                    key = {"kernel": name, "arch": arch, "dtype": dtype, "head_dim": head_dim}
                    # one kernel may serve many widths
                    distinct = {
                        id(compiled): launch for launch in recorder.launches for compiled in launch[:1]
                    }
                    for compiled, options in distinct.values():
                        yield key | measure(compiled, options, arch), compiled


def line(row: dict[str, Any]) -> str:
    mma = " ".join(f"{count}x{name}" for name, count in row["mma"].items())
    return (
        f"{row['kernel']:25}{row['arch']:7}{row['dtype']:5}{row['head_dim'] or '':4}  {row['config']:30}"
        f"{row['registers']:5}{row['spill_bytes']:7}{row['local_loads']:5}{row['shared_bytes']:8}"
        f"{row['ctas_per_sm']:5}{row['wide_loads']:6}{row['narrow_loads']:7}{row['waits']:6}  {mma}"
    )


HEADER = (
    f"{'kernel':25}{'arch':7}{'type':5}{'D':>4}  {'config':30}{'regs':>5}{'spill':>7}{'LDL':>5}{'shared':>8}"
    f"{'CTAs':>5}{'wide':>6}{'narrow':>7}{'waits':>6}  tensor core instructions"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.static", description="Compile the kernels for GPUs that need not be here."
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the rows there, as a list")
    parser.add_argument("--check", action="store_true", help="fail where bench/budgets.py is exceeded")
    parser.add_argument(
        "--show", metavar="KERNEL", choices=KERNELS, help="print the disassembly of its main loop"
    )
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--arch", nargs="+", choices=ARCHS, default=list(ARCHS))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--without", choices=["maps", "alignment"], help="what to take away")
    parser.add_argument("--head-dim", nargs="+", type=int, default=HEAD_DIMS)
    selected = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit(
            "TRITON_INTERPRET is set, and interpreted kernels are never compiled: unset it and run this again"
        )
    print(f"triton {triton.__version__}\n{HEADER}")
    found, broken = [], []
    for row, compiled in rows(selected):
        print(line(row), flush=True)
        found.append(row)
        where = f"{row['kernel']} {row['arch']} {row['dtype']} D = {row['head_dim']} {row['config']}"
        accesses = narrow_accesses(compiled.asm["ptx"])
        broken += [f"{where}: {problem}" for problem in budgets.exceeded(row, accesses)]
        broken += [f"{where}: 32-bit row offset {pair}" for pair in narrow_offsets(compiled.asm["ttir"])]
        if selected.show:
            print(main_loop(disassemble(compiled.asm["cubin"])[0]))
    if selected.json:
        selected.json.write_text(json.dumps(found, indent=1) + "\n")
    if selected.check and broken:
        sys.exit("\n".join(broken))


if __name__ == "__main__":
    main()
