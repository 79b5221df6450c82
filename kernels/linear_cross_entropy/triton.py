"""The loss head with its pointwise work in Triton: one program for each row of logits. It overwrites the row with its gradient.

Tokens are processed in chunks (``chunks``), and gradients are made in the forward pass. A row is read twice and written once: 3 · C · V elements,
part of which the second read finds in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kernels.linear_cross_entropy.chunks import (
    compute_in_chunks,
    count_flops,
    find_gpu_chunk_tokens,
    list_wanted_gradients,
    make_fake_outputs,
    save_inputs,
    scale_saved_gradients,
)

BLOCK = 4096  # logits of a row at a time, at most
SMALLEST = 1024
LOGITS_PER_THREAD = 16  # logits of a block that a thread holds: two loads of 16 bytes in bf16
ALIGN = 16  # a row begins at a multiple of this many logits, so that every load of it is 16 bytes wide
LEAST = tl.constexpr(
    -3.4028234663852886e38
)  # the lowest finite number in fp32, because minus infinity minus itself is NaN


@triton.jit
def rows_kernel(  # type: ignore[no-untyped-def]
    logits, targets, weights, terms, nll, V, STRIDE, z_loss, GRADIENTS: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    row = logits + n * STRIDE
    target = tl.load(targets + n)
    weight = tl.load(weights + n)
    column = tl.arange(0, BLOCK)
    if weight == 0.0:
        tl.store(terms + n, 0.0)
        tl.store(nll + n, 0.0)
        if GRADIENTS:
            for first in range(0, STRIDE, BLOCK):
                tl.store(row + first + column, tl.zeros((BLOCK,), tl.float32), mask=first + column < STRIDE)
    else:
        # A target that is not a token makes the loss NaN: raising would wait for the device.
        hit = tl.load(row + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)
        # The sum of exponentials beside the largest logit so far (arXiv 1805.02867), of each column of a block by itself:
        # threads meet once a row. Whichever of the two is larger, one exponential brings the other to it.
        most = tl.full((BLOCK,), LEAST, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, STRIDE, BLOCK):
            z = tl.load(row + first + column, mask=first + column < STRIDE, other=float("-inf")).to(tl.float32)
            z = tl.where(first + column < V, z, float("-inf"))  # masked above by STRIDE: it is a multiple of ALIGN
            apart = tl.where(z == most, 1.0, tl.exp(-tl.abs(z - most)))  # equal infinities are no distance apart
            total = tl.where(z > most, total * apart + 1.0, total + apart)
            most = tl.maximum(most, z)
        peak = tl.max(most, axis=0)
        sum = tl.sum(total * tl.where(most == peak, 1.0, tl.exp(most - peak)), axis=0)
        logsumexp = peak + tl.log(sum)
        tl.store(nll + n, logsumexp - hit)
        tl.store(terms + n, weight * (logsumexp - hit + z_loss * logsumexp * logsumexp))
        if GRADIENTS:
            share = weight * (1.0 + 2.0 * z_loss * logsumexp) / sum
            blocks = tl.cdiv(STRIDE, BLOCK)
            for block in range(blocks):
                first = (blocks - 1 - block) * BLOCK  # from the end on, which the cache still holds
                inside = first + column < STRIDE
                z = tl.load(row + first + column, mask=inside, other=float("-inf")).to(tl.float32)
                gradient = tl.exp(z - peak) * share - tl.where(first + column == target, weight, 0.0)
                tl.store(row + first + column, gradient, mask=inside)


def choose_block_size(V: int) -> int:
    """Number of logits of a row that a program processes at a time: a power of two, at least as long as a short row."""
    return min(BLOCK, max(SMALLEST, triton.next_power_of_2(V)))


def compute_loss_rows(
    logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor, z_loss: float, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights · (nll + z_loss · logsumexp²) [C], nll [C], ``logits_CV``). With ``gradients`` the logits are overwritten by their gradient, and the
    gap between the end of a row and the next row is written too.
    """
    C, V = logits_CV.shape
    terms_C, nll_C = weights_C.new_empty(C), weights_C.new_empty(C)
    block = choose_block_size(V)
    rows_kernel[(C,)](
        logits_CV,
        targets_C,
        weights_C,
        terms_C,
        nll_C,
        V,
        logits_CV.stride(0),
        z_loss,
        GRADIENTS=gradients,
        BLOCK=block,
        num_warps=block // (32 * LOGITS_PER_THREAD),
    )
    return terms_C, nll_C, logits_CV


@torch.library.custom_op("factory::linear_cross_entropy_triton", mutates_args=())
def triton_op(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float, of_x: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of ``compute_in_chunks``."""
    size = find_gpu_chunk_tokens(x_ND, weight_VD)
    return compute_in_chunks(
        compute_loss_rows, x_ND, weight_VD, targets_N, weights_N, z_loss, of_x, of_weight, size, ALIGN
    )


@triton_op.register_fake
def _(
    x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, z_loss: float, of_x: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return make_fake_outputs(find_gpu_chunk_tokens, x, weight, of_x, of_weight)


triton_op.register_autograd(scale_saved_gradients, setup_context=save_inputs)
register_flop_formula(torch.ops.factory.linear_cross_entropy_triton)(count_flops)


def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    """The same as ``kernels.linear_cross_entropy.reference``, for fp32 and bf16."""
    wanted = list_wanted_gradients(x_ND, weight_VD)
    loss, nll_N, _, _ = triton_op(x_ND, weight_VD, targets_N, weights_N, z_loss, *wanted)
    return loss, nll_N.detach()
