"""How far apart are two runs? The one place that says it: of weights and of moments tensor by tensor, of what they wrote down number by number.

    distance(a, b)                     ‖b − a‖ beside ‖a‖
    distance(a, b, begun=c)            of weights ‖(b − c) − (a − c)‖ beside how far a moved from c, ‖a − c‖
    distance(a, b, begun=c, other=d)   as before, where b began with d: (b − d) − (a − c)

What rounding alone does is measured beside it: ``perturbed`` copies a checkpoint with each weight one rounding larger or smaller, and the
distance of a run that goes on from the copy is the least that another distance means anything by.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import Checkpoint

RANDOM = "rng"  # among the moments: a state, of which half a difference means as much as a whole one
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Apart:
    """One tensor, or several together: how far two runs are apart, beside the size that it is a share of."""

    apart: float
    size: float

    @property
    def share(self) -> float:
        """
        >>> Apart(0.1, 2.0).share, Apart(0.0, 0.0).share, Apart(0.1, 0.0).share
        (0.05, 0.0, inf)
        """
        return share(self.apart, self.size)


@dataclass(frozen=True)
class Distance:
    """By the tensor's name. A tensor that only one has, or of another shape, is infinitely far."""

    weights: Mapping[str, Apart]
    moments: Mapping[str, Apart]

    def shares(self) -> dict[str, float]:
        """Of all tensors."""
        return {name: one.share for name, one in (*self.weights.items(), *self.moments.items())}


def distance(a: Checkpoint, b: Checkpoint, begun: Tensors | None = None, other: Tensors | None = None) -> Distance:
    """Of ``b`` from ``a``, in fp64. ``begun``: the weights that they began with; ``other``: those that ``b`` did, if they are not the same."""
    return Distance(apart(a.model, b.model, begun, other), apart(a.optimizer, b.optimizer))


def apart(a: Tensors, b: Tensors, begun: Tensors | None = None, other: Tensors | None = None) -> dict[str, Apart]:
    """``distance`` of some tensors alone."""
    found = {}
    other = begun if other is None else other
    for name in sorted((a.keys() | b.keys()) - {RANDOM}):
        one, two = a.get(name), b.get(name)
        lost = begun is not None and other is not None and (name not in begun or name not in other)
        if one is None or two is None or one.shape != two.shape or lost:
            found[name] = Apart(math.inf, 1.0)
            continue
        starts = (None, None) if begun is None or other is None else (begun[name], other[name])
        found[name] = between(one, two, *starts)
    return found


def between(one: Tensor, two: Tensor, begun: Tensor | None = None, other: Tensor | None = None) -> Apart:
    """``distance`` of two tensors of one shape."""
    way, others = one.double(), two.double()
    if begun is not None and other is not None:
        way, others = way - begun.double(), others - other.double()
    return Apart(float((others - way).norm()), float(way.norm()))


def by_kind(moments: Mapping[str, Apart]) -> dict[str, Apart]:
    """Of moments together, by kind (``exp_avg``, ``exp_avg_sq``, ``momentum``), as their sizes are unrelated."""
    kinds = sorted({name.partition(".")[0] for name in moments})
    return {kind: together(one for name, one in moments.items() if name.partition(".")[0] == kind) for kind in kinds}


def unlike(a: Checkpoint, b: Checkpoint) -> str:
    """The first tensor that has no counterpart of its shape and dtype; '': none."""
    for ours, theirs in ((a.model, b.model), (a.optimizer, b.optimizer)):
        for name in sorted(ours.keys() | theirs.keys()):
            one, two = ours.get(name), theirs.get(name)
            if one is None or two is None or one.shape != two.shape or one.dtype != two.dtype:
                return name
    return ""


def same_bits(a: Checkpoint, b: Checkpoint) -> bool:
    """Are weights and moments equal? What was written down is not asked: a diagnosis may round otherwise where its numbers lie otherwise
    in memory."""
    pairs = [
        (ours[name], theirs[name])
        for ours, theirs in ((a.model, b.model), (a.optimizer, b.optimizer))
        for name in ours
        if name in theirs
    ]
    return not unlike(a, b) and all(torch.equal(one, two) for one, two in pairs)


