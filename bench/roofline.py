"""How fast it could be: floor times from bytes and FLOPs, and what is dispatched, counted from a run. No GPU.

    python -m bench.roofline [--tower H] [--case "16 x 512^2"] [--gpu H200] [--no-run] [--json]

Prints three tables. Stages: bytes, FLOPs and floor time of every stage of a forward. Counted: operations and
bytes of one layer, ours and Transformers', from runs of two layers and of one on the CPU; and those of
embedding packed images, from runs on meta tensors, beside the loop over images of today's engines. Predicted:
whole forwards, written to bench/results/predictions.json for a GPU to confirm or to refute.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import counting, measure, models
from bench.cases import CASES, TOWERS, WORKLOADS, Shape, Tower
from bench.counting import Counts

Row = dict[str, Any]
PREDICTIONS = measure.RESULTS / "predictions.json"
WORKLOADS_PREDICTED = ("1 x 512^2", "16 x 512^2", "2 x 1024^2", "mix of 32", "128 tubelets")
E_BF16 = 2


@dataclass(frozen=True)
class Gpu:
    """What a card reaches: TFLOP/s of a large bf16 product, TB/s of a copy, TFLOP/s of attention at D = 80: ours
    as hoped for, and SDPA's flash backend as others measured it."""

    products: float
    copy: float
    attention: float
    flash: float


# H200: 790 and 4.3 were measured on such a card, 80 and 90 % of its data sheet (989, 4.8). The others are the same
# shares of their data sheets: 989 and 3.35, 312 and 2.04, 362 and 0.864, all dense. Attention: kernels.md 1.1, 4.3
GPUS = {
    "H200": Gpu(790, 4.3, 380, 270),
    "H100": Gpu(790, 3.0, 380, 270),
    "A100": Gpu(250, 1.83, 120, 109),
    "L40S": Gpu(290, 0.775, 100, 86),
}
# of the ceiling: what products of this size and elementwise kernels are expected to reach
PRODUCT_SHARE, ELEMENTWISE_SHARE = 0.82, 0.85


@dataclass(frozen=True)
class Stage:
    """One kernel of a forward, done `times` times."""

    name: str
    bytes: int
    flops: int
    times: int = 1

    @property
    def kind(self) -> str:
        if self.name == "varlen_attention":
            return "attention"
        return "product" if self.name.endswith("GEMM") else "elementwise"

    def floor_us(self, gpu: Gpu) -> float:
        """The time that neither the memory nor the tensor cores can go below."""
        # elementwise work does not run on tensor cores
        compute = 0.0 if self.kind == "elementwise" else self.flops / gpu.products / 1e6
        return max(compute, self.bytes / gpu.copy / 1e6) * self.times

    def expected_us(self, gpu: Gpu) -> float:
        """The same at the rates that are expected of kernels."""
        moving = self.bytes / (gpu.copy * ELEMENTWISE_SHARE) / 1e6
        rate = {"attention": gpu.attention, "product": gpu.products * PRODUCT_SHARE}.get(self.kind)
        return max(self.flops / rate / 1e6 if rate else 0.0, moving) * self.times


def _gemm(name: str, rows: int, depth: int, columns: int, times: int = 1) -> Stage:
    moved = (rows * depth + depth * columns + rows * columns) * E_BF16
    return Stage(f"{name} GEMM", moved, 2 * rows * depth * columns, times)


def _op(name: str, shape: Shape, times: int = 1) -> Stage:
    return Stage(name, CASES[name].moved(shape, E_BF16), CASES[name].flops(shape), times)


def stages(shape: Shape) -> list[Stage]:
    """A forward of ours in bf16, from uint8 pixels to the stream."""
    tower, tokens = shape.tower, shape.tokens
    width, inner, layers = tower.width, tower.inner, tower.layers
    return [
        _op("patchify", shape),
        _gemm("patches", shape.patches, shape.row, width),
        _op("embed_tokens", shape),
        _op("layer_norm", shape),
        _gemm("qkv", tokens, width, 3 * width, layers),
        _op("varlen_attention", shape, layers),
        _gemm("proj", tokens, width, width, layers),
        # the last layer's second addition has no norm after it: one stream less
        _op("layerscale_residual_norm", shape, 2 * layers),
        _gemm("fc1", tokens, width, inner, layers),
        _op("gelu", shape, layers),
        _gemm("fc2", tokens, inner, width, layers),
    ]


