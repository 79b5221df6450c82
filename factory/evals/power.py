"""The power of a comparison: the smallest gain that passes all bounds together with a probability of 80 %.

The gain is that of another candidate on the same items, whose standard error is another draw. So both the known and the future standard error are
estimates. Their squares scatter like χ² with the bound's degrees of freedom ν, reduced for heavy tails: the variance of a squared error is 2/ν + κ/n
for items of excess kurtosis κ (Cramér 1946, §27.4), so ν is divided by 1 + κ/2. With κ = 0 and the same error for both, this is the power of the
noncentral t. Bounds of target and domains are positively correlated, so treating them as independent is conservative. This leaves room for the
guards' tails, so only the target has a κ. Guards share their level by Holm's method (1979): if all guards pass in one order, each at its step, all
pass by Holm's method. The order used starts with the guard that is surest at the gain in question. ``make judge-calibration`` counts promotions: 80 %
or more. The share is larger if a guard has fewer sources (``benchmarks/judge/results.txt`` says why).

``ScoredGuard`` is a guard whose items are right or wrong. Its power follows from facts that no candidate can change: items, groups, margin, level,
and the share of items on which two equally good models differ. A guard that more than one in five equally good models would fail is set aside. Then
it holds a release only if the measured loss exceeds the margin, and only if equally good models seldom have such a loss (``is_loss_informative``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from factory.evals.statistics import Gain
from kernels.contract.message import Message

POWER = 0.8
TAILS = 6.0  # κ of a Student t with 5 degrees of freedom, from which the calibration draws items
NODES = 24  # points that represent the distribution of a standard error
MOST = 8.0  # bits per byte: the largest possible gain
MOST_FAILED = 0.2  # a guard that more equally good models fail is set aside
TOGETHER = (
    0.5  # ρ of right and wrong between equally good models: assumed; ``python -m benchmarks.judge.sides`` measures it
)
LARGEST = 10_000_000  # most items that ``find_items_needed`` returns


@dataclass(frozen=True)
class RequiredBound:
    """A one-sided bound at ``level`` that must lie above ``floor``. ``moves``: whether a larger gain of the candidate raises it. ``tails``: κ."""

    measured: Gain
    level: float
    floor: float = 0.0
    moves: bool = True
    tails: float = 0.0

    def compute_pass_probability(self, gain: float) -> float:
        """Return the probability that a candidate with the true gain ``gain`` passes. Without ``moves``, the true gain is 0."""
        if self.measured.compute_confidence_bound(self.level) is None:
            return 0.0
        assert self.measured.error is not None and self.measured.effective is not None
        above = (gain if self.moves else 0.0) - self.floor
        if not self.measured.error:
            return float(above > 0)
        from scipy.special import ndtr, stdtrit  # takes a moment, which only a comparison needs to wait for

        freedom = self.measured.effective - 1
        error_N = _errors(round(freedom, 1), self.tails)
        here_N, there_N = above / self.measured.error * error_N, float(stdtrit(freedom, 1 - self.level)) * error_N
        return float(ndtr(here_N[:, None] - there_N).mean())


@dataclass(frozen=True)
class ScoredGuard:
    """The properties of a guard on items scored from 0 to 1 that no candidate can change.

    ``variance``: the variance of the champion's item values (``compute_smoothed_variance``). The difference of two equally good models on an item
    has the
    variance 2 · variance · (1 − ρ). For right and wrong, this is the share of items that change, 2p(1 − p)(1 − ρ). ``level``: the level of Holm's
    last step.

    >>> small = ScoredGuard(items=36, groups=36.0, variance=0.24, margin=0.15, level=0.05)
    >>> round(small.standard_error, 3), round(small.pass_rate_of_equal_models, 2), small.is_reliable, small.find_items_needed()
    (0.082, 0.56, False, 68)
    >>> ScoredGuard(items=95, groups=95.0, variance=0.24, margin=0.15, level=0.05).is_reliable
    True
    """

    items: int
    groups: float  # effective number of groups of equal size
    variance: float
    margin: float
    level: float

    @property
    def standard_error(self) -> float:
        """The standard error of the difference between two equally good models."""
        return math.sqrt(2 * self.variance * (1 - TOGETHER) / self.items)

    @property
    def pass_rate_of_equal_models(self) -> float:
        """The share of equally good models that pass the guard."""
        if self.groups <= 1:
            return 0.0  # one group has no spread
        if not self.standard_error:
            return float(self.margin > 0)
        from scipy.special import ndtr, stdtrit  # takes a moment, which only a comparison needs to wait for

        freedom = self.groups - 1
        tested_N = float(stdtrit(freedom, 1 - self.level)) * _errors(round(freedom, 1), 0.0)
        return float(ndtr(self.margin / self.standard_error - tested_N).mean())

    @property
    def is_reliable(self) -> bool:
        """Whether at most one in five equally good models would fail the guard."""
        return self.pass_rate_of_equal_models >= 1 - MOST_FAILED

    @property
    def false_failure_rate(self) -> float:
        """The share of equally good models whose measured loss exceeds the margin."""
        from scipy.special import ndtr  # takes a moment, which only a comparison needs to wait for

        return float(ndtr(-self.margin / self.standard_error)) if self.standard_error else 0.0

    @property
    def is_loss_informative(self) -> bool:
        """Whether a measured loss beyond the margin is informative, because at most one in five equally good models has such a loss."""
        return self.groups > 1 and self.false_failure_rate <= MOST_FAILED

    @property
    def effect_when_set_aside(self) -> Message:
        """The effect that the guard still has after it is set aside."""
        if not self.is_loss_informative:
            return Message(
                "power.only_rejects",
                "Until there are more items, the guard never causes the verdict hold. The guard still causes the verdict reject if the "
                "candidate's confidence bound shows a loss of more than {margin:.3f}.",
                margin=self.margin,
            )  # fmt: skip
        return Message(
            "power.holds_measured_loss",
            "Until there are more items, the guard causes the verdict hold only if the measured loss is more than {margin:.3f}. By chance, "
            "{chance:.0f} of 100 equally good models have such a measured loss. The guard still causes the verdict reject if the "
            "candidate's confidence bound shows such a loss.",
            margin=self.margin, chance=100 * self.false_failure_rate,
        )  # fmt: skip

    def find_items_needed(self) -> int | None:
        """Return the number of items that make the guard reliable, with the same number of items per group; None if no number is enough."""
        low, high = 1, max(self.items, 2)
        while not self._of(high).is_reliable:
            low, high = high, 2 * high
            if high > LARGEST:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._of(middle).is_reliable else (middle, high)
        return high

    def find_margin_needed(self) -> float | None:
        """Return the smallest margin, in hundredths, that makes the guard reliable at its present size; None if no margin below 1 does.

        >>> ScoredGuard(items=36, groups=36.0, variance=0.24, margin=0.15, level=0.05).find_margin_needed()
        0.21
        """
        hundredths = range(math.floor(100 * self.margin) + 1, 100)
        return next((n / 100 for n in hundredths if replace(self, margin=n / 100).is_reliable), None)

    def _of(self, items: int) -> ScoredGuard:
        return replace(self, items=items, groups=self.groups * items / self.items)


def compute_smoothed_variance(values: Sequence[float]) -> float:
    """Return the variance of item values from 0 to 1. One right and one wrong item are added, so that few items never give 0.

    >>> round(compute_smoothed_variance([1.0] * 9 + [0.0] * 9), 3), round(compute_smoothed_variance([0.0] * 18), 3)
    (0.25, 0.048)
    """
    added = [*values, 0.0, 1.0]
    mean = math.fsum(added) / len(added)
    return math.fsum((value - mean) ** 2 for value in added) / len(added)


def compute_variance_of_share(share: float, items: int) -> float:
    """Return the ``compute_smoothed_variance`` of ``items`` items of which the share ``share`` is right and the others are wrong."""
    right = round(share * items)
    return compute_smoothed_variance([1.0] * right + [0.0] * (items - right))


def assign_holm_levels(guards: Mapping[str, RequiredBound], gain: float) -> dict[str, RequiredBound]:
    """Return the guards with the levels of Holm's steps. The guard that is surest at this true gain comes first and gets the smallest level."""

    def doubt(name: str) -> float:
        guard = guards[name]
        return (guard.floor - (gain if guard.moves else 0.0)) / (guard.measured.error or 1e-9)

    surest = sorted(guards, key=doubt)
    return {name: replace(guards[name], level=guards[name].level / (len(surest) - n)) for n, name in enumerate(surest)}


