"""Which keys a query of the op sees.

A separate file, because the op, each of its backends and the trainer import it, and the op's file imports its backends.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class VisibleKeys(NamedTuple):
    """Which keys a query sees, and what distance costs.

    ``document_BT``: integers. ``window``: at least one; None: every earlier key of the document. ``slopes_H``: fp32; None: distance costs nothing.
    """

    document_BT: Tensor
    window: int | None
    slopes_H: Tensor | None


def make_visibility_mask(visible: VisibleKeys) -> Tensor:
    """[B, T, T] bool: True where token i (row) may see token j (column).

    >>> make_visibility_mask(VisibleKeys(torch.tensor([[0, 0, 0, 1]]), 2, None)).int().tolist()
    [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]]
    """
    document_BT, window, _ = visible
    T = document_BT.shape[1]
    seen = torch.ones(T, T, dtype=torch.bool, device=document_BT.device).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    return seen & (document_BT.unsqueeze(2) == document_BT.unsqueeze(1))
