"""Causal grouped-query attention within documents: softmax(q kᵀ / sqrt(K)) v over earlier tokens of the same document.

GQA: Ainslie et al. 2023, arXiv:2305.13245. Documents packed into one row never see one another.
"""

from __future__ import annotations

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


BLOCK = 64  # queries a block: later keys are left out of its products, which halves the work of a long row


def plain(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, document_BT: Tensor) -> Tensor:
    """As ``reference``: the queries that share a key head become rows of one matrix product, and softmax is written
    out.

    Blocks of queries see only the keys up to their own end. Meant for torch.compile, which makes scale, mask and
    softmax one pass.
    """
    B, T, H, K = q_BTHK.shape
    G = k_BTGK.shape[2]
    R = H // G
    dtype = v_BTGK.dtype
    wide = torch.promote_types(dtype, torch.float32)
    k_bKT = k_BTGK.permute(0, 2, 3, 1).reshape(B * G, K, T)  # b: batch and key head
    v_bTK = v_BTGK.transpose(1, 2).reshape(B * G, T, K)
    mask_BTT = document_mask(document_BT)
    blocks = []
    for first in range(0, T, BLOCK):
        last = min(first + BLOCK, T)
        rows = last - first
        q_bCK = q_BTHK[:, first:last].reshape(B, rows, G, R, K).permute(0, 2, 3, 1, 4).reshape(B * G, R * rows, K)
        # Scores are never rounded to bf16: large ones would lose what softmax tells apart.
        scores = torch.bmm(q_bCK.to(wide), k_bKT[..., :last].to(wide)).view(B, G, R, rows, last) * K**-0.5
        hidden = ~mask_BTT[:, None, None, first:last, :last]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(dtype).view(B * G, R * rows, last)
        o = torch.bmm(weights, v_bTK[:, :last]).view(B, G, R, rows, K)
        blocks.append(o.permute(0, 3, 1, 2, 4).reshape(B, rows, H, K))
    return torch.cat(blocks, dim=1)


FOLDED = Implementation(
    "folded",
    torch.compile(plain, dynamic=False),
    "query group folded into rows, plain softmax in causal blocks, compiled",
)
OP = op(
    "attention",
    reference,
    cost=cost,
    make_inputs=make_inputs,
    gradients=(0, 1, 2),
    implementations=(compiled(reference), FOLDED),
)