def compute_probability_to_pass_all(
    gain: float,
    required_bounds: Sequence[RequiredBound],
    guards: Mapping[str, RequiredBound] | None = None,
    guard_set_aside: str = "",
) -> float:
    """Return the probability that a candidate with the true gain ``gain`` passes all bounds. The arguments are as in
    ``find_smallest_detectable_gain``."""
    steps = assign_holm_levels(guards or {}, gain)
    bounds = *required_bounds, *(guard for name, guard in steps.items() if name != guard_set_aside)
    return math.prod(one.compute_pass_probability(gain) for one in bounds)


def find_smallest_detectable_gain(
    required_bounds: Sequence[RequiredBound],
    other_failure_probability: float = 0.0,
    guards: Mapping[str, RequiredBound] | None = None,
    guard_set_aside: str = "",
) -> float | None:
    """Return the gain that passes all bounds with a probability of 80 %, accurate to 1 %; None if no gain does.

    ``other_failure_probability``: the largest probability that something else stops the candidate. ``guards``: more bounds, for
    ``assign_holm_levels``.
    ``guard_set_aside``: the name of a guard that counts as passed but keeps its step.

    >>> target = Gain(0.0, 0.01, 2001, 2001.0)
    >>> (round(find_smallest_detectable_gain([RequiredBound(target, 0.025)]), 4),
    ...  find_smallest_detectable_gain([RequiredBound(target, 0.025), RequiredBound(target, 0.05, 0.01, moves=False)]))
    (0.0281, None)
    """
    enough = lambda gain: (
        compute_probability_to_pass_all(gain, required_bounds, guards, guard_set_aside)
        >= POWER + other_failure_probability
    )
    low, high = 0.0, MOST
    if not enough(high):
        return None
    while high - low > max(high / 100, 1e-6):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def find_group_growth_to_detect(
    gain: float,
    required_bounds: Sequence[RequiredBound],
    other_failure_probability: float = 0.0,
    guards: Mapping[str, RequiredBound] | None = None,
    guard_set_aside: str = "",
) -> float | None:
    """Return the factor by which the number of groups must grow to show ``gain`` with a probability of 80 %, accurate to 5 %.

    With a factor of at most 1, the present groups are enough. None if the factor is more than 1000.

    >>> target = Gain(0.0, 0.01, 2001, 2001.0)
    >>> round(find_group_growth_to_detect(0.014, [RequiredBound(target, 0.025)]), 1)  # half the gain of above
    4.1
    """

    def enough(times: float) -> bool:
        wider = {name: _with_groups(one, times) for name, one in (guards or {}).items()}
        return (
            compute_probability_to_pass_all(
                gain, [_with_groups(one, times) for one in required_bounds], wider, guard_set_aside
            )
            >= POWER + other_failure_probability
        )

    low, high = 0.0, 1.0
    while not enough(high):
        low, high = high, 2 * high
        if high > 1000:
            return None
    while high - low > 0.05 * high and high > 1e-3:  # differences that are all the same are shown by any number
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _with_groups(bound: RequiredBound, times: float) -> RequiredBound:
    """Return the bound with ``times`` as many groups."""
    measured = bound.measured
    if measured.error is None or measured.effective is None:
        return bound
    error, effective = measured.error / math.sqrt(times), max(measured.effective * times, 1.1)
    return replace(bound, measured=replace(measured, error=error, effective=effective))


@functools.lru_cache(maxsize=4096)
def _errors(freedom: float, tails: float) -> npt.NDArray[np.float64]:
    """Equally likely estimates of a standard error whose true value is 1."""
    from scipy.special import chdtri

    of_tails = max(freedom, 0.1) / (1 + tails / 2)
    error_N: npt.NDArray[np.float64] = np.sqrt(chdtri(of_tails, (np.arange(NODES) + 0.5) / NODES) / of_tails)
    assert np.isfinite(error_N).all() and math.isfinite(of_tails)
    return error_N
