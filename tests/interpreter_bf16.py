"""Triton's interpreter, made right for bf16.

It keeps bf16 as the bits of a uint16: casts from fp32 truncate, and a dot multiplies the bits as integers
(triton 3.6 to 3.9). Kernels do all other arithmetic in fp32, so casts and dots are all there is to mend.
"""

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


def widened(x: Any) -> Any:
    """A bf16 handle as an fp32 one; any other as it is."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    bits = x.data.astype(np.uint32) << np.uint32(16)
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    """The bits of fp32 values as bf16, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FC0), nearest).astype(np.uint16)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the length of a test, in a process where TRITON_INTERPRET was set before triton was imported."""
    builder = interpreter.InterpreterBuilder
    cast, convert, dot = builder.cast_impl, builder.create_fp_to_fp, builder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar != tl.bfloat16:
            return cast(self, widened(src), dst_type)
        single = cast(self, widened(src), tl.float32)
        return interpreter.TensorHandle(rounded(single.data), tl.bfloat16)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
            return cast_impl(self, src, dst_type)
        return convert(self, src, dst_type, rounding_mode)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(builder, "cast_impl", cast_impl)
    monkeypatch.setattr(builder, "create_fp_to_fp", create_fp_to_fp)
    monkeypatch.setattr(builder, "create_dot", create_dot)
