"""Intervals for the mean of measurements that hold at every moment, so that one may look after each measurement and stop when the result is clear.

An ordinary t interval is wrong for one number of measurements that was fixed before. Who looks again and again until it shows a gain finds one
sooner or later. A *confidence sequence* contains the mean at all moments together with the stated probability: P(for some n: mean outside of the
interval after n measurements) ≤ ``error``. Its price is a wider interval: about twice as wide after eight measurements.

The sequence is that of the t statistic with a normal mixture over effect sizes μ/σ ~ N(0, 1/``PRECISION``). With S the sum and V the sum of squares
of n values of x − μ, the mixture of scale-invariant likelihood ratios

    G_n(μ) = √(c / (n + c)) · [V / (V − S² / (n + c))]^(n/2),    c = PRECISION,

is a martingale with mean 1 for the true μ, whatever σ. By Ville's inequality it reaches 1/``error`` with at most the probability ``error``. The
interval holds all μ with G_n(μ) < 1/``error``.
Source: T. L. Lai, On confidence sequences, Annals of Statistics 4 (1976); H. Wang and A. Ramdas, Anytime-valid t-tests and confidence sequences for
Gaussian means with unknown variance (arXiv 2310.03722, the Gaussian mixture), Ville's inequality in the scale-invariant filtration.

A separate file, because it is mathematics that can be read and checked without the gate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PRECISION = 0.1  # effect sizes are mostly below 1/√0.1 = 3: a gain of 20 % with pairs that scatter by 6 %


@dataclass(frozen=True)
class MeanInterval:
    """A mean with its bounds, and the standard deviation of one value."""

    mean: float
    low: float
    high: float
    deviation: float


def compute_reach(count: int, error: float) -> float:
    """Return half the width of the interval after ``count`` values, in standard deviations of one value (with the divisor ``count``).

    Infinite while nothing can be said: with few values, and a small ``error``.

    >>> [round(compute_reach(count, 0.05), 2) for count in (2, 4, 8, 16, 64)]
    [inf, 3.77, 1.67, 1.01, 0.46]
    """
    if count < 1:
        return math.inf
    ratio = math.exp(math.log((count + PRECISION) / (PRECISION * error * error)) / count)
    below = count + PRECISION - ratio * PRECISION
    return math.sqrt((ratio - 1) * (count + PRECISION) / below) if below > 0 else math.inf


def compute_interval_of_rounds(rounds: Sequence[Sequence[float]], error: float) -> MeanInterval:
    """Return the interval of the mean of all values. ``rounds``: the values by round; at least one value.

    The values of one round share a process of each side, and a process can be faster or slower as a whole (its place in memory). So the variance of
    a value is the larger of two estimates: that of all values, and the variance between the rounds' means times the number of values in a round,
    which is the same where processes do not matter.

    >>> same = compute_interval_of_rounds([[0.20, 0.21, 0.19, 0.20], [0.21, 0.19, 0.20, 0.20]], 0.05)
    >>> apart = compute_interval_of_rounds([[0.25, 0.26, 0.24, 0.25], [0.16, 0.14, 0.15, 0.15]], 0.05)
    >>> [round(x, 3) for x in (same.mean, same.low, same.high)], [round(x, 3) for x in (apart.mean, apart.low, apart.high)]
    ([0.2, 0.188, 0.212], [0.2, -0.036, 0.436])
    """
    values = [value for one in rounds for value in one]
    count = len(values)
    mean = sum(values) / count
    variance = sum((value - mean) ** 2 for value in values) / count
    if len(rounds) > 1:
        means = [sum(one) / len(one) for one in rounds]
        middle = sum(means) / len(means)
        between = sum((one - middle) ** 2 for one in means) / (len(means) - 1)
        variance = max(variance, between * count / len(rounds))
    reach = compute_reach(count, error)
    half = math.inf if math.isinf(reach) else reach * math.sqrt(variance)
    return MeanInterval(mean, mean - half, mean + half, math.sqrt(variance))
