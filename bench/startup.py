"""What a fresh process pays: seconds to import, and the first call of a small model against its second.

    python -m bench.startup ours|transformers [--device cuda]

Prints one line of JSON. `bench.encoder` runs it in a process of its own for each.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# nothing else is imported here: imports are what is measured
ROOT = Path(__file__).resolve().parents[1]


def measure(who: str, device: str) -> dict[str, Any]:
    """Import beyond torch, and calls of two layers of width 64; on CUDA the first compiles kernels."""
    marks = [time.perf_counter()]

    def lap() -> float:
        marks.append(time.perf_counter())
        return round(marks[-1] - marks[-2], 4)

    import torch

    found = {"torch_s": lap()}
    sizes = {"hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 2}
    # each pays for its own imports alone
    if who == "ours":
        from radio_triton import RadioConfig, RadioModel

        found["import_s"] = lap()
        model: Any = RadioModel(RadioConfig(**sizes, intermediate_size=256, position_grid=(8, 8)))
    else:
        from transformers import RadioConfig, RadioModel

        found["import_s"] = lap()
        model = RadioModel(RadioConfig(**sizes, mlp_ratio=4.0, max_img_size=128))
    model, x = model.eval().to(device), torch.rand(1, 3, 64, 64, device=device)

    def call() -> float:
        with torch.inference_mode():
            model(x)
        if device == "cuda":
            torch.cuda.synchronize()
        return lap()

    lap()
    return found | {"first_call_s": call(), "second_call_s": call()}


def in_process(who: str, device: str) -> dict[str, Any]:
    """The same, in a process of its own; an error names what it said."""
    command = [sys.executable, "-m", "bench.startup", who, "--device", device]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.startup", description=__doc__.partition("\n")[0])
    parser.add_argument("who", choices=["ours", "transformers"])
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    print(json.dumps(measure(options.who, options.device)))


if __name__ == "__main__":
    main()
