"""Peak private memory and time of loading a ViT-H of random weights, over the bytes of the resulting parameters.

    python -m bench.loading [--preset c-radio_v4-h] [--layers N] [--folder /tmp] [--threads N]

Writes a torch.hub file and a remote-code file of fp32 and of bf16 weights, one after the other, loads each as fp32
and as bf16 in a process of its own, and deletes it: 2.6 GB of disk at a time for a ViT-H. Linux: reads /proc.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from radio_triton import RadioConfig, RadioModel
from radio_triton.checkpoint.forms import form_config, form_tensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FORMS = ("remote-code", "torch.hub")
SAMPLE_SECONDS = 0.001


def write(folder: Path, config: RadioConfig, form: str, dtype: torch.dtype) -> Path:
    """A checkpoint of random weights; returns what from_pretrained takes."""
    torch.manual_seed(0)
    written = form_config("legacy", config, dtype)
    state = RadioModel(config, dtype=dtype).state_dict()
    tensors = {name: tensor.contiguous() for name, tensor in form_tensors("legacy", state.items(), written)}
    if form == "remote-code":
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(written))
        return folder
    named = {
        name.replace("radio_model.model.", "base_model.").removeprefix("radio_model."): tensor
        for name, tensor in tensors.items()
        if not name.endswith("summary_idxs")
    }
    torch.save({"state_dict": named, "args": argparse.Namespace(**written["args"])}, folder / "model.pth.tar")
    return folder / "model.pth.tar"


def private_bytes() -> int:
    """Anonymous memory of this process; the pages of a mapped file are not part of it."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024


def measure(source: Path, dtype: torch.dtype) -> dict[str, float]:
    """What one load takes; call it in a fresh process."""
    # what the first load imports and allocates once is not counted
    RadioModel.from_pretrained(source, num_hidden_layers=1)
    base, peak, done = private_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_SECONDS):
            peak[0] = max(peak[0], private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = time.perf_counter()
    model = RadioModel.from_pretrained(source, dtype=dtype)
    seconds = time.perf_counter() - begun
    peak[0] = max(peak[0], private_bytes())
    done.set()
    watcher.join()
    size = sum(parameter.nbytes for parameter in model.parameters())
    return {"parameters": size, "peak": peak[0] - base, "ratio": (peak[0] - base) / size, "seconds": seconds}


def in_child(source: Path, dtype: torch.dtype) -> dict[str, float]:
    """`measure` in a forked process, whose memory starts from the imports."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        os.write(writing, json.dumps(measure(source, dtype)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError(f"loading {source} failed: its error is above")
    return json.loads(text)


def write_in_child(folder: Path, config: RadioConfig, form: str, dtype: torch.dtype) -> Path:
    """`write` in a forked process, so that its memory is not inherited by the loads."""
    if (child := os.fork()) == 0:
        write(folder, config, form, dtype)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"the checkpoint could not be written into {folder}: its error is above")
    return folder if form == "remote-code" else folder / "model.pth.tar"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="c-radio_v4-h", choices=RadioConfig.presets())
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written for a while")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = RadioConfig.preset(options.preset)
    config = config.replace(num_hidden_layers=options.layers or config.num_hidden_layers)
    print(f"{options.preset}, {config.num_hidden_layers} blocks, {options.threads} threads, torch {torch.__version__}, "
          f"{platform.machine()}")  # fmt: skip
    print(
        f"{'form':12} {'file':5} {'model':5} {'parameters MB':>14} {'peak MB':>8} {'ratio':>6} {'seconds':>8}"
    )
    for form in FORMS:
        for stored, dtype in DTYPES.items():
            with tempfile.TemporaryDirectory(dir=options.folder) as name:
                source = write_in_child(Path(name), config, form, dtype)
                for wanted in DTYPES:
                    row = in_child(source, DTYPES[wanted])
                    print(f"{form:12} {stored:5} {wanted:5} {row['parameters'] / 1e6:14,.1f} {row['peak'] / 1e6:8,.1f} "
                          f"{row['ratio']:6.3f} {row['seconds']:8.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
