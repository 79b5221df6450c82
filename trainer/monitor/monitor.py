"""Measures updates: the update-to-weight ratio and the gradient noise scale. Every fourth step it measures one layer, in turn.

Exact numbers need extra passes over weights and gradients. Measuring one layer at a time costs the passes of one layer. All layers are
measured after four steps for each layer.

The gradient noise scale B = tr(Σ) / |G|² is the batch size, in supervised tokens, at which noise and signal are equal
(McCandlish et al. 2018, arXiv 1812.06162 §2.2; the estimator is that of their appendix A.1, with the two halves of a batch as small
batches). A batch has N supervised tokens and the gradient g. Its halves have n₁ and n₂ supervised tokens, and contribute h₁ and h₂ = g − h₁
to g, at the same weights. Then E[h₁ · h₂] = n₁ n₂ / N² |G|² and E[|g|²] = |G|² + tr(Σ) / N. The estimates of tr(Σ) and |G|² are smoothed, and
their ratio is taken last.

If a step has several micro-batches, measuring a half costs a copy of one layer's gradient. If it has one micro-batch, splitting it makes the step
slower (by a seventh on two CPU cores). Therefore only every ``stability.noise_scale_every``-th step is split. All layers are then measured at
once: the copies of their gradients take less memory than the split saves in activations.

Limits: a rank must have an even number of rows. The running mean of past gradients cannot replace a half, because at the rates of training
consecutive gradients oppose each other: the result would be wrong by a factor between a few and hundreds. The tokens of one document are not
independent. Therefore the scale predicts the effect of more documents in a batch, but not of longer documents. The scale is smoothed over about 20
measurements, which are too few if it is above about a hundred batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer.monitor.hook import StepHook, UpdateOutcome, WeightUpdate
from trainer.optim.optimizer import Optimizer
from trainer.parallel.ranks import Ranks, count_tensor_copies, get_local_part

TURN_STEPS = 4  # number of steps from one layer's turn to the next layer's turn
SMOOTHING = 0.9  # of the two sums of the noise scale, per measurement


def find_layer_of_parameter(name: str) -> str:
    """The layer of a parameter: ``blocks.3`` for ``blocks.3.q``, and ``embedding`` for parameters outside of blocks."""
    return ".".join(name.split(".")[:2]) if "." in name else "embedding"


def select_numbers_by_layer(quantity: str, numbers: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """The numbers named ``<quantity>/<layer>``, by layer."""
    return {
        name.removeprefix(f"{quantity}/"): found for name, found in numbers.items() if name.startswith(f"{quantity}/")
    }


@dataclass(frozen=True)
class HalfBatchGradient:
    """The gradient from the first half of a step's rows, for one layer or for all layers."""

    gradients: dict[str, list[Tensor]]  # by layer: for each parameter, this rank's part, flat
    squares: dict[str, Tensor]  # by layer: for each parameter, Σ gradient²


@dataclass(frozen=True)
class LayerBeforeUpdate:
    """Values from before the update: weights of the layer to measure, and h₁ · h₂ of the layers that have halves."""

    layer: str | None = None  # None: no layer's turn
    weights: list[Tensor] = field(default_factory=list)  # by parameter, this rank's share
    norms: list[Tensor] = field(default_factory=list)  # of each
    # by layer measured: h₁ · h₂, this rank's share, fp32 scalar; none without halves
    agreements: dict[str, Tensor] = field(default_factory=dict)


