"""Causal grouped-query attention within documents, with what ``kernels.attention`` lacks: a window, a soft-cap of the scores, sinks and ALiBi.

Window: a query sees keys with query − key < window (Beltagy et al. 2020, arXiv:2004.05150, as transformers counts it). Soft-cap: c · tanh(score / c)
(Gemma 2, arXiv:2408.00118 §2). Sink: a learned score of each head that takes a share of the softmax and has no value (gpt-oss; Xiao et al. 2023,
arXiv:2309.17453). ALiBi: score − slope · (query − key) (Press et al. 2021, arXiv:2108.12409).

A layer without any of them calls ``attention``. The cost is that of the keys in the window: O(T · window).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contract.op import (
    Cost,
    Implementation,
    Inputs,
    Shape,
    compile_lazily,
    draw_normal_tensor,
    make_compiled_implementation,
    make_op,
)
from kernels.general_attention import blocks, flex
from kernels.general_attention.visible_keys import VisibleKeys, make_visibility_mask

SOFTCAP = 5.0  # of the oracle's inputs: small enough to bend their scores


def reference(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, sinks_H: Tensor | None, softcap: float | None, visible: VisibleKeys
) -> Tensor:
    """q [B, T, H, K]; k, v [B, T, G, K], H a multiple of G; sinks [H]; all of one dtype. Returns [B, T, H, K]. Scores are in fp32 (fp64 for fp64)."""
    wide = torch.promote_types(q_BTHK.dtype, torch.float32)
    B, T, G, K = k_BTGK.shape
    q_BTGrK = q_BTHK.to(wide).unflatten(2, (G, -1))
    score_BGrTT = torch.einsum("bigrk,bjgk->bgrij", q_BTGrK, k_BTGK.to(wide)) * K**-0.5
    if softcap is not None:
        score_BGrTT = softcap * torch.tanh(score_BGrTT / softcap)
    visible = VisibleKeys(*visible)  # the gate's driver passes a plain list
    if visible.slopes_H is not None:
        place_T = torch.arange(T, device=q_BTHK.device, dtype=wide)
        distance_TT = place_T.unsqueeze(1) - place_T
        score_BGrTT = score_BGrTT - visible.slopes_H.to(wide).view(G, -1, 1, 1) * distance_TT
    score_BGrTT = score_BGrTT.masked_fill(~make_visibility_mask(visible)[:, None, None], float("-inf"))
    if sinks_H is not None:
        sink_BGrT1 = sinks_H.to(wide).view(1, G, -1, 1, 1).expand(B, -1, -1, T, 1)
        score_BGrTT = torch.cat((score_BGrTT, sink_BGrT1), dim=-1)
    weight_BGrTT = score_BGrTT.softmax(-1)[..., :T].to(q_BTHK.dtype)
    return torch.einsum("bgrij,bjgk->bigrk", weight_BGrTT, v_BTGK).flatten(2, 3)


def cost(shape: Shape, itemsize: int) -> Cost:
    """Each query sees the keys of its window. The backward pass recomputes the scores: it has 5 products, the forward pass 2."""
    queries = shape.tokens * shape.heads * shape.head_dim
    keys = shape.tokens * shape.kv_heads * shape.head_dim
    flops = 4 * queries * choose_window(shape.context)
    return Cost((2 * queries + 2 * keys) * itemsize, flops, (4 * queries + 4 * keys) * itemsize, 2.5 * flops)


def choose_window(context: int) -> int:
    """The window of the oracle's inputs: a quarter of the row.

    >>> choose_window(256), choose_window(37), choose_window(1)
    (64, 10, 1)
    """
    return -(-context // 4)


def make_inputs(shape: Shape, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Inputs with all four: a window, a soft-cap, sinks and slopes."""
    B, T, H, G, K = shape.batch, shape.context, shape.heads, shape.kv_heads, shape.head_dim
    q, k, v = (draw_normal_tensor(generator, (B, T, heads, K), device, dtype) for heads in (H, G, G))
    sinks = draw_normal_tensor(generator, (H,), device, dtype)
    starts = torch.rand((B, T), generator=generator) < 8 / (T + 8)
    slopes = torch.tensor([2.0 ** -(1 + head) for head in range(H)], device=device)
    return q, k, v, sinks, SOFTCAP, VisibleKeys(starts.cumsum(1).to(device), choose_window(T), slopes)


BLOCKS = Implementation(
    "blocks",
    blocks.attend_in_blocks,
    description="blocks of queries with the keys of their window; backward by matrix products on recomputed fp32 scores",
    devices=("cpu",),
)
FLEX = Implementation(
    "flex",
    compile_lazily(flex.flex),
    description="FlexAttention over blocks of the window and of one document, found once a batch; compiled",
    devices=("cuda",),
    eager=flex.flex,
    prepare=flex.find_visible_blocks,
)
OP = make_op(
    "general_attention",
    reference,
    cost=cost,
    make_inputs=make_inputs,
    gradients=(0, 1, 2, 3),
    implementations=(make_compiled_implementation(reference), BLOCKS, FLEX),
)
