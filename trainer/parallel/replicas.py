"""Compares the copies of weights that several ranks hold. All copies must have the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.contract.checkpoint.region import Region
from trainer.parallel.ranks import Ranks


def find_differing_tensors(parts: Mapping[str, tuple[Region, Tensor]], ranks: Ranks) -> list[str]:
    """The names of tensors whose same region has different bits on two ranks. All ranks must call it at the same step.

    ``parts``: the region and the values of this rank's part of each tensor, by name. A checkpoint contains the copy of one rank only, so only this
    comparison can show that another copy diverged. With one rank there are no copies to compare:

    >>> weight = torch.zeros(2, 3)
    >>> find_differing_tensors({"weight": (Region.from_tensor(weight), weight)}, Ranks(0, 1, weight.device))
    []
    """
    if ranks.size == 1:
        return []
    own = {name: (region.offset, region.shape, _hash(tensor)) for name, (region, tensor) in parts.items()}
    of_ranks: list[dict[str, tuple[tuple[int, ...], tuple[int, ...], str]]] = [{} for _ in range(ranks.size)]
    dist.all_gather_object(of_ranks, own)
    return sorted(name for name in own if len({of[name] for of in of_ranks}) > len({of[name][:2] for of in of_ranks}))


def _hash(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
