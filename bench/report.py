"""Turn results into the tables of README.md and bench/README.md, and draw the plots.

    python -m bench.report [--results FILE ...] [--readme README.md] [--full bench/README.md] [--plots FOLDER]

Reads bench/results: *.jsonl of the benchmarks, predictions.json of bench.roofline, static.json of bench.static.
Only what stands between the markers is replaced. A table names the machine and the command; what nobody has
measured is said in a line.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.measure import RESULTS, ROOT, read

Row = dict[str, Any]
BEGIN, END = "<!-- performance -->", "<!-- /performance -->"
NO_GPU = (
    "**No GPU has run this yet.** Nothing here says how fast the kernels are: `bench/gpu.sh` finds out in eight "
    "minutes."
)
# bench.encoder has the name of a preset, predictions the name of the model
TOWERS = {
    "c-radio_v4-h": "C-RADIOv4-H",
    "c-radio_v4-so400m": "C-RADIOv4-SO400M",
    "C-RADIOv2-B": "C-RADIOv2-B",
}


def table(head: list[str], rows: Iterable[list[Any]]) -> str:
    """Markdown; numbers to the right."""
    rows = [[str(cell) for cell in row] for row in rows]
    align = ["---:" if all(row[i][:1].isdigit() for row in rows) else "---" for i in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, align, *rows))


def on_gpu(row: Row) -> bool:
    return "driver" in row


def source(row: Row) -> str:
    """Where the numbers of a table are from: machine, versions and command."""
    versions = f"torch {row['torch']}"
    versions += (
        f", triton {row['triton']}, driver {row['driver']}" if on_gpu(row) else f", {row['threads']} threads"
    )
    return f"{row['machine']}; {versions}; transformers {row['transformers']}; " + (
        f"commit {row['commit']}; `{row['command']}`"
    )


def groups(rows: list[Row], part: str) -> list[list[Row]]:
    """Rows of one part that one command on one machine left, GPUs first."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        if row["part"] == part and not row["dry"] and row.get("version") != "tiny":
            found.setdefault((not on_gpu(row), source(row)), []).append(row)
    return [found[key] for key in sorted(found, key=lambda key: key[0])]


def described(rows: list[Row], part: str, title: str, body: Callable[[list[Row]], str]) -> list[str]:
    """A heading, and for each machine and command its table."""
    parts = [f"### {title}"] if (found := groups(rows, part)) else []
    for group in found:
        parts += [f"{source(group[0])}:", body(group)]
    return parts


def by_case(rows: list[Row], *keys: str) -> dict[tuple, dict[str, Row]]:
    """Rows of one thing that was measured, by who did it."""
    found: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(key) for key in keys), {})[row["who"]] = row
    return found


def number(value: float) -> str:
    """Three or four digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" if value >= 100 else f"{value:.3g}"


def race(rows: list[Row]) -> str:
    head = ["model", "layers", "case", "dtype", "who", "ms", "its time / ours", "images/s", "tokens/s"]
    head += ["peak MB", "operations", "that move data", "difference"]
    return table(head, [
        [
            row["version"], row["layers"], row["case"], row["dtype"], row["who"], number(row["ms"]),
            f"{row['ratio']:.2f}", number(row["images_per_s"]), number(row["tokens_per_s"]),
            number(row["peak_bytes"] / 1e6), row.get("operations", "by its compiler"),
            row.get("kernels", "by its compiler"), f"{row['difference']:.1e}",
        ]
        for row in rows
    ])  # fmt: skip


def race_short(rows: list[Row]) -> str:
    """One line for each case: ours and the fastest form of Transformers'."""
    lines = []
    for (case, dtype), who in by_case(rows, "case", "dtype").items():
        others = [row for name, row in who.items() if name.startswith("transformers")]
        if "ours" in who and others:
            ours, best = who["ours"], min(others, key=lambda row: row["ms"])
            memory = f"{number(ours['peak_bytes'] / 1e6)} / {number(best['peak_bytes'] / 1e6)}"
            lines.append(
                [
                    case,
                    dtype,
                    number(ours["ms"]),
                    number(best["ms"]),
                    f"{best['ms'] / ours['ms']:.2f}",
                    memory,
                ]
            )
    head = ["case", "dtype", "ours, ms", "Transformers, ms", "theirs / ours", "peak MB, ours / theirs"]
    first = rows[0]
    return f"{first['version']}, {first['layers']} layers, random weights.\n\n" + table(head, lines)


def plain(*keys: str) -> Callable[[list[Row]], str]:
    """A table of these fields."""

    def body(rows: list[Row]) -> str:
        shown = [[number(row[k]) if isinstance(row[k], float) else row[k] for k in keys] for row in rows]
        return table([key.replace("_", " ") for key in keys], shown)

    return body


def flat(rows: list[Row]) -> str:
    batches = by_case(rows, "batch", "tokens")
    names = list(next(iter(batches.values())))
    lines = [[*key, *(number(who[name]["us_per_token"]) for name in names)] for key, who in batches.items()]
    return table(["images", "tokens", *(f"{name}, us a token" for name in names)], lines)


