"""What the tests of the elementwise kernels share: where they run, the rule, and a count of what they move."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

import interpreter_bf16
from helpers import rel_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def interpret(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the kernel must be an interpreted one, and bf16 be right."""
    if DEVICE == "cpu":
        assert hasattr(kernel, "rewrite"), "set TRITON_INTERPRET=1 before triton is imported"
        interpreter_bf16.install(monkeypatch)


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    return "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def randn(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    """Standard normal values on the device that is tested."""
    return torch.randn(shape).to(DEVICE, dtype)


def doubled(x: Any) -> Any:
    """Floating point tensors in float64, everything else as it is."""
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def assert_as_good_as(got: Tensor, eager: Tensor, truth: Tensor) -> None:
    """The rule: an error against the float64 truth at most twice that of the eager form in the same dtype."""
    assert got.dtype == eager.dtype
    error, allowed = rel_error(got, truth), 2 * rel_error(eager, truth)
    assert error <= allowed, f"error {error:.3g}, twice that of the eager form is {allowed:.3g}"


class Traffic:
    """Addresses that interpreted kernels load and store, as their masks have it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads: Counter[int] = Counter()
        self.stores: Counter[int] = Counter()
        builder = interpreter.InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store

        def masked_load(this: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
            self.loads.update(np.broadcast_to(ptrs.data, mask.data.shape)[mask.data].tolist())
            return load(this, ptrs, mask, *rest)

        def masked_store(this: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.stores.update(np.broadcast_to(ptrs.data, mask.data.shape)[mask.data].tolist())
            return store(this, ptrs, value, mask, *rest)

        # plain loads and stores go through these as well
        monkeypatch.setattr(builder, "create_masked_load", masked_load)
        monkeypatch.setattr(builder, "create_masked_store", masked_store)

    @staticmethod
    def _times(counts: Counter[int], x: Tensor) -> list[int]:
        offsets = torch.zeros(x.shape, dtype=torch.int64)
        for size, stride, dim in zip(x.shape, x.stride(), range(x.ndim), strict=True):
            shape = [-1 if i == dim else 1 for i in range(x.ndim)]
            offsets += (torch.arange(size) * stride).view(shape)
        return [counts[x.data_ptr() + offset * x.itemsize] for offset in offsets.flatten().tolist()]

    def loaded(self, x: Tensor) -> set[int]:
        """How often the elements of x were loaded: {1} where each was once."""
        return set(self._times(self.loads, x))

    def stored(self, x: Tensor) -> set[int]:
        """How often the elements of x were stored."""
        return set(self._times(self.stores, x))

    def loads_of(self, x: Tensor) -> int:
        """Loads of elements of x, all together."""
        return sum(self._times(self.loads, x))
