"""What the compiler makes of the kernels for GPUs that are not here: bench.static, in its own process."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from bench import budgets

ROOT = Path(__file__).resolve().parents[2]
KEYS = ["kernel", "arch", "dtype", "head_dim", "config", "registers", "spill_bytes", "local_loads"]
KEYS += ["shared_bytes", "ctas_per_sm", "mma", "wide_loads", "narrow_loads", "waits", "triton"]

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        triton.__version__ != budgets.TRITON, reason=f"budgets are those of triton {budgets.TRITON}"
    ),
]


def run(*args: str) -> subprocess.CompletedProcess:
    # interpreted kernels are not compiled, and triton reads the variable once
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True)


def rows(folder: Path, *args: str) -> list[dict[str, Any]]:
    done = run("-m", "bench.static", "--check", "--json", str(folder / "rows.json"), *args)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "rows.json").read_text())


def test_hopper_and_ampere_keep_their_budgets(tmp_path: Path) -> None:
    found = rows(tmp_path, "--kernel", "varlen_attention", "--arch", "sm_90", "sm_80")
    assert all(list(row) == KEYS for row in found)
    combinations = {(row["arch"], row["dtype"], row["head_dim"]) for row in found}
    assert len(combinations) == 2 * 3 * 4
    hopper = [row for row in found if row["arch"] == "sm_90" and row["dtype"] != "fp32"]
    assert {row["config"].split()[0] for row in hopper} == {"128x64", "64x64"}
    for row in hopper:
        assert row["mma"] and all(name.startswith("wgmma") for name in row["mma"])
        assert row["spill_bytes"] == row["local_loads"] == row["narrow_loads"] == 0 < row["wide_loads"]
        assert 0 < row["waits"] < sum(row["mma"].values()) / 2
        assert row["ctas_per_sm"] >= (2 if row["head_dim"] <= 80 else 1)


def test_elementwise_kernels_keep_their_budgets(tmp_path: Path) -> None:
    found = rows(tmp_path, "--kernel", *budgets.ELEMENTWISE, "--arch", "sm_90", "sm_80")
    assert all(list(row) == KEYS and row["head_dim"] is None for row in found)
    kinds = {(row["kernel"], row["arch"], row["dtype"]) for row in found}
    assert kinds == set(itertools.product(budgets.ELEMENTWISE, ["sm_90", "sm_80"], ["bf16", "fp16", "fp32"]))
    for row in found:
        assert row["spill_bytes"] == row["local_loads"] == 0
        # every released width is a multiple of 128, and a row of 14 pixels is a multiple of nothing
        assert row["wide_loads"] or "P14" in row["config"] or "patchify" in row["kernel"]
        if row["arch"] == "sm_90" and row["dtype"] == "bf16" and "P14" not in row["config"]:
            threads = 32 * row["ctas_per_sm"] * int(row["config"].split(" w")[1].split()[0])
            assert threads == 2048 or (row["kernel"] == "embed_tokens" and threads == 1536)


def test_other_archs_keep_their_budgets(tmp_path: Path) -> None:
    found = rows(tmp_path, "--arch", "sm_89", "sm_100", "sm_120", "--dtype", "bf16")
    every = itertools.product(["varlen_attention", *budgets.ELEMENTWISE], ["sm_89", "sm_100", "sm_120"])
    assert {(row["kernel"], row["arch"]) for row in found} == set(every)
    assert all(row["shared_bytes"] <= 99 * 1024 for row in found if row["arch"] != "sm_100")


def test_the_other_head_sizes_compile(tmp_path: Path) -> None:
    sizes = ["8", "104", "256"]
    done = run(
        *("-m", "bench.static", "--json", str(tmp_path / "rows.json"), "--head-dim", *sizes),
        *("--kernel", "varlen_attention", "--arch", "sm_90", "sm_89", "--dtype", "bf16"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "rows.json").read_text())
    assert {row["head_dim"] for row in found} == {8, 104, 256}
    assert all(row["narrow_loads"] == 0 and row["ctas_per_sm"] >= 1 for row in found)


def test_show_prints_the_main_loop() -> None:
    one = ("--show", "varlen_attention", "--arch", "sm_90", "--dtype", "bf16", "--head-dim", "80")
    done = run("-m", "bench.static", *one)
    assert done.returncode == 0, done.stderr
    loop = done.stdout[done.stdout.index(".L") :]
    assert "HGMMA.64x64x16" in loop and "HGMMA.64x16x16" in loop and "MUFU.EX2" in loop and "BRA" in loop


ONCE = """
import torch
from bench import static
from radio_triton.kernels import varlen_attention as attention

