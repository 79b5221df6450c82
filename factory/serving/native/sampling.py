"""From logits to a token: drawn by temperature, top-k and top-p from a generator of the request's own.

A request's draws depend on its seed alone, never on who shares its batch.
"""

from __future__ import annotations

import torch

from factory.serving.api.defaults import Sampling


def draw(logits_V: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token. ``generator`` lives on the CPU; one number is drawn from it, also where only one token is possible."""
    at = float(torch.rand(1, generator=generator, dtype=torch.float64))
    sorted_V, order_V = (logits_V.double().cpu() / max(sampling.temperature, 1e-6)).sort(descending=True, stable=True)
    if sampling.top_k:
        sorted_V = sorted_V[: sampling.top_k]
    share_V = sorted_V.softmax(0)
    total_V = share_V.cumsum(0)
    kept = 1 + int((total_V < sampling.top_p).sum()) if sampling.top_p < 1 else len(total_V)
    total_V = total_V[:kept]
    place = int(torch.searchsorted(total_V, at * float(total_V[-1]), right=True))
    return int(order_V[min(place, len(total_V) - 1)])
