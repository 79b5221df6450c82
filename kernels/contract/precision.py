"""The precisions of a recipe, and a setting that lets a CPU's bf16 matrix units compute fp32 products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FP8 = "fp8"
# The dtype of values between the layers' products. With ``fp8`` only the operands of these products are in fp8 (``trainer/model/fp8.py``).
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, FP8: torch.bfloat16}


def find_compute_precision(precision: str) -> str:
    """The precision in which ops compute, for a precision of a recipe.

    >>> find_compute_precision("fp8"), find_compute_precision("fp32")
    ('bf16', 'fp32')
    """
    return "bf16" if precision == FP8 else precision


@contextmanager
def allow_bf16_matmul(dtype: torch.dtype) -> Iterator[None]:
    """Within this context, and if ``dtype`` is bf16, fp32 products may use bf16 matrix units, which sum in fp32.

    The scores of attention and the logits of a router are fp32 products of bf16 values. These units do not round such values. On a CPU that has
    them, the scores of a batch take a third of the time (``python -m kernels.contract.bench --op attention``). The setting holds for the whole
    process, and is restored at the end.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if dtype == torch.bfloat16 else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
