"""The op by FlexAttention (Dong et al. 2024, arXiv 2412.05496): blocks in which no query may see a key are left out.

``find_visible_blocks`` is called once for each batch and window. All layers with that window share its result. The sink is added after the softmax:
with the scores' logsumexp L a head's output is multiplied by exp(L) / (exp(L) + exp(sink)) = sigmoid(L − sink).

A separate file, because each backend of an op is one file, which a patch replaces as a whole.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from kernels.attention.flex import LEAST_HEAD_DIM, make_blocks
from kernels.general_attention.visible_keys import VisibleKeys


class VisibleBlocks(NamedTuple):
    """``VisibleKeys`` with the blocks of queries and keys in which some query may see some key."""

    blocks: BlockMask
    slopes_H: Tensor | None


def find_visible_blocks(visible: VisibleKeys, max_stretches: int = 0) -> VisibleBlocks | VisibleKeys:
    """The blocks for a batch. For a batch without rows, the argument itself."""
    document_BT, window, slopes_H = visible
    B, T = document_BT.shape
    if not B:
        return visible
    most = T if window is None else window

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < most) & (document_BT[b, i] == document_BT[b, j])

    make = make_blocks if document_BT.is_cuda else create_block_mask
    return VisibleBlocks(make(seen, B, None, T, T, device=document_BT.device), slopes_H)


def flex(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, sinks_H: Tensor | None, softcap: float | None, visible: Any
) -> Tensor:
    """The same as ``kernels.general_attention.reference``. ``visible``: ``VisibleKeys``, or the result of ``find_visible_blocks`` for them."""
    if not q_BTHK.numel():  # an empty result with a gradient for each argument
        return q_BTHK + k_BTGK.sum() + v_BTGK.sum() + (0.0 if sinks_H is None else 0.0 * sinks_H.sum())
    found = visible if isinstance(visible, VisibleBlocks) else find_visible_blocks(visible)
    assert isinstance(found, VisibleBlocks)  # there are rows
    blocks, slopes_H = found
    K = q_BTHK.shape[-1]

    def bend(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes_H is not None:
            score = score - slopes_H[h] * (i - j)
        return score

    zeros = (0, max(0, LEAST_HEAD_DIM - K))  # zeros change no score and no gradient
    q, k, v = (F.pad(x, zeros).transpose(1, 2) if zeros[1] else x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    o_BHTK, more = flex_attention(
        q,
        k,
        v,
        score_mod=None if softcap is None and slopes_H is None else bend,
        block_mask=blocks,
        scale=K**-0.5,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sinks_H is not None:
        assert more.lse is not None
        share_BHT = torch.sigmoid(more.lse - sinks_H.to(more.lse.dtype).unsqueeze(1))
        o_BHTK = (o_BHTK * share_BHT.unsqueeze(-1)).to(o_BHTK.dtype)
    return o_BHTK.transpose(1, 2)[..., :K]
