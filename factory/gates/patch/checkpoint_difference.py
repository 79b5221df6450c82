"""Compares the checkpoints of two runs on the same data: the weights, and the other state from which the next segment continues.

The distance of two sets of weights is a share of the distance that training moved them. The distance of two optimiser states is a share of the change
that skipped steps cause.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from factory.runs.distance import (
    compute_relative_size,
    find_value_differences,
    measure_tensor_distances,
    sum_distances,
    sum_moment_distances_by_kind,
)
from kernels.contract.message import Message
from trainer.contract.checkpoint.format import Checkpoint, Tensors

# Keys of state.json that must be equal, and those that must be equal up to rounding.
EQUAL = ("step", "kind", "first_step", "data_plan", "sampler", "skipped")
ROUNDED_STATE_KEYS = ("detector",)
UNMOVED_DISTANCE = 1e9  # the distance if training moved no weight
ROUNDED = 0.1  # the share by which values under ROUNDED_STATE_KEYS (losses, gradient norms) may differ


def compute_weight_drift(
    candidate: Tensors,
    baseline: Tensors,
    origin: Tensors,
    include_worst_tensor: bool = True,
    candidate_origin: Tensors | None = None,
) -> float:
    """Return ‖candidate − baseline‖ / ‖baseline − origin‖ over all tensors. ``candidate_origin``: the candidate's start, if it began elsewhere.
    Then the difference of the two ways counts.

    With ``include_worst_tensor``, half the ratio of the worst tensor if that is larger.
    """
    each = measure_tensor_distances(baseline, candidate, origin, candidate_origin).values()
    worst = max((one.relative_distance for one in each), default=0.0)
    whole = sum_distances(each).relative_distance
    return min(max(whole, worst / 2) if include_worst_tensor else whole, UNMOVED_DISTANCE)


def compute_squared_moment_distances(one: Checkpoint | None, other: Checkpoint | None) -> dict[str, float]:
    """Return the squared distance of two optimiser states by kind (``exp_avg``, ``exp_avg_sq``, ``momentum``)."""
    assert one is not None and other is not None
    return {
        kind: found.apart**2
        for kind, found in sum_moment_distances_by_kind(
            measure_tensor_distances(other.optimizer, one.optimizer)
        ).items()
    }


def find_checkpoint_difference(
    candidate: Checkpoint | None,
    baseline: Checkpoint | None,
    distances_of_left_out_steps: Mapping[str, float],
    max_drift: float,
) -> Message | None:
    """Return a difference between the checkpoints that would change a run that continues from them. None: they are alike.

    Moments are compared by kind, because the sizes of kinds are unrelated. ``distances_of_left_out_steps``: kind → the squared distance that
    left-out steps cause. A kind may differ by ``max_drift`` times that distance.
    """
    assert candidate is not None and baseline is not None
    if lost := sorted(baseline.state.keys() - candidate.state.keys()):
        return Message("patch.state_lacks", "the candidate's state.json lacks the keys {keys}", keys=lost)
    if other := [key for key in EQUAL if candidate.state.get(key) != baseline.state.get(key)]:
        return _different_state(other)
    for key in ROUNDED_STATE_KEYS:
        if any(
            far.relative_distance > ROUNDED
            for _, far in find_value_differences(baseline.state.get(key), candidate.state.get(key))
        ):
            return _different_state([key])
    if _without_computing(candidate.state.get("recipe")) != _without_computing(baseline.state.get("recipe")):
        return _different_state(["recipe"])
    for name, tensor in sorted(baseline.optimizer.items()):
        found = candidate.optimizer.get(name)
        if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
            return Message(
                "patch.optimiser_shape",
                "the optimiser's tensor {tensor} is missing, or its shape or dtype is not that of the baseline's tensor",
                tensor=name,
            )
        if name.startswith("step.") and not torch.equal(found, tensor):
            return Message(
                "patch.optimiser_step", "the optimiser's tensor {tensor} differs from the baseline's", tensor=name
            )
    for kind, square in sorted(compute_squared_moment_distances(candidate, baseline).items()):
        off = compute_relative_size(square, distances_of_left_out_steps.get(kind, 0.0)) ** 0.5
        if off > max_drift:
            return Message(
                "patch.optimiser_apart",
                "the optimiser's values of {kind} differ too much from the baseline's. The difference is {share:.2g} times the effect of leaving out "
                "steps, and at most {most:g} times is allowed",
                kind=kind, share=off, most=max_drift,
            )  # fmt: skip
    return None


def _different_state(keys: list[str]) -> Message:
    return Message(
        "patch.state_differs",
        "the candidate's state.json and the baseline's state.json have different values of {keys}",
        keys=keys,
    )


def _without_computing(recipe: object) -> object:
    """Return a recipe without the keys that change how a step is computed, but not its result."""
    if not isinstance(recipe, dict) or not isinstance(recipe.get("batch"), dict):
        return recipe
    return recipe | {"compile": None, "batch": recipe["batch"] | {"micro_sequences": None}}
