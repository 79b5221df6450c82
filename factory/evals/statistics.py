"""Paired comparison of two candidates on the same items: a bootstrap over source documents (clusters).

Items of one source (its code, its docs, its chat pairs) rise and fall together, so whole sources are drawn again, not items. A measure is
a ratio of sums (nats over bytes; right answers over questions) and its gain is champion minus candidate for costs, candidate minus
champion for scores: positive is better. Bounds are percentile bounds at levels widened for few clusters ("expanded percentile", Hesterberg
2015, §3.5). The seed is the suite's hash, so that it cannot be chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from factory.evals.tasks import EvalItem

REPLICATES = 10_000
CLOZE = "cloze"


@dataclass(frozen=True)
class Bounds:
    """One measure's gain. ``lower`` and ``upper`` are one-sided bounds by number of hypotheses shared with (Holm): 1, 2, … ."""

    gain: float
    clusters: int
    low95: float  # the two-sided 95 % interval, for people
    high95: float
    lower: dict[int, float]
    upper: dict[int, float]


def compare(
    candidate: Sequence[EvalItem],
    champion: Sequence[EvalItem],
    weights: Mapping[str, float],
    suite_sha256: str,
    alpha: float,
) -> tuple[Bounds, dict[str, Bounds]] | None:
    """(target, {measure: bounds}) where measures are the domains (bits per byte) and 'cloze' (share right); None when items differ.

    weights: of each domain's gain in the target; domains not named count 0; empty: all the same. alpha: one-sided level of one bound.
    """
    ours = {(item.task, item.item): item for item in candidate if item.task in ("bpb", CLOZE)}
    theirs = {(item.task, item.item): item for item in champion if item.task in ("bpb", CLOZE)}
    if not ours or ours.keys() != theirs.keys() or any(ours[key].weight != theirs[key].weight for key in ours):
        return None
    measures = sorted({_measure(item) for item in ours.values()})
    domains = [measure for measure in measures if measure != CLOZE]
    clusters = sorted({item.cluster for item in ours.values()})
    row = {name: index for index, name in enumerate(clusters)}
    column = {name: index for index, name in enumerate(measures)}
    sums_CM3 = np.zeros((len(clusters), len(measures), 3))  # ours, theirs, weight
    for key in sorted(ours):
        place = row[ours[key].cluster], column[_measure(ours[key])]
        sums_CM3[place] += (ours[key].value, theirs[key].value, ours[key].weight)
    scale_M = np.array([-1.0 if measure == CLOZE else 1 / math.log(2) for measure in measures])
    draws_RC = np.random.default_rng(int(suite_sha256[:16], 16)).multinomial(
        len(clusters), np.full(len(clusters), 1 / len(clusters)), REPLICATES
    )
    drawn_RM3 = (draws_RC @ sums_CM3.reshape(len(clusters), -1)).reshape(REPLICATES, len(measures), 3)
    gain_RM, gain_M = _gain(drawn_RM3) * scale_M, _gain(sums_CM3.sum(0)) * scale_M
    share_M = np.array([0.0 if m == CLOZE else weights.get(m, 0.0) if weights else 1.0 for m in measures])
    if not domains or share_M.sum() <= 0:
        return None
    share_M = share_M / share_M.sum()
    used = share_M > 0
    target_R, target = gain_RM[:, used] @ share_M[used], float(gain_M[used] @ share_M[used])
    count_M = (sums_CM3[:, :, 2] > 0).sum(0)
    guards = {
        m: _bounds(gain_RM[:, i], float(gain_M[i]), int(count_M[i]), alpha, len(measures)) for m, i in column.items()
    }
    return _bounds(target_R, target, len(clusters), alpha, 1), guards


def holm(lower: Mapping[str, Mapping[int, float]], floor: Mapping[str, float]) -> dict[str, bool]:
    """Which measures are shown to lie above their floor, all together at one level (Holm 1979, step down).

    With k still open, those whose bound at level alpha / k clears the floor are shown; repeat with the rest until none is.
    """
    shown: dict[str, bool] = dict.fromkeys(lower, False)
    while True:
        open_ = [name for name, done in shown.items() if not done]
        passed = [name for name in open_ if lower[name].get(len(open_), -math.inf) > floor[name]]
        if not passed:
            return shown
        shown |= dict.fromkeys(passed, True)


def _measure(item: EvalItem) -> str:
    return CLOZE if item.task == CLOZE else item.domain


def _gain(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    # A draw without any item of a measure gives NaN, which _bounds counts as the worst value.
    with np.errstate(invalid="ignore", divide="ignore"):
        gain: npt.NDArray[np.float64] = (sums[..., 1] - sums[..., 0]) / sums[..., 2]
    return gain


def _bounds(gain_R: npt.NDArray[np.float64], gain: float, clusters: int, alpha: float, hypotheses: int) -> Bounds:
    empty = np.isnan(gain_R)
    low, high = np.where(empty, -np.inf, gain_R), np.where(empty, np.inf, gain_R)

    def below(level: float) -> float:
        return float(np.quantile(low, expanded(level, clusters), method="lower"))

    def above(level: float) -> float:
        return float(np.quantile(high, 1 - expanded(level, clusters), method="higher"))

    levels = range(1, hypotheses + 1)
    return Bounds(
        gain,
        clusters,
        below(0.025),
        above(0.025),
        {k: below(alpha / k) for k in levels},
        {k: above(alpha / k) for k in levels},
    )


def expanded(alpha: float, clusters: int) -> float:
    """The percentile that covers like a t interval with few clusters: Phi(-t(alpha, n-1) * sqrt(n / (n - 1)))."""
    if clusters < 2:
        return 0.0
    from scipy.stats import t  # half a second, which only a comparison needs to wait for

    return NormalDist().cdf(t.ppf(alpha, clusters - 1) * math.sqrt(clusters / (clusters - 1)))
