"""Kernels over many tensors want dense ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def dense(lists: Sequence[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """The lists with a dense copy for each tensor that is not dense; what is written there is written back at the end."""
    copies = [[x.contiguous() for x in tensors] for tensors in lists]
    yield copies
    for tensors, changed in zip(lists, copies):
        for x, copy in zip(tensors, changed):
            if copy is not x:
                x.copy_(copy)
