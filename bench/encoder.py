"""End to end against Transformers' RadioModel: same weights, same inputs, one process, the two in turn.

    python -m bench.encoder [--layers N] [--repeats N] [--dtype fp32 --dtype bf16] [--threads N]

Prints medians in ms, the ratio of the two (above 1: we are faster), the largest relative difference of the
outputs, and the share of our time that is spent in nn.Linear, which bounds what anyone can gain without
better matrix products.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager

import torch
import transformers
from torch import Tensor, nn
from transformers import RadioConfig as TransformersConfig
from transformers import RadioModel as TransformersModel

from radio_triton import RadioConfig, RadioModel

GEOMETRY = {"hidden_size": 768, "num_attention_heads": 12, "num_cls_tokens": 4, "num_registers": 4}
MIX = [(14, 14), (20, 31), (32, 32), (8, 40)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Call = Callable[[nn.Module], Tensor]


def build(layers: int, dtype: torch.dtype) -> tuple[RadioModel, nn.Module]:
    """Ours and theirs, ViT-B of random weights."""
    config = TransformersConfig(**GEOMETRY, num_hidden_layers=layers, summary_idxs=[0, 1, 2])
    config._attn_implementation = "sdpa"
    theirs = TransformersModel(config).eval().to(dtype)
    ours = RadioModel(RadioConfig.from_hf(config), dtype=dtype).eval()
    ours.load_weights(theirs.state_dict().items())
    return ours, theirs


def cases(dtype: torch.dtype) -> dict[str, Call]:
    """Each case calls either model, whose call forms agree, and returns the features."""
    small, large = torch.rand(4, 3, 224, 224, dtype=dtype), torch.rand(2, 3, 512, 512, dtype=dtype)
    grids = torch.tensor(MIX)
    patches = torch.rand(int(grids.prod(1).sum()), 3 * 16 * 16, dtype=dtype)
    return {
        "dense 4 x 224^2": lambda model: model(small).features,
        "dense 2 x 512^2": lambda model: model(large).features,
        "packed mix": lambda model: model(patches, image_grid_hw=grids).features,
    }


@contextmanager
def linear_seconds(model: nn.Module):
    """Counts the seconds spent inside every nn.Linear of a model."""
    spent, begun = [0.0], [0.0]

    def before(*_: object) -> None:
        begun[0] = time.perf_counter()

    def after(*_: object) -> None:
        spent[0] += time.perf_counter() - begun[0]

    hooks = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    yield spent
    for hook in hooks:
        hook.remove()


def seconds(call: Call, model: nn.Module) -> float:
    begun = time.perf_counter()
    call(model)
    return time.perf_counter() - begun


def linear_share(call: Call, model: nn.Module, repeats: int) -> float:
    """Median share of a forward pass that is spent in nn.Linear."""
    shares = []
    with linear_seconds(model) as spent:
        for _ in range(repeats):
            spent[0] = 0.0
            whole = seconds(call, model)
            shares.append(spent[0] / whole)
    return statistics.median(shares)


@torch.inference_mode()
def compare(call: Call, ours: nn.Module, theirs: nn.Module, repeats: int) -> dict[str, float]:
    got, want = call(ours).double().flatten(), call(theirs).double().flatten()
    times: dict[nn.Module, list[float]] = {ours: [], theirs: []}
    for _ in range(repeats):
        for model, measured in times.items():
            measured.append(seconds(call, model))
    mine, other = (1e3 * statistics.median(measured) for measured in times.values())
    return {
        "ours_ms": mine,
        "transformers_ms": other,
        "ratio": other / mine,
        "difference": float((got - want).norm() / want.norm()),
        "linear_share": linear_share(call, ours, max(3, repeats // 3)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"ViT-B, {options.layers} layers, {options.threads} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {platform.machine()}; medians of {options.repeats}"
    )
    print(
        f"{'case':18} {'dtype':5} {'ours ms':>9} {'theirs ms':>10} {'ratio':>6} {'in linears':>10} {'difference':>11}"
    )
    for name in options.dtype or DTYPES:
        torch.manual_seed(0)
        ours, theirs = build(options.layers, DTYPES[name])
        for case, call in cases(DTYPES[name]).items():
            row = compare(call, ours, theirs, options.repeats)
            print(
                f"{case:18} {name:5} {row['ours_ms']:9.1f} {row['transformers_ms']:10.1f} {row['ratio']:6.2f} "
                f"{row['linear_share']:10.0%} {row['difference']:11.1e}"
            )


if __name__ == "__main__":
    main()