def kernels(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        if problem := row.get("refused") or row.get("error"):
            found = [problem, "not timed", "not timed", "not timed"]
        else:
            rate = (
                f"{number(row['tflops'])} TFLOP/s"
                if row["bound"] == "compute"
                else f"{number(row['gbs'])} GB/s"
            )
            share = f"{row['share']:.0%}" if row["share"] else "caches: none"
            found = [
                number(row["median_us"]),
                f"{number(row['p20_us'])} to {number(row['p80_us'])}",
                rate,
                share,
            ]
        lines.append([row["op"], row["case"], row["dtype"], row["who"], *found])
    head = ["op", "case", "dtype", "who", "us", "p20 to p80", "useful work", "of the ceiling"]
    return table(head, lines)


def predictions(file: Path, rows: list[Row]) -> list[str]:
    """What bench.roofline wrote, beside what was measured since."""
    if not file.exists():
        return ["No predictions are written yet: `python -m bench.roofline`."]
    found = [row for row in json.loads(file.read_text())["rows"] if row["version"] == "C-RADIOv4-H"]
    measured = {
        (TOWERS.get(row["version"]), row["case"].split(" ", 1)[1], gpu): row["ms"]
        for row in rows
        if row["part"] == "race" and row["who"] == "ours" and on_gpu(row) and row["dtype"] == "bf16"
        for gpu in ("H200", "H100", "A100", "L40S")
        if gpu in row["machine"]
    }
    lines = []
    for row in found:
        came = measured.get((row["version"], row["case"], row["gpu"]))
        extra = [number(came)] if came else ["not yet"] if measured else []
        times = (number(row[key]) for key in ("floor_ms", "ours_ms", "transformers_ms"))
        lines.append([row["gpu"], row["case"], *times, *extra])
    head = [
        "GPU",
        "case",
        "floor, ms",
        "ours, ms",
        "Transformers, ms",
        *(["measured, ms"] if measured else []),
    ]
    note = "Computed by `python -m bench.roofline` from bytes and FLOPs: **predicted, not measured**."
    return ["### Predicted, C-RADIOv4-H in bf16", note, table(head, lines)]


COUNTED = ("case", "who", "tokens", "operations", "kernels", "elementwise_kernels", "elementwise_units")


def full(rows: list[Row], results: Path, plots: list[str]) -> str:
    """Everything, for bench/README.md."""
    parts = [] if any(map(on_gpu, rows)) else [NO_GPU]
    parts += described(rows, "race", "End to end", race)
    parts += described(
        rows, "profile", "Where our time goes", plain("case", "dtype", "linear", "attention", "other")
    )
    parts += described(rows, "flat", "Time for each token by number of images", flat)
    parts += described(
        rows, "host", "A forward without arithmetic, microseconds", plain("who", "dtype", "layers", "us")
    )
    startup = plain("who", "torch_s", "import_s", "first_call_s", "second_call_s")
    parts += described(rows, "startup", "Fresh process, seconds (import beyond torch)", startup)
    parts += described(rows, "kernels", "Kernel by kernel", kernels)
    tuned = plain("op", "case", "dtype", "key", "config", "median_us")
    parts += described([row for row in rows if "median_us" in row], "tune", "Tiles", tuned)
    parts += described(rows, "counted", "One layer, counted (a unit is T * C elements)", plain(*COUNTED))
    embedding = plain("case", "who", "kernels", "gb")
    parts += described(rows, "embedding", "Embedding packed images, counted", embedding)
    parts += predictions(results / "predictions.json", rows)
    return "\n\n".join([*parts, *(["### Plots"] if plots else []), *plots])


def short(rows: list[Row]) -> str:
    """What README.md says."""
    parts = [] if any(map(on_gpu, rows)) else [NO_GPU]
    # of each machine the latest
    for group in {group[0]["machine"]: group for group in groups(rows, "race")}.values():
        parts += [f"{source(group[0])}:", race_short(group)]
    if not groups(rows, "race"):
        parts.append("Nobody has timed the encoder yet: `make bench`.")
    if counted := groups(rows, "counted"):
        per_layer = by_case(counted[0], "case")["dense",]
        ours, theirs = per_layer["ours"], per_layer["transformers"]
        parts.append(
            f"Counted from a run (`{ours['command']}`): a layer of {ours['version']} is {ours['kernels']} "
            f"operations that move data, {ours['elementwise_units']:.0f} times T x C elements of it outside matrix "
            f"products and attention; Transformers' is {theirs['kernels']} and {theirs['elementwise_units']:.0f}."
        )
    if embedding := groups(rows, "embedding"):
        who = by_case(embedding[0], "case")["64 x 512^2",]
        sizes = "; ".join(f"{name} {row['kernels']} and {row['gb']:.3g}" for name, row in who.items())
        parts.append(f"Embedding 64 packed images of 512^2, operations and GB that they move: {sizes}.")
    parts.append(
        "All tables, plots, predictions and how to race a kernel of your own: [bench/README.md](bench/README.md)."
    )
    return "\n\n".join(parts)


def write(file: Path, text: str) -> None:
    """Put text between the markers, which are appended with a heading where there are none."""
    old = file.read_text() if file.exists() else ""
    if BEGIN not in old:
        old = f"{old.rstrip()}\n\n## Performance\n\n{BEGIN}\n{END}\n".lstrip()
    before, rest = old.split(BEGIN, 1)
    new = file.with_suffix(".new")
    new.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}")
    new.replace(file)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.report", description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder that is read")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--full", type=Path, default=ROOT / "bench" / "README.md")
    parser.add_argument("--plots", type=Path, default=ROOT / "bench" / "plots")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    rows = read(*sorted(options.results.glob("*.jsonl")))
    try:
        from bench.plots import draw
    except ModuleNotFoundError as missing:
        print(f'no plots: {missing.name} is not installed (pip install -e ".[bench]")')
        plots = []
    else:
        plots = draw(rows, options.results, options.plots)
    write(options.full, full(rows, options.results, plots))
    write(options.readme, short(rows))
    print(f"{len(rows)} rows into {options.full} and {options.readme}")


if __name__ == "__main__":
    main()
