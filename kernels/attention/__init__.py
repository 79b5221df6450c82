"""Causal grouped-query attention within documents: softmax(q kᵀ / sqrt(K)) v over earlier tokens of the same document.

GQA: Ainslie et al. 2023, arXiv:2305.13245. Documents packed into one row never see one another.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import cpp as attention_native
from kernels.attention import flex
from kernels.contract.message import Message
from kernels.contract.op import (
    Cost,
    Implementation,
    Inputs,
    LazilyImportedFunction,
    Shape,
    compile_lazily,
    draw_normal_tensor,
    make_compiled_implementation,
    make_op,
)
from kernels.native import make_fallback_for_other_dtypes


def make_document_mask(document_BT: Tensor) -> Tensor:
    """[B, T, T] bool: True where token i (row) may see token j (column): j ≤ i, and both are in the same document."""
    same = document_BT.unsqueeze(2) == document_BT.unsqueeze(1)
    T = document_BT.shape[1]
    return same & torch.ones(T, T, dtype=torch.bool, device=document_BT.device).tril()


def attend_in_empty_batch(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor) -> Tensor:
    """The result for a batch without rows, with a gradient for each argument. (On a GPU torch 2.11 would return None.)"""
    return q_BTHK + k_BTGK.sum() + v_BTGK.sum()


def reference(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, document_BT: Tensor) -> Tensor:
    """q [B, T, H, K]; k, v [B, T, G, K], H a multiple of G; document [B, T] integers. Returns [B, T, H, K]."""
    if not q_BTHK.numel():
        return attend_in_empty_batch(q_BTHK, k_BTGK, v_BTGK)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=make_document_mask(document_BT).unsqueeze(1), enable_gqa=True)
    return o.transpose(1, 2)


def cost(shape: Shape, itemsize: int) -> Cost:
    """Half of the score matrix is masked. The backward pass recomputes the scores: it has 5 products, the forward pass 2."""
    queries = shape.tokens * shape.heads * shape.head_dim
    keys = shape.tokens * shape.kv_heads * shape.head_dim
    flops = 2 * queries * shape.context  # two products, half of the square each
    return Cost((2 * queries + 2 * keys) * itemsize, flops, (4 * queries + 4 * keys) * itemsize, 2.5 * flops)


def make_inputs(shape: Shape, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Inputs:
    B, T, H, G, K = shape.batch, shape.context, shape.heads, shape.kv_heads, shape.head_dim
    q, k, v = (draw_normal_tensor(generator, (B, T, heads, K), device, dtype) for heads in (H, G, G))
    starts = torch.rand((B, T), generator=generator) < 8 / (T + 8)
    return q, k, v, starts.cumsum(1).to(device)


BLOCK = 64  # queries of a block, at least (else an eighth of the row). The scores of a block leave out later keys


class RecomputedAttention(torch.autograd.Function):
    """torch's SDPA forward on the CPU, and a backward pass of matrix products that computes the softmax again (arXiv 2205.14135 §3.1).

    torch's own backward pass on the CPU does not use the matrix units. Here the scores and the gradients of the weights are fp32 products, so that
    softmax can distinguish large scores. The three products after them are in the inputs' dtype. The logsumexp of the forward pass is not used:
    if scores are in the millions, scores that are summed in another order do not fit it.
    """

    @staticmethod
    def forward(ctx: Any, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, document_BT: Tensor) -> Tensor:
        R = q_BTHK.shape[2] // k_BTGK.shape[2]
        hidden = torch.zeros((), dtype=q_BTHK.dtype).masked_fill(~make_document_mask(document_BT), float("-inf"))
        q, k, v = q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2)
        k, v = (x.repeat_interleave(R, dim=1) for x in (k, v))
        ctx.save_for_backward(q_BTHK, k_BTGK, v_BTGK, document_BT)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=hidden.unsqueeze(1)).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, do_BTHK: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q_BTHK, k_BTGK, v_BTGK, document_BT = ctx.saved_tensors
        B, T, H, K = q_BTHK.shape
        G = k_BTGK.shape[2]
        R, dtype = H // G, q_BTHK.dtype

        def by_key_head(x: Tensor) -> Tensor:  # [B, T, H, …] → [b, T R, …], b: batch and key head
            return x.unflatten(2, (G, R)).transpose(1, 2).reshape(B * G, T * R, *x.shape[3:])

        q, do = by_key_head(q_BTHK), by_key_head(do_BTHK)
        k, v = (x.transpose(1, 2).reshape(B * G, T, K) for x in (k_BTGK, v_BTGK))
        q_wide, do_wide, k_wide, v_wide = (x.float() for x in (q, do, k, v))
        seen_BTT = make_document_mask(document_BT)
        dq, dk, dv = [], [], []
        step = max(BLOCK, -(-T // 8))
        for first in range(0, T, step):
            last = min(first + step, T)
            rows, rest = slice(first * R, last * R), (0, 0, 0, T - last)
            seen = (
                seen_BTT[:, None, first:last, None, :last]
                .expand(B, G, -1, R, -1)
                .reshape(B * G, (last - first) * R, last)
            )
            score = torch.bmm(q_wide[:, rows], k_wide[:, :last].transpose(1, 2)) * K**-0.5
            dweight = torch.bmm(do_wide[:, rows], v_wide[:, :last].transpose(1, 2))
            weight = score.masked_fill(~seen, float("-inf")).softmax(-1)  # after both products: one pass to the end
            dscore = (weight * (dweight - (weight * dweight).sum(-1, keepdim=True)) * K**-0.5).to(dtype)
            dq.append(torch.bmm(dscore, k[:, :last]))
            dk.append(F.pad(torch.bmm(dscore.transpose(1, 2), q[:, rows]).float(), rest))
            dv.append(F.pad(torch.bmm(weight.to(dtype).transpose(1, 2), do[:, rows]).float(), rest))
        dq_BTHK = torch.cat(dq, dim=1).view(B, G, T, R, K).transpose(1, 2).reshape(B, T, H, K)
        dk_BTGK, dv_BTGK = (torch.stack(parts).sum(0).to(dtype).view(B, G, T, K).transpose(1, 2) for parts in (dk, dv))
        return dq_BTHK, dk_BTGK, dv_BTGK, None


def recompute(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, document_BT: Tensor) -> Tensor:
    """The same as ``reference``, with a backward pass of matrix products (``RecomputedAttention``)."""
    return RecomputedAttention.apply(q_BTHK, k_BTGK, v_BTGK, document_BT)  # type: ignore[no-any-return,no-untyped-call]


RECOMPUTE = Implementation(
    "recompute",
    compile_lazily(recompute),
    description="SDPA forward; backward by matrix products on recomputed fp32 scores, compiled",
    devices=("cpu",),
    eager=recompute,
)


def native(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, document_BT: Tensor) -> Tensor:
    """The same as ``reference``, in C++ for fp32 and bf16. ``recompute`` computes it in other dtypes, and bf16 on a CPU that cannot multiply it."""
    if attention_native.is_usable(q_BTHK.shape[-1], q_BTHK.dtype):
        return attention_native.forward_op(q_BTHK, k_BTGK, v_BTGK, document_BT)
    return recompute(q_BTHK, k_BTGK, v_BTGK, document_BT)


def find_native_fallback(shape: Shape, dtype: torch.dtype) -> str:
    """ "NAME: reason" of the implementation that computes instead of the C++ of ``native``, for this shape and dtype; "" if the C++ computes.

    Raises: KernelError if the C++ cannot be compiled.
    """
    if dtype == torch.bfloat16 and not attention_native.is_usable(shape.head_dim, dtype):
        why = Message(
            "kernels.no_bf16_products",
            "this CPU cannot multiply bf16 matrices for heads of {head_dim} elements",
            head_dim=shape.head_dim,
        )
        return f"recompute, uncompiled: {why}"
    return find_fallback_for_other_dtypes(shape, dtype)


find_fallback_for_other_dtypes = make_fallback_for_other_dtypes("recompute, uncompiled")


NATIVE = Implementation(
    "native",
    native,
    description="C++: a key head's rows stay in cache, blocks of other documents are left out",
    devices=("cpu",),
    fallback=find_native_fallback,
)


MOST_HEAD_DIM = 256  # the largest head that FlashAttention supports


def supports_head_dim(head_dim: int, dtype: torch.dtype) -> bool:
    """True if FlashAttention supports heads of this size and dtype."""
    return head_dim <= MOST_HEAD_DIM and dtype == torch.bfloat16


def find_varlen_fallback(shape: Shape, dtype: torch.dtype) -> str:
    if supports_head_dim(shape.head_dim, dtype):
        return ""
    why = Message(
        "kernels.flash_heads",
        "FlashAttention does not support {dtype} with heads of {head_dim} elements (it needs bf16 and at most {most} elements)",
        most=MOST_HEAD_DIM,
        head_dim=shape.head_dim,
        dtype=str(dtype).removeprefix("torch."),
    )
    return f"reference: {why}"


VARLEN = Implementation(
    "varlen",
    LazilyImportedFunction("kernels.attention.varlen", function="varlen"),
    description="FlashAttention over the stretches of one document, found once a batch",
    devices=("cuda",),
    fallback=find_varlen_fallback,
    prepare=LazilyImportedFunction("kernels.attention.varlen", function="find_document_run_bounds"),
)
FLEX = Implementation(
    "flex",
    compile_lazily(flex.flex),
    description="FlexAttention over blocks of one document, found once a batch; compiled",
    devices=("cuda",),
    eager=flex.flex,
    prepare=flex.make_document_blocks,
)
OP = make_op(
    "attention",
    reference,
    cost=cost,
    make_inputs=make_inputs,
    gradients=(0, 1, 2),
    implementations=(make_compiled_implementation(reference), RECOMPUTE, NATIVE, VARLEN, FLEX),
)
