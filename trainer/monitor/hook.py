"""The trainer's extension point: a hook watches a run, keeps its state in the checkpoints, and may report anomalies.

A step calls four methods of each hook in ``SegmentRun.hooks``, in this order:

    before_update(update)        the gradients are summed over the micro-batches, the weights are the old ones
    after_update(update)         the weights are the new ones; returns numbers as tensors on the device
    record(numbers, outcome)     gets the same numbers on the host; returns keys for the step's line in metrics.jsonl
    after_step(record)           gets the whole line; returns anomalies

The numbers of all hooks reach the host in the same transfer as the loss, so a hook adds no wait for the device. The first two methods must not
wait: they must not call ``.item()`` or ``.tolist()``, nor branch on a tensor.

With ``stability.read_every`` above one, several steps are launched before their numbers are read. Then the first two methods are called for later
steps before the last two are called for this step. The last two are called in the order of the steps. Therefore ``record`` must take everything
about its step from the numbers. Their names may carry information too. Each step must return tensors of its own, into which no later step writes.

To add a hook, write a subclass of ``StepHook`` and add it to ``SegmentRun.hooks``.
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
    onset: int | None = None  # the step where it began, at most ``step``; None: it was not searched
    where: str = ""  # domain/<name> · layer/<name> · rank/<number>; '': the whole model


@dataclass(frozen=True)
class WeightUpdate:
    """One update of the weights. Tensors are on the device."""

    step: int
    gradients: dict[str, Tensor]  # by parameter: this rank's part, unclipped
    squares_P: Tensor  # Σ gradient² by parameter, over all ranks, fp32
    load_LE: Tensor | None = (
        None  # tokens [expert layers, experts]; over all ranks in ``after_update``, this rank's in ``before_update``
    )


@dataclass(frozen=True)
class UpdateOutcome:
    """Facts about an update that the host knows after the step: numbers of tokens, and whether the update was skipped."""

    supervised: int  # tokens of the global batch that carry loss
    supervised_in_half: float  # the same for the rows of ``Monitor.after_half_batch``; 0 if it kept no gradients
    skipped: bool
    supervised_by_domain: Mapping[str, float] = field(
        default_factory=dict
    )  # tokens of the global batch that carry loss


class StepHook:
    """A hook that does nothing. A subclass overrides the methods that it needs."""

    key: str  # the unique name of its state in a checkpoint
    required = True  # False: a checkpoint may be older than the hook, and lack its state

    def before_update(self, update: WeightUpdate) -> None:
        """Called before the update. A hook may copy gradients or weights here, because the update changes them."""

    def after_update(self, update: WeightUpdate) -> dict[str, Tensor]:
        """Called after the update. Returns fp32 tensors on the device, of any shape, by unique names."""
        return {}

    def record(self, numbers: dict[str, list[float]], outcome: UpdateOutcome) -> dict[str, Any]:
        """Returns keys for the step's record. ``numbers``: what ``after_update`` returned, as flat lists on the host."""
        return {}

    def after_step(self, record: dict[str, Any]) -> list[Anomaly]:
        """Returns the anomalies of a step. ``record``: the step's line in metrics.jsonl. Measurements that run single steps do not call it."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a ``state_dict``. It is not called if the checkpoint lacks the state, which is allowed unless ``required``."""


def copy_numbers_to_host(*groups: dict[str, Tensor]) -> list[dict[str, list[float]]]:
    """The values of each tensor as a flat list under its name, for each group. All groups need one transfer and one wait for the device."""
    tensors = [tensor.reshape(-1) for group in groups for tensor in group.values()]
    values = iter(torch.cat(tensors).tolist())
    return [{name: list(islice(values, tensor.numel())) for name, tensor in group.items()} for group in groups]
