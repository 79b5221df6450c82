"""The op on a CPU, as torch.library ops: blocks of queries, each with the keys from the first that its first query sees.

Scores and the gradients of weights are fp32 products, so that softmax can distinguish large scores. The other products are in the inputs' dtype. The
backward pass computes the softmax again (arXiv 2205.14135 §3.1).

A separate file, because each backend of an op is one file, which a patch replaces as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kernels.general_attention.visible_keys import VisibleKeys
from kernels.native import define_cpu_op

STEP = 64  # queries of a block, at least (else half of the window, or an eighth of the row)


def list_blocks(T: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """(the queries, the keys) of each block.

    >>> [(q.start, q.stop, k.start, k.stop) for q, k in list_blocks(160, 10)]
    [(0, 64, 0, 64), (64, 128, 55, 128), (128, 160, 119, 160)]
    """
    step = max(STEP, -(-T // 8) if window is None else min(window // 2, -(-T // 8)))
    for first in range(0, T, step):
        last = min(first + step, T)
        yield slice(first, last), slice(0 if window is None else max(0, first - window + 1), last)


def split_by_key_head(x_BTHK: Tensor, G: int) -> Tensor:
    """[B, T, H, K] → [B, G, R, T, K]."""
    return x_BTHK.unflatten(2, (G, -1)).permute(0, 2, 3, 1, 4)


def multiply_by_key_head(x_BGRIX: Tensor, y_BGXJ: Tensor) -> Tensor:
    """x y for each key head: [B, G, R, I, J]."""
    leading, J = x_BGRIX.shape[:-1], y_BGXJ.shape[-1]
    return torch.bmm(merge_rows(x_BGRIX).flatten(0, 1), y_BGXJ.flatten(0, 1)).view(*leading, J)


def merge_rows(x_BGRIX: Tensor) -> Tensor:
    """[B, G, R, I, X] → [B, G, R I, X]."""
    return x_BGRIX.reshape(*x_BGRIX.shape[:2], math.prod(x_BGRIX.shape[2:4]), x_BGRIX.shape[4])


def weigh_keys(
    q_BGRIK: Tensor,
    k_BGJK: Tensor,
    sinks_H: Tensor | None,
    softcap: float | None,
    visible: VisibleKeys,
    rows: slice,
    keys: slice,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """For one block: (the weights [B, G, R, I, J]; those of the sinks [B, G, R, I, 1]; tanh of the scores), all in at least fp32."""
    wide, (G, R), K = torch.promote_types(q_BGRIK.dtype, torch.float32), q_BGRIK.shape[1:3], q_BGRIK.shape[-1]
    score_BGRIJ = multiply_by_key_head(q_BGRIK.to(wide), k_BGJK.to(wide).transpose(2, 3)).mul_(K**-0.5)
    bent_BGRIJ = None
    if softcap is not None:
        bent_BGRIJ = torch.tanh(score_BGRIJ / softcap)
        score_BGRIJ = softcap * bent_BGRIJ
    places_I = torch.arange(rows.start, rows.stop).unsqueeze(1)
    distance_IJ = places_I - torch.arange(keys.start, keys.stop)
    if visible.slopes_H is not None:
        score_BGRIJ -= visible.slopes_H.to(wide).view(G, R, 1, 1) * distance_IJ
    seen_BIJ = visible.document_BT[:, rows].unsqueeze(2) == visible.document_BT[:, keys].unsqueeze(1)
    seen_BIJ &= distance_IJ >= 0
    if visible.window is not None:
        seen_BIJ &= distance_IJ < visible.window
    score_BGRIJ.masked_fill_(~seen_BIJ[:, None, None], float("-inf"))
    if sinks_H is None:
        return score_BGRIJ.softmax(-1), None, bent_BGRIJ
    sink_BGRI1 = sinks_H.to(wide).view(1, G, R, 1, 1).expand(*q_BGRIK.shape[:-1], 1)
    weight_BGRIX = torch.cat((score_BGRIJ, sink_BGRI1), dim=-1).softmax(-1)
    return weight_BGRIX[..., :-1], weight_BGRIX[..., -1:], bent_BGRIJ


@define_cpu_op("factory::general_attention")
def forward_op(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    sinks_H: Tensor | None,
    softcap: float | None,
    document_BT: Tensor,
    window: int | None,
    slopes_H: Tensor | None,
) -> Tensor:
    o_BTHK = torch.empty_like(q_BTHK, memory_format=torch.contiguous_format)
    G, visible = k_BTGK.shape[2], VisibleKeys(document_BT, window, slopes_H)
    q_BGRTK, o_BGRTK = split_by_key_head(q_BTHK, G), split_by_key_head(o_BTHK, G)
    k_BGTK, v_BGTK = k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2)
    for rows, keys in list_blocks(q_BTHK.shape[1], window):
        weight_BGRIJ, _, _ = weigh_keys(
            q_BGRTK[..., rows, :], k_BGTK[:, :, keys], sinks_H, softcap, visible, rows, keys
        )
        o_BGRTK[..., rows, :] = multiply_by_key_head(weight_BGRIJ.to(q_BTHK.dtype), v_BGTK[:, :, keys])
    return o_BTHK


@define_cpu_op("factory::general_attention_backward")
def backward_op(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    sinks_H: Tensor | None,
    softcap: float | None,
    document_BT: Tensor,
    window: int | None,
    slopes_H: Tensor | None,
    do_BTHK: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients by q, k, v and the sinks, the last empty if there are none."""
    dtype, wide = q_BTHK.dtype, torch.promote_types(q_BTHK.dtype, torch.float32)
    (B, T, H, K), G, visible = q_BTHK.shape, k_BTGK.shape[2], VisibleKeys(document_BT, window, slopes_H)
    q_BGRTK, do_BGRTK = split_by_key_head(q_BTHK, G), split_by_key_head(do_BTHK, G)
    k_BGTK, v_BGTK = k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2)
    dq_BTHK = torch.empty_like(q_BTHK, memory_format=torch.contiguous_format)
    dq_BGRTK = split_by_key_head(dq_BTHK, G)
    dk_BGTK, dv_BGTK = q_BTHK.new_zeros((B, G, T, K), dtype=wide), q_BTHK.new_zeros((B, G, T, K), dtype=wide)
    dsinks_GR = q_BTHK.new_zeros((G, H // G) if sinks_H is not None else 0, dtype=wide)
    for rows, keys in list_blocks(T, window):
        q_BGRIK, do_BGRIK, k_BGJK = q_BGRTK[..., rows, :], do_BGRTK[..., rows, :], k_BGTK[:, :, keys]
        weight_BGRIJ, sink_BGRI1, bent_BGRIJ = weigh_keys(q_BGRIK, k_BGJK, sinks_H, softcap, visible, rows, keys)
        dweight_BGRIJ = multiply_by_key_head(do_BGRIK.to(wide), v_BGTK[:, :, keys].to(wide).transpose(2, 3))
        mean_BGRI1 = (weight_BGRIJ * dweight_BGRIJ).sum(-1, keepdim=True)
        dscore_BGRIJ = weight_BGRIJ * (dweight_BGRIJ - mean_BGRI1)
        if sink_BGRI1 is not None:
            dsinks_GR -= (sink_BGRI1 * mean_BGRI1).sum((0, 3, 4))
        if bent_BGRIJ is not None:
            dscore_BGRIJ *= 1 - bent_BGRIJ.square()
        dscore_BGRIJ = (dscore_BGRIJ * K**-0.5).to(dtype)
        dq_BGRTK[..., rows, :] = multiply_by_key_head(dscore_BGRIJ, k_BGJK)
        dk_BGTK[:, :, keys] += merge_rows(dscore_BGRIJ).transpose(2, 3) @ merge_rows(q_BGRIK)
        dv_BGTK[:, :, keys] += merge_rows(weight_BGRIJ.to(dtype)).transpose(2, 3) @ merge_rows(do_BGRIK)
    dk_BTGK, dv_BTGK = (x_BGTK.to(dtype).transpose(1, 2).contiguous() for x_BGTK in (dk_BGTK, dv_BGTK))
    return dq_BTHK, dk_BTGK, dv_BTGK, dsinks_GR.flatten().to(dtype)


@forward_op.register_fake
def _(q: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@backward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0 if sinks is None else sinks.shape)


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, sinks, softcap, document, window, slopes = inputs
    ctx.save_for_backward(q, k, v, sinks, document, slopes)
    ctx.settings = softcap, window


def compute_gradients(ctx: Any, do_BTHK: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, document, slopes = ctx.saved_tensors
    softcap, window = ctx.settings
    dq, dk, dv, dsinks = backward_op(q, k, v, sinks, softcap, document, window, slopes, do_BTHK)
    return dq, dk, dv, None if sinks is None else dsinks, *(None,) * 4


forward_op.register_autograd(compute_gradients, setup_context=save_inputs)


def count_seen_pairs(T: int, window: int | None) -> int:
    """Pairs of a query and a key that the blocks compute."""
    return sum((rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys in list_blocks(T, window))


@register_flop_formula(torch.ops.factory.general_attention)
def count_forward_flops(q: Any, k: Any, v: Any, sinks: Any, softcap: Any, document: Any, window: Any, *_: Any, **__: Any) -> int:  # fmt: skip
    """FLOPs of two products."""
    B, T, H, K = q
    return int(4 * B * H * K * count_seen_pairs(T, window))


@register_flop_formula(torch.ops.factory.general_attention_backward)
def count_backward_flops(q: Any, k: Any, v: Any, sinks: Any, softcap: Any, document: Any, window: Any, *_: Any, **__: Any) -> int:  # fmt: skip
    """FLOPs of five products: the backward pass computes the scores again."""
    B, T, H, K = q
    return int(10 * B * H * K * count_seen_pairs(T, window))


def attend_in_blocks(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, sinks_H: Tensor | None, softcap: float | None, visible: VisibleKeys
) -> Tensor:
    """The same as ``kernels.general_attention.reference``."""
    return forward_op(q_BTHK, k_BTGK, v_BTGK, sinks_H, softcap, *visible)
