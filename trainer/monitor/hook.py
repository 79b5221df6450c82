"""The trainer's extension point: a hook watches a run, keeps its state in the checkpoints, and may report anomalies.

A step calls each hook of ``Run.hooks`` four times, in this order:

    before_update(update)        gradients are summed over the micro-batches, weights are the old ones
    after_update(update)         weights are the new ones; returns numbers, still on the device
    record(numbers, outcome)     the same numbers on the host; returns keys for the step's line in metrics.jsonl
    after_step(record)           the whole line; returns anomalies

The numbers of all hooks reach the host in the transfer that the loss needs anyway, so a hook causes no wait of its own. The first two
calls must not wait: no ``.item()``, no ``.tolist()``, no branch on a tensor.

With ``stability.read_every`` above one, the first two calls of later steps come before the last two of this step. Those still come step by
step. Therefore everything that ``record`` must know of its step comes with the numbers; their names may carry it. A number must be a tensor
of its own step, into which no later step writes.
To add a hook: a subclass of ``StepHook``, and its place in ``Run.hooks``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Anomaly:
    """A line of anomalies.jsonl: something that a person should look at."""

    step: int
    # non_finite · skipped_outlier · loss_spike · loss_drop · grad_norm_jump · divergence · plateau · throughput_drop
    # domain_spike · domain_drop · update_jump · activation_jump · attention_logits · rank_grad_norm · router_collapse
    kind: str
    value: float
    usual: float  # the value to compare with: the window's median, the best one so far, the value before a plateau, or a limit
    deviations: float  # robust deviations above the usual value (negative: below it); for a limit, value / limit
    skipped: bool  # the update was skipped
    onset: int | None = None  # the step where it began, at most ``step``; None: not searched
    where: str = ""  # domain/<name> · layer/<name> · rank/<number>; '': the whole


@dataclass(frozen=True)
class WeightUpdate:
    """One update of the weights. Tensors are on the device."""

    step: int
    gradients: dict[str, Tensor]  # by parameter: this rank's share, unclipped
    squares_P: Tensor  # Σ gradient² by parameter, over all ranks, fp32
    load_LE: Tensor | None = (
        None  # tokens [expert layers, experts]; over all ranks in ``after_update``, this rank's in ``before_update``
    )


@dataclass(frozen=True)
class UpdateOutcome:
    """The facts of an update that the host knows."""

    supervised: int  # tokens of the global batch that carry loss
    supervised_in_half: float  # the same for the rows that ``Monitor.half`` measured; 0 if it measured none
    skipped: bool
    supervised_by_domain: Mapping[str, float] = field(
        default_factory=dict
    )  # tokens of the global batch that carry loss


class StepHook:
    """A hook that does nothing. A subclass overrides the calls that it needs."""

    key: str  # the unique name of its state in a checkpoint
    required = True  # False: a checkpoint may be older than the hook, and lack its state

    def before_update(self, update: WeightUpdate) -> None:
        """May copy gradients or weights, which the update changes."""

    def after_update(self, update: WeightUpdate) -> dict[str, Tensor]:
        """Numbers by unique names: fp32 tensors on the device, of any shape."""
        return {}

    def record(self, numbers: dict[str, list[float]], outcome: UpdateOutcome) -> dict[str, Any]:
        """Keys of the step's record. ``numbers``: the numbers of ``after_update``, flat, on the host."""
        return {}

    def after_step(self, record: dict[str, Any]) -> list[Anomaly]:
        """``record``: the step's line in metrics.jsonl. Not called by measurements that run single steps."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from a ``state_dict``. Not called if a checkpoint lacks the state of a hook that is not ``required``."""


def copy_to_host(*groups: dict[str, Tensor]) -> list[dict[str, list[float]]]:
    """Each tensor's values as a flat list under its name: one transfer, and one wait for the device, for all groups."""
    tensors = [tensor.reshape(-1) for group in groups for tensor in group.values()]
    values = iter(torch.cat(tensors).tolist())
    return [{name: list(islice(values, tensor.numel())) for name, tensor in group.items()} for group in groups]
