"""Paired comparison of two candidates on the same items: t intervals with standard errors clustered by document group.

Items of a group (a document or a source) are correlated, so groups count, not items. A measure is a ratio of sums (nats over bytes, right answers
over questions). Its gain is positive if the candidate is better. The standard error is that of a ratio over clusters, each residual divided by one
minus its cluster's share ("CR3", Bell & McCaffrey 2002). The degrees of freedom are the effective number of clusters, 1/Σp² of their shares p,
minus one (Carter, Schnepel & Steigerwald 2017), so a source with half of the bytes counts as half of the evidence. ``make judge-calibration``
prints how often the intervals hold the truth. A bootstrap of sources is as good for sources of equal size, and worse otherwise (``docs/LOG.md``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from factory.evals.tasks import EvalItem

CLOZE = "cloze"


@dataclass(frozen=True)
class Gain:
    """The gain of a measure over the champion. A field that is None or not finite was not measured."""

    gain: float | None = None
    error: float | None = None  # standard error
    clusters: int | None = None  # document groups
    effective: float | None = None  # effective number of clusters of equal size

    def compute_confidence_bound(self, level: float, upper: bool = False) -> float | None:
        """Return the one-sided lower confidence bound of the gain, or the upper one. The true gain is beyond it with probability ``level``."""
        if not (_finite(self.gain) and _finite(self.error) and _finite(self.effective)):
            return None
        assert self.gain is not None and self.error is not None and self.effective is not None
        if self.effective <= 1 or self.error < 0 or not 0 < level < 1:
            return None
        width = _quantile(1 - level, self.effective - 1) * self.error
        return self.gain + width if upper else self.gain - width


def read_confidence_interval(stored: object) -> tuple[float, float, float] | None:
    """Return (gain, lower end, upper end) of the 95 % interval of a gain in stored evidence; None if the gain was not measured."""
    if not isinstance(stored, dict):
        return None
    gain = Gain(**{key: stored.get(key) for key in ("gain", "error", "clusters", "effective")})
    low, high = gain.compute_confidence_bound(0.025), gain.compute_confidence_bound(0.025, upper=True)
    return (gain.gain, low, high) if gain.gain is not None and low is not None and high is not None else None


def compare_items(
    candidate: Sequence[EvalItem], champion: Sequence[EvalItem], weights: Mapping[str, float]
) -> tuple[Gain, dict[str, Gain]] | None:
    """Return (gain of the target, {measure: gain}), or None if the items of the candidates differ.

    The measures are the domains (bits per byte) and 'cloze' (share right). ``weights``: the weight of each domain in the target; other domains have
    weight 0. If ``weights`` is empty, all domains have the same weight.

    >>> one = [EvalItem("bpb", f"{i}", "code", f"source{i}", 100.0 + i, 100.0) for i in range(4)]
    >>> other = [EvalItem("bpb", f"{i}", "code", f"source{i}", 110.0, 100.0) for i in range(4)]
    >>> target, guards = compare_items(one, other, {})
    >>> round(target.gain, 4), round(target.error, 4), target.clusters, round(target.effective, 6), target == guards["code"]
    (0.1226, 0.0108, 4, 4.0, True)
    """
    ours = {(item.task, item.item): item for item in candidate if item.task in ("bpb", CLOZE)}
    theirs = {(item.task, item.item): item for item in champion if item.task in ("bpb", CLOZE)}
    if not ours or ours.keys() != theirs.keys() or any(ours[key].weight != theirs[key].weight for key in ours):
        return None
    measures = sorted({_measure(item) for item in ours.values()})
    share_M = np.array([0.0 if m == CLOZE else weights.get(m, 0.0) if weights else 1.0 for m in measures])
    if share_M.sum() <= 0:
        return None
    clusters = sorted({item.cluster for item in ours.values()})
    row = {name: index for index, name in enumerate(clusters)}
    column = {name: index for index, name in enumerate(measures)}
    better_CM, weight_CM = np.zeros((2, len(clusters), len(measures)))
    for key in sorted(ours):
        place = row[ours[key].cluster], column[_measure(ours[key])]
        better_CM[place] += theirs[key].value - ours[key].value
        weight_CM[place] += ours[key].weight
    better_CM *= np.array([-1.0 if measure == CLOZE else 1 / math.log(2) for measure in measures])
    each = {name: _gain(better_CM, weight_CM, np.eye(len(measures))[i]) for name, i in column.items()}
    return _gain(better_CM, weight_CM, share_M / share_M.sum()), each


def _gain(
    better_CM: npt.NDArray[np.float64], weight_CM: npt.NDArray[np.float64], share_M: npt.NDArray[np.float64]
) -> Gain:
    """Return the weighted gain of several measures. ``share_M``: their weights."""
    used = share_M > 0
    better_CM, weight_CM, share_M = better_CM[:, used], weight_CM[:, used], share_M[used]
    total_M = weight_CM.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):  # a measure of one cluster has no error
        gain_M = better_CM.sum(0) / total_M
        residual_CM = (better_CM - gain_M * weight_CM) / total_M / (1 - weight_CM / total_M)
    influence_C = residual_CM @ share_M
    part_C = (weight_CM / total_M) @ share_M
    return Gain(
        float(gain_M @ share_M),
        float(np.sqrt((influence_C**2).sum())),
        int((weight_CM.sum(1) > 0).sum()),
        float(1 / (part_C**2).sum()),
    )


def subtract_gains(one: Gain, other: Gain) -> Gain:
    """Return ``one`` minus ``other``. The two gains come from different documents. The degrees of freedom are Welch's (1947).

    >>> found = subtract_gains(Gain(0.3, 0.03, 9, 9.0), Gain(0.1, 0.04, 9, 9.0))
    >>> round(found.gain, 3), round(found.error, 3), found.clusters, round(found.effective, 2)
    (0.2, 0.05, 18, 15.84)
    """
    if not all(map(_finite, (one.gain, one.error, one.effective, other.gain, other.error, other.effective))):
        return Gain()
    assert one.gain is not None and one.error is not None and one.effective is not None and one.clusters is not None
    assert other.gain is not None and other.error is not None and other.effective is not None
    assert other.clusters is not None
    of_one, of_other = one.error**2, other.error**2
    clusters, gain = one.clusters + other.clusters, one.gain - other.gain
    if one.effective <= 1 or other.effective <= 1:
        return Gain(gain, None, clusters, None)
    if not of_one + of_other:
        return Gain(gain, 0.0, clusters, one.effective + other.effective - 1)
    freedom = (of_one + of_other) ** 2 / (of_one**2 / (one.effective - 1) + of_other**2 / (other.effective - 1))
    return Gain(gain, math.sqrt(of_one + of_other), clusters, freedom + 1)


def add_training_noise(gain: Gain, noise: float, runs: int) -> Gain:
    """Return the gain of recipe and data rather than of two single trainings: the variance between trainings is added for candidate and champion.

    ``noise``: the standard deviation of ``runs`` trainings. The degrees of freedom are those of Welch (1947) and Satterthwaite (1946).

    >>> found = add_training_noise(Gain(0.02, 0.003, 40, 41.0), 0.004, 3)
    >>> round(found.error, 5), round(found.effective, 2)
    (0.0064, 4.27)
    """
    if not (_finite(gain.error) and _finite(gain.effective)) or runs < 2:
        return Gain()
    assert gain.error is not None and gain.effective is not None
    of_items, of_draws = gain.error**2, 2 * noise**2
    if gain.effective <= 1 or not of_items + of_draws:
        return gain
    freedom = (of_items + of_draws) ** 2 / (of_items**2 / (gain.effective - 1) + of_draws**2 / (runs - 1))
    return Gain(gain.gain, math.sqrt(of_items + of_draws), gain.clusters, freedom + 1)


def run_holm_step_down(hypotheses: Sequence[str], is_shown_at: Callable[[str, int], bool]) -> dict[str, bool]:
    """Return, for each hypothesis, whether it is shown at a joint level (Holm 1979, step down).

    Among k open hypotheses, those for which ``is_shown_at(name, k)`` is true at level alpha / k are shown. This repeats until no more are shown.
    """
    shown = dict.fromkeys(hypotheses, False)
    while True:
        open_ = [name for name, done in shown.items() if not done]
        passed = [name for name in open_ if is_shown_at(name, len(open_))]
        if not passed:
            return shown
        shown |= dict.fromkeys(passed, True)


def compute_alpha_at_look(alpha: float, look: int) -> float:
    """Return the part of ``alpha`` that the ``look``-th candidate against the same champion may spend.

    All looks together never spend more than ``alpha``.

    >>> ([round(compute_alpha_at_look(0.05, look), 4) for look in (1, 2, 3, 10)],
    ...  round(sum(compute_alpha_at_look(0.05, k) for k in range(1, 10_000)), 4))
    ([0.025, 0.0083, 0.0042, 0.0005], 0.05)
    """
    return alpha / (look * (look + 1))


def _measure(item: EvalItem) -> str:
    return CLOZE if item.task == CLOZE else item.domain


def _finite(value: float | None) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@functools.lru_cache(maxsize=4096)
def _quantile(level: float, freedom: float) -> float:
    from scipy.special import stdtrit  # takes a moment, which only a comparison needs to wait for

    return float(stdtrit(freedom, level))
