"""The loss head with its pointwise work in Triton: a program a row of logits, which becomes its gradient in place.

As ``kernels.linear_cross_entropy.cpp`` has it for CPUs: a bounded number of tokens at a time, gradients made forward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kernels.linear_cross_entropy.cpp import fake, flops, in_chunks, keep, scale

BLOCK = 4096  # logits of a row at a time


@triton.jit
def rows_kernel(  # type: ignore[no-untyped-def]
    logits, targets, weights, terms, nll, V, z_loss, GRADIENTS: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    row = logits + n * V
    target = tl.load(targets + n)
    weight = tl.load(weights + n)
    column = tl.arange(0, BLOCK)
    if weight == 0.0:
        tl.store(terms + n, 0.0)
        tl.store(nll + n, 0.0)
        if GRADIENTS:
            for first in range(0, V, BLOCK):
                tl.store(row + first + column, tl.zeros((BLOCK,), tl.float32), mask=first + column < V)
    else:
        # A target that is no token makes the loss NaN: raising would wait for the device.
        hit = tl.load(row + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)
        most = float("-inf")
        total = 0.0
        for first in range(0, V, BLOCK):  # the sum of exponentials beside the largest so far, arXiv 1805.02867
            z = tl.load(row + first + column, mask=first + column < V, other=float("-inf")).to(tl.float32)
            larger = tl.maximum(most, tl.max(z, axis=0))
            shift = tl.where(larger == float("-inf"), 0.0, larger)
            total = total * tl.exp(most - shift) + tl.sum(tl.exp(z - shift), axis=0)
            most = larger
        logsumexp = most + tl.log(total)
        tl.store(nll + n, logsumexp - hit)
        tl.store(terms + n, weight * (logsumexp - hit + z_loss * logsumexp * logsumexp))
        if GRADIENTS:
            share = weight * (1.0 + 2.0 * z_loss * logsumexp) / total
            for first in range(0, V, BLOCK):
                inside = first + column < V
                z = tl.load(row + first + column, mask=inside, other=float("-inf")).to(tl.float32)
                gradient = tl.exp(z - most) * share - tl.where(first + column == target, weight, 0.0)
                tl.store(row + first + column, gradient, mask=inside)


def rows(
    logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor, z_loss: float, gradients: bool
) -> tuple[Tensor, Tensor]:
    """(weights · (nll + z_loss · logsumexp²), nll), both [C]; ``logits`` become their gradient, if asked, or stay."""
    C, V = logits_CV.shape
    terms_C, nll_C = weights_C.new_empty(C), weights_C.new_empty(C)
    rows_kernel[(C,)](logits_CV, targets_C, weights_C, terms_C, nll_C, V, z_loss, GRADIENTS=gradients, BLOCK=BLOCK)
    return terms_C, nll_C


@torch.library.custom_op("factory::linear_cross_entropy_triton", mutates_args=())
def triton_op(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float, gradients: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, nll, gradient by x, gradient by weight) of unit upstream gradient; the last two empty unless asked for."""
    return in_chunks(rows, x_ND, weight_VD, targets_N, weights_N, z_loss, gradients)


triton_op.register_fake(fake)
triton_op.register_autograd(scale, setup_context=keep)
register_flop_formula(torch.ops.factory.linear_cross_entropy_triton)(flops)


def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    """As ``kernels.linear_cross_entropy.reference``; fp32 and bf16."""
    gradients = torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)
    loss, nll_N, _, _ = triton_op(x_ND, weight_VD, targets_N, weights_N, z_loss, gradients)
    return loss, nll_N.detach()
