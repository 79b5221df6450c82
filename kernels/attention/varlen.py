"""Attention by FlashAttention over stretches. A stretch is a run of neighbouring tokens of one document in one row. Padding is a stretch too.

torch's flash kernels do not support a dense mask [B, 1, T, T], which would also take T bytes for each token. The result of
``find_document_run_bounds`` has the same information. It is computed once for each batch. All layers share it in their forward pass, backward pass
and recomputation.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from kernels.attention import attend_in_empty_batch, reference, supports_head_dim

HEAD_MULTIPLE = 8
MOST_STRETCHES = 65535  # CUDA's bound for the second dimension of a grid, which FlashAttention uses for the stretches
# torch 2.11 accepts fewer heads of keys than of queries. Later versions need this argument for that.
GQA: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def mark_document_starts(document_BT: Tensor) -> Tensor:
    """[B, T] bool: True for the first token of each stretch."""
    first_BT = torch.ones_like(document_BT, dtype=torch.bool)
    first_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    return first_BT


def find_document_run_bounds(document_BT: Tensor, max_stretches: int) -> Tensor:
    """The position of the first token of each stretch, if the rows are laid end to end, and last the end of the last row.

    The result is int32 [max_stretches + 1]. ``max_stretches``: an upper bound of the number of stretches. With 0 they are counted, which waits for
    the device. Unused entries are empty stretches.

    >>> find_document_run_bounds(torch.tensor([[0, 0, 1, -1], [0, 0, 0, 0]]), 5).tolist()
    [0, 2, 3, 4, 8, 8]
    """
    max_stretches = max_stretches or int(mark_document_starts(document_BT).sum())
    assert max_stretches <= MOST_STRETCHES, max_stretches
    number_N = mark_document_starts(document_BT).flatten().cumsum(0)  # of the stretch that a token is in, from 1
    wanted = torch.arange(1, max_stretches + 2, device=document_BT.device)
    return torch.searchsorted(number_N, wanted).int()


def find_run_of_each_token(bounds: Tensor, B: int, T: int) -> Tensor:
    """[B, T]: the stretch of each token, from the result of ``find_document_run_bounds``.

    >>> find_run_of_each_token(torch.tensor([0, 2, 3, 4, 8, 8]), 2, 4).tolist()
    [[0, 0, 1, 2], [3, 3, 3, 3]]
    """
    tokens_N = torch.arange(B * T, device=bounds.device)
    return torch.searchsorted(bounds[1:].long(), tokens_N, right=True).view(B, T)


def varlen(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, documents: Tensor) -> Tensor:
    """The same as ``kernels.attention.reference``, by FlashAttention (Dao 2023, arXiv 2307.08691) over stretches.

    ``documents``: [B, T], with the tokens of a document next to each other; or the result of ``find_document_run_bounds`` for them. The reference
    computes what FlashAttention does not support: dtypes other than bf16, and large heads.
    """
    B, T, _, K = q_BTHK.shape
    if not supports_head_dim(K, q_BTHK.dtype):
        return reference(
            q_BTHK, k_BTGK, v_BTGK, documents if documents.ndim == 2 else find_run_of_each_token(documents, B, T)
        )
    if not q_BTHK.numel():
        return attend_in_empty_batch(q_BTHK, k_BTGK, v_BTGK)
    bounds = find_document_run_bounds(documents, 0) if documents.ndim == 2 else documents
    q, k, v = (_whole_heads(x).flatten(0, 1) for x in (q_BTHK, k_BTGK, v_BTGK))
    o_NHK = varlen_attn(q, k, v, bounds, bounds, T, T, scale=K**-0.5, window_size=(-1, 0), **GQA)
    assert isinstance(o_NHK, Tensor)
    return o_NHK[..., :K].unflatten(0, (B, T))


def _whole_heads(x_BTHK: Tensor) -> Tensor:
    """Make the last dimension contiguous, and pad it with zeros to a multiple of eight. Zeros change no score and no gradient."""
    x = x_BTHK if x_BTHK.stride(-1) == 1 else x_BTHK.contiguous()
    missing = -x.shape[-1] % HEAD_MULTIPLE
    return F.pad(x, (0, missing)) if missing else x
