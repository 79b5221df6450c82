"""How large a gain a comparison would have shown: the smallest that passes all of its bounds together with 80 %.

Of another candidate on the same items, whose standard error is another draw: both the error that it is told from here and the one that it is
tested with are estimates. Their squares scatter like χ² with the bound's degrees of freedom, fewer by the tails: the variance of a squared error
is 2/ν + κ/n for items of excess kurtosis κ (Cramér 1946, §27.4), so ν is divided by 1 + κ/2. With κ = 0 and one error for both it is the power
of the noncentral t. Bounds of target and domains rise and fall together, so all are passed at least as often as if they were independent, which
is what is said here; that is room enough for the guards' tails, so κ is the target's alone. Guards share their level by Holm (1979): those that
pass in any one order, each at its step, all pass, so the order is the one that is surest at the gain that is asked for.
``make judge-calibration`` counts how many are promoted:
80 % or more, the more the fewer sources a guard has (``benchmarks/judge/results.txt`` says why).

A guard whose items are right or wrong is told from what a candidate cannot move (``ScoredGuard``): how many items and groups there are, the margin,
the level, and how many items change sides between two equally good models. One that an equally good model fails more than once in five is set aside:
it no longer asks that no loss be shown, and holds only where the loss that was measured is itself beyond the margin (``tells``), if as good a model
seldom shows one.
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
TAILS = 6.0  # κ: of a Student t with 5 degrees of freedom, as the calibration draws items
NODES = 24  # of the distribution of a standard error
MOST = 8.0  # bits per byte: no model gains more than a byte holds
MOST_FAILED = 0.2  # of equally good models: a guard that fails more of them is set aside
TOGETHER = (
    0.5  # ρ of right and wrong between equally good models: assumed; ``python -m benchmarks.judge.sides`` measures it
)
LARGEST = 10_000_000  # items that a guard may be said to need


@dataclass(frozen=True)
class Needed:
    """A one-sided bound at ``level`` that must lie above ``floor``; ``moves``: the gain that is asked for moves it; ``tails``: κ."""

    measured: Gain
    level: float
    floor: float = 0.0
    moves: bool = True
    tails: float = 0.0

    def chance(self, gain: float) -> float:
        """That a candidate which is truly better by ``gain`` passes; one that it does not move has a true gain of 0."""
        if self.measured.bound(self.level) is None:
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
    """A guard on items that are scored from 0 to 1, as far as no candidate moves it.

    ``variance``: of an item's value, of the champion's (``variance_of``). Two models as good as it differ on an item by 2 · variance · (1 − ρ): for
    right and wrong that is the share of items that change sides, 2p(1 − p)(1 − ρ). ``level``: that of Holm's last step, at which a guard is tested
    once all others have passed, so that it alone decides.

    >>> small = ScoredGuard(items=36, groups=36.0, variance=0.24, margin=0.15, level=0.05)
    >>> round(small.error, 3), round(small.passed, 2), small.stands, small.needed()
    (0.082, 0.56, False, 68)
    >>> ScoredGuard(items=95, groups=95.0, variance=0.24, margin=0.15, level=0.05).stands
    True
    """

    items: int
    groups: float  # as many of the same size say as much
    variance: float
    margin: float
    level: float

    @property
    def error(self) -> float:
        """Standard, of the difference of two equally good models."""
        return math.sqrt(2 * self.variance * (1 - TOGETHER) / self.items)

    @property
    def passed(self) -> float:
        """The share of equally good models that pass: their difference is drawn with ``error``, and tested with one that is estimated."""
        if self.groups <= 1:
            return 0.0  # one group has no spread
        if not self.error:
            return float(self.margin > 0)
        from scipy.special import ndtr, stdtrit  # takes a moment, which only a comparison needs to wait for

        freedom = self.groups - 1
        tested_N = float(stdtrit(freedom, 1 - self.level)) * _errors(round(freedom, 1), 0.0)
        return float(ndtr(self.margin / self.error - tested_N).mean())

    @property
    def stands(self) -> bool:
        """Does it fail at most one in five equally good models?"""
        return self.passed >= 1 - MOST_FAILED

    @property
    def lost_by_chance(self) -> float:
        """The share of equally good models that are measured to lose more than the margin."""
        from scipy.special import ndtr  # takes a moment, which only a comparison needs to wait for

        return float(ndtr(-self.margin / self.error)) if self.error else 0.0

    @property
    def tells(self) -> bool:
        """Does a measured loss beyond the margin say something, as at most one in five equally good models shows one?"""
        return self.groups > 1 and self.lost_by_chance <= MOST_FAILED

    @property
    def still(self) -> Message:
        """The effect that the guard still has after it is set aside."""
        if not self.tells:
            return Message(
                "power.only_rejects", "It cannot hold a release. It rejects a release that shows a loss of more than {margin:.3f}.",
                margin=self.margin,
            )  # fmt: skip
        return Message(
            "power.holds_measured_loss",
            "It holds a release only if the measured loss is more than {margin:.3f}. {chance:.0f} of 100 equally good models have such a loss. "
            "It rejects a release that shows such a loss.",
            margin=self.margin, chance=100 * self.lost_by_chance,
        )  # fmt: skip

    def needed(self) -> int | None:
        """The items with which it stands, as many to a group as now; None: no number is enough."""
        low, high = 1, max(self.items, 2)
        while not self._of(high).stands:
            low, high = high, 2 * high
            if high > LARGEST:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._of(middle).stands else (middle, high)
        return high

    def margin_needed(self) -> float | None:
        """The least margin, in hundredths, with which as many items stand; None: none below 1.

        >>> ScoredGuard(items=36, groups=36.0, variance=0.24, margin=0.15, level=0.05).margin_needed()
        0.21
        """
        hundredths = range(math.floor(100 * self.margin) + 1, 100)
        return next((n / 100 for n in hundredths if replace(self, margin=n / 100).stands), None)

    def _of(self, items: int) -> ScoredGuard:
        return replace(self, items=items, groups=self.groups * items / self.items)


def variance_of(values: Sequence[float]) -> float:
    """Of an item's value from 0 to 1, one right item and one wrong one added: of few items, none right is no proof that none will be.

    >>> round(variance_of([1.0] * 9 + [0.0] * 9), 3), round(variance_of([0.0] * 18), 3)
    (0.25, 0.048)
    """
    added = [*values, 0.0, 1.0]
    mean = math.fsum(added) / len(added)
    return math.fsum((value - mean) ** 2 for value in added) / len(added)


def variance_right(share: float, items: int) -> float:
    """``variance_of`` items of which a share is right and the others are wrong."""
    right = round(share * items)
    return variance_of([1.0] * right + [0.0] * (items - right))


def stepped(guards: Mapping[str, Needed], gain: float) -> dict[str, Needed]:
    """Guards whose ``level`` is of all together, each at its step of Holm's: the surest at this true gain first, at the smallest level."""

    def doubt(name: str) -> float:
        guard = guards[name]
        return (guard.floor - (gain if guard.moves else 0.0)) / (guard.measured.error or 1e-9)

    surest = sorted(guards, key=doubt)
    return {name: replace(guards[name], level=guards[name].level / (len(surest) - n)) for n, name in enumerate(surest)}


