"""Newton–Schulz in Triton: one kernel for both symmetric products of a step, which computes the tiles on and below the
diagonal and stores each twice."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.newton_schulz import COEFFICIENTS, begin

# triton 3.9's interpreter multiplies the bits of bf16, not its values, and truncates to it: it is given fp32 instead
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BLOCK, DEPTH = 64, 32  # rows and columns of a tile of the result, and what it sums over at a time


@triton.jit
def symmetric_kernel(  # type: ignore[no-untyped-def]
    a, out, rows, columns, alpha, beta, ADD: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr
):
    """out = alpha · a aᵀ, and where ADD (``a`` is symmetric itself) + beta · a."""
    i, j, matrix = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if i < j:
        return
    a += matrix * rows * columns
    out += matrix * rows * rows
    row = (i * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    other = (j * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for first in range(0, columns, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        left = tl.load(
            a + row[:, None] * columns + depth[None, :],
            mask=(row < rows)[:, None] & (depth < columns)[None, :],
            other=0.0,
        )
        right = tl.load(
            a + other[None, :] * columns + depth[:, None],
            mask=(other < rows)[None, :] & (depth < columns)[:, None],
            other=0.0,
        )
        total = tl.dot(left, right, total)
    inside = (row < rows)[:, None] & (other < rows)[None, :]
    total *= alpha
    if ADD:
        total += beta * tl.load(a + row[:, None] * rows + other[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * rows + other[None, :], total, mask=inside)
    if i != j:
        tl.store(out + other[None, :] * rows + row[:, None], total, mask=inside)


def symmetric(a: Tensor, alpha: float = 1.0, beta: float | None = None) -> Tensor:
    """alpha · a aᵀ (+ beta · a, of symmetric a) of matrices [E, rows, columns], contiguous; sums in fp32."""
    E, rows, columns = a.shape
    dtype = a.dtype
    a = a.float() if INTERPRETED else a
    out = a.new_empty((E, rows, rows))
    tiles = triton.cdiv(rows, BLOCK)
    symmetric_kernel[(tiles, tiles, E)](
        a, out, rows, columns, alpha, beta or 0.0, ADD=beta is not None, BLOCK=BLOCK, DEPTH=DEPTH
    )
    return out.to(dtype)


@torch.library.custom_op("factory::newton_schulz_triton", mutates_args=())
def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """As ``kernels.newton_schulz.reference``."""
    a, b, c = COEFFICIENTS
    x, tall = begin(matrices)
    x = x.reshape(-1, *x.shape[-2:]).contiguous()
    for _ in range(steps):
        gram = symmetric(x)
        x = torch.baddbmm(x, symmetric(gram, c, b), x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape).contiguous()


@newton_schulz.register_fake
def _(matrices: Tensor, steps: int) -> Tensor:
    return matrices.new_empty(matrices.shape, dtype=torch.bfloat16)
