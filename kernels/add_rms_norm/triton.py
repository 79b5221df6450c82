"""Residual addition and RMSNorm in Triton. The kernels are those of ``kernels.rms_norm.triton``, but they also compute and store the sum."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rows_in_triton import choose_tile_settings, divide_rows_among_programs


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    x, y, weight, total, normed, scale, rows, columns, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    added = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    added += tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    rounded = added.to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask=inside)
    values = rounded.to(tl.float32)
    w = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    r = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / columns + eps)
    tl.store(scale + row, r, mask=row < rows)
    tl.store(normed + at, values * r[:, None] * w, mask=inside)


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
    dtotal, dnormed, total, weight, scale, dx, partial, rows, columns, rows_each,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    first = program * rows_each
    for begin in tl.range(first, tl.minimum(first + rows_each, rows), ROWS, num_stages=STAGES):
        row = begin + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        upstream = tl.load(dnormed + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
        unit = tl.load(total + at, mask=inside, other=0.0).to(tl.float32) * r
        through = tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
        dw += upstream * unit
        wdy = upstream * w
        mean = tl.sum(wdy * unit, axis=1)[:, None] / columns
        tl.store(dx + at, through + (wdy - unit * mean) * r, mask=inside)
    tl.store(partial + program.to(tl.int64) * columns + column, tl.sum(dw, axis=0), mask=column < columns)


@torch.library.custom_op("factory::add_rms_norm_triton", mutates_args=())
def forward_op(x_XD: Tensor, y_XD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(sum, normalised, 1 / root mean square [rows] fp32)."""
    x, y = x_XD.contiguous(), y_XD.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns
    total, normed = torch.empty_like(x), torch.empty_like(x)
    scale_N = torch.empty(rows, dtype=torch.float32, device=x.device)
    settings = choose_tile_settings(columns)
    grid = (triton.cdiv(rows, settings["ROWS"]),)
    forward_kernel[grid](x, y, weight_D.contiguous(), total, normed, scale_N, rows, columns, eps, **settings)
    return total, normed, scale_N


@torch.library.custom_op("factory::add_rms_norm_triton_backward", mutates_args=())
def backward_op(
    dsum_XD: Tensor, dnormed_XD: Tensor, sum_XD: Tensor, weight_D: Tensor, scale_N: Tensor
) -> tuple[Tensor, Tensor]:
    """(gradient by x, equal to the gradient by y; gradient by the weight)."""
    dtotal, dnormed, total = dsum_XD.contiguous(), dnormed_XD.contiguous(), sum_XD.contiguous()
    rows, columns = len(scale_N), total.shape[-1]
    dx = torch.empty_like(total)
    launch = divide_rows_among_programs(rows, columns, 3 * columns * total.element_size(), total.device)
    partial = torch.empty((launch.programs, columns), dtype=torch.float32, device=total.device)
    tensors = (dtotal, dnormed, total, weight_D.contiguous(), scale_N, dx, partial)
    backward_kernel[(launch.programs,)](*tensors, rows, columns, launch.rows_each, **launch.settings)
    return dx, partial.sum(0).to(weight_D.dtype)


@forward_op.register_fake
def _(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)


@backward_op.register_fake
def _(dsum: Tensor, dnormed: Tensor, total: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return total.new_empty(total.shape), weight.new_empty(weight.shape)


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[0], inputs[2], output[2])
    ctx.mark_non_differentiable(output[2])


def compute_gradients(ctx: Any, dsum_XD: Tensor, dnormed_XD: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    dx_XD, dweight_D = backward_op(dsum_XD, dnormed_XD, *ctx.saved_tensors)
    return dx_XD, dx_XD, dweight_D, None


forward_op.register_autograd(compute_gradients, setup_context=save_inputs)


def add_rms_norm(x_XD: Tensor, y_XD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same as ``kernels.add_rms_norm.reference``, in fp32 and bf16 (statistics in fp32)."""
    return forward_op(x_XD, y_XD, weight_D, eps)[:2]
