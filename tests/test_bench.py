"""The benchmarks: their formulas against counts, what they refuse to time, and what they leave behind."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")
pytest.importorskip("transformers")

from bench import cases, counting, encoder, kernels, measure, models, report, roofline, startup, tune
from bench.cases import CASES, TOWERS, Shape
from kernel_checks import Traffic
from radio_triton.kernels import qk_norm

ROOT = Path(__file__).resolve().parent.parent
TINY = TOWERS["tiny"]
# a grid like the table reads all of it
SHAPES = {True: Shape(TINY, "dense", ((8, 8),)), False: Shape(TINY, "mixed", ((8, 8), (1, 2)))}
COMMON = {"part", "machine", "command", "torch", "triton", "commit", "threads", "dry"}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU bench/gpu.sh runs all of it")


def shape_for(op: str) -> Shape:
    return next(shape for shape in SHAPES.values() if CASES[op].fits(shape))


def arguments(op: str, shape: Shape) -> tuple:
    return cases.arguments(CASES[op], shape, torch.float32, "cpu")


def tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [] if values.dtype in (torch.int32, torch.int64) else [values]
    return [x for value in values for x in tensors(value)] if isinstance(values, (tuple, list)) else []


def addresses(x: Tensor) -> set[int]:
    offsets = torch.arange(x.untyped_storage().nbytes() // x.itemsize).as_strided(
        x.size(), x.stride(), x.storage_offset()
    )
    return {x.untyped_storage().data_ptr() + offset * x.itemsize for offset in offsets.flatten().tolist()}


@pytest.mark.parametrize("op", CASES)
def test_bytes_are_those_that_the_kernel_moves(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, traffic = shape_for(op), Traffic(monkeypatch)
    args = arguments(op, shape)
    outputs = cases.run(CASES[op].launcher, args)
    touched = {id(x): x for x in [*tensors(args), *outputs]}
    moved = 0
    for x in touched.values():
        own = addresses(x)
        moved += x.itemsize * (len(own & traffic.loads.keys()) + len(own & traffic.stores.keys()))
    assert moved == CASES[op].moved(shape, 4)


@pytest.mark.parametrize("op", CASES)
def test_bytes_are_those_that_the_recorder_counts(op: str) -> None:
    shape = shape_for(op)
    args = arguments(op, shape)
    assert counting.count(lambda: CASES[op].ours(*args)).totals()["bytes"] == CASES[op].moved(shape, 4)


def test_attention_flops_are_those_of_its_matrix_products() -> None:
    case, shape = CASES["varlen_attention"], SHAPES[False]
    args = arguments("varlen_attention", shape)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        case.eager(*args)
    assert counter.get_total_flops() == case.flops(shape)
    assert counting.count(lambda: case.ours(*args)).totals()["flops"] == case.flops(shape)


def test_stage_flops_are_those_of_a_forward() -> None:
    shape = Shape(TINY, "dense", ((2, 3), (2, 3)))
    ours, _ = models.build("tiny", 2, torch.float32, "cpu")
    counts = counting.count(lambda: ours(torch.zeros(2, 3, 32, 48, dtype=torch.uint8)))
    formula = sum(s.flops * s.times for s in roofline.stages(shape) if s.kind != "elementwise")
    assert counts.totals()["flops"] == formula


def test_a_layer_costs_what_the_design_says() -> None:
    rows = {(row["case"], row["who"]): row for row in roofline.counted(TINY, "tiny")}
    for case in ("dense", "packed"):
        ours = rows[case, "ours"]
        assert (ours["kernels"], ours["elementwise_kernels"]) == (8, 3)
        # parameters of the norms are a part of a unit
        assert 0 <= ours["elementwise_units"] - roofline.UNITS["ours"] < 0.3
    theirs = rows["dense", "transformers"]
    assert theirs["kernels"] == 14
    assert 0 <= theirs["elementwise_units"] - roofline.UNITS["transformers"] < 0.4


def test_the_loop_over_images_is_the_same_arithmetic() -> None:
    grids = [(2, 3), (4, 1), (5, 5)]
    rows, prefix, table = torch.randn(35, 32), torch.randn(10, 32), torch.randn(8, 8, 32)
    want = models.embed_one_by_one(rows, prefix, table, grids)
    torch.testing.assert_close(models.embed_packed(rows, prefix, table, grids), want, rtol=1e-5, atol=1e-5)


def test_embedding_one_by_one_moves_ever_more() -> None:
    found = {(row["batch"], row["who"]): row for row in roofline.embedding(TOWERS["B"], (4, 64))}
    assert found[64, "ours"]["kernels"] == found[4, "ours"]["kernels"] == 1
    assert found[64, "loop over images"]["kernels"] == 5 * 64
    assert found[64, "loop over images"]["gb"] > 20 * found[4, "loop over images"]["gb"]
    assert found[64, "ours"]["gb"] < 16 * found[4, "ours"]["gb"]


MINE = {
    "right": "return torch.nn.functional.gelu(x)",
    "tanh": "return torch.nn.functional.gelu(x, approximate='tanh')",
    "nan": "return torch.nn.functional.gelu(x).where(x < 2, torch.nan)",
    "narrow": "return torch.nn.functional.gelu(x).bfloat16()",
    "short": "return torch.nn.functional.gelu(x)[1:]",
}


@pytest.mark.parametrize("name", MINE)
def test_a_kernel_of_ones_own_is_timed_only_if_it_is_right(name: str, tmp_path: Path) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "rows.jsonl"
    file.write_text(f"import torch\n\n\ndef gelu(x):\n    {MINE[name]}\n")
    command = [
        "--file",
        str(file),
        "--tower",
        "tiny",
        "--case",
        "tiny",
        "--budget",
        "0",
        "--quick",
        "--json",
        str(out),
    ]
    if name in ("right", "short"):
        kernels.main(command)
    else:
        with pytest.raises(SystemExit, match="not timed"):
            kernels.main(command)
    rows = {row["who"]: row for row in measure.read(out)}
    assert rows.keys() == {"ours", "eager", "mine.py"} and "median_us" in rows["ours"]
    own = rows["mine.py"]
    assert ("median_us" in own) == (name == "right")
    reason = {"right": "", "tanh": "error", "nan": "error nan", "narrow": "dtypes", "short": "shapes"}[name]
    assert reason in own.get("refused", own.get("error", ""))


def test_a_file_must_define_an_op(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def geglu(x):\n    return x\n")
    with pytest.raises(ValueError, match=r"defines none of the ops.*gelu"):
        kernels.load(tmp_path / "mine.py")


@pytest.mark.parametrize("op", CASES)
def test_ours_is_held_to_the_rule(op: str) -> None:
    race = kernels.Race(CASES[op], shape_for(op), torch.float32, "cpu")
    assert race.objection(CASES[op].ours) == ""
    assert race.allowed < 1e-5


def test_kernels_leaves_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = [
        "layer_norm",
        "patchify",
        "--tower",
        "tiny",
        "--case",
        "tiny",
        "tiny dense",
        "--budget",
        "0",
        "--quick",
    ]
    for _ in range(2):
        kernels.main([*command, "--json", str(out)])
    rows = measure.read(out)
    # the second run replaced the rows of the first; patchify takes no mixed sizes
    assert len(rows) == 2 * (2 + 1)
    keys = {
        "op",
        "case",
        "dtype",
        "who",
        "median_us",
        "p20_us",
        "p80_us",
        "gbs",
        "tflops",
        "share",
        "copy_gbs",
    }
    assert all(keys | COMMON <= row.keys() for row in rows)
    for row in rows:
        moved = CASES[row["op"]].moved(Shape.of("tiny", row["case"].removeprefix("tiny ")), 4)
        assert row["gbs"] == pytest.approx(moved / row["median_us"] / 1e3, rel=1e-3)
    with pytest.raises(SystemExit):
        kernels.main(["no_such_op"])


def test_encoder_leaves_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["--version", "tiny", "--size", "tiny", "--layers", "2", "--repeats", "1", "--dtype", "fp32"]
    encoder.main([*command, "--part", "race", "flat", "host", "profile", "--json", str(out)])
    rows = measure.read(out)
    assert all(row.keys() >= COMMON for row in rows)
    race = [row for row in rows if row["part"] == "race"]
    assert len(race) == 3 * 3
    for row in race:
        assert row["difference"] < 1e-5
        assert row["ms"] > 0 and row["peak_bytes"] > 0
        assert row["images_per_s"] == pytest.approx(2e3 / row["ms"], rel=1e-2)
    ours, theirs = ([row for row in race if row["who"] == who] for who in ("ours", "transformers sdpa"))
    assert all(a["operations"] < b["operations"] for a, b in zip(ours, theirs, strict=True))
    assert {row["batch"] for row in rows if row["part"] == "flat"} == {1, 4}
    assert (
        sum(
            row[kind] for kind in ("linear", "attention", "other") for row in rows if row["part"] == "profile"
        )
        > 2.9
    )
    assert {row["who"] for row in rows if row["part"] == "host"} == {"ours", "transformers sdpa"}


def test_startup_is_measured_in_a_process_of_its_own() -> None:
    found = startup.in_process("ours", "cpu")
    assert found.keys() == {"torch_s", "import_s", "first_call_s", "second_call_s"}
    assert found["torch_s"] > 0.1 and found["import_s"] > 0


def test_peak_memory_is_the_most_that_was_held() -> None:
    def call() -> None:
        # two of 4 MB at a time, then one
        for _ in range(3):
            torch.zeros(1_000_000).add(1)

    assert 8_000_000 <= measure.peak_bytes(call, "cpu") < 8_100_000


def test_predictions_are_written(tmp_path: Path) -> None:
    roofline.main(["--no-run", "--predictions", str(tmp_path / "p.json")])
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["measured"] is False and found["assumed"].keys() >= {"H200", "H100", "A100", "L40S"}
    assert {row["gpu"] for row in found["rows"]} == {"H200", "H100", "A100", "L40S"}
    for row in found["rows"]:
        assert 0 < row["floor_ms"] < row["ours_ms"] < row["transformers_ms"]


def test_tune_sweeps_and_names_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.main(["qk_rms_norm_"])
    assert "no CUDA device" in capsys.readouterr().err
    before = qk_norm._config(32)
    tune.main(["qk_rms_norm_", "--dry", "--budget", "0", "--json", str(tmp_path / "rows.jsonl")])
    rows = measure.read(tmp_path / "rows.jsonl")
    assert {row["config"] for row in rows} == {tune.CURRENT, "32 w1"} and all(row["dry"] for row in rows)
    assert qk_norm._config(32) == before
    assert "dry: no evidence" in capsys.readouterr().out


def test_the_best_ran_every_case() -> None:
    key = {"op": "gelu", "dtype": "bf16", "key": "I 8"}
    times = {("a", "1"): 4.0, ("a", "2"): 9.0, ("b", "1"): 3.0, ("b", "2"): 27.0, ("c", "1"): 1.0}
    rows = [key | {"config": config, "case": case, "median_us": us} for (config, case), us in times.items()]
    [found] = tune.best([*rows, key | {"config": "c", "case": "2", "refused": "error"}])
    assert (found["config"], found["us"]) == ("a", 6.0)


def test_gpu_script_is_in_order() -> None:
    lines = (ROOT / "bench/gpu.sh").read_text().replace("\\\n", " ").splitlines()
    parts = [shlex.split(re.sub(r"\$\{.*", "", line)) for line in lines if re.match(r"part \d", line)]
    assert sum(int(part[1]) for part in parts) <= 480
    parsers = {"bench.kernels": kernels.parse, "bench.encoder": encoder.parse, "bench.tune": tune.parse}
    for _, _, module, *rest in parts:
        assert parsers[module]([*rest, "--json"], "cuda").json == ""


def row(**fields: Any) -> dict[str, Any]:
    facts = {
        "machine": "Abacus",
        "threads": 1,
        "torch": "2",
        "transformers": "5",
        "commit": "abc",
        "dry": False,
    }
    return facts | {"command": "python -m bench.encoder --part race", "version": "B", "layers": 1} | fields


def race_row(who: str, ms: float, **fields: Any) -> dict[str, Any]:
    numbers = {"images_per_s": 1.0, "tokens_per_s": 1.0, "peak_bytes": 1e6, "difference": 0.0, "ratio": 1.0}
    return row(part="race", case="dense 1 x 512^2", dtype="bf16", who=who, ms=ms, **numbers, **fields)


def written(tmp_path: Path, rows: list[dict[str, Any]]) -> tuple[str, str]:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "results": tmp_path,
        "readme": tmp_path / "R.md",
        "full": tmp_path / "F.md",
        "plots": tmp_path / "plots",
    }
    report.main([word for name, value in options.items() for word in (f"--{name}", str(value))])
    return (tmp_path / "R.md").read_text(), (tmp_path / "F.md").read_text()


def test_tables_name_machine_and_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bench.plots", None)
    (tmp_path / "R.md").write_text("# Mine\n\nKept.\n")
    rows = [race_row("ours", 2.0), race_row("transformers sdpa", 3.0), race_row("transformers eager", 5.0)]
    for _ in range(2):
        readme, full = written(tmp_path, rows)
        assert readme.startswith("# Mine\n\nKept.\n\n## Performance\n\n<!-- performance -->\n")
        assert readme.count("## Performance") == readme.count(report.END) == 1
    for text in (readme, full):
        assert "Abacus" in text and "`python -m bench.encoder --part race`" in text and report.NO_GPU in text
    assert "| dense 1 x 512^2 | bf16 | 2 | 3 | 1.50 |" in readme
    assert "| - |" not in full


def test_nothing_measured_is_said_in_a_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    readme, full = written(tmp_path, [])
    assert "Nobody has timed the encoder yet" in readme and report.NO_GPU in readme
    assert "| ---" not in readme + full and full.count("nothing to draw yet") == 4


def test_predictions_stand_beside_what_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bench.plots", None)
    roofline.write_predictions(tmp_path / "predictions.json")
    card = {"machine": "NVIDIA H200", "driver": "1", "version": "c-radio_v4-h", "triton": "3"}
    _, full = written(tmp_path, [race_row("ours", 7.77) | card, race_row("transformers sdpa", 9.0) | card])
    assert report.NO_GPU not in full
    assert re.search(r"\| H200 \| 1 x 512\^2 \| [\d.]+ \| [\d.]+ \| [\d.]+ \| 7.77 \|", full)


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    flat = [
        row(part="flat", case="packed", who="ours", batch=n, tokens=10 * n, us_per_token=5.0) for n in (1, 2)
    ]
    _, full = written(tmp_path, flat)
    assert "plots/flat.png" in full and (tmp_path / "plots/flat.png").stat().st_size > 5000
