"""The guards of a release: what each must be shown to hold, which of them can tell harm at all, and how large a gain passes them.

Bits per byte of each domain always guard it. Cloze is set aside where an equally good model would fail it more than once in five: it then holds only
where a loss beyond its margin is measured, if as good a model seldom shows one, and rejects where one is shown. Whether it is set aside follows from
the suite, the policy and the champion alone (``ScoredGuard``): a candidate that changes many items has a wider interval, and would else take a guard
away by that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from factory.evals.power import (
    MOST,
    MOST_FAILED,
    POWER,
    TAILS,
    Needed,
    ScoredGuard,
    smallest_gain,
    stepped,
    times_needed,
    variance_right,
)
from factory.evals.statistics import CLOZE, Gain, spent_at
from factory.gates.release.evidence import ReleaseEvidence, number
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.reasons import Reason


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


# -- in words ----------------------------------------------------------------------------------------------------------
SEEN = "would have been seen with"  # of a sentence that decides nothing


def seen(gain: float | None, target: Needed, guards: Mapping[str, Needed], look: int, cloze: ScoredGuard | None) -> str:
    """The gain that is promoted with 80 %, and beside it how often cloze, where it stands, lets a model through that is as good there.

    >>> target = Needed(Gain(0.1, 0.009, 40, 38.2), 0.025)
    >>> print(seen(0.0284, target, {}, 1, ScoredGuard(90, 40.0, 0.24, 0.15, 0.05)))
    A gain of 0.028 in every domain would have been seen with 80 % (look 1 against this champion, so at 2.50 %; 38 document groups of one size). \
Cloze lets 89 of 100 models through that are as good there.
    >>> print(seen(None, Needed(Gain(0.1, 0.9, 3, 2.1), 0.025), {}, 1, None))
    No gain would have been seen with 80 %: of the largest that there is, 45 % pass the bound of the target (look 1 against this champion, so at \
2.50 %; 2 document groups of one size).
    """
    effective = target.measured.effective or 0.0
    looks = f"look {look} against this champion, so at {target.level:.2%}; {effective:.0f} document groups of one size"
    looks = looks.replace("%", " %")
    if gain is None:
        return f"No gain {SEEN} {100 * POWER:.0f} %: {_why_none(target, guards)} ({looks})."
    words = f"A gain of {gain:.3f} in every domain {SEEN} {100 * POWER:.0f} % ({looks})."
    if cloze is not None:
        words += f" Cloze lets {100 * cloze.passed:.0f} of 100 models through that are as good there."
    return words


def _why_none(target: Needed, guards: Mapping[str, Needed]) -> str:
    """The bound that even the largest gain passes least often."""
    needed = {"the target": target} | {name: one for name, one in stepped(guards, MOST).items() if one.moves}
    chances = {name: one.chance(MOST) for name, one in needed.items()}
    name = min(chances, key=lambda one: chances[one])
    if needed[name].measured.bound(needed[name].level) is None:
        return f"{name} could not be compared"
    return f"of the largest that there is, {100 * chances[name]:.0f} % pass the bound of {name}"


def aside(name: str, known: ScoredGuard, clusters: float, clusters_min: int, unit: str = "items") -> str:
    """That a guard is set aside, and the size that it needs.

    >>> print(aside("cloze", ScoredGuard(36, 30.0, 0.24, 0.15, 0.05), 30, 8))
    cloze is set aside: of 100 models that are as good there, 36 items hold 44, and at most 20 are allowed. About 68 items are needed. It holds only \
where a loss of more than 0.150 is measured, as of 3 in 100 such models, and rejects where one is shown.
    >>> print(aside("cloze", ScoredGuard(36, 3.0, 0.24, 0.15, 0.05), 3, 8))
    cloze is set aside: 36 items of 3 document groups, and 8 groups are needed. It informs alone.
    """
    if clusters < clusters_min:
        groups = "1 document group" if clusters == 1 else f"{clusters:.0f} document groups"
        return f"{name} is set aside: {known.items} {unit} of {groups}, and {clusters_min} groups are needed. It informs alone."
    held = 100 * (1 - known.passed)
    needed = known.needed()
    size = f"About {needed} {unit} are needed." if needed else f"No number of {unit} is enough for its margin."
    return (
        f"{name} is set aside: of 100 models that are as good there, {known.items} {unit} hold {held:.0f}, and at most {100 * MOST_FAILED:.0f} "
        f"are allowed. {size} {known.still}"
    )
