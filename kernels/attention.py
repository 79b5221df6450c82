"""Causal grouped-query attention within documents: softmax(q kᵀ / sqrt(K)) v over earlier tokens of the same document.

GQA: Ainslie et al. 2023, arXiv:2305.13245. Documents packed into one row never see one another.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.op import Cost, Implementation, Inputs, Shape, compiled, normal, op


def document_mask(document_BT: Tensor) -> Tensor:
    """[B, T, T] bool: may token i (row) see token j (column)? True where j ≤ i and both stand in the same document."""
    same = document_BT.unsqueeze(2) == document_BT.unsqueeze(1)
    T = document_BT.shape[1]
    return same & torch.ones(T, T, dtype=torch.bool, device=document_BT.device).tril()


def reference(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, document_BT: Tensor) -> Tensor:
    """q [B, T, H, K]; k, v [B, T, G, K], H a multiple of G; document [B, T] integers. Returns [B, T, H, K]."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=document_mask(document_BT).unsqueeze(1), enable_gqa=True)
    return o.transpose(1, 2)


def cost(shape: Shape, itemsize: int) -> Cost:
    """Half of the square is masked away; the backward pass recomputes the scores (5 products for 2)."""
    queries = shape.tokens * shape.heads * shape.head_dim
    keys = shape.tokens * shape.kv_heads * shape.head_dim
    flops = 2 * queries * shape.context  # two products, half of the square each
    return Cost((2 * queries + 2 * keys) * itemsize, flops, (4 * queries + 4 * keys) * itemsize, 2.5 * flops)


def make_inputs(shape: Shape, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Inputs:
    B, T, H, G, K = shape.batch, shape.context, shape.heads, shape.kv_heads, shape.head_dim
    q, k, v = (normal(generator, (B, T, heads, K), device, dtype) for heads in (H, G, G))
    starts = torch.rand((B, T), generator=generator) < 8 / (T + 8)
    return q, k, v, starts.cumsum(1).to(device)


BLOCKS = 8  # of queries: later keys are left out of a block's scores, which saves nearly half of them


class Recompute(torch.autograd.Function):
    """SDPA's own forward for the CPU; backward by matrix products from the logsumexp that it keeps (arXiv 2205.14135 §3.1).

    torch's CPU backward leaves the matrix units idle. Here scores and their gradients are fp32 products, so that large
    ones keep what softmax tells apart, and the three products that follow are in the inputs' dtype.
    """

    @staticmethod
    def forward(ctx: Any, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, document_BT: Tensor) -> Tensor:
        R = q_BTHK.shape[2] // k_BTGK.shape[2]
        hidden = torch.zeros((), dtype=q_BTHK.dtype).masked_fill(~document_mask(document_BT), float("-inf"))
        q, k, v = q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2)
        k, v = (x.repeat_interleave(R, dim=1) for x in (k, v))
        o, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=hidden.unsqueeze(1)
        )
        ctx.save_for_backward(q_BTHK, k_BTGK, v_BTGK, document_BT, o.transpose(1, 2), logsumexp)
        return o.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, do_BTHK: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q_BTHK, k_BTGK, v_BTGK, document_BT, o_BTHK, logsumexp_BHT = ctx.saved_tensors
        B, T, H, K = q_BTHK.shape
        G = k_BTGK.shape[2]
        R, dtype = H // G, q_BTHK.dtype
        delta_BTH = (do_BTHK.float() * o_BTHK.float()).sum(-1)

        def by_key_head(x: Tensor) -> Tensor:  # [B, T, H, …] → [b, T R, …], b: batch and key head
            return x.unflatten(2, (G, R)).transpose(1, 2).reshape(B * G, T * R, *x.shape[3:])

        q, do = by_key_head(q_BTHK), by_key_head(do_BTHK)
        logsumexp, delta = by_key_head(logsumexp_BHT.transpose(1, 2)), by_key_head(delta_BTH)
        k, v = (x.transpose(1, 2).reshape(B * G, T, K) for x in (k_BTGK, v_BTGK))
        q_wide, do_wide, k_wide, v_wide = (x.float() for x in (q, do, k, v))
        seen_BTT = document_mask(document_BT)
        every_weight, every_score = [], []
        step = -(-T // BLOCKS)
        for first in range(0, T, step):
            last = min(first + step, T)
            rows = slice(first * R, last * R)
            seen = seen_BTT[:, None, first:last, None, :last].expand(B, G, -1, R, -1).reshape(B * G, -1, last)
            score = torch.bmm(q_wide[:, rows], k_wide[:, :last].transpose(1, 2)) * K**-0.5
            weight = torch.where(seen, torch.exp(score - logsumexp[:, rows, None]), 0.0)
            dweight = torch.bmm(do_wide[:, rows], v_wide[:, :last].transpose(1, 2))
            dscore = weight * (dweight - delta[:, rows, None]) * K**-0.5
            every_weight.append(F.pad(weight.to(dtype), (0, T - last)))
            every_score.append(F.pad(dscore.to(dtype), (0, T - last)))
        weights, dscores = torch.cat(every_weight, dim=1), torch.cat(every_score, dim=1)
        dq = torch.bmm(dscores, k).view(B, G, T, R, K).transpose(1, 2).reshape(B, T, H, K)
        dk = torch.bmm(dscores.transpose(1, 2), q).view(B, G, T, K).transpose(1, 2)
        dv = torch.bmm(weights.transpose(1, 2), do).view(B, G, T, K).transpose(1, 2)
        return dq, dk, dv, None


def recompute(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, document_BT: Tensor) -> Tensor:
    """As ``reference``, with a backward pass made of matrix products."""
    return Recompute.apply(q_BTHK, k_BTGK, v_BTGK, document_BT)  # type: ignore[no-any-return,no-untyped-call]


RECOMPUTE = Implementation(
    "recompute",
    torch.compile(recompute, dynamic=False),
    "SDPA forward; backward by matrix products on recomputed fp32 scores, compiled",
    devices=("cpu",),
)
OP = op(
    "attention",
    reference,
    cost=cost,
    make_inputs=make_inputs,
    gradients=(0, 1, 2),
    implementations=(compiled(reference), RECOMPUTE),
)
