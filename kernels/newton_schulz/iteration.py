"""What every implementation of Newton–Schulz begins with."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic; Jordan 2024
LEAST_NORM = 1e-7


def begin(matrices: Tensor) -> tuple[Tensor, bool]:
    """(the matrices rounded, lying and of norm one; were they tall?)"""
    x = matrices if matrices.dtype == torch.float64 else matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    return x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=LEAST_NORM), tall
