"""The loss head in chunks of tokens: code that is shared by all implementations that never hold the logits of the whole batch.

The matrix products of a chunk of C tokens take 6 · C · D · V FLOPs. Its other costs determine the size of a chunk. On a CPU its logits should stay
in cache. On a GPU each chunk reads the weight twice, and reads and writes the fp32 sum of the weight's gradient: 12 · V · D bytes in all. Compared
with the time of the products, this traffic takes 2 · r / C for all D and V, where r is the number of FLOPs that the GPU computes while it moves
a byte: about 300 in bf16 (an H100's data sheet: 989 TFLOP/s, 3.35 TB/s). For 8,192 tokens that would be 7 % if nothing overlapped, but a matrix
product overlaps its own reads and writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

GPU_TOKENS = 8192  # of a chunk on a GPU, at most
GPU_BYTES = 2 << 30  # of a chunk's logits, at most
MEMORY_SHARE = 16  # a chunk's logits take at most 1/16 of the card's memory
EVEN = 128  # a chunk's tokens are a multiple of this: a tile of a product

ChunkSize = Callable[[Tensor, Tensor], int]  # (x [N, D], weight [V, D]) → tokens of a chunk
RowsFunction = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor, Tensor]]


def choose_gpu_chunk_tokens(N: int, V: int, itemsize: int, memory: int) -> int:
    """Number of tokens of a chunk on a GPU with ``memory`` bytes. It does not depend on free memory, so that equal sizes give equal sums.

    >>> [choose_gpu_chunk_tokens(N, V, 2, 80 << 30) for N, V in ((16384, 131072), (16384, 151936), (9000, 32768))]
    [8192, 4096, 4608]
    """
    fits = max(1, min(GPU_BYTES, memory // MEMORY_SHARE) // max(1, V * itemsize))
    most = min(GPU_TOKENS, 1 << (fits.bit_length() - 1))
    if most >= N:
        return max(1, N)
    chunks = -(-N // most)
    return min(
        most, -(-N // (chunks * EVEN)) * EVEN
    )  # even chunks: a short last chunk would move as much as a whole one


def find_gpu_chunk_tokens(x_ND: Tensor, weight_VD: Tensor) -> int:
    return choose_gpu_chunk_tokens(x_ND.shape[0], weight_VD.shape[0], x_ND.element_size(), _memory(x_ND.device))


@functools.cache
def _memory(device: torch.device) -> int:
    """Bytes of memory of a GPU. Without a GPU (in tracing or in the interpreter), so many bytes that memory is no limit."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return MEMORY_SHARE * GPU_BYTES
    return int(torch.cuda.get_device_properties(device).total_memory)


