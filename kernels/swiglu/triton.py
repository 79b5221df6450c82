"""silu(gate) · up in Triton. The backward pass recomputes the sigmoid instead of reading a stored one.

For each bf16 element the forward pass moves 6 bytes and the backward pass 10. For 16,384 x 24,576 elements that takes 0.80 and 1.34 ms, at 90 % of
3.35 TB/s (predicted, not measured). A thread has 16 elements of each tensor: two loads of 16 bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.swiglu.autograd import register_gradient

BLOCK = 2048  # elements of a program, which has 4 warps


@triton.jit
def forward_kernel(gate, up, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    g = tl.load(gate + index, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + index, mask=inside, other=0.0)
    silu = (g * tl.sigmoid(g)).to(u.dtype)  # rounded where eager rounds it
    tl.store(out + index, silu.to(tl.float32) * u.to(tl.float32), mask=inside)


@triton.jit
def backward_kernel(dout, gate, up, dgate, dup, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    upstream = tl.load(dout + index, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + index, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + index, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    tl.store(dgate + index, upstream * u * sigmoid * (1.0 + g * (1.0 - sigmoid)), mask=inside)
    tl.store(dup + index, upstream * g * sigmoid, mask=inside)


@torch.library.custom_op("factory::swiglu_triton", mutates_args=())
def forward_op(gate_XF: Tensor, up_XF: Tensor) -> Tensor:
    gate, up = gate_XF.contiguous(), up_XF.contiguous()
    out = torch.empty_like(gate)
    forward_kernel[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, out, gate.numel(), BLOCK=BLOCK, num_warps=4)
    return out


@torch.library.custom_op("factory::swiglu_triton_backward", mutates_args=())
def backward_op(dout_XF: Tensor, gate_XF: Tensor, up_XF: Tensor) -> tuple[Tensor, Tensor]:
    dout, gate, up = (x.contiguous() for x in (dout_XF, gate_XF, up_XF))
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    backward_kernel[(triton.cdiv(gate.numel(), BLOCK),)](
        dout, gate, up, dgate, dup, gate.numel(), BLOCK=BLOCK, num_warps=4
    )
    return dgate, dup


register_gradient(forward_op, backward_op)


def swiglu(gate_XF: Tensor, up_XF: Tensor) -> Tensor:
    """The same as ``kernels.swiglu.reference``, in fp32 and bf16."""
    return forward_op(gate_XF, up_XF)