def weights_apart(a: Tensors, b: Tensors) -> list[str]:
    """The names of weights that are not the same to the bit in both."""
    same = lambda name: name in a and name in b and a[name].equal(b[name])
    return sorted(name for name in a.keys() | b.keys() if not same(name))


def sizes(tensors: Tensors) -> dict[str, float]:
    """The norm of each tensor of floats."""
    return {name: float(t.double().norm()) for name, t in tensors.items() if t.is_floating_point()}


def together(parts: Iterable[Apart]) -> Apart:
    """Several tensors as one long one.

    >>> together([Apart(3.0, 1.0), Apart(4.0, 0.0)])
    Apart(apart=5.0, size=1.0)
    """
    held = list(parts)
    return Apart(length(one.apart for one in held), length(one.size for one in held))


def length(parts: Iterable[float]) -> float:
    """The norm of a vector that is given by the norms of its parts."""
    return math.sqrt(math.fsum(part * part for part in parts))


def share(difference: float, size: float) -> float:
    """A difference as a share of a size; infinite where that is nothing, or the difference no number."""
    if difference == 0:
        return 0.0
    found = difference / size if size > 0 else math.inf
    return math.inf if math.isnan(found) else found


def values_apart(one: Any, other: Any, ignored: Collection[str] = (), where: str = "") -> Iterator[tuple[str, Apart]]:
    """Where two JSON values differ, and how far. Floats differ by a share of the larger one; all else wholly or not at all. Of the keys in
    ``ignored`` only the type counts.

    >>> list(values_apart({"loss": 2.0, "time": 5.0}, {"loss": 2.5, "time": 9.0}, {"time"}, "line 1"))
    [('line 1: loss', Apart(apart=0.5, size=2.5))]
    """
    wholly = Apart(math.inf, 1.0)
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            yield f"{where}: other keys: {', '.join(sorted(map(str, one.keys() ^ other.keys()))[:5])}", wholly
            return
        for key in one:
            if key not in ignored:
                yield from values_apart(one[key], other[key], ignored, f"{where}: {key}")
            elif type(one[key]) is not type(other[key]):
                yield f"{where}: {key} is no {type(one[key]).__name__}", wholly
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other)):
            yield from values_apart(*pair, ignored, f"{where}[{number}]")
    elif type(one) is float and type(other) is float:
        if one != other and not (math.isnan(one) and math.isnan(other)):
            finite = math.isfinite(one) and math.isfinite(other)
            yield where, Apart(abs(one - other), max(abs(one), abs(other))) if finite else wholly
    elif type(one) is not type(other) or one != other:
        yield f"{where}: {str(other)[:80]} where the baseline has {str(one)[:80]}", wholly


def shares_of(values: Sequence[float | None], others: Sequence[float | None]) -> list[float]:
    """How far ``others`` are from ``values``, as shares of them; infinite where one is missing.

    >>> shares_of([2.0, 4.0, None], [2.0, 3.0, 1.0])
    [0.0, 0.25, inf]
    """
    found = []
    for at, value in enumerate(values):
        other = others[at] if at < len(others) else None
        found.append(math.inf if value is None or other is None else share(abs(value - other), abs(value)))
    return found


# -- what rounding does ------------------------------------------------------------------------------------------------
def perturbed(checkpoint: Path, target: Path, unit: float, seed: int) -> Path:
    """Save a copy of a checkpoint in ``target`` whose weights are each ``unit`` of themselves larger or smaller, by a coin; once."""
    made = target / checkpoint.name
    if not made.exists():
        whole = checkpoints.load(checkpoint)
        draw = torch.Generator().manual_seed(seed)
        coin = lambda tensor: torch.randint(0, 2, tensor.shape, generator=draw) * 2 - 1
        model = {
            name: tensor * (1 + unit * coin(tensor)) if tensor.is_floating_point() else tensor
            for name, tensor in whole.model.items()
        }
        target.mkdir(parents=True, exist_ok=True)
        checkpoints.save(target, replace(whole, model=model))
    return made
