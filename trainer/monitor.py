"""How healthy the updates are: update-to-weight ratio and gradient noise scale, one layer a step, in turn.

Exact numbers need passes over weights and gradients that the step itself does not make. One layer a step makes their
cost that of one layer; after as many steps as there are layers all have been measured.

The gradient noise scale B = tr(Σ) / |G|² (McCandlish et al. 2018, arXiv 1812.06162 §2.2) is the batch size, in
supervised tokens, at which noise and signal are equal. Their estimator compares two batch sizes; a run has one. Here
the optimiser's running mean m of past gradients stands in for a second, independent sample of the same gradient:
E[g · m] = |G|², E[|g|²] = |G|² + tr(Σ) / tokens. It lags by as many steps as m looks back on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.optimizer import Optimizer
from trainer.parallel import Ranks, copies, local

SMOOTHING = 0.9  # of the two sums of the noise scale, per round of all layers


def layer_of(name: str) -> str:
    """``blocks.3`` of ``blocks.3.q``; what is in no block is the embedding's."""
    return ".".join(name.split(".")[:2]) if name.startswith("blocks.") else "embedding"


@dataclass(frozen=True)
class Before:
    """Of the layer whose turn it is, before the update."""

    layer: str
    weights: dict[str, Tensor]
    sums: Tensor  # [|g|², g · m], this rank's share


class Monitor:
    """``begin`` before an update and ``end`` after it. Its state is in the checkpoint."""

    def __init__(self, optimizer: Optimizer, ranks: Ranks) -> None:
        self.optimizer, self.ranks = optimizer, ranks
        self.layers: dict[str, list[str]] = {}
        for name in optimizer.parameters:
            self.layers.setdefault(layer_of(name), []).append(name)
        self.sums: dict[str, list[float]] = {}  # layer → smoothed [|g|², g · m]

    def layer_norms(self, squares: Tensor) -> dict[str, Tensor]:
        """Gradient norm by layer from Σ gradient² by parameter, in the order of ``optimizer.parameters``."""
        by_name = dict(zip(self.optimizer.parameters, squares.unbind()))
        return {layer: torch.stack([by_name[n] for n in names]).sum().sqrt() for layer, names in self.layers.items()}

    @torch.no_grad()
    def begin(self, step: int, gradients: dict[str, Tensor], divide_by: Tensor, momentum_steps: int) -> Before:
        layer = list(self.layers)[step % len(self.layers)]
        sums = torch.zeros(2, device=divide_by.device)
        for name in self.layers[layer]:
            found = self.optimizer.momentum(name)
            if found is None or not momentum_steps:
                continue
            running, newest = found
            share = 1 / copies(self.optimizer.parameters[name])
            grad = gradients[name].flatten() / divide_by
            unbiased = 1 - (1 - newest) ** momentum_steps
            sums += torch.stack((grad @ grad, grad @ running.flatten() / unbiased)) * share
        weights = {name: local(self.optimizer.parameters[name]).clone() for name in self.layers[layer]}
        return Before(layer, weights, sums)

    @torch.no_grad()
    def end(self, before: Before, tokens: int, skipped: bool) -> dict[str, Any]:
        """The record of this step: ``update_ratio/<layer>`` and, once every layer had its turn, ``noise_scale``."""
        sums = torch.zeros(4, device=before.sums.device)
        sums[:2] = before.sums
        for name, old in before.weights.items():
            parameter = self.optimizer.parameters[name]
            moved = local(parameter) - old
            sums[2:] += torch.stack((moved.square().sum(), old.square().sum())) / copies(parameter)
        self.ranks.sum_(sums)
        grad_square, agreement, moved_square, weight_square = sums.tolist()
        record: dict[str, Any] = {f"update_ratio/{before.layer}": (moved_square / max(weight_square, 1e-30)) ** 0.5}
        if not skipped and grad_square:
            old_sums = self.sums.get(before.layer, [grad_square, agreement])
            new_sums = [SMOOTHING * a + (1 - SMOOTHING) * b for a, b in zip(old_sums, (grad_square, agreement))]
            self.sums[before.layer] = new_sums
        if len(self.sums) == len(self.layers):
            whole, signal = (sum(held) for held in zip(*self.sums.values()))
            # without agreement there is no signal to tell from the noise
            record["noise_scale"] = tokens * max(0.0, whole - signal) / signal if signal > 0 else None
        return record

    def state_dict(self) -> dict[str, Any]:
        return dict(self.sums)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = {layer: list(sums) for layer, sums in state.items() if layer in self.layers}
