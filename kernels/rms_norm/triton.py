"""RMSNorm in Triton: a row a program forward; backward a few programs, each over many rows, so that the weight's
gradient is summed in registers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rows_in_triton import block_of, shares


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


@torch.library.custom_op("factory::rms_norm_triton", mutates_args=())
def forward_op(x_XD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normalised, 1 / root mean square [rows] fp32)."""
    columns = x_XD.shape[-1]
    x_ND = x_XD.reshape(-1, columns).contiguous()
    y_ND = torch.empty_like(x_ND)
    scale_N = torch.empty(len(x_ND), dtype=torch.float32, device=x_XD.device)
    forward_kernel[(len(x_ND),)](x_ND, weight_D.contiguous(), y_ND, scale_N, columns, eps, BLOCK=block_of(columns))
    return y_ND.view(x_XD.shape), scale_N


@torch.library.custom_op("factory::rms_norm_triton_backward", mutates_args=())
def backward_op(dy_XD: Tensor, x_XD: Tensor, weight_D: Tensor, scale_N: Tensor) -> tuple[Tensor, Tensor]:
    columns, rows = x_XD.shape[-1], len(scale_N)
    dy_ND, x_ND = (x.reshape(rows, columns).contiguous() for x in (dy_XD, x_XD))
    dx_ND = torch.empty_like(x_ND)
    programs, rows_each = shares(rows)
    partial = torch.empty((programs, columns), dtype=torch.float32, device=x_XD.device)
    backward_kernel[(programs,)](
        dy_ND, x_ND, weight_D.contiguous(), scale_N, dx_ND, partial, rows, columns, rows_each, BLOCK=block_of(columns)
    )
    return dx_ND.view(x_XD.shape), partial.sum(0).to(weight_D.dtype)


@forward_op.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)


@backward_op.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def gradients(ctx: Any, dy_XD: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
    dx_XD, dweight_D = backward_op(dy_XD, *ctx.saved_tensors)
    return dx_XD, dweight_D, None


forward_op.register_autograd(gradients, setup_context=keep)


def rms_norm(x_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """As ``kernels.rms_norm.reference``; any leading shape, fp32 and bf16 (statistics in fp32)."""
    return forward_op(x_XD, weight_D, eps)[0]
