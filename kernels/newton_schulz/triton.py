"""Newton–Schulz in Triton: one kernel for both symmetric products of a step. It computes the tiles on and below the diagonal,
and stores each tile twice. The third product is computed by cuBLAS.

Half a product by this kernel should be faster than a whole product by cuBLAS. This is an estimate, not a measurement. If all products are computed
whole, a step on a matrix of s × l (s ≤ l) takes 4 s² l + 2 s³ FLOPs. Here cuBLAS computes 2 s² l of them, and the kernel computes
(s² l + s³) (1 + 1/t), with t tiles of 128 in a row. For five steps on 4,096 × 4,096, with cuBLAS at 700 TFLOP/s of bf16 on an H100 (of 989) and
the kernel at 450:

    whole    2.06e12 FLOPs, 2.94 ms        half    0.69e12 at 700 + 0.71e12 at 450, 2.56 ms

Thus the kernel must reach (1 + 1/t) / 2 of cuBLAS's rate, for every shape. The 450 TFLOP/s are a guess. A single matrix of fewer than about
1,024 rows fills too few multiprocessors (1,024 rows: 36 tiles for 132 multiprocessors). Therefore Muon makes stacks of matrices.
A tile of 128 x 128 computes 64 FLOPs for each byte that it loads. Tiles that share rows follow one another, so that these bytes come
from L2.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.newton_schulz import COEFFICIENTS, round_and_normalise

# triton 3.9's interpreter multiplies the bits of bf16 instead of its values, and truncates to bf16. Therefore it gets fp32.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# A tile of the result has BLOCK rows and columns, and sums over DEPTH at a time. Three stages of the large tile take 96 KiB of
# shared memory, which every GPU since 2020 has; each thread of its 8 warps holds 64 sums. The small tile is for matrices of few
# rows, and for numbers of columns that 64 does not divide, whose loads are narrow.
LARGE = {"BLOCK": 128, "DEPTH": 64, "num_warps": 8, "num_stages": 3}
SMALL = {"BLOCK": 64, "DEPTH": 32, "num_warps": 4, "num_stages": 3}
GROUP = 8  # rows of tiles that are computed side by side


@triton.jit
def symmetric_kernel(  # type: ignore[no-untyped-def]
    a, out, rows, columns, alpha, beta,
    ADD: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out = alpha · a aᵀ, and with ADD also + beta · a, for a symmetric ``a``. EVEN: DEPTH divides the number of columns."""
    tiles = tl.cdiv(rows, BLOCK)
    matrix = (tl.program_id(0) // (tiles * tiles)).to(tl.int64)
    program = tl.program_id(0) % (tiles * tiles)
    i, j = tl.swizzle2d(program // tiles, program % tiles, tiles, tiles, GROUP)
    if i < j:
        return
    a += matrix * rows * columns
    out += matrix * rows * rows
    row = (i * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    other = (j * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    # Rows beyond the end are the first rows again: the loop needs no masks, and the results of these rows are not stored.
    left_at = a + (row % rows)[:, None] * columns + depth[None, :]
    right_at = a + (other % rows)[None, :] * columns + depth[:, None]
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for first in range(0, columns, DEPTH):
        if EVEN:
            left, right = tl.load(left_at), tl.load(right_at)
        else:
            left = tl.load(left_at, mask=(depth < columns - first)[None, :], other=0.0)
            right = tl.load(right_at, mask=(depth < columns - first)[:, None], other=0.0)
        total = tl.dot(left, right, total)
        left_at += DEPTH
        right_at += DEPTH
    inside = (row < rows)[:, None] & (other < rows)[None, :]
    total *= alpha
    if ADD:
        total += beta * tl.load(a + row[:, None] * rows + other[None, :], mask=inside, other=0.0).to(tl.float32)
    total = total.to(out.dtype.element_ty)
    tl.store(out + row[:, None] * rows + other[None, :], total, mask=inside)
    if i != j:
        tl.store(out + other[None, :] * rows + row[:, None], total, mask=inside)


def multiply_by_own_transpose(a: Tensor, alpha: float = 1.0, beta: float | None = None) -> Tensor:
    """alpha · a aᵀ for contiguous matrices [E, rows, columns]. If ``beta`` is given, beta · a is added, for a symmetric a. Sums are in fp32."""
    E, rows, columns = a.shape
    dtype = a.dtype
    a = a.float() if INTERPRETED else a
    out = a.new_empty((E, rows, rows))
    tile = LARGE if rows > SMALL["BLOCK"] and columns % LARGE["DEPTH"] == 0 else SMALL
    grid = (E * triton.cdiv(rows, tile["BLOCK"]) ** 2,)
    constants = {"ADD": beta is not None, "EVEN": columns % tile["DEPTH"] == 0, "GROUP": GROUP}
    symmetric_kernel[grid](a, out, rows, columns, alpha, beta or 0.0, **constants, **tile)
    return out.to(dtype)


@torch.library.custom_op("factory::newton_schulz_triton", mutates_args=())
def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """The same as ``kernels.newton_schulz.reference``, in bf16."""
    a, b, c = COEFFICIENTS
    x, tall = round_and_normalise(matrices)
    x = x.reshape(-1, *x.shape[-2:]).contiguous()
    for _ in range(steps):
        gram = multiply_by_own_transpose(x)
        x = torch.baddbmm(x, multiply_by_own_transpose(gram, c, b), x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape).contiguous()


@newton_schulz.register_fake
def _(matrices: Tensor, steps: int) -> Tensor:
    return matrices.new_empty(matrices.shape, dtype=torch.bfloat16)
