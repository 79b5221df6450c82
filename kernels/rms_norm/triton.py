"""RMSNorm in Triton. A forward program computes one tile of rows. A backward program computes many tiles, so that it can sum the weight's gradient
in registers. ``kernels.rows_in_triton`` says how large tiles are and how many programs there are.

The forward pass is one launch. The backward pass is one launch, and a sum over the parts of its programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rows_in_triton import choose_tile_settings, divide_rows_among_programs


@triton.jit
def forward_kernel(x, weight, y, scale, rows, columns, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    r = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / columns + eps)
    tl.store(scale + row, r, mask=row < rows)
    tl.store(y + at, values * r[:, None] * w, mask=inside)


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
    dy, x, weight, scale, dx, partial, rows, columns, rows_each,
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
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
        normed = values * r
        dw += upstream * normed
        wdy = upstream * w
        mean = tl.sum(wdy * normed, axis=1)[:, None] / columns
        tl.store(dx + at, (wdy - normed * mean) * r, mask=inside)
    tl.store(partial + program.to(tl.int64) * columns + column, tl.sum(dw, axis=0), mask=column < columns)


@torch.library.custom_op("factory::rms_norm_triton", mutates_args=())
def forward_op(x_XD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normalised, 1 / root mean square [rows] fp32)."""
    x = x_XD.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns
    y = torch.empty_like(x)
    scale_N = torch.empty(rows, dtype=torch.float32, device=x.device)
    settings = choose_tile_settings(columns)
    grid = (triton.cdiv(rows, settings["ROWS"]),)
    forward_kernel[grid](x, weight_D.contiguous(), y, scale_N, rows, columns, eps, **settings)
    return y, scale_N


@torch.library.custom_op("factory::rms_norm_triton_backward", mutates_args=())
def backward_op(dy_XD: Tensor, x_XD: Tensor, weight_D: Tensor, scale_N: Tensor) -> tuple[Tensor, Tensor]:
    dy, x = dy_XD.contiguous(), x_XD.contiguous()
    rows, columns = len(scale_N), x.shape[-1]
    dx = torch.empty_like(x)
    launch = divide_rows_among_programs(rows, columns, 2 * columns * x.element_size(), x.device)
    partial = torch.empty((launch.programs, columns), dtype=torch.float32, device=x.device)
    backward_kernel[(launch.programs,)](
        dy, x, weight_D.contiguous(), scale_N, dx, partial, rows, columns, launch.rows_each, **launch.settings
    )
    return dx, partial.sum(0).to(weight_D.dtype)


@forward_op.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)


@backward_op.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def compute_gradients(ctx: Any, dy_XD: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
    dx_XD, dweight_D = backward_op(dy_XD, *ctx.saved_tensors)
    return dx_XD, dweight_D, None


forward_op.register_autograd(compute_gradients, setup_context=save_inputs)


def rms_norm(x_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The same as ``kernels.rms_norm.reference``, for every leading shape, in fp32 and bf16 (statistics in fp32)."""
    return forward_op(x_XD, weight_D, eps)[0]
