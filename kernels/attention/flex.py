"""Attention by FlexAttention over blocks of queries and keys. Blocks in which no query may see a key are left out.

``make_document_blocks`` is called once for each batch. All layers share its result in their forward pass, backward pass and recomputation.

A separate file, because each backend of an op is one file, which a patch replaces as a whole.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from kernels.contract.op import compile_lazily

LEAST_HEAD_DIM = 16  # the smallest head that torch's template supports (torch 2.11 raises NotImplementedError below it)

make_blocks = compile_lazily(create_block_mask)  # the eager function writes the whole [B, T, T]


def make_document_blocks(document_BT: Tensor, max_stretches: int = 0) -> BlockMask | Tensor:
    """The blocks of queries and keys in which some query may see some key. For a batch without rows, the documents themselves."""
    B, T = document_BT.shape
    if not B:
        return document_BT

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (document_BT[b, i] == document_BT[b, j])

    make = make_blocks if document_BT.is_cuda else create_block_mask
    return make(seen, B, None, T, T, device=document_BT.device)  # type: ignore[no-any-return]


def flex(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, documents: Any) -> Tensor:
    """The same as ``kernels.attention.reference``, by FlexAttention (Dong et al. 2024, arXiv 2412.05496). Masked blocks are not computed.

    ``documents``: the documents [B, T], or the result of ``make_document_blocks`` for them.
    """
    if not q_BTHK.numel():
        return q_BTHK + k_BTGK.sum() + v_BTGK.sum()  # an empty result with a gradient for each argument
    blocks: Any = documents if isinstance(documents, BlockMask) else make_document_blocks(documents)
    K = q_BTHK.shape[-1]
    zeros = (0, max(0, LEAST_HEAD_DIM - K))  # zeros change no score and no gradient
    q, k, v = (F.pad(x, zeros).transpose(1, 2) if zeros[1] else x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    o = flex_attention(q, k, v, block_mask=blocks, scale=K**-0.5, enable_gqa=q.shape[1] != k.shape[1])
    assert isinstance(o, Tensor)
    return o.transpose(1, 2)[..., :K]
