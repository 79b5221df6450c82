"""Puts two runs' curves of one metric on one grid, and finds the first step where the curves diverge. All functions are pure.

>>> ours = [(float(step), 3.0 - step / 100) for step in range(40)]
>>> theirs = [(step, value + (0.5 if step >= 20 else 0.0)) for step, value in ours]
>>> compare_curves("loss", ours, theirs, floor=1e-4).first
Divergence(metric='loss', x=20.0, ours=2.8, theirs=3.3, difference=-0.5, tolerance=0.0008)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

WINDOW = 50  # the spread of the difference is measured over this many previous points
LEAST = 32  # a spread is measured over at least this many points
ALLOWED_SPREADS = 8.0  # the allowed difference, in spreads. Of 400 pairs of runs that differ only in noise, 8 reports none, and 6 reports four.
NORMAL = 1.4826 / math.sqrt(2)  # standard deviation divided by the median absolute difference of neighbours

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Divergence:
    """The first point where two curves diverge. ``difference``: ours minus theirs. ``tolerance``: the allowed difference there."""

    metric: str
    x: float
    ours: float
    theirs: float
    difference: float
    tolerance: float


@dataclass(frozen=True)
class MetricComparison:
    """The comparison of one metric. ``grid``: (x, ours, theirs) for each compared x."""

    metric: str
    grid: list[tuple[float, float, float]]
    first: Divergence | None
    coarser: str  # the curve with fewer points, whose x are the grid: 'ours' | 'theirs' | 'both'
    not_finite: dict[str, list[float]]  # x of values that are not finite, for 'ours' and 'theirs'
    largest: float | None  # largest absolute difference


def compare_curves(
    metric: str, ours: Curve, theirs: Curve, *, tolerance: float | None = None, floor: float = 0.0
) -> MetricComparison:
    """Compare two curves. ``tolerance``: the allowed absolute difference; None for ``ALLOWED_SPREADS`` times the spread of the difference.

    The spread is computed from the changes of the difference between neighbouring points, over the last ``WINDOW`` points. A drift or an offset
    therefore does not enlarge the spread. ``floor``: the smallest spread, from rounding. If only one curve has a finite value, the curves
    diverge. The curve with fewer points in the common range gives the grid, and the other curve is interpolated.
    """
    low, high = max(ours[0][0], theirs[0][0]), min(ours[-1][0], theirs[-1][0])
    mine, other = _between(ours, low, high), _between(theirs, low, high)
    same = {x for x, _ in mine} & {x for x, _ in other}
    one_spacing = 2 * len(same) > max(len(mine), len(other))
    coarser = "both" if one_spacing else "ours" if len(mine) < len(other) else "theirs"
    xs = sorted(same) if one_spacing else [x for x, _ in (mine if coarser == "ours" else other)]
    grid = [(x, _at(ours, x), _at(theirs, x)) for x in xs]
    finite = [abs(a - b) for _, a, b in grid if math.isfinite(a) and math.isfinite(b)]
    return MetricComparison(
        metric,
        grid,
        _first(metric, grid, tolerance, floor),
        coarser,
        {
            "ours": [x for x, y in ours if not math.isfinite(y)],
            "theirs": [x for x, y in theirs if not math.isfinite(y)],
        },
        max(finite, default=None),
    )


def _first(
    metric: str, grid: Sequence[tuple[float, float, float]], tolerance: float | None, floor: float
) -> Divergence | None:
    before: list[float] = []  # differences
    early = [a - b for _, a, b in grid if math.isfinite(a) and math.isfinite(b)][:LEAST]
    for x, a, b in grid:
        if not (math.isfinite(a) and math.isfinite(b)):
            if math.isfinite(a) != math.isfinite(b):
                return Divergence(metric, x, a, b, math.nan, tolerance or 0.0)
            continue
        rounding = max(floor, 1e-7 * max(abs(a), abs(b)))
        known = before[-WINDOW:] if len(before) >= LEAST else early
        allowed = tolerance if tolerance is not None else round(ALLOWED_SPREADS * max(_spread(known), rounding), 12)
        if abs(a - b) > allowed:
            return Divergence(metric, x, a, b, round(a - b, 12), allowed)
        before.append(a - b)
    return None


def _spread(differences: Sequence[float]) -> float:
    """Return the standard deviation of the noise in a sequence of differences.

    >>> round(_spread([0.5, 0.51, 0.5, 0.51, 0.5]), 4)
    0.0105
    """
    changes = [abs(b - a) for a, b in zip(differences, differences[1:])]
    return NORMAL * median(changes) if changes else 0.0


def _between(curve: Curve, low: float, high: float) -> list[tuple[float, float]]:
    return [(x, y) for x, y in curve if low <= x <= high]


def _at(curve: Curve, x: float) -> float:
    """Return a curve's value at ``x``, linearly interpolated. ``x`` must be between the curve's ends."""
    at = bisect_left(curve, (x, -math.inf))
    if curve[at][0] == x:
        return curve[at][1]
    (x0, y0), (x1, y1) = curve[at - 1], curve[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
