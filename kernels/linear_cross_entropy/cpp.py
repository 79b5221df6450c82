"""The loss head with its pointwise work in C++ (``linear_cross_entropy.cpp``), for CPUs.

The gradient by the logits is made in the forward pass, in the logits' own place, a bounded number of tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kernels.native import NAMES, call, cpu_op

CHUNK = 1 << 24  # logits at a time: what they take is 32 MiB in bf16


def chunk(N: int, V: int) -> int:
    """How many of the tokens go at a time."""
    return max(1, min(N, CHUNK // max(1, V)))


def rows(
    logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor, z_loss: float, gradients: bool
) -> tuple[Tensor, Tensor]:
    """(weights · (nll + z_loss · logsumexp²), nll), both [C]; ``logits`` become their gradient, if asked, or stay.

    Raises: IndexError for a target that is no token.
    """
    (C, V), function = logits_CV.shape, f"cross_entropy_{NAMES[logits_CV.dtype]}"
    terms_C, nll_C = weights_C.new_empty(C), weights_C.new_empty(C)
    outside = call(
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
        raise IndexError(f"{outside} targets are outside the vocabulary of {V}")
    return terms_C, nll_C


Rows = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]


def in_chunks(
    rows: Rows,
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    z_loss: float,
    gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, nll, gradient by x, gradient by weight) of unit upstream gradient; the last two empty unless asked for.

    ``rows`` does the pointwise work of a chunk.
    """
    (N, D), V = x_ND.shape, weight_VD.shape[0]
    if weight_VD.shape != (V, D) or targets_N.shape != (N,) or weights_N.shape != (N,):
        shapes = ", ".join(str(list(given.shape)) for given in (x_ND, weight_VD, targets_N, weights_N))
        raise ValueError(f"x [N, D], weight [V, D], targets [N] and weights [N] do not fit: {shapes}")
    targets_N, weights_N = targets_N.long().contiguous(), weights_N.float().contiguous()
    size = chunk(N, V)
    losses, nlls, dxs = [], [], []
    dweight_VD = weight_VD.new_empty(0)
    for first in range(0, N, size):
        part = slice(first, first + size)
        logits_CV = x_ND[part] @ weight_VD.t()
        terms_C, nll_C = rows(logits_CV, targets_N[part], weights_N[part], z_loss, gradients)
        losses.append(terms_C.sum())
        nlls.append(nll_C)
        if gradients:
            dxs.append(logits_CV @ weight_VD)
            product_VD = logits_CV.t() @ x_ND[part]
            # a sum over chunks is kept in fp32, or each addition would round it
            dweight_VD = product_VD if size >= N else dweight_VD.add_(product_VD) if first else product_VD.float()
    if not losses:  # no token at all
        dx_ND, dweight_VD = (x.new_zeros(x.shape if gradients else 0) for x in (x_ND, weight_VD))
        return weights_N.new_zeros(()), weights_N.new_empty(0), dx_ND, dweight_VD
    return torch.stack(losses).sum(), torch.cat(nlls), torch.cat(dxs) if dxs else x_ND.new_empty(0), dweight_VD


@cpu_op("factory::linear_cross_entropy_native")
def native_op(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float, gradients: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return in_chunks(rows, x_ND, weight_VD, targets_N, weights_N, z_loss, gradients)


def fake(
    x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, z_loss: float, gradients: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N, V = x.shape[0], weight.shape[0]
    wide = torch.float32 if chunk(N, V) < N else weight.dtype
    dx = torch.empty_like(x) if gradients else x.new_empty(0)
    dweight = torch.empty_like(weight, dtype=wide) if gradients else weight.new_empty(0)
    return weights.new_empty((), dtype=torch.float32), weights.new_empty(N, dtype=torch.float32), dx, dweight


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[2], output[3])
    ctx.dtype = inputs[1].dtype
    ctx.mark_non_differentiable(*output[1:])


def scale(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
    dx_ND, dweight_VD = ctx.saved_tensors
    return dx_ND * upstream[0], (dweight_VD * upstream[0]).to(ctx.dtype), None, None, None, None


def flops(x: Any, weight: Any, targets: Any, weights: Any, z_loss: float, gradients: bool, **_: Any) -> int:
    return int(2 * x[0] * x[1] * weight[0] * (3 if gradients else 1))


native_op.register_fake(fake)
native_op.register_autograd(scale, setup_context=keep)
register_flop_formula(torch.ops.factory.linear_cross_entropy_native)(flops)
