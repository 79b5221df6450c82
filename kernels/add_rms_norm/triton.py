"""Residual addition and RMSNorm in Triton: as ``kernels.rms_norm.triton``, with the sum made and kept on the way."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rows_in_triton import block_of, shares


@triton.jit
def forward_kernel(x, y, weight, total, normed, scale, columns, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    at = row * columns + column
    added = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + tl.load(y + at, mask=inside, other=0.0).to(
        tl.float32
    )
    rounded = added.to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask=inside)
    values = rounded.to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / columns + eps)
    tl.store(scale + row, r)
    tl.store(normed + at, values * r * w, mask=inside)


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
    dtotal, dnormed, total, weight, scale, dx, partial, rows, columns, rows_each, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    first = program.to(tl.int64) * rows_each
    for row in range(first, tl.minimum(first + rows_each, rows)):
        at = row * columns + column
        upstream = tl.load(dnormed + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(scale + row)
        unit = tl.load(total + at, mask=inside, other=0.0).to(tl.float32) * r
        dw += upstream * unit
        wdy = upstream * w
        mean = tl.sum(wdy * unit, axis=0) / columns
        through = tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, through + (wdy - unit * mean) * r, mask=inside)
    tl.store(partial + program * columns + column, dw, mask=inside)


@torch.library.custom_op("factory::add_rms_norm_triton", mutates_args=())
def forward_op(x_XD: Tensor, y_XD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(sum, normalised, 1 / root mean square [rows] fp32)."""
    columns = x_XD.shape[-1]
    x_ND, y_ND = (x.reshape(-1, columns).contiguous() for x in (x_XD, y_XD))
    sum_ND, normed_ND = torch.empty_like(x_ND), torch.empty_like(x_ND)
    scale_N = torch.empty(len(x_ND), dtype=torch.float32, device=x_XD.device)
    forward_kernel[(len(x_ND),)](
        x_ND, y_ND, weight_D.contiguous(), sum_ND, normed_ND, scale_N, columns, eps, BLOCK=block_of(columns)
    )
    return sum_ND.view(x_XD.shape), normed_ND.view(x_XD.shape), scale_N


@torch.library.custom_op("factory::add_rms_norm_triton_backward", mutates_args=())
def backward_op(
    dsum_XD: Tensor, dnormed_XD: Tensor, sum_XD: Tensor, weight_D: Tensor, scale_N: Tensor
) -> tuple[Tensor, Tensor]:
    """(gradient by x, which y's equals; gradient by the weight)."""
    columns, rows = sum_XD.shape[-1], len(scale_N)
    dsum_ND, dnormed_ND, sum_ND = (x.reshape(rows, columns).contiguous() for x in (dsum_XD, dnormed_XD, sum_XD))
    dx_ND = torch.empty_like(sum_ND)
    programs, rows_each = shares(rows)
    partial = torch.empty((programs, columns), dtype=torch.float32, device=sum_XD.device)
    tensors = (dsum_ND, dnormed_ND, sum_ND, weight_D.contiguous(), scale_N, dx_ND, partial)
    backward_kernel[(programs,)](*tensors, rows, columns, rows_each, BLOCK=block_of(columns))
    return dx_ND.view(sum_XD.shape), partial.sum(0).to(weight_D.dtype)


@forward_op.register_fake
def _(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)


@backward_op.register_fake
def _(dsum: Tensor, dnormed: Tensor, total: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return total.new_empty(total.shape), weight.new_empty(weight.shape)


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[0], inputs[2], output[2])
    ctx.mark_non_differentiable(output[2])


def gradients(ctx: Any, dsum_XD: Tensor, dnormed_XD: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    dx_XD, dweight_D = backward_op(dsum_XD, dnormed_XD, *ctx.saved_tensors)
    return dx_XD, dx_XD, dweight_D, None


forward_op.register_autograd(gradients, setup_context=keep)


def add_rms_norm(x_XD: Tensor, y_XD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As ``kernels.add_rms_norm.reference``; fp32 and bf16 (statistics in fp32)."""
    return forward_op(x_XD, y_XD, weight_D, eps)[:2]
