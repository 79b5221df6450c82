"""The matrix products of a layer in fp8: y = x weightᵀ and its two gradients, from operands of eight bits. Everything else is in bf16.

The formats are those of Micikevicius et al. 2022 (arXiv 2209.05433 §3). Weights and activations are in e4m3, which has three bits of mantissa.
Incoming gradients are in e5m2, which has two bits of mantissa and a wider range. Each tensor has one scale, computed from its present largest
element ("current scaling"; torchao's recipe ``tensorwise``, the fastest of its three on H100s). No scale is kept from step to step. Therefore
a resumed run continues with the same bits.

A scale is a power of two. It brings the largest element just below 2⁸ in e4m3 (whose largest number is 448) or 2¹⁵ in e5m2 (57,344). Therefore
no element saturates, and scaling itself rounds nothing. An element rounds the same under any such scale, unless it is 2¹³ times smaller than
the largest element (2²⁹ in e5m2). Therefore splitting rows over micro-batches and ranks, or joining matrices, changes the rounding of such
small elements only. An infinity or a NaN makes the whole product NaN.

Sums are in fp32. On a GPU the forward product sums in the tensor cores alone (``use_fast_accum``, as in torchao's recipe). The products of the
backward pass add their partial sums in fp32 outside of the tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FORWARD = torch.float8_e4m3fn
GRADIENT = torch.float8_e5m2
LARGEST = {FORWARD: 2.0**7, GRADIENT: 2.0**14}  # the power of two to which a tensor's largest element is scaled
EXPONENT = 0x7F800000  # the bits of an fp32 number that are its power of two
SMALLEST = (
    2.0**-100
)  # if all elements of a tensor are smaller than this (zeros, for example), its scale is computed from this number


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x in eight bits, the fp32 factor that scales it back, which is a power of two).

    >>> quantise(torch.tensor([[0.75, -1.5, 0.0]]), FORWARD)
    (tensor([[  96., -192.,    0.]], dtype=torch.float8_e4m3fn), tensor(0.0078))
    """
    largest = x.detach().abs().amax().float()
    power = (largest.view(torch.int32) & EXPONENT).view(torch.float32).clamp(min=SMALLEST)
    factor = power / LARGEST[dtype]  # of an infinity or a NaN: infinite
    return (x.float() / factor).to(dtype), factor


def multiply_fp8(a_MK: Tensor, b_NK: Tensor, factors: tuple[Tensor, Tensor], dtype: torch.dtype, fast: bool) -> Tensor:
    """a bᵀ [M, N] in ``dtype``, for operands in eight bits with contiguous rows, as the tensor cores need them. ``factors``: of a and b."""
    return torch._scaled_mm(a_MK, b_NK.t(), *factors, out_dtype=dtype, use_fast_accum=fast)


class Fp8Products(torch.autograd.Function):
    """x [M, K] and several matrices [N, K] → x matrixᵀ [M, N] for each. x is quantised once. Its eight bits are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, *matrices: Tensor) -> tuple[Tensor, ...]:
        x8_MK, of_x = quantise(x_MK, FORWARD)
        ctx.save_for_backward(x8_MK, of_x, *matrices)
        products = []
        for weight_NK in matrices:
            weight8_NK, of_weight = quantise(weight_NK, FORWARD)
            products.append(multiply_fp8(x8_MK, weight8_NK, (of_x, of_weight), x_MK.dtype, fast=True))
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x8_MK, of_x, *matrices = ctx.saved_tensors
        of_input, *trained = (
            ctx.needs_input_grad
        )  # a frozen matrix, or an input below every trained one, has no gradient
        x8_KM = x8_MK.t().contiguous() if any(trained) else x8_MK
        dx_MK: Tensor | None = None
        dweights: list[Tensor | None] = []
        for dy_MN, weight_NK, is_trained in zip(gradients, matrices, trained, strict=True):
            dy8_MN, of_dy = quantise(dy_MN, GRADIENT)
            if of_input:
                weight8_NK, of_weight = quantise(weight_NK, FORWARD)
                weight8_KN = weight8_NK.t().contiguous()
                part_MK = multiply_fp8(dy8_MN, weight8_KN, (of_dy, of_weight), dy_MN.dtype, fast=False)
                dx_MK = part_MK if dx_MK is None else dx_MK + part_MK
            dweights.append(None)
            if is_trained:
                dy8_NM = dy8_MN.t().contiguous()
                dweights[-1] = multiply_fp8(dy8_NM, x8_KM, (of_dy, of_x), weight_NK.dtype, fast=False)
        return dx_MK, *dweights


def apply_several_fp8_linears(x: Tensor, matrices: Sequence[Tensor]) -> list[Tensor]:
    """x weightᵀ […, N] for each matrix [N, K] and x […, K]. All sizes must be multiples of 16 (``Recipe`` checks that)."""
    x_MK = x.reshape(-1, x.shape[-1])
    return [y.view(*x.shape[:-1], -1) for y in Fp8Products.apply(x_MK, *matrices)]  # type: ignore[no-untyped-call]


def apply_fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x weightᵀ […, N] for one matrix [N, K] and x […, K]."""
    return apply_several_fp8_linears(x, [weight])[0]
