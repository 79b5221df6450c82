"""How large a gain a comparison would have shown: the smallest that passes all of its bounds together with 80 %.

Of another candidate on the same items, whose standard error is another draw: both the error that it is told from here and the one that it is
tested with are estimates. Their squares scatter like χ² with the bound's degrees of freedom, fewer by the tails: the variance of a squared error
is 2/ν + κ/n for items of excess kurtosis κ (Cramér 1946, §27.4), so ν is divided by 1 + κ/2. With κ = 0 and one error for both it is the power
of the noncentral t. Bounds of target and domains rise and fall together, so all are passed at least as often as if they were independent, which
is what is said here; that is room enough for the guards' tails, so κ is the target's alone. Guards share their level by Holm (1979): those that
pass in any one order, each at its step, all pass, so the order is the one that is surest at the gain that is asked for.
``make judge-calibration`` counts how many are promoted:
80 % or more, the more the fewer sources a guard has (``benchmarks/judge/results.txt`` says why).

Items that are right or wrong tell an error only by those that changed sides, and of few items two or three did, or none: an error that came out
small by chance would state gains that are not promoted with 80 %. Such a guard is counted in with the error of as many changed sides as are not
exceeded with 95 % (``cautious``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from factory.evals.statistics import Gain

POWER = 0.8
TAILS = 6.0  # κ: of a Student t with 5 degrees of freedom, as the calibration draws items
NODES = 24  # of the distribution of a standard error
MOST = 8.0  # bits per byte: no model gains more than a byte holds
SURE = 0.95  # that no more items change sides than a cautious error is made of


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


def cautious(bound: Needed, items: int) -> Needed:
    """A bound on ``items`` that each change by -1, 0 or 1, with the error that it has where as many change as are not exceeded with ``SURE``.

    How many did is a count, so the error's bound is that of a Poisson mean (Garwood 1936).

    >>> none, two, many = (Needed(Gain(0.0, changed**0.5 / 24, 24, 24.0), 0.05, -0.15, moves=False) for changed in (0, 2, 20))
    >>> [round((cautious(one, 24).measured.error * 24) ** 2, 1) for one in (none, two, many)]
    [3.0, 6.3, 29.1]
    """
    if bound.measured.error is None:
        return bound
    from scipy.special import chdtri

    changed = (bound.measured.error * items) ** 2
    error = math.sqrt(float(chdtri(2 * changed + 2, 1 - SURE)) / 2) / items
    return replace(bound, measured=replace(bound.measured, error=error))


def stepped(guards: Mapping[str, Needed], gain: float) -> dict[str, Needed]:
    """Guards whose ``level`` is of all together, each at its step of Holm's: the surest at this true gain first, at the smallest level."""

    def doubt(name: str) -> float:
        guard = guards[name]
        return (guard.floor - (gain if guard.moves else 0.0)) / (guard.measured.error or 1e-9)

    surest = sorted(guards, key=doubt)
    return {name: replace(guards[name], level=guards[name].level / (len(surest) - n)) for n, name in enumerate(surest)}


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

    def passed(gain: float) -> bool:
        steps = stepped(guards or {}, gain)
        bounds = *needed, *(guard for name, guard in steps.items() if name != apart)
        return math.prod(one.chance(gain) for one in bounds) >= POWER + otherwise

    low, high = 0.0, MOST
    if not passed(high):
        return None
    while high - low > max(high / 100, 1e-6):
        middle = (low + high) / 2
        low, high = (low, middle) if passed(middle) else (middle, high)
    return high


@functools.lru_cache(maxsize=4096)
def _errors(freedom: float, tails: float) -> npt.NDArray[np.float64]:
    """Estimates of a standard error of 1, equally likely."""
    from scipy.special import chdtri

    of_tails = max(freedom, 0.1) / (1 + tails / 2)
    error_N: npt.NDArray[np.float64] = np.sqrt(chdtri(of_tails, (np.arange(NODES) + 0.5) / NODES) / of_tails)
    assert np.isfinite(error_N).all() and math.isfinite(of_tails)
    return error_N