def attend(lengths, width, transposed=False):
    tokens = sum(lengths)
    x = torch.zeros(*([2] if transposed else []), tokens, width, dtype=torch.bfloat16)
    q, k, v = [x.transpose(0, 1)] * 3 if transposed else x[:, :480].unflatten(1, (3, 2, 80)).unbind(1)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    work = torch.zeros(len(lengths), 2, dtype=torch.int32)
    attention.varlen_attention_triton(q, k, v, cu_seqlens[:], cu_seqlens, work, 64, 0.1)

with static.offline(attention, "_kernel", "sm_80") as recorder:
    attend([64], 480)
    attend([1, 17, 130], 480)
    attend([7], 496)
    attend([33], 1048)
    attend([33], 80, transposed=True)
    print(len({id(compiled) for compiled, _ in recorder.launches}))
"""


def test_token_counts_and_strides_never_recompile() -> None:
    done = run("-c", ONCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"spill_bytes": 8}, "spill_bytes is 8"),
        ({"narrow_loads": 64}, "narrow_loads is 64"),
        ({"ctas_per_sm": 1}, "ctas_per_sm is 1"),
        ({"mma": {"mma.sync.m16n8k16": 160}}, "not wgmma alone"),
        ({"mma": {}}, "no tensor cores"),
        ({"waits": 26}, "one by one"),
    ],
)
def test_a_budget_that_is_exceeded_is_seen(change: dict[str, Any], problem: str) -> None:
    good = dict.fromkeys(("spill_bytes", "local_loads", "narrow_loads"), 0) | {
        "kernel": "varlen_attention",
        "arch": "sm_90",
        "dtype": "bf16",
        "head_dim": 80,
        "config": "128x64 w8 s2 tma",
        "ctas_per_sm": 2,
        "wide_loads": 17,
        "waits": 7,
        "shared_bytes": 61472,
        "registers": 117,
        "mma": {"wgmma.m64n16k16": 8, "wgmma.m64n64k16": 18},
    }
    assert budgets.exceeded(good) == []
    assert any(problem in found for found in budgets.exceeded(good | change))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"registers": 33}, "registers is 33"),
        ({"spill_bytes": 4}, "spill_bytes"),
        ({"wide_loads": 0}, "under 1"),
    ],
)
def test_an_elementwise_budget_that_is_exceeded_is_seen(change: dict[str, Any], problem: str) -> None:
    good = {
        "kernel": "gelu",
        "arch": "sm_90",
        "dtype": "bf16",
        "head_dim": None,
        "config": "C5120 1024 w4 cheap",
    }
    good |= {"registers": 32, "spill_bytes": 0, "local_loads": 0, "narrow_loads": 0, "wide_loads": 1}
    assert budgets.exceeded(good) == []
    assert any(problem in found for found in budgets.exceeded(good | change))
    assert budgets.exceeded(good, ["@%p1 st.global.v2.b32"]) == [
        "@%p1 st.global.v2.b32 is narrower than 16 bytes"
    ]


def test_an_access_of_less_than_16_bytes_is_seen() -> None:
    code = """
from bench.static import narrow_accesses as narrow
print(narrow("@%p1 ld.global.v4.b32 { %r1 }, [ %rd1 + 0 ];"), narrow("ld.global.b32 { %r1 }, [ %rd1 ];"),
      narrow("@%p1 ld.global.v2.b32 { %r1 }, [ %rd1 ];"), narrow("@!%p2 st.global.b16 [ %rd1 ], { %rs1 };"))
"""
    assert run("-c", code).stdout.strip() == "[] [] ['@%p1 ld.global.v2.b32'] ['@!%p2 st.global.b16']"


def test_a_32_bit_row_offset_is_seen() -> None:
    code = """
from bench.static import narrow_offsets
print(narrow_offsets("%1 = arith.muli %row, %stride : i32 loc(#loc1)"),
      narrow_offsets("%1 = arith.muli %row_2, %3 : tensor<64x1xi32> loc(#loc1)"),
      narrow_offsets("%1 = arith.muli %row, %c64_i32 : i32"),
      narrow_offsets("%1 = arith.muli %row, %stride : i64"))
"""
    assert run("-c", code).stdout.split("\\n")[0].strip() == "['%row, %stride'] ['%row_2, %3'] [] []"
