"""The work behind `radio-triton doctor`: versions, devices, and how each op runs."""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from radio_triton import __version__
from radio_triton.ops import OPS

PACKAGES = (
    "torch",
    "triton",
    "einops",
    "numpy",
    "safetensors",
    "huggingface_hub",
    "click",
    "tqdm",
    "pillow",
    "transformers",
)


def report() -> list[str]:
    """Lines to print."""
    lines = [f"radio_triton {__version__}, Python {sys.version.split()[0]}, {platform.platform()}", ""]
    lines += [f"{name:16} {installed(name)}" for name in PACKAGES]
    lines += ["", f"{'cpu':16} {torch.get_num_threads()} threads", *cuda_lines(), ""]
    lines += [f"{'op':26} {'on CPU':18} on CUDA"]
    lines += [f"{name:26} {how(name, 'CPU'):18} {how(name, 'CUDA')}" for name in OPS]
    return lines


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def cuda_lines() -> list[str]:
    if not torch.cuda.is_available():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return [f"{'cuda':16} none found; torch is {build}"]
    lines = []
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        lines.append(
            f"{f'cuda:{i}':16} {card.name}, {card.total_memory / 2**30:.0f} GiB, sm_{card.major}{card.minor}"
        )
    return lines


def how(name: str, device: str) -> str:
    """How the dispatcher runs an op on a device: by a kernel registered for just this device, or by
    PyTorch."""
    own = torch._C._dispatch_has_kernel_for_dispatch_key(f"radio_triton::{name}", device)
    return "Triton" if own and device == "CUDA" else "eager (PyTorch)"