class UpdateMonitor(StepHook):
    """The hook that measures update-to-weight ratios and the noise scale. The step also calls it between two backward passes
    (``after_half_batch``)."""

    key = "monitor"

    def __init__(self, optimizer: Optimizer, ranks: Ranks) -> None:
        self.optimizer, self.ranks = optimizer, ranks
        self.layers: dict[str, list[str]] = {}
        for name in optimizer.parameters:
            self.layers.setdefault(find_layer_of_parameter(name), []).append(name)
        # by parameter: 1 / the number of ranks that hold each of its elements
        self.shares = self._on_device(
            [1 / count_tensor_copies(parameter) for parameter in optimizer.parameters.values()]
        )
        self._shares = {
            layer: self._on_device([1 / count_tensor_copies(optimizer.parameters[name]) for name in names])
            for layer, names in self.layers.items()
        }
        self._is_in = self._on_device(  # [layers, parameters]
            [[find_layer_of_parameter(name) == layer for name in optimizer.parameters] for layer in self.layers]
        )
        self.sums: dict[str, list[float]] = {}  # layer → [tr(Σ), |G|², 1], smoothed from zero on
        self._half: HalfBatchGradient | None = None  # of the present step
        self._before = LayerBeforeUpdate()

    def find_layer_to_measure(self, step: int) -> str | None:
        """The layer to measure at a step; None at most steps."""
        return None if step % TURN_STEPS else list(self.layers)[step // TURN_STEPS % len(self.layers)]

    def compute_grad_norms_by_layer(self, squares: Tensor) -> Tensor:
        """Gradient norm by layer, in the order of ``layers``, from Σ gradient² by parameter."""
        return torch.where(self._is_in, squares, 0.0).sum(1).sqrt()

    def after_half_batch(self, step: int, split: bool) -> bool:
        """Called after the backward pass of half of the step's rows. Returns True if it kept their gradients. It keeps none in most steps.

        ``split``: the rows were one micro-batch, which was split for this measurement. Then all layers are measured.
        """
        turn = self.find_layer_to_measure(step)
        if not split and turn is None:
            return False
        gradients = self.optimizer.gradients()
        flat: dict[str, list[Tensor]] = {}
        squares: dict[str, Tensor] = {}
        for layer in self.layers if split or turn is None else [turn]:
            flat[layer], found = [], []
            for name in self.layers[layer]:
                flat[layer].append(gradients[name].flatten().clone())
                found.append(flat[layer][-1] @ flat[layer][-1])  # at once, while it is in the cache
            squares[layer] = torch.stack(found)
        self._half = HalfBatchGradient(flat, squares)
        return True

    @torch.no_grad()
    def before_update(self, update: WeightUpdate) -> None:
        half, self._half = self._half, None
        agreements: dict[str, Tensor] = {}
        if half is not None:
            for measured, firsts in half.gradients.items():
                wholes = (update.gradients[name].flatten() for name in self.layers[measured])
                across = torch.stack([first @ whole for first, whole in zip(firsts, wholes)])
                agreements[measured] = (self._shares[measured] * (across - half.squares[measured])).sum()
        layer = self.find_layer_to_measure(update.step)
        weights, norms = [], []
        for name in self.layers[layer] if layer else ():
            weights.append(get_local_part(self.optimizer.parameters[name]).clone())
            norms.append(weights[-1].norm())
        self._before = LayerBeforeUpdate(layer, weights, norms, agreements)

    @torch.no_grad()
    def after_update(self, update: WeightUpdate) -> dict[str, Tensor]:
        """Returns ``agreement/<layer>`` (h₁ · h₂ of each measured layer), ``lengths/<layer>`` (Σ update² and Σ weight² of the layer whose turn it is)
        and ``grad_norms`` (by layer, unclipped), all summed over all ranks. It overwrites its copies of the weights.
        """
        before, self._before = self._before, LayerBeforeUpdate()
        found = list(before.agreements.values())
        if before.layer is not None:
            moved = before.weights
            torch._foreach_sub_(
                moved, [get_local_part(self.optimizer.parameters[name]) for name in self.layers[before.layer]]
            )
            norms = torch.stack((torch.stack(torch._foreach_norm(moved)), torch.stack(before.norms)))
            found += (norms.square() * self._shares[before.layer]).sum(1)
        numbers = {}
        if found:
            sums = torch.stack(found)
            self.ranks.sum_over_ranks_in_place(sums)
            numbers = {f"agreement/{layer}": sums[number] for number, layer in enumerate(before.agreements)}
            if before.layer is not None:
                numbers[f"lengths/{before.layer}"] = sums[len(before.agreements) :]
        return numbers | {"grad_norms": self.compute_grad_norms_by_layer(update.squares_P)}

    def _on_device(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, device=self.ranks.device)

    def record(self, numbers: dict[str, list[float]], outcome: UpdateOutcome) -> dict[str, Any]:
        """Returns ``grad_norm/<layer>``, ``update_ratio/<layer>`` of the measured layer, and ``noise_scale`` once all layers were measured."""
        grad_norms = dict(zip(self.layers, numbers["grad_norms"]))
        record: dict[str, Any] = {f"grad_norm/{layer}": norm for layer, norm in grad_norms.items()}
        for layer, (moved, held) in select_numbers_by_layer("lengths", numbers).items():
            record[f"update_ratio/{layer}"] = (moved / max(held, 1e-30)) ** 0.5
        tokens, half_tokens = outcome.supervised, outcome.supervised_in_half
        if not outcome.skipped and 0 < half_tokens < tokens:
            for layer, (agreement,) in select_numbers_by_layer("agreement", numbers).items():
                signal = agreement * tokens**2 / (half_tokens * (tokens - half_tokens))
                old, new = self.sums.get(layer, [0.0] * 3), (tokens * (grad_norms[layer] ** 2 - signal), signal, 1.0)
                self.sums[layer] = [SMOOTHING * a + (1 - SMOOTHING) * b for a, b in zip(old, new)]
        if len(self.sums) == len(self.layers):
            noise, signal = self.compute_noise_and_signal()
            # without agreement there is no signal to distinguish from the noise
            record["noise_scale"] = max(0.0, noise) / signal if signal > 0 else None
        return record

    def compute_noise_and_signal(self) -> tuple[float, float]:
        """(tr(Σ), |G|²) of all layers together, smoothed. The order of the sum does not depend on the order in the state."""
        held = [self.sums[layer] for layer in self.layers if layer in self.sums]
        return sum(noise / weight for noise, _, weight in held), sum(signal / weight for _, signal, weight in held)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.sums)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = {layer: list(sums) for layer, sums in state.items() if layer in self.layers}
