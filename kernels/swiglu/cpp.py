"""silu(gate) · up in C++ (``swiglu.cpp``), for CPUs, as torch.library ops.

A separate file, because each backend of an op is one file, which a patch replaces as a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.native import NAMES, call_cpp_function, define_cpu_op, view_as_rows
from kernels.swiglu.autograd import register_gradient


@define_cpu_op("factory::swiglu_native")
def forward_op(gate_XF: Tensor, up_XF: Tensor) -> Tensor:
    out_XF = torch.empty(gate_XF.shape, dtype=gate_XF.dtype)
    gate, up = view_as_rows(gate_XF), view_as_rows(up_XF)
    call_cpp_function(
        "swiglu", f"swiglu_{NAMES[gate.dtype]}", gate, up, out_XF, *gate.shape, gate.stride(0), up.stride(0)
    )
    return out_XF


@define_cpu_op("factory::swiglu_native_backward")
def backward_op(dout_XF: Tensor, gate_XF: Tensor, up_XF: Tensor) -> tuple[Tensor, Tensor]:
    dgate_XF, dup_XF = (torch.empty(gate_XF.shape, dtype=gate_XF.dtype) for _ in range(2))
    inputs = [view_as_rows(x) for x in (dout_XF, gate_XF, up_XF)]
    steps = [x.stride(0) for x in inputs]
    function = f"swiglu_backward_{NAMES[gate_XF.dtype]}"
    call_cpp_function("swiglu", function, *inputs, dgate_XF, dup_XF, *inputs[0].shape, *steps)
    return dgate_XF, dup_XF


register_gradient(forward_op, backward_op)
