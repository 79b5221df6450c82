"""The addition to the residual stream and the RMSNorm that follows it, in one op: s = x + y, n = RMSNorm(s) · weight.

The op returns s and n, because the residual stream continues with the sum s. The sum is rounded to the stream's dtype before it is normalised,
as two separate ops would do.
"""

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
from kernels.rms_norm import EPS
from kernels.rms_norm import reference as rms_norm


def reference(x_XD: Tensor, y_XD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, y of one shape and float dtype, weight [D] → (x + y, RMSNorm(x + y) · weight), both of that dtype."""
    sum_XD = x_XD + y_XD
    return sum_XD, rms_norm(sum_XD, weight_D, eps)


def cost(shape: Shape, itemsize: int) -> Cost:
    """The backward pass reads the sum and both gradients, and writes the one gradient that x and y share."""
    elements = shape.tokens * shape.d_model
    return Cost(4 * elements * itemsize, 5 * elements, 4 * elements * itemsize, 10 * elements)


def make_inputs(shape: Shape, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Inputs:
    size = (shape.batch, shape.context, shape.d_model)
    x, y = draw_normal_tensor(generator, size, device, dtype), draw_normal_tensor(generator, size, device, dtype)
    return x, y, 1 + draw_normal_tensor(generator, (shape.d_model,), device, dtype, 0.1), EPS


TRITON = make_triton_implementation("kernels.add_rms_norm.triton", function="add_rms_norm")
OP = make_op(
    "add_rms_norm",
    reference,
    cost=cost,
    make_inputs=make_inputs,
    gradients=(0, 1, 2),
    implementations=(make_compiled_implementation(reference), TRITON),
)
