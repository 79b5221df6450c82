"""Data parallelism: every rank holds the model, reads its rows of the global batch, and gradients are summed.

A batch's weights already hold the global normaliser, so that the sum over ranks is the gradient of the global mean.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """Who takes part, and where this one computes."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls) -> Ranks:
        """One rank, or those that torchrun started (it sets RANK, WORLD_SIZE, LOCAL_RANK)."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        rank = int(os.environ.get("RANK", "0"))
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        if size > 1:
            dist.init_process_group("nccl" if cuda else "gloo")
        return cls(rank, size, device)

    @property
    def leads(self) -> bool:
        """Does this rank write the files?"""
        return self.rank == 0

    def sum_(self, tensors: list[Tensor]) -> None:
        """Sum each tensor over the ranks, in place, in one message a dtype."""
        if self.size == 1:
            return
        for dtype in {tensor.dtype for tensor in tensors}:
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            dist.all_reduce(flat)
            for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same])):
                tensor.copy_(part.view_as(tensor))

    def wait(self) -> None:
        """Until every rank is here."""
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
