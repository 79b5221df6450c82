"""Attention by FlashAttention over stretches: runs of neighbouring tokens of one document in one row. Padding is a stretch too.

A dense mask [B, 1, T, T] keeps torch's flash kernels from running, and costs T bytes a token. ``document_run_bounds`` carries the same
information. It is made once a batch, and shared by all layers in their forward pass, backward pass and recomputation.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from kernels.attention import attend_no_rows, reference, supports_head_dim

HEAD_MULTIPLE = 8
MOST_STRETCHES = 65535  # FlashAttention lays them along the second side of its grid, which CUDA bounds
# torch 2.11 accepts fewer heads of keys; later versions need this argument
GQA: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def mark_document_starts(document_BT: Tensor) -> Tensor:
    """[B, T] bool: the first token of each stretch."""
    first_BT = torch.ones_like(document_BT, dtype=torch.bool)
    first_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    return first_BT


def document_run_bounds(document_BT: Tensor, most: int) -> Tensor:
    """The start of each stretch in the rows laid end to end, then the end of all: int32 [most + 1], without a wait for the device.

    ``most``: an upper bound of the number of stretches; with 0 they are counted, which waits for the device. Unused entries are empty stretches.

    >>> document_run_bounds(torch.tensor([[0, 0, 1, -1], [0, 0, 0, 0]]), 5).tolist()
    [0, 2, 3, 4, 8, 8]
    """
    most = most or int(mark_document_starts(document_BT).sum())
    assert most <= MOST_STRETCHES, most
    number_N = mark_document_starts(document_BT).flatten().cumsum(0)  # of the stretch that a token is in, from 1
    wanted = torch.arange(1, most + 2, device=document_BT.device)
    return torch.searchsorted(number_N, wanted).int()


def number_document_runs(bounds: Tensor, B: int, T: int) -> Tensor:
    """[B, T]: the stretch of each token, from the result of ``document_run_bounds``.

    >>> number_document_runs(torch.tensor([0, 2, 3, 4, 8, 8]), 2, 4).tolist()
    [[0, 0, 1, 2], [3, 3, 3, 3]]
    """
    tokens_N = torch.arange(B * T, device=bounds.device)
    return torch.searchsorted(bounds[1:].long(), tokens_N, right=True).view(B, T)


def varlen(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, documents: Tensor) -> Tensor:
    """Computes what ``kernels.attention.reference`` does, by FlashAttention (Dao 2023, arXiv 2307.08691) over stretches.

    ``documents``: [B, T], a document's tokens together; or their ``document_run_bounds``. For what FlashAttention does not take (dtypes other
    than bf16, larger heads) the reference computes.
    """
    B, T, _, K = q_BTHK.shape
    if not supports_head_dim(K, q_BTHK.dtype):
        return reference(
            q_BTHK, k_BTGK, v_BTGK, documents if documents.ndim == 2 else number_document_runs(documents, B, T)
        )
    if not q_BTHK.numel():
        return attend_no_rows(q_BTHK, k_BTGK, v_BTGK)
    bounds = document_run_bounds(documents, 0) if documents.ndim == 2 else documents
    q, k, v = (_whole_heads(x).flatten(0, 1) for x in (q_BTHK, k_BTGK, v_BTGK))
    o_NHK = varlen_attn(q, k, v, bounds, bounds, T, T, scale=K**-0.5, window_size=(-1, 0), **GQA)
    assert isinstance(o_NHK, Tensor)
    return o_NHK[..., :K].unflatten(0, (B, T))


def _whole_heads(x_BTHK: Tensor) -> Tensor:
    """Makes the values contiguous and pads K with zeros to a multiple of eight. Zeros change no score and no gradient."""
    x = x_BTHK if x_BTHK.stride(-1) == 1 else x_BTHK.contiguous()
    missing = -x.shape[-1] % HEAD_MULTIPLE
    return F.pad(x, (0, missing)) if missing else x
