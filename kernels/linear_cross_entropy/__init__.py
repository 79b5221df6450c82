"""The output head and its loss in one op: logits = x weightᵀ, loss = Σ weights · (nll + z_loss · logsumexp²).

The eager op keeps the logits [N, V] in fp32, and reads and writes them about ten times. ``chunked`` computes the gradients in the forward pass, a
thousand tokens at a time. Therefore the logits of the whole batch are never in memory, and are not computed for tokens without loss. The z-loss
term keeps the normaliser of the softmax near one (PaLM, Chowdhery et al. 2022, arXiv:2204.02311 §5).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kernels import native as native_library
from kernels.contract.op import (
    Cost,
    Implementation,
    Inputs,
    Shape,
    compile_lazily,
    draw_normal_tensor,
    make_compiled_implementation,
    make_op,
    make_triton_implementation,
)
from kernels.linear_cross_entropy import chunks
from kernels.linear_cross_entropy import cpp as linear_cross_entropy_native

Z_LOSS = 1e-4
ROWS = 1024  # tokens of a chunk: smaller chunks would read the weight and its gradient too often
PADDED_TO = 128  # the last chunk is padded to a multiple of this divisor of ROWS


def reference(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    """x [N, D], weight [V, D], targets [N] integers, weights [N] fp32. The weights include the mask and the division by their sum.

    Returns (the loss, a scalar; nll [N], detached, zero where the weight is zero), both in fp32 (in fp64 for fp64 inputs).
    """
    logits_NV = F.linear(x_ND, weight_VD)
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    logsumexp_N = torch.logsumexp(logits_NV, dim=-1)
    nll_N = logsumexp_N - logits_NV.gather(1, targets_N.long().unsqueeze(1)).squeeze(1)
    loss = (weights_N * (nll_N + z_loss * logsumexp_N.square())).sum()
    return loss, torch.where(weights_N != 0, nll_N.detach(), 0.0)


def cost(shape: Shape, itemsize: int) -> Cost:
    """The least traffic is x, the weight and their gradients, because the logits need not be in memory."""
    operands = (shape.tokens + shape.vocab_size) * shape.d_model * itemsize
    flops = 2 * shape.tokens * shape.d_model * shape.vocab_size
    return Cost(operands, flops, 2 * operands, 2 * flops)


def make_inputs(shape: Shape, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Inputs in which a quarter of the tokens carry no loss, as in chat data."""
    N = shape.tokens
    x = draw_normal_tensor(generator, (N, shape.d_model), device, dtype)
    weight = draw_normal_tensor(generator, (shape.vocab_size, shape.d_model), device, dtype, shape.d_model**-0.5)
    targets = torch.randint(shape.vocab_size, (N,), generator=generator).to(device)
    mask = (torch.rand(N, generator=generator) >= 0.25).float()
    return x, weight, targets, (mask / mask.sum().clamp(min=1)).to(device), Z_LOSS


