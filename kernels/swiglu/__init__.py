"""SwiGLU's pointwise half: silu(gate) · up (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.op import (
    Cost,
    Implementation,
    Inputs,
    Shape,
    draw_normal_tensor,
    make_compiled_implementation,
    make_op,
    make_triton_implementation,
)
from kernels.native import NAMES, make_fallback_for_other_dtypes
from kernels.swiglu import cpp as swiglu_native


def reference(gate_XF: Tensor, up_XF: Tensor) -> Tensor:
    """silu(gate) · up. gate, up and the result have the same shape and dtype."""
    return F.silu(gate_XF) * up_XF


def cost(shape: Shape, itemsize: int) -> Cost:
    elements = shape.tokens * shape.d_ff
    return Cost(3 * elements * itemsize, 5 * elements, 5 * elements * itemsize, 12 * elements)


def make_inputs(shape: Shape, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Inputs:
    size = (shape.batch, shape.context, shape.d_ff)
    return draw_normal_tensor(generator, size, device, dtype), draw_normal_tensor(generator, size, device, dtype)


TRITON = make_triton_implementation("kernels.swiglu.triton", function="swiglu")


def native(gate_XF: Tensor, up_XF: Tensor) -> Tensor:
    """The same as ``reference``, in C++ for fp32 and bf16. In other dtypes ``reference`` computes it."""
    if gate_XF.dtype in NAMES and up_XF.dtype == gate_XF.dtype:
        return swiglu_native.forward_op(gate_XF, up_XF)
    return reference(gate_XF, up_XF)


NATIVE = Implementation(
    "native",
    native,
    description="C++: one pass forward, one backward",
    devices=("cpu",),
    fallback=make_fallback_for_other_dtypes("reference"),
)
OP = make_op(
    "swiglu",
    reference,
    cost=cost,
    make_inputs=make_inputs,
    gradients=(0, 1),
    implementations=(make_compiled_implementation(reference), TRITON, NATIVE),
)
