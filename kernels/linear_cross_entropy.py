"""The output head and its loss in one op: logits = x weightᵀ, loss = Σ weights · (nll + z_loss · logsumexp²).

The z-loss term keeps the logits' normaliser near one (PaLM, Chowdhery et al. 2022, arXiv:2204.02311 §5).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.op import Cost, Inputs, Shape, normal, op

Z_LOSS = 1e-4


def reference(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """x [N, D], weight [V, D], targets [N] integers, weights [N] fp32 that already hold mask and normaliser.

    Returns (loss: scalar, nll [N] detached), both fp32 (fp64 for fp64 inputs).
    """
    logits_NV = F.linear(x_ND, weight_VD)
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    logsumexp_N = torch.logsumexp(logits_NV, dim=-1)
    nll_N = logsumexp_N - logits_NV.gather(1, targets_N.long().unsqueeze(1)).squeeze(1)
    loss = (weights_N * (nll_N + z_loss * logsumexp_N.square())).sum()
    return loss, nll_N.detach()


def cost(shape: Shape, itemsize: int) -> Cost:
    """Logits need never be in memory: the least traffic is x, the weight and their gradients."""
    operands = (shape.tokens + shape.vocab_size) * shape.d_model * itemsize
    flops = 2 * shape.tokens * shape.d_model * shape.vocab_size
    return Cost(operands, flops, 2 * operands, 2 * flops)


def make_inputs(shape: Shape, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Inputs:
    """A quarter of the tokens carry no loss, as in chat data."""
    N = shape.tokens
    x = normal(generator, (N, shape.d_model), device, dtype)
    weight = normal(generator, (shape.vocab_size, shape.d_model), device, dtype, shape.d_model**-0.5)
    targets = torch.randint(shape.vocab_size, (N,), generator=generator).to(device)
    mask = (torch.rand(N, generator=generator) >= 0.25).float()
    return x, weight, targets, (mask / mask.sum().clamp(min=1)).to(device), Z_LOSS


OP = op("linear_cross_entropy", reference, cost=cost, make_inputs=make_inputs, gradients=(0, 1))
