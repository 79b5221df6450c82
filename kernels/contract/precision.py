"""Where fp32 products of bf16 values are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def bf16_matmul(dtype: torch.dtype) -> Iterator[None]:
    """While training in bf16, let fp32 products go through the bf16 matrix units, which sum in fp32.

    Attention's scores and a router's logits are fp32 products of bf16 values: nothing is rounded by it. On a CPU with
    such units a batch of scores takes a third of the time (``python -m kernels.contract.bench --op attention``). Torch's switch is
    the process's own: outside of this nothing changes.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if dtype == torch.bfloat16 else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
