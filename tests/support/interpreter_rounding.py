"""Gives Triton's interpreter the GPU's rounding: fp32 to the nearest bf16, ties to even.

The interpreter of triton 3.9 truncates, with twice the error, or rounds ties away from zero. This module computes PTX's ``cvt.rn.bf16.f32``,
which Triton emits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def to_bf16(x: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Return the bits of an fp32 array as bf16. NaN stays NaN, and too large values become infinity."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FC0), nearest).astype(np.uint16).reshape(x.shape)


def use() -> None:
    """Use this rounding in this process from now on."""
    builder: Any = interpreter.InterpreterBuilder
    cast, convert = builder.cast_impl, builder.create_fp_to_fp

    def narrows(source: Any, target: Any) -> bool:
        return bool(source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16)

    def rounded(source: Any, target: Any) -> Any:
        return interpreter.TensorHandle(to_bf16(source.data), target.scalar)

    builder.cast_impl = lambda self, x, to: rounded(x, to) if narrows(x, to) else cast(self, x, to)
    builder.create_fp_to_fp = lambda self, x, to, how: rounded(x, to) if narrows(x, to) else convert(self, x, to, how)