def floor_ms(shape: Shape, gpu: Gpu) -> float:
    return sum(stage.floor_us(gpu) for stage in stages(shape)) / 1e3


# T * C elements that one layer moves between matrix products and attention, for I = 4 C; a test counts them
UNITS = {"ours": 16.0, "transformers": 22.0}


def predict(shape: Shape, gpu: Gpu) -> Row:
    """Milliseconds of the floor, of ours and of Transformers' by SDPA's flash backend, with no cost on the host."""
    parts = stages(shape)
    ours = sum(stage.expected_us(gpu) for stage in parts)
    attention = next(stage for stage in parts if stage.kind == "attention")
    unit = shape.tokens * shape.tower.width * E_BF16 / (gpu.copy * ELEMENTWISE_SHARE) / 1e6
    more = (UNITS["transformers"] - UNITS["ours"]) * unit * shape.tower.layers
    slower = attention.flops / gpu.flash / 1e6 * attention.times - attention.expected_us(gpu)
    found = {
        "floor_ms": floor_ms(shape, gpu),
        "ours_ms": ours / 1e3,
        "transformers_ms": (ours + more + slower) / 1e3,
    }
    return {key: round(ms, 3) for key, ms in found.items()}


def predictions() -> Iterator[Row]:
    for tower in ("H", "SO400M", "B"):
        for workload in WORKLOADS_PREDICTED:
            shape = Shape.of(tower, workload)
            for name, gpu in GPUS.items():
                row = {"version": shape.tower.name, "case": workload, "tokens": shape.tokens, "dtype": "bf16"}
                yield row | {"gpu": name, **predict(shape, gpu)}


def write_predictions(file: Path) -> list[Row]:
    found = list(predictions())
    facts = {name: vars(gpu) for name, gpu in GPUS.items()}
    shares = {"product_share": PRODUCT_SHARE, "elementwise_share": ELEMENTWISE_SHARE}
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in found)
    head = json.dumps({"measured": False, "assumed": facts | shares})
    file.write_text(f'{head[:-1]}, "rows": [\n{lines}\n]}}\n')
    return found


def layer_counts(version: str, call: models.Call, dtype: torch.dtype = torch.float32) -> dict[str, Counts]:
    """What one layer dispatches, by ours and by theirs: a run of two layers less a run of one."""
    found = {}
    pairs = [models.build(version, layers, dtype, "cpu") for layers in (2, 1)]
    for i, who in enumerate(("ours", "transformers")):
        two, one = (counting.count(partial(call, pair[i])) for pair in pairs)
        found[who] = two - one
    return found


def counted(tower: Tower, version: str) -> Iterator[Row]:
    """One layer of a dense and of a packed batch, in operations and in units of T * C elements."""
    grids = [(14, 14), (10, 16), (8, 8)] if version != "tiny" else [(2, 3), (1, 2)]
    calls = {
        "dense": (models.images_of(2, grids[0][0] * 16, torch.float32, "cpu"), [(grids[0][0],) * 2] * 2),
        "packed": (models.patches_of(grids, 16, torch.float32, "cpu"), grids),
    }
    for case, (call, sizes) in calls.items():
        tokens = sum(h * w for h, w in sizes) + len(sizes) * tower.prefix
        for who, counts in layer_counts(version, call).items():
            between = counts.totals(counting.is_elementwise)
            yield {
                "case": case, "who": who, "version": tower.name, "tokens": tokens,
                "operations": counts.totals()["calls"], "kernels": counts.totals()["kernels"],
                "elementwise_kernels": between["kernels"],
                "elementwise_units": round(between["bytes"] / (tokens * tower.width * 4), 2),
                "gflop": round(counts.totals()["flops"] / 1e9, 3),
            }  # fmt: skip


