"""The precisions of a recipe, and which units of a CPU compute fp32 products of bf16 values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FP8 = "fp8"
# Of the values between the layers' products. ``fp8`` is bf16 but for the operands of these products (``trainer/model/fp8.py``).
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, FP8: torch.bfloat16}


def precision_of_values(precision: str) -> str:
    """The precision that ops and kernels compute in.

    >>> precision_of_values("fp8"), precision_of_values("fp32")
    ('bf16', 'fp32')
    """
    return "bf16" if precision == FP8 else precision


@contextmanager
def bf16_matmul(dtype: torch.dtype) -> Iterator[None]:
    """Within this context, for bf16, fp32 products may use the bf16 matrix units, which sum in fp32.

    Attention's scores and a router's logits are fp32 products of bf16 values, which this does not round. On a CPU with such
    units a batch of scores takes a third of the time (``python -m kernels.contract.bench --op attention``). The setting is the
    process's; it is restored at the end.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if dtype == torch.bfloat16 else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
