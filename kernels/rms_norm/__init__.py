"""RMSNorm: y = x / sqrt(mean(x²) + eps) · weight (Zhang & Sennrich 2019, arXiv:1910.07467). Statistics are in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contract.op import (
    Cost,
    Inputs,
    Shape,
    draw_normal_tensor,
    make_compiled_implementation,
    make_op,
    make_triton_implementation,
)

EPS = 1e-6


def reference(x_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x [..., D] of any float dtype, weight [D]. The result has the shape and the dtype of x."""
    x = x_XD if x_XD.dtype == torch.float64 else x_XD.float()
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight_D).to(x_XD.dtype)


def cost(shape: Shape, itemsize: int) -> Cost:
    elements = shape.tokens * shape.d_model
    return Cost(2 * elements * itemsize, 4 * elements, 3 * elements * itemsize, 9 * elements)


def make_inputs(shape: Shape, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Inputs:
    x = draw_normal_tensor(generator, (shape.batch, shape.context, shape.d_model), device, dtype)
    weight = 1 + draw_normal_tensor(generator, (shape.d_model,), device, dtype, 0.1)
    return x, weight, EPS


TRITON = make_triton_implementation("kernels.rms_norm.triton", function="rms_norm")
OP = make_op(
    "rms_norm",
    reference,
    cost=cost,
    make_inputs=make_inputs,
    gradients=(0, 1),
    implementations=(make_compiled_implementation(reference), TRITON),
)