def passes(gain: float, needed: Sequence[Needed], guards: Mapping[str, Needed] | None = None, apart: str = "") -> float:
    """The chance that a candidate which is truly better by ``gain`` passes all bounds; as ``smallest_gain`` takes them."""
    steps = stepped(guards or {}, gain)
    bounds = *needed, *(guard for name, guard in steps.items() if name != apart)
    return math.prod(one.chance(gain) for one in bounds)


def smallest_gain(
    needed: Sequence[Needed], otherwise: float = 0.0, guards: Mapping[str, Needed] | None = None, apart: str = ""
) -> float | None:
    """The gain with which all bounds are passed with 80 %, to 1 % of it; None: no gain is.

    ``otherwise``: the chance at most that something else than these bounds holds it up; ``guards``: further bounds, as ``stepped`` takes them;
    ``apart``: the guard that is taken as passed, though it has its step.

    >>> target = Gain(0.0, 0.01, 2001, 2001.0)
    >>> round(smallest_gain([Needed(target, 0.025)]), 4), smallest_gain([Needed(target, 0.025), Needed(target, 0.05, 0.01, moves=False)])
    (0.0281, None)
    """
    enough = lambda gain: passes(gain, needed, guards, apart) >= POWER + otherwise
    low, high = 0.0, MOST
    if not enough(high):
        return None
    while high - low > max(high / 100, 1e-6):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def times_needed(
    gain: float,
    needed: Sequence[Needed],
    otherwise: float = 0.0,
    guards: Mapping[str, Needed] | None = None,
    apart: str = "",
) -> float | None:
    """How many times as many groups show ``gain`` with 80 %, to a tenth; 1 or less: these do. None: not even a thousand times as many.

    >>> target = Gain(0.0, 0.01, 2001, 2001.0)
    >>> round(times_needed(0.014, [Needed(target, 0.025)]), 1)  # half the gain of above
    4.1
    """

    def enough(times: float) -> bool:
        wider = {name: _with_groups(one, times) for name, one in (guards or {}).items()}
        return passes(gain, [_with_groups(one, times) for one in needed], wider, apart) >= POWER + otherwise

    low, high = 0.0, 1.0
    while not enough(high):
        low, high = high, 2 * high
        if high > 1000:
            return None
    while high - low > 0.05 * high and high > 1e-3:  # differences that are all the same are shown by any number
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _with_groups(bound: Needed, times: float) -> Needed:
    """The bound of so many times as many groups."""
    measured = bound.measured
    if measured.error is None or measured.effective is None:
        return bound
    error, effective = measured.error / math.sqrt(times), max(measured.effective * times, 1.1)
    return replace(bound, measured=replace(measured, error=error, effective=effective))


@functools.lru_cache(maxsize=4096)
def _errors(freedom: float, tails: float) -> npt.NDArray[np.float64]:
    """Estimates of a standard error of 1, equally likely."""
    from scipy.special import chdtri

    of_tails = max(freedom, 0.1) / (1 + tails / 2)
    error_N: npt.NDArray[np.float64] = np.sqrt(chdtri(of_tails, (np.arange(NODES) + 0.5) / NODES) / of_tails)
    assert np.isfinite(error_N).all() and math.isfinite(of_tails)
    return error_N
