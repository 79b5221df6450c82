"""QK-norm and RoPE in Triton. A row is one head of one token. The heads of a token follow one another. Therefore a token's cos and sin are read from
memory once, and come from the cache for its other heads.

The two halves of a head are two tiles, because a rotation pairs the elements at the same place of both halves. The number of heads and their size
are constants of a model, and also of the compiled code. Therefore the token and head of a row are computed by multiplications.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rows_in_triton import BACKWARD, choose_tile_settings, divide_rows_among_programs


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    x, weight, cos, sin, y, scale, rows, T, sequence_step, token_step, head_step, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK // 2)[None, :]
    within = column < HALF
    inside = (row < rows)[:, None] & within
    token = row // HEADS
    sequence = token // T
    begin = sequence.to(tl.int64) * sequence_step + (token - sequence * T).to(tl.int64) * token_step
    at = x + (begin + (row % HEADS) * head_step)[:, None] + column
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = token.to(tl.int64)[:, None] * (2 * HALF) + column
    cos_first = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + eps)
    tl.store(scale + row, r, mask=row < rows)
    first *= r[:, None] * tl.load(weight + column, mask=within, other=0.0).to(tl.float32)
    second *= r[:, None] * tl.load(weight + HALF + column, mask=within, other=0.0).to(tl.float32)
    out = y + row.to(tl.int64)[:, None] * (2 * HALF) + column
    tl.store(out, first * cos_first - second * sin_first, mask=inside)
    tl.store(out + HALF, second * cos_second + first * sin_second, mask=inside)


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
    dy, x, weight, cos, sin, scale, dx, partial, rows, rows_each, T, sequence_step, token_step, head_step,
    HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK // 2)[None, :]
    within = column < HALF
    weight_first = tl.load(weight + column, mask=within, other=0.0).to(tl.float32)
    weight_second = tl.load(weight + HALF + column, mask=within, other=0.0).to(tl.float32)
    dw_first = tl.zeros((ROWS, BLOCK // 2), dtype=tl.float32)
    dw_second = tl.zeros((ROWS, BLOCK // 2), dtype=tl.float32)
    start = program * rows_each
    for begin in tl.range(start, tl.minimum(start + rows_each, rows), ROWS, num_stages=STAGES):
        row = begin + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & within
        token = row // HEADS
        sequence = token // T
        begins = sequence.to(tl.int64) * sequence_step + (token - sequence * T).to(tl.int64) * token_step
        at = x + (begins + (row % HEADS) * head_step)[:, None] + column
        out = row.to(tl.int64)[:, None] * (2 * HALF) + column
        angle = token.to(tl.int64)[:, None] * (2 * HALF) + column
        cos_first = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        sin_first = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        cos_second = tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        sin_second = tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        dy_first = tl.load(dy + out, mask=inside, other=0.0).to(tl.float32)
        dy_second = tl.load(dy + out + HALF, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
        first = tl.load(at, mask=inside, other=0.0).to(tl.float32) * r
        second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32) * r
        turned_first = dy_first * cos_first + dy_second * sin_second  # the transposed rotation
        turned_second = dy_second * cos_second - dy_first * sin_first
        dw_first += turned_first * first
        dw_second += turned_second * second
        turned_first *= weight_first
        turned_second *= weight_second
        mean = tl.sum(turned_first * first + turned_second * second, axis=1)[:, None] / (2 * HALF)
        tl.store(dx + out, (turned_first - first * mean) * r, mask=inside)
        tl.store(dx + out + HALF, (turned_second - second * mean) * r, mask=inside)
    place = partial + program.to(tl.int64) * (2 * HALF) + tl.arange(0, BLOCK // 2)
    tl.store(place, tl.sum(dw_first, axis=0), mask=tl.arange(0, BLOCK // 2) < HALF)
    tl.store(place + HALF, tl.sum(dw_second, axis=0), mask=tl.arange(0, BLOCK // 2) < HALF)


def make_heads_dense(x_BTHK: Tensor) -> Tensor:
    """x, copied if a head's values are not neighbours in memory. The kernels support all other layouts, such as a part of a joined product."""
    return x_BTHK if x_BTHK.stride(-1) == 1 else x_BTHK.contiguous()


def list_kernel_arguments(x_BTHK: Tensor) -> tuple[int, tuple[int, ...], dict[str, int]]:
    """Arguments for both kernels: (number of rows, (T and the strides of sequences, tokens and heads), the constants HEADS and HALF)."""
    B, T, heads, K = x_BTHK.shape
    assert K % 2 == 0, K
    return B * T * heads, (T, *x_BTHK.stride()[:3]), {"HEADS": heads, "HALF": K // 2}


@torch.library.custom_op("factory::qk_norm_rope_triton", mutates_args=())
def forward_op(x_BTHK: Tensor, weight_K: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normalised and rotated, 1 / root mean square [B, T, heads] fp32)."""
    x = make_heads_dense(x_BTHK)
    rows, steps, constants = list_kernel_arguments(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scale = torch.empty(x.shape[:3], dtype=torch.float32, device=x.device)
    tables = (t.contiguous() for t in (weight_K, cos_BTK, sin_BTK))
    settings = choose_tile_settings(x.shape[-1], BACKWARD)
    grid = (triton.cdiv(rows, settings["ROWS"]),)
    forward_kernel[grid](x, *tables, y, scale, rows, *steps, eps, **constants, **settings)
    return y, scale


@torch.library.custom_op("factory::qk_norm_rope_triton_backward", mutates_args=())
def backward_op(
    dy_BTHK: Tensor, x_BTHK: Tensor, weight_K: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, scale_BTH: Tensor
) -> tuple[Tensor, Tensor]:
    x = make_heads_dense(x_BTHK)
    rows, steps, constants = list_kernel_arguments(x)
    K = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch = divide_rows_among_programs(rows, K, 2 * K * (x.element_size() + cos_BTK.element_size()), x.device)
    partial = torch.empty((launch.programs, K), dtype=torch.float32, device=x.device)
    tables = (t.contiguous() for t in (weight_K, cos_BTK, sin_BTK))
    tensors = (dy_BTHK.contiguous(), x, *tables, scale_BTH, dx, partial)
    backward_kernel[(launch.programs,)](*tensors, rows, launch.rows_each, *steps, **constants, **launch.settings)
    return dx, partial.sum(0).to(weight_K.dtype)


@forward_op.register_fake
def _(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:3], dtype=torch.float32)


@backward_op.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], output[1])
    ctx.mark_non_differentiable(output[1])


def compute_gradients(ctx: Any, dy_BTHK: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *backward_op(dy_BTHK, *ctx.saved_tensors), None, None, None


forward_op.register_autograd(compute_gradients, setup_context=save_inputs)


def qk_norm_rope(x_BTHK: Tensor, weight_K: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, eps: float) -> Tensor:
    """The same as ``kernels.qk_norm_rope.reference``, in fp32 and bf16. All computation is in fp32, and results are rounded once."""
    return forward_op(x_BTHK, weight_K, cos_BTK, sin_BTK, eps)[0]