def compute_loss_rows_eagerly(
    logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor, z_loss: float, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """For each token: (the term weights · (nll + z_loss · logsumexp²), nll, the gradient of the term by the logits). The gradient is in the logits'
    dtype. It is empty unless ``gradients``."""
    logits = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    lse = torch.logsumexp(logits, dim=-1)
    nll = lse - logits.gather(1, targets_C.unsqueeze(1)).squeeze(1)
    term = weights_C * (nll + z_loss * lse.square())
    if not gradients:
        return term, nll, logits_CV.new_empty(0)
    softmax = torch.exp(logits - lse.unsqueeze(1))
    dlogits = softmax * (weights_C * (1 + 2 * z_loss * lse)).unsqueeze(1)
    vocabulary = torch.arange(logits.shape[1], device=logits.device)
    dlogits = dlogits - torch.where(vocabulary == targets_C.unsqueeze(1), weights_C.unsqueeze(1), 0.0)
    return term, nll, dlogits.to(logits_CV.dtype)


def compute_loss_rows_eagerly_and_mask(
    logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor, z_loss: float, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as ``compute_loss_rows_eagerly``, but with zeros for tokens without loss, even if their logits are not finite."""
    term, nll, dlogits = compute_loss_rows_eagerly(logits_CV, targets_C, weights_C, z_loss, gradients)
    silent = weights_C == 0
    dlogits = dlogits.masked_fill(silent.unsqueeze(1), 0.0) if gradients else dlogits
    return term.masked_fill(silent, 0.0), nll.masked_fill(silent, 0.0), dlogits


rows_compiled = compile_lazily(compute_loss_rows_eagerly, dynamic=None)
all_rows_compiled = compile_lazily(compute_loss_rows_eagerly_and_mask, dynamic=None)


@torch.library.custom_op("factory::linear_cross_entropy_chunked", mutates_args=())
def chunked_op(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    z_loss: float,
    of_x: bool,
    of_weight: bool,
    fuse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, nll, gradient by x, gradient by weight) for an upstream gradient of one. Without ``of_x`` or ``of_weight`` that gradient is empty.

    On a GPU the chunks are larger and include tokens without loss, because only the device knows which tokens carry loss.
    """
    if x_ND.is_cuda:
        rows = all_rows_compiled if fuse else compute_loss_rows_eagerly_and_mask
        size = chunks.find_gpu_chunk_tokens(x_ND, weight_VD)
        return chunks.compute_in_chunks(rows, x_ND, weight_VD, targets_N, weights_N, z_loss, of_x, of_weight, size)
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=x_ND.device)
    nll_N = torch.zeros(x_ND.shape[0], dtype=wide, device=x_ND.device)
    dx_ND = x_ND.new_zeros(x_ND.shape) if of_x else x_ND.new_empty(0)
    # The weight's gradient is a sum over chunks. It is kept in fp32, because in bf16 each addition would round it.
    dweight_VD = torch.zeros(weight_VD.shape, dtype=wide, device=x_ND.device) if of_weight else x_ND.new_empty(0)
    kept = weights_N.nonzero().squeeze(1)
    for index in kept.split(ROWS):
        real = len(index)
        # The number of tokens that carry loss differs from step to step, and oneDNN makes and keeps code for each new shape (0.6 MiB each, up
        # to a thousand). Padded with copies of its last token, the last chunk has one of ROWS / PADDED_TO shapes.
        padding = -real % max(1, min(PADDED_TO, x_ND.shape[0]))
        index = torch.cat((index, index[-1:].expand(padding))) if padding else index
        x, targets, weights = x_ND[index], targets_N[index].long(), weights_N[index].to(wide)
        weights[real:] = 0
        logits = x @ weight_VD.t()
        if fuse:
            for tensor in (logits, targets, weights):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        term, nll, dlogits = (rows_compiled if fuse else compute_loss_rows_eagerly)(
            logits, targets, weights, z_loss, of_x or of_weight
        )
        loss += term.sum()
        nll_N[index[:real]] = nll[:real]
        if of_x:
            dx_ND[index[:real]] = (dlogits @ weight_VD)[:real]
        if of_weight:
            dweight_VD += dlogits.t() @ x
    return loss, nll_N, dx_ND, dweight_VD


@chunked_op.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor,
    z_loss: float,
    of_x: bool,
    of_weight: bool,
    fuse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    in_fp32: chunks.ChunkSize = lambda x, weight: -1  # a CPU keeps its sum over chunks in fp32 for any number of tokens
    size = chunks.find_gpu_chunk_tokens if x.is_cuda else in_fp32
    return chunks.make_fake_outputs(size, x, weight, of_x, of_weight)


def scale_gradients(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
    dx_ND, dweight_VD = ctx.saved_tensors
    if dx_ND.is_cuda:
        return chunks.scale_saved_gradients(ctx, *upstream)
    scale = upstream[0].to(
        torch.promote_types(dx_ND.dtype, torch.float32)
    )  # a rounded scale would shift every gradient
    x_dtype, weight_dtype = ctx.dtypes
    of_x, of_weight, *_ = ctx.needs_input_grad
    return (
        (dx_ND.to(scale.dtype) * scale).to(x_dtype) if of_x else None,
        (dweight_VD * scale).to(weight_dtype) if of_weight else None,
        *(None,) * (ctx.arguments - 2),
    )


chunked_op.register_autograd(scale_gradients, setup_context=chunks.save_inputs)


register_flop_formula(torch.ops.factory.linear_cross_entropy_chunked)(chunks.count_flops)


def _chunked(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float, fuse: bool
) -> tuple[Tensor, Tensor]:
    device = x_ND.device.type
    if torch.is_autocast_enabled(device):  # our own op has no autocast rule: round the operands as linear would
        x_ND, weight_VD = x_ND.to(torch.get_autocast_dtype(device)), weight_VD.to(torch.get_autocast_dtype(device))
    wanted = chunks.list_wanted_gradients(x_ND, weight_VD)
    loss, nll_N, _, _ = chunked_op(x_ND, weight_VD, targets_N, weights_N, z_loss, *wanted, fuse)
    return loss, nll_N.detach()


def chunked(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    """The same as ``reference``, computed in chunks of tokens, with the gradients made in the forward pass."""
    return _chunked(x_ND, weight_VD, targets_N, weights_N, z_loss, fuse=False)


def chunked_compiled(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    """The same as ``chunked``, with all work on the logits of a chunk compiled into one kernel."""
    return _chunked(x_ND, weight_VD, targets_N, weights_N, z_loss, fuse=True)


class SavedLogits(torch.autograd.Function):
    """Keeps the logits in the inputs' dtype. The backward pass computes their gradient in one pass over memory.

    Autograd's backward pass of the reference would read and write [N, V] in fp32 five times.
    """

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float
    ) -> tuple[Tensor, Tensor]:
        logits_NV = F.linear(x_ND, weight_VD)
        wide = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        logsumexp_N = torch.logsumexp(wide, dim=-1)
        nll_N = logsumexp_N - wide.gather(1, targets_N.long().unsqueeze(1)).squeeze(1)
        loss = (weights_N * (nll_N + z_loss * logsumexp_N.square())).sum()
        ctx.save_for_backward(x_ND, weight_VD, targets_N, weights_N, logits_NV, logsumexp_N)
        ctx.z_loss = z_loss
        nll_N = torch.where(weights_N != 0, nll_N, 0.0)
        ctx.mark_non_differentiable(nll_N)
        return loss, nll_N

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, upstream: Tensor, _: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x_ND, weight_VD, targets_N, weights_N, logits_NV, logsumexp_N = ctx.saved_tensors
        weights_N = weights_N * upstream
        softmax_NV = torch.exp(logits_NV.to(logsumexp_N.dtype) - logsumexp_N.unsqueeze(1))
        dlogits_NV = softmax_NV * (weights_N * (1 + 2 * ctx.z_loss * logsumexp_N)).unsqueeze(1)
        columns = torch.arange(logits_NV.shape[1], dtype=torch.int32, device=logits_NV.device)
        hit_NV = columns == targets_N.int().unsqueeze(
            1
        )  # int32: as wide as the values, so that one vector register holds both
        dlogits_NV = torch.where(hit_NV, dlogits_NV - weights_N.unsqueeze(1), dlogits_NV).to(logits_NV.dtype)
        of_x, of_weight, *_ = ctx.needs_input_grad
        dx_ND = dlogits_NV @ weight_VD if of_x else None
        return dx_ND, dlogits_NV.t() @ x_ND if of_weight else None, None, None, None


def saved_logits(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    """The same as ``reference``, with an explicit backward pass (``SavedLogits``)."""
    return SavedLogits.apply(x_ND, weight_VD, targets_N, weights_N, z_loss)  # type: ignore[no-any-return,no-untyped-call]


def native(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    """The same as ``reference``, with the pointwise work in C++. In dtypes other than fp32 and bf16, ``saved_logits`` computes it."""
    if x_ND.dtype not in native_library.NAMES or x_ND.dtype != weight_VD.dtype:
        return saved_logits(x_ND, weight_VD, targets_N, weights_N, z_loss)
    wanted = chunks.list_wanted_gradients(x_ND, weight_VD)
    loss, nll_N, _, _ = linear_cross_entropy_native.native_op(x_ND, weight_VD, targets_N, weights_N, z_loss, *wanted)
    return loss, nll_N.detach()


TRITON = make_triton_implementation(
    "kernels.linear_cross_entropy.triton",
    function="linear_cross_entropy",
    about="chunks of tokens, gradients made forward in the logits' place, in Triton",
)
NATIVE = Implementation(
    "native",
    native,
    description="chunks of tokens, gradients made forward in the logits' place, in C++",
    devices=("cpu",),
    fallback=native_library.make_fallback_for_other_dtypes("saved_logits"),
)
CHUNKED = Implementation(
    "chunked", chunked, description="chunks of tokens, gradients made forward, tokens without loss left out"
)
CHUNKED_COMPILED = Implementation(
    "chunked_compiled",
    chunked_compiled,
    description="chunked, with the pointwise work compiled into one region",
    eager=chunked,
)
SAVED_LOGITS = Implementation(
    "saved_logits",
    compile_lazily(saved_logits),
    description="logits kept in the inputs' dtype, their gradient in one pass, compiled",
    eager=saved_logits,
)
OP = make_op(
    "linear_cross_entropy",
    reference,
    cost=cost,
    make_inputs=make_inputs,
    gradients=(0, 1),
    in_block=False,
    implementations=(make_compiled_implementation(reference), CHUNKED, CHUNKED_COMPILED, SAVED_LOGITS, NATIVE, TRITON),
)
