"""The loss head of a model whose logits are soft-capped: logits = c · tanh(x weightᵀ / c), and then the loss of ``kernels.linear_cross_entropy``.

Gemma 2 (arXiv:2408.00118 §2) caps its logits at 30. The product is in the inputs' dtype. The cap and all after it are in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kernels import linear_cross_entropy
from kernels.contract.op import (
    Cost,
    Implementation,
    Inputs,
    Shape,
    compile_lazily,
    make_compiled_implementation,
    make_op,
)
from kernels.linear_cross_entropy import chunks

SOFTCAP = 2.0  # of the oracle's inputs: small enough to bend their logits


def reference(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """The arguments and results of ``kernels.linear_cross_entropy.reference``, and the soft-cap c."""
    logits_NV = F.linear(x_ND, weight_VD)
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    logits_NV = softcap * torch.tanh(logits_NV / softcap)
    logsumexp_N = torch.logsumexp(logits_NV, dim=-1)
    nll_N = logsumexp_N - logits_NV.gather(1, targets_N.long().unsqueeze(1)).squeeze(1)
    loss = (weights_N * (nll_N + z_loss * logsumexp_N.square())).sum()
    return loss, torch.where(weights_N != 0, nll_N.detach(), 0.0)


def cost(shape: Shape, itemsize: int) -> Cost:
    return linear_cross_entropy.cost(shape, itemsize)


def make_inputs(shape: Shape, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Inputs:
    return *linear_cross_entropy.make_inputs(shape, generator, device, dtype), SOFTCAP


def compute_capped_rows(
    logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor, z_loss: float, gradients: bool, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as ``linear_cross_entropy.compute_loss_rows_eagerly_and_mask`` for capped logits. The gradient is by the logits before the cap."""
    bent_CV = torch.tanh(logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)) / softcap)
    term, nll, dcapped_CV = linear_cross_entropy.compute_loss_rows_eagerly_and_mask(
        softcap * bent_CV, targets_C, weights_C, z_loss, gradients
    )
    if not gradients:
        return term, nll, logits_CV.new_empty(0)
    dlogits_CV = (dcapped_CV * (1 - bent_CV.square())).masked_fill((weights_C == 0).unsqueeze(1), 0.0)
    return term, nll, dlogits_CV.to(logits_CV.dtype)


rows_compiled = compile_lazily(compute_capped_rows, dynamic=None)


def find_chunk_tokens(x_ND: Tensor, weight_VD: Tensor) -> int:
    return chunks.find_gpu_chunk_tokens(x_ND, weight_VD) if x_ND.is_cuda else linear_cross_entropy.ROWS


@torch.library.custom_op("factory::softcapped_cross_entropy", mutates_args=())
def chunked_op(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    z_loss: float,
    of_x: bool,
    of_weight: bool,
    softcap: float,
    fuse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of ``chunks.compute_in_chunks``."""
    compute = rows_compiled if fuse else compute_capped_rows
    rows: chunks.RowsFunction = lambda logits, targets, weights, z, grads: compute(
        logits, targets, weights, z, grads, softcap
    )
    size = find_chunk_tokens(x_ND, weight_VD)
    return chunks.compute_in_chunks(rows, x_ND, weight_VD, targets_N, weights_N, z_loss, of_x, of_weight, size)


@chunked_op.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor,
    z_loss: float,
    of_x: bool,
    of_weight: bool,
    softcap: float,
    fuse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return chunks.make_fake_outputs(find_chunk_tokens, x, weight, of_x, of_weight)


chunked_op.register_autograd(chunks.scale_saved_gradients, setup_context=chunks.save_inputs)
register_flop_formula(torch.ops.factory.softcapped_cross_entropy)(chunks.count_flops)


def _chunked(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float, softcap: float, fuse: bool
) -> tuple[Tensor, Tensor]:
    wanted = chunks.list_wanted_gradients(x_ND, weight_VD)
    loss, nll_N, _, _ = chunked_op(x_ND, weight_VD, targets_N, weights_N, z_loss, *wanted, softcap, fuse)
    return loss, nll_N.detach()


def chunked(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """The same as ``reference``, computed in chunks of tokens, with the gradients made in the forward pass."""
    return _chunked(x_ND, weight_VD, targets_N, weights_N, z_loss, softcap, fuse=False)


def chunked_compiled(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """The same as ``chunked``, with all work on the logits of a chunk compiled into one kernel."""
    return _chunked(x_ND, weight_VD, targets_N, weights_N, z_loss, softcap, fuse=True)


CHUNKED = Implementation("chunked", chunked, description="chunks of tokens, gradients made forward")
CHUNKED_COMPILED = Implementation(
    "chunked_compiled",
    chunked_compiled,
    description="chunked, with the pointwise work compiled into one region",
    eager=chunked,
)
OP = make_op(
    "softcapped_cross_entropy",
    reference,
    cost=cost,
    make_inputs=make_inputs,
    gradients=(0, 1),
    in_block=False,
    implementations=(make_compiled_implementation(reference), CHUNKED, CHUNKED_COMPILED),
)
