"""Estimates how far rounding alone moves a run of the preflight: the noise with which its judge compares the other runs.

Nudged runs start from weights each of which is changed by one rounding. They differ from the straight run by rounding only. Their differences are
small numbers that scatter around zero, so one of them says little: at a given step it is below a tenth of its usual size in 8 of 100 runs.
A difference of another run, divided by such a chance value, looks like a fault. So the noise of a quantity is never taken from one number:

- **over runs**: the square of the noise at a step is the mean square over all nudged runs. With n independent normal differences,
  (difference of another run) / noise has Student's t distribution with n degrees of freedom. For n = 4, the number of runs, |t| > 10 has a
  probability of 0.06 %; for the n = 2 of two runs it was 1 %, at each of some hundred comparisons. (The old bound took the larger of two.)
- **over steps**: the mean square of a step is at least the mean over the ``WINDOW`` steps around it: 20 differences, t > 10 in 10^-9.
  At a step whose batch is sensitive all runs scatter more, so the step's own mean square counts if it is larger.
- **growth**: weights that differ make gradients that differ, so differences persist and grow, sometimes by a factor of 1,000 in 20 steps. The
  variance at a step is therefore at least that of each step before it. (Of a sequence of variances that cannot fall, a running maximum is the
  cautious estimate. The most likely one, isotonic regression, would divide a sensitive step's variance among its calm successors.)
- **over tensors**: a tensor has one difference in a run, at the last step. Its noise is the root mean square over the runs, and at least the median
  over the tensors of its kind (weights, first moments, second moments).

Two limits come from the number format, because the nudged runs cannot show them. They do all their sums in the same order:

- ``LEAST``: metrics are fp32 numbers. A loss or norm that is itself rounded differs by some units in the last place (2^-23 = 1.2e-7) where the
  nudged runs happen to agree to the bit.
- ``sum_error``: the gradient norm is a sum of as many squares as there are weights. Ranks that split the weights add it up in shorter parts. A sum
  of n positive fp32 numbers is wrong by up to n · 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., §4.2), and in one
  direction, because the small addends lose their last bits. On a CPU, torch's norm of 131,072 values is too small by 3e-6, of 8 million by
  8e-4. No theory tells the order of a sum, so the error is measured: ``factory.runs.distance.measure_norm_error`` takes the norms of the straight
  run's first moments in fp32 and exactly. Measured at width 256: 1.2e-5 for one tensor, and two ranks differ by 5e-6, at single steps by 1.2e-5.
  ``SUM_ERRORS`` times the error is allowed to the gradient norm of runs on several ranks, and to nothing else. A measured error can be small by
  chance too. So at least sqrt(n) · 2^-24 is allowed: the error of a sum of n numbers, each addition of which is rounded by chance (Higham and Mary
  2019, A new approach to probabilistic rounding error analysis, theorem 2.4), in a norm with a margin of two.

Clipping divides every gradient by that norm, so a norm of other rounding (but within its limit) moves all moments and weights from the first
step on. ``compute_early_excess`` says how many times the noise it is in the first steps. As differences grow alike, the noise of the later numbers
of that run is multiplied by it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WINDOW = 5  # steps over which noise is pooled
LEAST = 1e-6  # share of a value: a smaller difference is always accepted
GRAD_NORM = "grad_norm"  # the series that is a sum over all weights
SUM_ERRORS = 3.0  # largest difference of two orders of a sum, in multiples of the error that was measured at two steps
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum", "step")  # kinds of optimiser tensors; all other tensors are weights


@dataclass(frozen=True)
class DistanceFromStraightRun:
    """How far a run is from the straight run, as shares of the straight run's values.

    ``series``: by key of metrics.jsonl, one value for each step. ``tensors``: by name. For a weight: the difference between the two changes
    since step LEAD, as a share of the straight run's change. For ``exp_avg.<weight>`` and other moments: a share of their norm.
    """

    series: Mapping[str, Sequence[float]]
    tensors: Mapping[str, float]


@dataclass(frozen=True)
class RoundingNoise:
    """The standard deviation that rounding gives each number of a run, as a share of the number."""

    series: Mapping[str, Sequence[float]]  # by key of metrics.jsonl: by step, never falling
    early: Mapping[str, float]  # by key: pooled over the first ``WINDOW`` steps
    tensors: Mapping[str, float]
    kinds: Mapping[str, float]  # by kind of tensor: the median

    @property
    def is_measured(self) -> bool:
        """False if there are no runs, or no step at which all runs have a finite number of a series."""
        return bool(self.series) and all(any(map(math.isfinite, values)) for values in self.series.values())

    def estimate_tensor_noise(self, name: str) -> float:
        """Return the noise of a tensor: its own, or the median of its kind if that is larger."""
        return max(self.tensors.get(name, 0.0), self.kinds.get(find_tensor_kind(name), 0.0))


def estimate_rounding_noise(nudged: Sequence[DistanceFromStraightRun]) -> RoundingNoise:
    """Return the noise of each number, from the distances of the nudged runs.

    Two runs that agree by chance at the first step, where another run may well differ by 2e-7:

    >>> runs = [DistanceFromStraightRun({"loss": [0.0, 1e-7, 3e-7, 1e-7, 1e-7, 1e-7]}, {"w": 3e-6, "v": 0.0}) for _ in range(2)]
    >>> noise = estimate_rounding_noise(runs)
    >>> [f"{value:.1e}" for value in noise.series["loss"]]
    ['1.5e-07', '1.5e-07', '3.0e-07', '3.0e-07', '3.0e-07', '3.0e-07']
    >>> noise.estimate_tensor_noise("v")
    1.5e-06
    """
    names = sorted({name for run in nudged for name in run.series})
    squares = {
        name: [_mean_square(values) for values in zip(*(run.series[name] for run in nudged), strict=True)]
        for name in names
    }
    tensors = {
        name: math.sqrt(_mean_square([run.tensors.get(name, 0.0) for run in nudged]))
        for name in sorted({name for run in nudged for name in run.tensors})
    }
    by_kind: dict[str, list[float]] = {}
    for name, noise in tensors.items():
        by_kind.setdefault(find_tensor_kind(name), []).append(noise)
    return RoundingNoise(
        {name: _pool_over_steps(values) for name, values in squares.items()},
        {name: math.sqrt(_mean(values[:WINDOW])) for name, values in squares.items()},
        tensors,
        {kind: statistics.median(found) for kind, found in by_kind.items()},
    )


def estimate_order_effect(sum_error: float, terms: int) -> float:
    """Return how much two orders of an fp32 sum may change a norm, as a share. ``sum_error``: as measured. ``terms``: the number of squares.

    >>> f"{estimate_order_effect(6e-7, 65536):.1e} {estimate_order_effect(1.2e-5, 131072):.1e}"
    '1.5e-05 3.6e-05'
    """
    return max(SUM_ERRORS * sum_error, math.sqrt(terms) * 2.0**-24)


def compute_early_excess(noise: RoundingNoise, grad_norm: Sequence[float], explained: float) -> float:
    """Return how many times the noise a run's gradient norm differs in the first ``WINDOW`` steps. What is more than ``explained`` does not count.

    >>> noise = RoundingNoise({}, {"grad_norm": 2e-7}, {}, {})
    >>> round(compute_early_excess(noise, [5e-6] * 9, explained=9e-6)), round(compute_early_excess(noise, [5e-3] * 9, explained=9e-6))
    (25, 45)
    """
    own, usual = math.sqrt(_mean([share * share for share in grad_norm[:WINDOW]])), noise.early.get(GRAD_NORM, 0.0)
    return min(own, explained) / usual if usual > 0 else 0.0


def find_tensor_kind(tensor: str) -> str:
    """``exp_avg`` for ``exp_avg.embedding``; ``weight`` for a weight, whose name is that of the model."""
    kind = tensor.partition(".")[0]
    return kind if kind in MOMENTS else "weight"


def _pool_over_steps(squares: Sequence[float]) -> list[float]:
    """Return the noise by step, from the mean squares by step. A step without a finite mean square has infinite noise, and no part in the others'."""
    noise, least = [], 0.0
    for at, own in enumerate(squares):
        first = max(0, min(at - WINDOW // 2, len(squares) - WINDOW))
        least = max(least, _mean(squares[first : first + WINDOW]), own if math.isfinite(own) else 0.0)
        noise.append(math.sqrt(least) if math.isfinite(own) else math.inf)
    return noise


def _mean_square(values: Sequence[float]) -> float:
    return math.fsum(value * value for value in values) / len(values)


def _mean(squares: Sequence[float]) -> float:
    """The mean of the finite numbers; 0 if there are none."""
    finite = [square for square in squares if math.isfinite(square)]
    return math.fsum(finite) / len(finite) if finite else 0.0
