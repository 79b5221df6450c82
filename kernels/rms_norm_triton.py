"""RMSNorm in Triton: a row a program forward; backward a few programs, each over many rows, so that the weight's
gradient is summed in registers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 65536  # elements of one row held by a program
PROGRAMS = 256  # partial sums of the weight's gradient, about two a multiprocessor


@triton.jit
def forward_kernel(x, weight, y, scale, columns, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    values = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / columns + eps)
    tl.store(scale + row, r)
    tl.store(y + row * columns + column, values * r * w, mask=inside)


@triton.jit
def backward_kernel(dy, x, weight, scale, dx, partial, rows, columns, rows_each, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    first = program.to(tl.int64) * rows_each
    for row in range(first, tl.minimum(first + rows_each, rows)):
        values = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(dy + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(scale + row)
        normed = values * r
        dw += upstream * normed
        wdy = upstream * w
        mean = tl.sum(wdy * normed, axis=0) / columns
        tl.store(dx + row * columns + column, (wdy - normed * mean) * r, mask=inside)
    tl.store(partial + program * columns + column, dw, mask=inside)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        columns = x_XD.shape[-1]
        x = x_XD.reshape(-1, columns).contiguous()
        weight = weight_D.contiguous()
        y = torch.empty_like(x)
        scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        BLOCK = triton.next_power_of_2(columns)
        assert BLOCK <= WIDEST, columns
        forward_kernel[(x.shape[0],)](x, weight, y, scale, columns, eps, BLOCK=BLOCK)
        ctx.save_for_backward(x, weight, scale)
        ctx.BLOCK = BLOCK
        return y.view(x_XD.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        rows, columns = x.shape
        dy = gradients[0].reshape(-1, columns).contiguous()
        dx = torch.empty_like(x)
        rows_each = -(-rows // PROGRAMS)
        programs = -(-rows // rows_each)
        partial = torch.empty((programs, columns), dtype=torch.float32, device=x.device)
        backward_kernel[(programs,)](dy, x, weight, scale, dx, partial, rows, columns, rows_each, BLOCK=ctx.BLOCK)
        return dx.view(gradients[0].shape), partial.sum(0).to(weight.dtype), None


def rms_norm(x_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """As ``kernels.rms_norm.reference``; any leading shape, fp32 and bf16 (statistics in fp32)."""
    return RMSNorm.apply(x_XD, weight_D, eps)
