"""Triton's interpreter with the GPU's rounding: fp32 to bf16 goes to the nearest, ties to even.

As it stands (triton 3.9) the interpreter truncates, which is twice the error, and rounds half away where it is told to
round. PTX's ``cvt.rn.bf16.f32``, which Triton emits, is what is written down here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def to_bf16(x: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The bits of bf16 for an array of fp32; NaN stays NaN, what is too large becomes infinity."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FC0), nearest).astype(np.uint16).reshape(x.shape)


def use() -> None:
    """From here on, in this process."""
    builder: Any = interpreter.InterpreterBuilder
    cast, convert = builder.cast_impl, builder.create_fp_to_fp

    def narrows(source: Any, target: Any) -> bool:
        return bool(source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16)

    def rounded(source: Any, target: Any) -> Any:
        return interpreter.TensorHandle(to_bf16(source.data), target.scalar)

    builder.cast_impl = lambda self, x, to: rounded(x, to) if narrows(x, to) else cast(self, x, to)
    builder.create_fp_to_fp = lambda self, x, to, how: rounded(x, to) if narrows(x, to) else convert(self, x, to, how)
