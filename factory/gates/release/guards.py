"""The guards of a release: what each must be shown to hold, which of them can tell harm at all, and how large a gain passes them.

Bits per byte of each domain always guard it. Cloze is set aside where an equally good model would fail it more than once in five: it then holds only
where a loss beyond its margin is measured, if as good a model seldom shows one, and rejects where one is shown. Whether it is set aside follows from
the suite, the policy and the champion alone (``ScoredGuard``): a candidate that changes many items has a wider interval, and would else take a guard
away by that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from factory.evals.power import TAILS, Needed, ScoredGuard, smallest_gain, times_needed, variance_right
from factory.evals.statistics import CLOZE, Gain, spent_at
from factory.gates.release.evidence import ReleaseEvidence
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.reasons import Reason
from factory.gates.release.wording import number


def guarded(evidence: ReleaseEvidence) -> list[str]:
    """All of them: the domains, and cloze where there are items."""
    return [*evidence.domains, *([CLOZE] if evidence.cloze_items else [])]


def standing(policy: ReleasePolicy, evidence: ReleaseEvidence) -> list[str]:
    """Those that hold a candidate which does not pass them."""
    apart = set_aside(policy, evidence)
    return [name for name in guarded(evidence) if name not in apart]


def set_aside(policy: ReleasePolicy, evidence: ReleaseEvidence) -> dict[str, ScoredGuard]:
    """Those that cannot tell harm, by name. One of which too little is known stands."""
    cloze = cloze_guard(policy, evidence)
    if cloze is None:
        return {}
    clusters = number(evidence.guards[CLOZE].clusters)
    few = clusters is not None and clusters < policy.clusters_min
    return {CLOZE: cloze} if few or (clusters is not None and not cloze.stands) else {}


def cloze_guard(policy: ReleasePolicy, evidence: ReleaseEvidence) -> ScoredGuard | None:
    """Cloze as far as no candidate moves it: items and groups of the suite, share right of the champion; None: something is not known."""
    guard = evidence.guards.get(CLOZE)
    items, right = number(evidence.cloze_items), number(evidence.champion_cloze)
    groups = number(guard.effective) if guard else None
    if items is None or items < 1 or right is None or not 0 <= right <= 1 or groups is None or groups > items + 1e-6:
        return None
    variance = variance_right(right, int(items))
    return ScoredGuard(int(items), groups, variance, policy.guards.cloze_margin, policy.guards.alpha)


def floors(policy: ReleasePolicy, evidence: ReleaseEvidence) -> tuple[dict[str, float], dict[str, float], list[Reason]]:
    """Of each guard: the gain that its bound must lie above, and what earlier releases lost there; and what is not known of them."""
    floor: dict[str, float] = {}
    lost: dict[str, float] = {}
    missing: list[Reason] = []
    for name in guarded(evidence):
        margin = policy.guards.cloze_margin
        least = 0.0
        if name != CLOZE:
            noise = number(evidence.noise_floor.get(name))
            most = policy.guards.noise_floor_max
            if noise is None or noise < 0:
                missing.append(Reason("noise_unknown", f"{name}: the noise floor was not measured."))
                noise = 0.0
            elif noise > most:
                missing.append(
                    Reason(
                        "noise_floor",
                        f"{name}: the noise floor is {noise:.4f} bits per byte, at most {most:.4f} is allowed.",
                        f"hold out longer documents of {name}, or allow more noise (guards.noise_floor_max in gates/release.yaml).",
                    )
                )
                noise = 0.0
            # of the champion's recipe: no candidate can widen it
            draws = min(max(number(evidence.replica_noise.get(name)) or 0.0, 0.0), most)
            margin, least = max(policy.guards.bits_per_byte_margin, 2 * max(noise, draws)), 2 * noise
        gone = number(evidence.lost.get(name))
        if gone is None or gone < 0:
            missing.append(Reason("lost_unknown", f"{name}: what earlier releases lost there is not known."))
            gone = margin
        lost[name] = gone
        floor[name] = -max(margin - gone, least)
    return floor, lost, missing


@dataclass(frozen=True)
class Bounds:
    """What a promotion has to pass: the target's bound, and those of the guards that stand, whose level is of all together."""

    target: Needed
    guards: dict[str, Needed]
    otherwise: float  # the chance that another comparison holds a good one

    def smallest_gain(self) -> float | None:
        """The gain, in every domain alike, with which 80 % are promoted of those that cloze lets through; None: with none."""
        return smallest_gain([self.target], self.otherwise, self.guards, apart=CLOZE)

    def times_needed(self, gain: float) -> float | None:
        """How many times as many groups show a gain with 80 %; None: not even a thousand times as many."""
        return times_needed(gain, [self.target], self.otherwise, self.guards, apart=CLOZE)


def bounds(policy: ReleasePolicy, evidence: ReleaseEvidence) -> Bounds | None:
    """What this comparison asks of another candidate; None: it was not made. No gain in bits per byte moves cloze, whose error is that of equally
    good models."""
    if evidence.target is None or not evidence.look:
        return None
    floor, _, _ = floors(policy, evidence)
    guards = {}
    for name in standing(policy, evidence):
        measured = evidence.guards.get(name, Gain())
        if name == CLOZE and (known := cloze_guard(policy, evidence)):
            measured = Gain(0.0, known.error, measured.clusters, measured.effective)
        guards[name] = Needed(measured, policy.guards.alpha, floor[name], moves=name != CLOZE)
    target = Needed(evidence.target, spent_at(policy.target.alpha, evidence.look), tails=TAILS)
    return Bounds(target, guards, 1.5 * policy.memorising.alpha)  # of both comparisons; one is one-sided


def detectable(policy: ReleasePolicy, evidence: ReleaseEvidence) -> float | None:
    """The smallest gain, in every domain alike, with which 80 % of candidates are promoted, of those that cloze lets through; None: none is."""
    asked = bounds(policy, evidence)
    return asked.smallest_gain() if asked else None


def groups_needed(gain: Gain, level: float, floor: float) -> int | None:
    """Groups of one size with which four of five candidates that change nothing are shown to be above ``floor``; None: far too many, or unknown.

    >>> groups_needed(Gain(0.0, 0.015, 8, 8.0), 0.05, -0.02)
    31
    """
    groups = number(gain.effective)
    error = number(gain.error)
    if groups is None or error is None or groups <= 1 or floor >= 0:
        return None
    found = times_needed(0.0, [Needed(gain, level, floor)])
    return None if found is None else math.ceil(found * groups)


def enough(gain: Gain | None, clusters_min: int) -> bool:
    """Are there groups enough behind an interval?"""
    clusters = number(gain.clusters) if gain else None
    return clusters is not None and clusters >= clusters_min
