"""The plots of bench/README.md: each is drawn where there are rows for it, else says what would bring them."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Row = dict[str, Any]


def draw(rows: list[Row], results: Path, folder: Path) -> list[str]:
    """Markdown of all plots, which are written to `folder`."""
    kept = [row for row in rows if not row["dry"] and row.get("version") != "tiny"]
    static = results / "static.json"
    plots = [
        ("length", by_length, kept, "Attention by length, TFLOP/s", "python -m bench.kernels varlen_attention --json"),
        ("roofline", roofline, kept, "Every kernel under the roofline", "python -m bench.kernels --json"),
        ("flat", flat, kept, "Time for each token by number of images", "python -m bench.encoder --part flat --json"),
        (
            "static", registers, json.loads(static.read_text()) if static.exists() else [],
            "Registers and programs on an SM by tile, sm_90, from the compiler",
            f"python -m bench.static --json {static.name}",
        ),
    ]  # fmt: skip
    return [_drawn(folder, *plot) for plot in plots]


def _drawn(folder: Path, name: str, plot: Any, rows: list[Row], title: str, command: str) -> str:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    subject = plot(axes, rows)
    if not subject:
        plt.close(figure)
        return f"{title}: nothing to draw yet (`{command}`)."
    axes.set_title(f"{title}\n{subject}", fontsize=9)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=110, metadata={"Software": None})
    plt.close(figure)
    return f"![{title}]({folder.name}/{name}.png)"


def _one_machine(rows: list[Row]) -> list[Row]:
    """Of a GPU if there is one, else of the first machine."""
    chosen = next((row["machine"] for row in rows if "driver" in row), rows[0]["machine"] if rows else "")
    return [row for row in rows if row["machine"] == chosen]


def by_length(axes: Axes, rows: list[Row]) -> str:
    """A line for each contestant, of batches whose pictures have one size."""
    found = [r for r in rows if r["part"] == "kernels" and r["op"] == "varlen_attention" and "tflops" in r]
    found = [r for r in _one_machine(found) if "mix" not in r["case"]]
    lines: dict[str, dict[int, float]] = defaultdict(dict)
    for row in found:
        name = f"{row['who']}, D = {row['head_dim']}, {row['dtype']}"
        lines[name][row["longest"]] = max(row["tflops"], lines[name].get(row["longest"], 0))
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points.items()), strict=True), marker="o", label=name)
    if not found:
        return ""
    axes.set(xlabel="tokens of a sequence", ylabel="TFLOP/s of useful work", ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=7)
    return found[0]["machine"]


def roofline(axes: Axes, rows: list[Row]) -> str:
    """Our kernels, and the ceilings of the same run."""
    found = [r for r in rows if r["part"] == "kernels" and r["who"] == "ours" and "tflops" in r]
    found = _one_machine(found)
    if not found:
        return ""
    for op in dict.fromkeys(row["op"] for row in found):
        points = [row for row in found if row["op"] == op]
        axes.scatter(
            [r["tflops"] / r["gbs"] * 1e3 for r in points], [r["tflops"] for r in points], label=op, s=16
        )
    copy, product = found[0]["copy_gbs"] / 1e3, found[0]["mm_tflops"]
    ridge = product / copy
    axes.plot([0.1, ridge, 100 * ridge], [0.1 * copy, product, product], color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs for each byte", ylabel="TFLOP/s")
    axes.legend(fontsize=7)
    note = "" if "driver" in found[0] else "\neager forms; what stays in its caches is above the line"
    return found[0]["machine"] + note


def flat(axes: Axes, rows: list[Row]) -> str:
    found = _one_machine([row for row in rows if row["part"] == "flat"])
    for who in dict.fromkeys(row["who"] for row in found):
        points = sorted((row["batch"], row["us_per_token"]) for row in found if row["who"] == who)
        axes.plot(*zip(*points, strict=True), marker="o", label=who)
    if not found:
        return ""
    axes.set(xlabel="images in one call", ylabel="microseconds for each token", ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=8)
    return f"{found[0]['machine']}, {found[0]['version']}, {found[0]['layers']} layers, {found[0]['case']}"


def registers(axes: Axes, rows: list[Row]) -> str:
    """A bar for each tile of attention; on it, how many programs an SM holds."""
    found = [
        r for r in rows if r["kernel"] == "varlen_attention" and (r["arch"], r["dtype"]) == ("sm_90", "bf16")
    ]
    for i, row in enumerate(found):
        axes.bar(i, row["registers"], color=f"C{row['ctas_per_sm'] - 1}")
        axes.text(i, row["registers"] + 3, f"{row['ctas_per_sm']} on an SM", ha="center", fontsize=7)
    if not found:
        return ""
    names = [f"D = {row['head_dim']}\n{row['config'].replace(' ', chr(10), 1)}" for row in found]
    axes.set_xticks(range(len(found)), names, fontsize=7)
    axes.set(ylabel="registers of a thread", ylim=(0, 256))
    return f"varlen_attention, bf16, triton {found[0]['triton']}"
