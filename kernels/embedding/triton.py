"""The embedding's backward pass in Triton: a program a token and a block of columns, no atomic additions.

A token's places stand together once places are sorted by token, and where they begin is a binary search: nothing waits
for the device. The price of that order is that a token's places are summed by one program a block of columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PLACES, BLOCK = 16, 128  # of a program's tile


@triton.jit
def backward_kernel(dy, order, begins, dweight, columns, PLACES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(begins + token + 1)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(tl.load(begins + token), end, PLACES):
        place = first + tl.arange(0, PLACES)
        row = tl.load(order + place, mask=place < end, other=0)[:, None]
        inside = (place < end)[:, None] & (column < columns)[None, :]
        total += tl.sum(tl.load(dy + row * columns + column[None, :], mask=inside, other=0.0).to(tl.float32), axis=0)
    tl.store(dweight + token * columns + column, total, mask=column < columns)


@torch.library.custom_op("factory::embedding_triton", mutates_args=())
def forward_op(tokens_X: Tensor, weight_VD: Tensor) -> Tensor:
    """A gather is one pass over memory in torch already."""
    return weight_VD.index_select(0, tokens_X.flatten()).view(*tokens_X.shape, weight_VD.shape[1])


@torch.library.custom_op("factory::embedding_triton_backward", mutates_args=())
def backward_op(dy_XD: Tensor, tokens_X: Tensor, vocab_size: int) -> Tensor:
    D = dy_XD.shape[-1]
    tokens_N, order_N = tokens_X.flatten().sort(stable=True)
    begins = torch.searchsorted(tokens_N, torch.arange(vocab_size + 1, device=tokens_N.device, dtype=tokens_N.dtype))
    dweight_VD = dy_XD.new_empty((vocab_size, D))
    grid = (vocab_size, triton.cdiv(D, BLOCK))
    backward_kernel[grid](dy_XD.contiguous(), order_N, begins, dweight_VD, D, PLACES=PLACES, BLOCK=BLOCK)
    return dweight_VD


@forward_op.register_fake
def _(tokens: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty((*tokens.shape, weight.shape[1]))


@backward_op.register_fake
def _(dy: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    return dy.new_empty((vocab_size, dy.shape[-1]))


def keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.vocab_size = inputs[1].shape[0]


def gradients(ctx: Any, dy_XD: Tensor) -> tuple[None, Tensor]:
    return None, backward_op(dy_XD, *ctx.saved_tensors, ctx.vocab_size)


forward_op.register_autograd(gradients, setup_context=keep)


def embedding(tokens_X: Tensor, weight_VD: Tensor) -> Tensor:
    """As ``kernels.embedding.reference``; a token outside the vocabulary fails as in ``torch.index_select``."""
    return forward_op(tokens_X, weight_VD)