def embedding(tower: Tower, batches: tuple[int, ...] = (1, 8, 64, 128)) -> Iterator[Row]:
    """Embedding packed images of 512^2, after the projection: meta tensors have sizes and no memory."""
    width, grid = tower.width, (32, 32)
    table, prefix = torch.empty(*tower.table, width), torch.empty(tower.prefix, width)
    table, prefix = (x.to("meta", torch.bfloat16) for x in (table, prefix))
    config = models.theirs_config("c-radio_v4-h", 1, "sdpa")
    config.hidden_size, config.num_attention_heads = width, tower.heads
    theirs = models.TransformersModel(config).embeddings.to("meta", torch.bfloat16)
    theirs.patch_projection = torch.nn.Identity()
    for count in batches:
        grids = [grid] * count
        rows = torch.empty(count * 1024, width, dtype=torch.bfloat16, device="meta")
        calls = {
            "ours": partial(models.embed_packed, rows, prefix, table, grids),
            "transformers": partial(theirs, rows, torch.tensor(grids)),
            "loop over images": partial(models.embed_one_by_one, rows, prefix, table, grids),
        }
        for who, call in calls.items():
            totals = counting.count(call).totals()
            row = {"case": f"{count} x 512^2", "batch": count, "who": who, "version": tower.name}
            yield row | {"kernels": totals["kernels"], "gb": round(totals["bytes"] / 1e9, 3)}


def show(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    keys = list(rows[0])
    widths = [max(len(str(row.get(key, ""))) for row in [*rows, dict.fromkeys(keys, key)]) for key in keys]
    widths = [max(width, len(key)) for width, key in zip(widths, keys, strict=True)]
    for row in (dict(zip(keys, keys, strict=True)), *rows):
        print("  ".join(f"{row.get(key, '')!s:>{width}}" for key, width in zip(keys, widths, strict=True)))


def stage_rows(shape: Shape, gpu: Gpu) -> list[Row]:
    total = floor_ms(shape, gpu) * 1e3
    return [
        {
            "stage": stage.name, "times": stage.times, "MB": round(stage.bytes / 1e6, 1),
            "GFLOP": round(stage.flops / 1e9, 2), "floor_us": round(stage.floor_us(gpu), 1),
            "share": f"{stage.floor_us(gpu) / total:.1%}",
        }
        for stage in stages(shape)
    ]  # fmt: skip


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.roofline", description=__doc__.partition("\n")[0])
    parser.add_argument("--tower", choices=TOWERS, default="H")
    parser.add_argument("--case", choices=WORKLOADS, default="16 x 512^2")
    parser.add_argument("--gpu", choices=GPUS, default="H200")
    parser.add_argument("--no-run", dest="run", action="store_false", help="formulas alone")
    parser.add_argument("--predictions", type=Path, default=PREDICTIONS, help="where these go")
    measure.add_json_option(parser)
    return parser.parse_args(arguments)


VERSIONS = {"H": "c-radio_v4-h", "SO400M": "c-radio_v4-so400m", "B": "C-RADIOv2-B", "tiny": "tiny"}


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    shape, gpu = Shape.of(options.tower, options.case), GPUS[options.gpu]
    results = measure.Results(options.json, "cpu")
    title = f"{shape.tower.name}, {options.case}, bf16, on {options.gpu}: floor {floor_ms(shape, gpu):.2f} ms"
    show(title, stage_rows(shape, gpu))
    if options.run:
        layers, packed = list(counted(shape.tower, VERSIONS[options.tower])), list(embedding(shape.tower))
        show("One layer, counted from runs on this CPU (a unit is T * C elements)", layers)
        show("Embedding packed images, counted from runs on meta tensors (bf16)", packed)
        for part, rows in (("counted", layers), ("embedding", packed)):
            for row in rows:
                results.add(part, **row)
    found = [row for row in write_predictions(options.predictions) if row["version"] == shape.tower.name]
    show(f"Predicted, not measured, in {options.predictions}", found)


if __name__ == "__main__":
    main()
