"""QK-norm and RoPE in Triton: all heads of a token in one program, so that its cos and sin are read once.

The two halves of a head are two tiles: what a rotation pairs lies at the same place of each.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rows_in_triton import shares


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    x, weight, cos, sin, y, scale, T, heads, half, row_step, token_step, head_step, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (column < half)
    at = x + (token // T) * row_step + (token % T) * token_step + head * head_step + column
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * half) + eps)
    tl.store(scale + token * heads + tl.arange(0, HEADS), r, mask=tl.arange(0, HEADS) < heads)
    first *= r[:, None] * tl.load(weight + column, mask=column < half, other=0.0).to(tl.float32)
    second *= r[:, None] * tl.load(weight + half + column, mask=column < half, other=0.0).to(tl.float32)
    angle = token * 2 * half + column
    cos_first = tl.load(cos + angle, mask=column < half, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + angle, mask=column < half, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + angle + half, mask=column < half, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + angle + half, mask=column < half, other=0.0).to(tl.float32)
    out = y + (token * heads + head) * 2 * half + column
    tl.store(out, first * cos_first - second * sin_first, mask=inside)
    tl.store(out + half, second * cos_second + first * sin_second, mask=inside)


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
    dy, x, weight, cos, sin, scale, dx, partial, T, heads, half, row_step, token_step, head_step, tokens, tokens_each,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (column < half)
    weight_first = tl.load(weight + column, mask=column < half, other=0.0).to(tl.float32)
    weight_second = tl.load(weight + half + column, mask=column < half, other=0.0).to(tl.float32)
    dw_first = tl.zeros((HEADS, HALF), dtype=tl.float32)
    dw_second = tl.zeros((HEADS, HALF), dtype=tl.float32)
    begin = program.to(tl.int64) * tokens_each
    for token in range(begin, tl.minimum(begin + tokens_each, tokens)):
        angle = token * 2 * half + column
        cos_first = tl.load(cos + angle, mask=column < half, other=0.0).to(tl.float32)
        sin_first = tl.load(sin + angle, mask=column < half, other=0.0).to(tl.float32)
        cos_second = tl.load(cos + angle + half, mask=column < half, other=0.0).to(tl.float32)
        sin_second = tl.load(sin + angle + half, mask=column < half, other=0.0).to(tl.float32)
        out = (token * heads + head) * 2 * half + column
        dy_first = tl.load(dy + out, mask=inside, other=0.0).to(tl.float32)
        dy_second = tl.load(dy + out + half, mask=inside, other=0.0).to(tl.float32)
        turned_first = dy_first * cos_first + dy_second * sin_second  # the transposed rotation
        turned_second = dy_second * cos_second - dy_first * sin_first
        r = tl.load(scale + token * heads + head, mask=head < heads, other=0.0)
        at = x + (token // T) * row_step + (token % T) * token_step + head * head_step + column
        first = tl.load(at, mask=inside, other=0.0).to(tl.float32) * r
        second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32) * r
        dw_first += turned_first * first
        dw_second += turned_second * second
        turned_first *= weight_first
        turned_second *= weight_second
        mean = (tl.sum(turned_first * first, axis=1) + tl.sum(turned_second * second, axis=1)) / (2 * half)
        tl.store(dx + out, (turned_first - first * mean[:, None]) * r, mask=inside)
        tl.store(dx + out + half, (turned_second - second * mean[:, None]) * r, mask=inside)
    place = partial + program * 2 * half + tl.arange(0, HALF)
    tl.store(place, tl.sum(dw_first, axis=0), mask=tl.arange(0, HALF) < half)
    tl.store(place + half, tl.sum(dw_second, axis=0), mask=tl.arange(0, HALF) < half)


def dense_heads(x_BTHK: Tensor) -> Tensor:
    """The kernels take any layout in which a head's values are neighbours, as in a part of a joined product."""
    return x_BTHK if x_BTHK.stride(-1) == 1 else x_BTHK.contiguous()


def sizes(x_BTHK: Tensor) -> tuple[int, ...]:
    """What both kernels need to know of x: T, heads, half a head, and the steps between rows, tokens and heads."""
    _, T, heads, K = x_BTHK.shape
    assert K % 2 == 0, K
    return T, heads, K // 2, *x_BTHK.stride()[:3]


def tile(x_BTHK: Tensor) -> dict[str, int]:
    _, _, heads, K = x_BTHK.shape
    return {"HEADS": triton.next_power_of_2(heads), "HALF": triton.next_power_of_2(K // 2)}


@torch.library.custom_op("factory::qk_norm_rope_triton", mutates_args=())
def forward_op(x_BTHK: Tensor, weight_K: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normalised and rotated, 1 / root mean square [B, T, heads] fp32)."""
    x = dense_heads(x_BTHK)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scale = torch.empty(x.shape[:3], dtype=torch.float32, device=x.device)
    tables = (t.contiguous() for t in (weight_K, cos_BTK, sin_BTK))
    forward_kernel[(x.shape[0] * x.shape[1],)](x, *tables, y, scale, *sizes(x), eps, **tile(x))
    return y, scale


@torch.library.custom_op("factory::qk_norm_rope_triton_backward", mutates_args=())
def backward_op(
    dy_BTHK: Tensor, x_BTHK: Tensor, weight_K: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, scale_BTH: Tensor
) -> tuple[Tensor, Tensor]:
    x = dense_heads(x_BTHK)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens = x.shape[0] * x.shape[1]
    programs, tokens_each = shares(tokens)
    partial = torch.empty((programs, x.shape[-1]), dtype=torch.float32, device=x.device)
    tables = (t.contiguous() for t in (weight_K, cos_BTK, sin_BTK))
    tensors = (dy_BTHK.contiguous(), x, *tables, scale_BTH, dx, partial)
    backward_kernel[(programs,)](*tensors, *sizes(x), tokens, tokens_each, **tile(x))
    return dx, partial.sum(0).to(weight_K.dtype)


@forward_op.register_fake
def _(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:3], dtype=torch.float32)


@backward_op.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], output[1])
    ctx.mark_non_differentiable(output[1])


def gradients(ctx: Any, dy_BTHK: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *backward_op(dy_BTHK, *ctx.saved_tensors), None, None, None


forward_op.register_autograd(gradients, setup_context=keep)


def qk_norm_rope(x_BTHK: Tensor, weight_K: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, eps: float) -> Tensor:
    """As ``kernels.qk_norm_rope.reference``; fp32 and bf16, all sums in fp32, rounded once."""
    return forward_op(x_BTHK, weight_K, cos_BTK, sin_BTK, eps)[0]
