"""Do the ranks that hold copies of the same weights still hold the same bits?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.contract.checkpoint.region import Region
from trainer.parallel.ranks import Ranks


def apart(held: Mapping[str, tuple[Region, Tensor]], ranks: Ranks) -> list[str]:
    """Names of the tensors of which two ranks hold other bits of the same region. All ranks must ask, at the same step.

    ``held``: what this rank holds of each tensor, by name. A checkpoint has the first holder's copy alone, so nothing else shows
    that the others went another way. One rank holds no copies:

    >>> weight = torch.zeros(2, 3)
    >>> apart({"weight": (Region.of(weight), weight)}, Ranks(0, 1, weight.device))
    []
    """
    if ranks.size == 1:
        return []
    own = {name: (region.offset, region.shape, _hash(tensor)) for name, (region, tensor) in held.items()}
    of_ranks: list[dict[str, tuple[tuple[int, ...], tuple[int, ...], str]]] = [{} for _ in range(ranks.size)]
    dist.all_gather_object(of_ranks, own)
    return sorted(name for name in own if len({of[name] for of in of_ranks}) > len({of[name][:2] for of in of_ranks}))


def _hash(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
