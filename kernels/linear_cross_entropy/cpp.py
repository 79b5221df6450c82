"""The loss head with its pointwise work in C++ (``linear_cross_entropy.cpp``), for CPUs.

The forward pass computes the gradient by the logits in place of the logits, for a bounded number of tokens at a time.

A separate file, because each backend of an op is one file, which a patch replaces as a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kernels.linear_cross_entropy.chunks import (
    compute_in_chunks,
    count_flops,
    make_fake_outputs,
    save_inputs,
    scale_saved_gradients,
)
from kernels.native import NAMES, call_cpp_function, define_cpu_op

CHUNK = 1 << 24  # logits at a time: 32 MiB in bf16
# Tokens of a chunk, at least: each chunk reads and writes the sum of the weight's gradient. A step of 2,048 tokens with a vocabulary of 49,152 and
# a width of 576 takes 0.94 s of processor time with 512 tokens a chunk, 1.01 with the 341 of ``CHUNK``, in bf16 on one thread of an AMD EPYC
# (Zen 5); 1,024 take 0.93.
LEAST_TOKENS = 512


def count_chunk_tokens(x_ND: Tensor, weight_VD: Tensor) -> int:
    """The number of tokens of a chunk: so many that their logits stay in cache, but not fewer than ``LEAST_TOKENS``."""
    return max(1, min(x_ND.shape[0], max(LEAST_TOKENS, CHUNK // max(1, weight_VD.shape[0]))))


def compute_loss_rows(
    logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor, z_loss: float, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights · (nll + z_loss · logsumexp²) [C], nll [C], ``logits_CV``). With ``gradients`` the logits are overwritten by their gradient.

    Raises: IndexError for a target that is not a token.
    """
    (C, V), function = logits_CV.shape, f"cross_entropy_{NAMES[logits_CV.dtype]}"
    terms_C, nll_C = weights_C.new_empty(C), weights_C.new_empty(C)
    outside = call_cpp_function(
        "linear_cross_entropy",
        function,
        logits_CV,
        targets_C,
        weights_C,
        float(z_loss),
        terms_C,
        nll_C,
        C,
        V,
        int(gradients),
    )
    if outside:
        raise IndexError(f"targets outside the vocabulary of {V}: {outside}")
    return terms_C, nll_C, logits_CV


@define_cpu_op("factory::linear_cross_entropy_native")
def native_op(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float, of_x: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size = count_chunk_tokens(x_ND, weight_VD)
    return compute_in_chunks(compute_loss_rows, x_ND, weight_VD, targets_N, weights_N, z_loss, of_x, of_weight, size)


@native_op.register_fake
def _(
    x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, z_loss: float, of_x: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return make_fake_outputs(count_chunk_tokens, x, weight, of_x, of_weight)


native_op.register_autograd(scale_saved_gradients, setup_context=save_inputs)
register_flop_formula(torch.ops.factory.linear_cross_entropy_native)(count_flops)
