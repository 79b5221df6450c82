"""Measures how far apart two runs are: weights and optimizer moments tensor by tensor, recorded values number by number.

    measure_checkpoint_distance(a, b)                           ‖b − a‖, as a share of ‖a‖
    measure_checkpoint_distance(a, b, start_a=c)                for weights ‖(b − c) − (a − c)‖, as a share of the way of a from c, ‖a − c‖
    measure_checkpoint_distance(a, b, start_a=c, start_b=d)     the same, if b began from d: ‖(b − d) − (a − c)‖

``save_perturbed_checkpoint`` helps to measure the effect of rounding: it copies a checkpoint with each weight larger or smaller by one rounding
error. A distance means something only if it is larger than the distance of a run from that copy.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.contract.message import Message
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import Checkpoint

RANDOM_STATE = "rng"  # a state that is stored among the moments and has no distance
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class TensorDistance:
    """The distance ``apart`` of one tensor (or of several together) in two runs, and the norm ``size`` of which it is a share."""

    apart: float
    size: float

    @property
    def relative_distance(self) -> float:
        """
        >>> TensorDistance(0.1, 2.0).relative_distance, TensorDistance(0.0, 0.0).relative_distance, TensorDistance(0.1, 0.0).relative_distance
        (0.05, 0.0, inf)
        """
        return compute_relative_size(self.apart, self.size)


@dataclass(frozen=True)
class CheckpointDistance:
    """Distances by name of the tensor. A tensor that only one run has, or that has two shapes, is infinitely far."""

    weights: Mapping[str, TensorDistance]
    moments: Mapping[str, TensorDistance]

    def list_relative_distances_by_tensor(self) -> dict[str, float]:
        """Return the share of each tensor, by name."""
        return {name: one.relative_distance for name, one in (*self.weights.items(), *self.moments.items())}


def measure_checkpoint_distance(
    a: Checkpoint, b: Checkpoint, start_a: Tensors | None = None, start_b: Tensors | None = None
) -> CheckpointDistance:
    """Return the distance of ``b`` from ``a``, in fp64. ``start_a``: the weights from which ``a`` began; ``start_b``: those of ``b``, if others."""
    return CheckpointDistance(
        measure_tensor_distances(a.model, b.model, start_a, start_b), measure_tensor_distances(a.optimizer, b.optimizer)
    )


def measure_tensor_distances(
    a: Tensors, b: Tensors, start_a: Tensors | None = None, start_b: Tensors | None = None
) -> dict[str, TensorDistance]:
    """Return the distance of each tensor by name, as in ``measure_checkpoint_distance``."""
    found = {}
    start_b = start_a if start_b is None else start_b
    for name in sorted((a.keys() | b.keys()) - {RANDOM_STATE}):
        one, two = a.get(name), b.get(name)
        lost = start_a is not None and start_b is not None and (name not in start_a or name not in start_b)
        if one is None or two is None or one.shape != two.shape or lost:
            found[name] = TensorDistance(math.inf, 1.0)
            continue
        starts = (None, None) if start_a is None or start_b is None else (start_a[name], start_b[name])
        found[name] = measure_tensor_distance(one, two, *starts)
    return found


def measure_tensor_distance(
    one: Tensor, two: Tensor, start_one: Tensor | None = None, start_two: Tensor | None = None
) -> TensorDistance:
    """Return the distance of two tensors of the same shape, as in ``measure_checkpoint_distance``."""
    way, others = one.double(), two.double()
    if start_one is not None and start_two is not None:
        way, others = way - start_one.double(), others - start_two.double()
    return TensorDistance(float((others - way).norm()), float(way.norm()))


def sum_moment_distances_by_kind(moments: Mapping[str, TensorDistance]) -> dict[str, TensorDistance]:
    """Sum the distances of moments by kind (``exp_avg``, ``exp_avg_sq``, ``momentum``): sizes of different kinds are not comparable."""
    kinds = sorted({name.partition(".")[0] for name in moments})
    return {
        kind: sum_distances(one for name, one in moments.items() if name.partition(".")[0] == kind) for kind in kinds
    }


def find_unmatched_tensor(a: Checkpoint, b: Checkpoint) -> str:
    """Return the name of the first tensor that has no counterpart of the same shape and dtype; '': none."""
    for ours, theirs in ((a.model, b.model), (a.optimizer, b.optimizer)):
        for name in sorted(ours.keys() | theirs.keys()):
            one, two = ours.get(name), theirs.get(name)
            if one is None or two is None or one.shape != two.shape or one.dtype != two.dtype:
                return name
    return ""


def have_same_bits(a: Checkpoint, b: Checkpoint) -> bool:
    """Return whether weights and moments are equal. Recorded values do not count, because another memory layout may round them differently."""
    pairs = [
        (ours[name], theirs[name])
        for ours, theirs in ((a.model, b.model), (a.optimizer, b.optimizer))
        for name in ours
        if name in theirs
    ]
    return not find_unmatched_tensor(a, b) and all(torch.equal(one, two) for one, two in pairs)


def find_different_weights(a: Tensors, b: Tensors) -> list[str]:
    """Return the names of the weights that are not bit-identical."""
    same = lambda name: name in a and name in b and a[name].equal(b[name])
    return sorted(name for name in a.keys() | b.keys() if not same(name))


def measure_tensor_norms(tensors: Tensors) -> dict[str, float]:
    """Return the norm of each floating-point tensor, by name."""
    return {name: float(t.double().norm()) for name, t in tensors.items() if t.is_floating_point()}


def measure_norm_error(tensors: Tensors) -> float:
    """Return the largest relative error of the fp32 norm of a tensor of ``tensors``: how wrong a sum of so many squares becomes in fp32.

    It differs from machine to machine, because the order of the sum does. torch's sum over 131,072 values on a CPU is too small by 3e-6.
    """
    found = 0.0
    for held in tensors.values():
        if held.is_floating_point() and held.numel() and math.isfinite(exact := float(held.double().norm())):
            found = max(found, compute_relative_size(abs(float(held.float().norm()) - exact), exact))
    return found


def sum_distances(parts: Iterable[TensorDistance]) -> TensorDistance:
    """Return the distance of several tensors as if they were one long tensor.

    >>> sum_distances([TensorDistance(3.0, 1.0), TensorDistance(4.0, 0.0)])
    TensorDistance(apart=5.0, size=1.0)
    """
    held = list(parts)
    return TensorDistance(
        compute_norm_from_part_norms(one.apart for one in held), compute_norm_from_part_norms(one.size for one in held)
    )


def compute_norm_from_part_norms(parts: Iterable[float]) -> float:
    """Return the norm of a vector, given the norms of its parts."""
    return math.sqrt(math.fsum(part * part for part in parts))


def compute_relative_size(difference: float, size: float) -> float:
    """Return ``difference`` / ``size``; 0 if the difference is 0, else infinite if the size is 0 or the difference is not a number."""
    if difference == 0:
        return 0.0
    found = difference / size if size > 0 else math.inf
    return math.inf if math.isnan(found) else found


def find_value_differences(
    one: Any, other: Any, ignored: Collection[str] = (), where: str = ""
) -> Iterator[tuple[str, TensorDistance]]:
    """Yield (place, distance) for each difference of two JSON values. The distance of floats is a share of the larger one, of other values infinite.

    For keys in ``ignored`` only the type is compared.

    >>> list(find_value_differences({"loss": 2.0, "time": 5.0}, {"loss": 2.5, "time": 9.0}, {"time"}, "line 1"))
    [('line 1: loss', TensorDistance(apart=0.5, size=2.5))]
    """
    wholly = TensorDistance(math.inf, 1.0)
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            keys = sorted(map(str, one.keys() ^ other.keys()))[:5]
            yield (
                Message(
                    "runs.other_keys",
                    "{where}: these keys are missing in the baseline or in the candidate: {keys}",
                    where=where,
                    keys=keys,
                ),
                wholly,
            )
            return
        for key in one:
            if key not in ignored:
                yield from find_value_differences(one[key], other[key], ignored, f"{where}: {key}")
            elif type(one[key]) is not type(other[key]):
                kind = type(one[key]).__name__
                yield (
                    Message("runs.other_type", "{where}: {key} is not of type {kind}", where=where, key=key, kind=kind),
                    wholly,
                )
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other)):
            yield from find_value_differences(*pair, ignored, f"{where}[{number}]")
    elif type(one) is float and type(other) is float:
        if one != other and not (math.isnan(one) and math.isnan(other)):
            finite = math.isfinite(one) and math.isfinite(other)
            yield where, TensorDistance(abs(one - other), max(abs(one), abs(other))) if finite else wholly
    elif type(one) is not type(other) or one != other:
        yield (
            Message(
                "runs.other_value",
                "{where}: the value is {value}, but the baseline has {baseline}",
                where=where, value=str(other)[:80], baseline=str(one)[:80],
            ),
            wholly,
        )  # fmt: skip


def compute_relative_differences(values: Sequence[float | None], others: Sequence[float | None]) -> list[float]:
    """Return the distance of each of ``others`` from its value in ``values``, as a share of the latter; infinite where one is missing.

    >>> compute_relative_differences([2.0, 4.0, None], [2.0, 3.0, 1.0])
    [0.0, 0.25, inf]
    """
    found = []
    for at, value in enumerate(values):
        other = others[at] if at < len(others) else None
        found.append(
            math.inf if value is None or other is None else compute_relative_size(abs(value - other), abs(value))
        )
    return found


# -- the effect of rounding --------------------------------------------------------------------------------------------
def save_perturbed_checkpoint(checkpoint: Path, target: Path, unit: float, seed: int) -> Path:
    """Save a copy of a checkpoint in ``target``, with each weight at random larger or smaller by the share ``unit``. An existing copy is kept."""
    made = target / checkpoint.name
    if not made.exists():
        whole = checkpoints.load_checkpoint(checkpoint)
        draw = torch.Generator().manual_seed(seed)
        coin = lambda tensor: torch.randint(0, 2, tensor.shape, generator=draw) * 2 - 1
        model = {
            name: tensor * (1 + unit * coin(tensor)) if tensor.is_floating_point() else tensor
            for name, tensor in whole.model.items()
        }
        target.mkdir(parents=True, exist_ok=True)
        checkpoints.save_checkpoint(target, replace(whole, model=model))
    return made
