"""Newton–Schulz: approximates the orthogonal factor U Vᵀ of a matrix, by matrix products alone. Muon uses it (Jordan 2024,
kellerjordan.github.io/posts/muon).

Each step is x ← a x + (b g + c g²) x with g = x xᵀ. Two of its three products are symmetric. ``triton`` computes only half of each of these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contract.op import (
    Cost,
    Inputs,
    Shape,
    draw_normal_tensor,
    make_compiled_implementation,
    make_op,
    make_triton_implementation,
)

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic; Jordan 2024
LEAST_NORM = 1e-7


def round_and_normalise(matrices: Tensor) -> tuple[Tensor, bool]:
    """(the matrices in bf16 (or fp64), of norm one, transposed if they had more rows than columns; True if they were transposed)."""
    x = matrices if matrices.dtype == torch.float64 else matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    return x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=LEAST_NORM), tall


def reference(matrices: Tensor, steps: int) -> Tensor:
    """[rows, columns] or [E, rows, columns] → approximately U Vᵀ of each matrix, in bf16 (in fp64 for fp64).

    After five steps, singular values that were at least 0.3 % of the matrix's norm lie in about [0.68, 1.21]. Smaller ones have grown by a factor of
    3.4445⁵ ≈ 485.
    """
    a, b, c = COEFFICIENTS
    multiply = torch.addmm if matrices.ndim == 2 else torch.baddbmm  # each product is rounded once
    x, tall = round_and_normalise(matrices)
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def cost(shape: Shape, itemsize: int) -> Cost:
    """The cost for one matrix [d_ff, d_model] for each sequence of the batch, with all products in full. A step reads x twice and writes it once."""
    short, long = sorted((shape.d_ff, shape.d_model))
    bytes_each = STEPS * (3 * short * long + 4 * short * short) * 2 + short * long * (itemsize + 2)
    flops = STEPS * (4 * short * short * long + 2 * short**3)
    return Cost(shape.batch * bytes_each, shape.batch * flops, 0, 0)


def make_inputs(shape: Shape, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Inputs:
    """A stack of matrices of the size of an MLP's, as experts have them."""
    return draw_normal_tensor(generator, (shape.batch, shape.d_ff, shape.d_model), device, dtype), STEPS


TRITON = make_triton_implementation(
    "kernels.newton_schulz.triton", function="newton_schulz", about="half of each symmetric product, in Triton"
)
OP = make_op(
    "newton_schulz",
    reference,
    cost=cost,
    make_inputs=make_inputs,
    gradients=(),
    hostile=(0,),
    in_block=False,
    implementations=(make_compiled_implementation(reference), TRITON),
)