def compute_in_chunks(
    compute_rows: RowsFunction,
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    z_loss: float,
    of_x: bool,
    of_weight: bool,
    size: int,
    align: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, nll, gradient by x, gradient by weight) for an upstream gradient of one. Without ``of_x`` or ``of_weight`` that gradient is empty.

    ``compute_rows`` does the pointwise work of a chunk. It returns (terms, nll, gradient by the logits). The gradient may overwrite the logits,
    which are a view [C, V] whose rows begin at multiples of ``align`` elements. ``size``: tokens of a chunk. Nothing waits for the device.
    """
    (N, D), V = x_ND.shape, weight_VD.shape[0]
    if weight_VD.shape != (V, D) or targets_N.shape != (N,) or weights_N.shape != (N,):
        shapes = ", ".join(str(list(given.shape)) for given in (x_ND, weight_VD, targets_N, weights_N))
        raise ValueError(f"x [N, D], weight [V, D], targets [N] and weights [N] do not fit: {shapes}")
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    targets_N, weights_N = targets_N.long().contiguous(), weights_N.to(wide).contiguous()
    buffer = x_ND.new_empty(min(N, size), -(-V // align) * align)[:, :V]  # one buffer for all chunks
    losses, nlls = [], []
    dx_ND, dweight_VD = x_ND.new_empty((N, D) if of_x else 0), weight_VD.new_empty(0)
    for first in range(0, N, size):
        part = slice(first, first + size)
        logits_CV = torch.mm(x_ND[part], weight_VD.t(), out=buffer[: min(size, N - first)])
        terms_C, nll_C, dlogits_CV = compute_rows(
            logits_CV, targets_N[part], weights_N[part], z_loss, of_x or of_weight
        )
        losses.append(terms_C.sum())
        nlls.append(nll_C)
        if of_x:
            torch.mm(dlogits_CV, weight_VD, out=dx_ND[part])
        if of_weight:
            if size >= N:
                dweight_VD = dlogits_CV.t() @ x_ND
            else:  # a sum over chunks is kept in fp32, or each addition would round it
                dweight_VD = add_product(dweight_VD if first else None, dlogits_CV.t(), x_ND[part])
    if not losses:  # no token at all
        dweight_VD = weight_VD.new_zeros(weight_VD.shape if of_weight else 0)
        return weights_N.new_zeros(()), weights_N.new_empty(0), dx_ND, dweight_VD
    return torch.stack(losses).sum(), torch.cat(nlls), dx_ND, dweight_VD


def add_product(sum_VD: Tensor | None, a_VC: Tensor, b_CD: Tensor) -> Tensor:
    """Add a b to ``sum_VD`` in place, in at least fp32. If ``sum_VD`` is None, return a b.

    On a GPU this is one product, which sums bf16 operands in fp32 and adds them without rounding: ``aten::addmm.dtype_out`` accepts a ``self`` in
    ``out_dtype`` that is also ``out`` (PyTorch 2.11, ``_addmm_dtype_out_cuda`` in aten/native/cuda/Blas.cpp). It has no CPU kernel. On a CPU
    the product is rounded once before it is added.
    """
    if a_VC.is_cuda:
        wide = torch.promote_types(a_VC.dtype, torch.float32)
        if sum_VD is None:
            return torch.mm(a_VC, b_CD, out_dtype=wide)
        return torch.addmm(sum_VD, a_VC, b_CD, out_dtype=wide, out=sum_VD)
    product_VD = a_VC @ b_CD
    if sum_VD is None:
        return product_VD.to(torch.promote_types(product_VD.dtype, torch.float32))
    return sum_VD.add_(product_VD)


def make_fake_outputs(
    choose_size: ChunkSize, x_ND: Tensor, weight_VD: Tensor, of_x: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty tensors of the shapes that ``compute_in_chunks`` returns."""
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    its_dtype = wide if of_weight and choose_size(x_ND, weight_VD) < x_ND.shape[0] else weight_VD.dtype
    # not by ``new_empty``, which a torch without CUDA lacks for a GPU's fake tensor
    empty = lambda shape, dtype: torch.empty(shape, dtype=dtype, device=x_ND.device)
    dx = empty(x_ND.shape if of_x else (0,), x_ND.dtype)
    return empty((), wide), empty(x_ND.shape[:1], wide), dx, empty(weight_VD.shape if of_weight else (0,), its_dtype)


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[2], output[3])
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype
    ctx.arguments = len(inputs)
    ctx.mark_non_differentiable(*output[1:])


def scale_saved_gradients(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
    """The kept gradients times the upstream gradient of the loss, and a None for each further argument of the operator.

    A gradient that was not asked for is None too.
    """
    asked = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad)
    gradients = (_times(kept, upstream[0], dtype) if needed else None for kept, dtype, needed in asked)
    return *gradients, *(None,) * (ctx.arguments - 2)


def _times(gradient: Tensor, upstream: Tensor, dtype: torch.dtype) -> Tensor:
    if gradient.is_cuda:  # one pass that reads, multiplies in fp32 and writes in ``dtype``, with no copy between
        return torch.mul(gradient, upstream.view(1), out=torch.empty_like(gradient, dtype=dtype))
    return (gradient * upstream).to(dtype)


def count_flops(
    x: Any, weight: Any, targets: Any, weights: Any, z_loss: float, of_x: bool, of_weight: bool, *_: Any, **__: Any
) -> int:
    """FLOPs of the logits and of each gradient, as if every token carried loss: the shapes do not say how many do."""
    return int(2 * x[0] * x[1] * weight[0] * (1 + of_x + of_weight))


def list_wanted_gradients(x_ND: Tensor, weight_VD: Tensor) -> tuple[bool, bool]:
    """(whether x needs a gradient, whether the weight does). A frozen head needs none, which is a third of the products."""
    enabled = torch.is_grad_enabled()
    return enabled and x_ND.requires_grad, enabled and weight_VD.requires_grad
