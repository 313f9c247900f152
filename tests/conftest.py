"""Every test starts from seed 0, and memory that our code asked for but did not write is NaN.

Without a GPU the Triton kernels run in Triton's interpreter, on the CPU.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
OURS = tuple(f"{ROOT / folder}{os.sep}" for folder in ("radio_triton", "kernels"))

torch.set_num_threads(min(torch.get_num_threads(), 4))
if not torch.cuda.is_available():
    # kernels run in Triton's interpreter; triton reads this once, when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
# torch lists the functions that obey a device context at its first use: before any of them is replaced below
with torch.device("cpu"):
    torch.empty(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`allocate`, filled with NaN (integers: their largest value) when our own code calls it."""

    def call(*args: object, **kwargs: object) -> Tensor:
        out = allocate(*args, **kwargs)
        # fake tensors have no memory, and a fill would be recorded as an operation
        if type(out) is not Tensor or out.is_meta or not sys._getframe(1).f_code.co_filename.startswith(OURS):
            return out
        inexact = out.is_floating_point() or out.is_complex()
        value = float("nan") if inexact else out.dtype == torch.bool or torch.iinfo(out.dtype).max
        with torch.no_grad():
            return out.fill_(value)

    return call


@pytest.fixture(autouse=True)
def _seed_and_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))
