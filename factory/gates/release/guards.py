"""The guards of a release are measures that must not get worse. This module computes their bounds, and finds guards that cannot detect harm.

The bits per byte of every domain are always guards. Cloze is set aside if equally good models would fail it more than once in five. A cloze guard
that is set aside still rejects a shown loss. It also holds a measured loss beyond its margin if equally good models seldom show such a loss. Only the
suite, the policy and the champion decide whether cloze is set aside (``ScoredGuard``). Otherwise a candidate that changes many items, which widens
its interval, could remove a guard.
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
    RequiredBound,
    ScoredGuard,
    assign_holm_levels,
    compute_variance_of_share,
    find_group_growth_to_detect,
    find_smallest_detectable_gain,
)
from factory.evals.statistics import CLOZE, Gain, compute_alpha_at_look
from factory.gates.release.evidence import ReleaseEvidence, read_finite_number
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.reasons import Reason, make_reason
from kernels.contract.message import Message


def list_guard_names(evidence: ReleaseEvidence) -> list[str]:
    """Return the names of all guards: the domains, and cloze if the suite has cloze items."""
    return [*evidence.domains, *([CLOZE] if evidence.cloze_items else [])]


def list_binding_guards(policy: ReleasePolicy, evidence: ReleaseEvidence) -> list[str]:
    """Return the names of the guards that are not set aside. They hold a candidate that does not pass them."""
    apart = list_unreliable_guards(policy, evidence)
    return [name for name in list_guard_names(evidence) if name not in apart]


def list_unreliable_guards(policy: ReleasePolicy, evidence: ReleaseEvidence) -> dict[str, ScoredGuard]:
    """Return the guards that are set aside because they cannot detect harm, by name. A guard of unknown size is not set aside."""
    cloze = make_cloze_guard(policy, evidence)
    if cloze is None:
        return {}
    clusters = read_finite_number(evidence.guards[CLOZE].clusters)
    few = clusters is not None and clusters < policy.clusters_min
    return {CLOZE: cloze} if few or (clusters is not None and not cloze.is_reliable) else {}


def make_cloze_guard(policy: ReleasePolicy, evidence: ReleaseEvidence) -> ScoredGuard | None:
    """Return cloze as a guard, computed from values that no candidate changes: items and groups of the suite, and the champion's share right.

    None: a number is missing.
    """
    guard = evidence.guards.get(CLOZE)
    items, right = read_finite_number(evidence.cloze_items), read_finite_number(evidence.champion_cloze)
    groups = read_finite_number(guard.effective) if guard else None
    if items is None or items < 1 or right is None or not 0 <= right <= 1 or groups is None or groups > items + 1e-6:
        return None
    variance = compute_variance_of_share(right, int(items))
    return ScoredGuard(int(items), groups, variance, policy.guards.cloze_margin, policy.guards.alpha)


def compute_guard_floors(
    policy: ReleasePolicy, evidence: ReleaseEvidence
) -> tuple[dict[str, float], dict[str, float], list[Reason]]:
    """Return (guard → floor, guard → earlier loss, reasons about missing numbers). The lower bound of a guard's gain must be above its floor."""
    floor: dict[str, float] = {}
    lost: dict[str, float] = {}
    missing: list[Reason] = []
    for name in list_guard_names(evidence):
        margin = policy.guards.cloze_margin
        least = 0.0
        if name != CLOZE:
            noise = read_finite_number(evidence.noise_floor.get(name))
            most = policy.guards.noise_floor_max
            if noise is None or noise < 0:
                missing.append(
                    make_reason("release.noise_unknown", "{domain}: the noise floor was not measured.", domain=name)
                )
                noise = 0.0
            elif noise > most:
                missing.append(
                    make_reason(
                        "release.noise_floor",
                        "{domain}: the noise floor is {noise:.4f} bits per byte. At most {most:.4f} is allowed.",
                        domain=name,
                        noise=noise,
                        most=most,
                        remedy=Message(
                            "release.remedy_noise_floor",
                            "hold out longer documents of {domain}, or allow more noise: raise guards.noise_floor_max in gates/release.yaml.",
                            domain=name,
                        ),
                    )  # fmt: skip
                )
                noise = 0.0
            # The replicas have the champion's recipe, so no candidate can widen its margin.
            draws = min(max(read_finite_number(evidence.replica_noise.get(name)) or 0.0, 0.0), most)
            margin, least = max(policy.guards.bits_per_byte_margin, 2 * max(noise, draws)), 2 * noise
        gone = read_finite_number(evidence.lost.get(name))
        if gone is None or gone < 0:
            missing.append(
                make_reason(
                    "release.lost_unknown", "{guard}: the loss since the best release is not known.", guard=name
                )
            )
            gone = margin
        lost[name] = gone
        floor[name] = -max(margin - gone, least)
    return floor, lost, missing


@dataclass(frozen=True)
class PromotionBounds:
    """The bounds that a promotion must pass: the target's, and those of the binding guards, which share one significance level."""

    target: RequiredBound
    guards: dict[str, RequiredBound]
    otherwise: float  # probability that the comparisons of ``overfitting`` hold a good candidate

    def compute_smallest_gain(self) -> float | None:
        """Return the smallest gain, the same in every domain, at which 80 % of candidates that pass cloze are promoted. None: no gain is enough."""
        return find_smallest_detectable_gain([self.target], self.otherwise, self.guards, guard_set_aside=CLOZE)

    def find_group_growth_factor(self, gain: float) -> float | None:
        """Return the factor by which the number of groups must grow to show ``gain`` with a probability of 80 %. None: a thousand is not enough."""
        return find_group_growth_to_detect(gain, [self.target], self.otherwise, self.guards, guard_set_aside=CLOZE)


def make_promotion_bounds(policy: ReleasePolicy, evidence: ReleaseEvidence) -> PromotionBounds | None:
    """Return the bounds that this comparison sets for another candidate. None: nothing was compared.

    A gain in bits per byte is assumed not to change cloze, whose error is that of equally good models.
    """
    if evidence.target is None or not evidence.look:
        return None
    floor, _, _ = compute_guard_floors(policy, evidence)
    guards = {}
    for name in list_binding_guards(policy, evidence):
        measured = evidence.guards.get(name, Gain())
        if name == CLOZE and (known := make_cloze_guard(policy, evidence)):
            measured = Gain(0.0, known.standard_error, measured.clusters, measured.effective)
        guards[name] = RequiredBound(measured, policy.guards.alpha, floor[name], moves=name != CLOZE)
    target = RequiredBound(evidence.target, compute_alpha_at_look(policy.target.alpha, evidence.look), tails=TAILS)
    return PromotionBounds(
        target, guards, 1.5 * policy.memorising.alpha
    )  # of the two comparisons of ``overfitting``, one of which is one-sided


def compute_detectable_gain(policy: ReleasePolicy, evidence: ReleaseEvidence) -> float | None:
    """Return the ``compute_smallest_gain`` of ``make_promotion_bounds``. None: no gain is enough, or nothing was compared."""
    asked = make_promotion_bounds(policy, evidence)
    return asked.compute_smallest_gain() if asked else None


def count_groups_to_show_no_loss(gain: Gain, level: float, floor: float) -> int | None:
    """Return the number of equally large groups that show, for 80 % of candidates without any change, that they are above ``floor``.

    None: the number is unknown, or far too large.

    >>> count_groups_to_show_no_loss(Gain(0.0, 0.015, 8, 8.0), 0.05, -0.02)
    31
    """
    groups = read_finite_number(gain.effective)
    error = read_finite_number(gain.error)
    if groups is None or error is None or groups <= 1 or floor >= 0:
        return None
    found = find_group_growth_to_detect(0.0, [RequiredBound(gain, level, floor)])
    return None if found is None else math.ceil(found * groups)


def has_enough_groups(gain: Gain | None, clusters_min: int) -> bool:
    """True if the gain was measured on at least ``clusters_min`` document groups."""
    clusters = read_finite_number(gain.clusters) if gain else None
    return clusters is not None and clusters >= clusters_min


# -- messages ----------------------------------------------------------------------------------------------------------
ESTIMATE_CODES = frozenset({"release.detects_gain", "release.detects_gain_beside_cloze", "release.detects_no_gain"})
"""Codes of the messages about the gain that a comparison can detect. This gain is an estimate, and no decision depends on it."""


def make_detectable_gain_message(
    gain: float | None, target: RequiredBound, guards: Mapping[str, RequiredBound], look: int, cloze: ScoredGuard | None
) -> Message:
    """Return the message about the gain that is detected with a probability of 80 %, and with ``cloze`` about equally good models that pass it.

    >>> target = RequiredBound(Gain(0.1, 0.009, 40, 38.2), 0.025)
    >>> print(make_detectable_gain_message(0.0284, target, {}, 1, ScoredGuard(90, 40.0, 0.24, 0.15, 0.05)))
    A gain of 0.028 bits per byte in every domain is detected with a probability of 80%. This is comparison number 1 with this champion, at a \
significance level of 2.50%, on 38 document groups of equal size. Of 100 models that are as good as the champion, 89 pass the cloze guard.
    >>> print(make_detectable_gain_message(None, RequiredBound(Gain(0.1, 0.9, 3, 2.1), 0.025), {}, 1, None))
    No gain, however large, would be detected with a probability of 80%: even a gain of 8 bits per byte passes the bound of the target with a \
probability of only 45%. This is comparison number 1 with this champion, at a significance level of 2.50%, on 2 document groups of equal size.
    """
    comparison = Message(
        "release.comparison",
        "This is comparison number {look} with this champion, at a significance level of {level:.2%}, on {groups:.0f} document groups of equal size.",
        look=look, level=target.level, groups=target.measured.effective or 0.0,
    )  # fmt: skip
    if gain is None:
        return Message(
            "release.detects_no_gain",
            "No gain, however large, would be detected with a probability of {power:.0%}: {why}. {comparison}",
            power=POWER, why=_why_none(target, guards), comparison=comparison,
        )  # fmt: skip
    detected = Message(
        "release.detects_gain",
        "A gain of {gain:.3f} bits per byte in every domain is detected with a probability of {power:.0%}. {comparison}",
        gain=gain, power=POWER, comparison=comparison,
    )  # fmt: skip
    if cloze is None:
        return detected
    return Message(
        "release.detects_gain_beside_cloze",
        "{detected} Of 100 models that are as good as the champion, {passed:.0f} pass the cloze guard.",
        detected=detected, passed=100 * cloze.pass_rate_of_equal_models,
    )  # fmt: skip


def _why_none(target: RequiredBound, guards: Mapping[str, RequiredBound]) -> Message:
    """Return the message about the bound that the largest possible gain passes with the lowest probability."""
    needed = {"the target": target} | {name: one for name, one in assign_holm_levels(guards, MOST).items() if one.moves}
    chances = {name: one.compute_pass_probability(MOST) for name, one in needed.items()}
    name = min(chances, key=lambda one: chances[one])
    if needed[name].measured.compute_confidence_bound(needed[name].level) is None:
        return Message("release.bound_unknown", "{guard} could not be compared with the champion", guard=name)
    return Message(
        "release.bound_seldom_passed",
        "even a gain of {most:.0f} bits per byte passes the bound of {guard} with a probability of only {chance:.0%}",
        most=MOST, guard=name, chance=chances[name],
    )  # fmt: skip


def make_unused_guard_message(name: str, known: ScoredGuard, clusters: float, clusters_min: int) -> Message:
    """Return the message that a guard is set aside, with the number of items or groups that it needs.

    >>> print(make_unused_guard_message("cloze", ScoredGuard(36, 30.0, 0.24, 0.15, 0.05), 30, 8).partition(" needed.")[0])
    cloze is not used as a guard, because with 36 items it would stop 44 of 100 models that are as good as the champion. At most 20 are \
allowed. About 68 items are
    >>> print(make_unused_guard_message("cloze", ScoredGuard(36, 3.0, 0.24, 0.15, 0.05), 3, 8))
    cloze is not used as a guard: its 36 items are from 3 document groups, and at least 8 groups are needed. The result of cloze decides \
nothing.
    """
    if clusters < clusters_min:
        return Message(
            "release.aside_few_groups",
            "{guard} is not used as a guard: its {items} items are from {groups:.0f|document group|document groups}, and at least {least} "
            "groups are needed. The result of {guard} decides nothing.",
            guard=name, items=known.items, groups=clusters, least=clusters_min,
        )  # fmt: skip
    needed = known.find_items_needed()
    size = (
        Message("release.items_needed", "About {needed} items are needed.", needed=needed)
        if needed
        else Message(
            "release.no_items_enough",
            "The margin of {guard} is so narrow that more items would not be enough.",
            guard=name,
        )
    )
    return Message(
        "release.aside",
        "{guard} is not used as a guard, because with {items} items it would stop {held:.0f} of 100 models that are as good as the champion. "
        "At most {most:.0f} are allowed. {size} {still}",
        guard=name, items=known.items, held=100 * (1 - known.pass_rate_of_equal_models), most=100 * MOST_FAILED, size=size,
        still=known.effect_when_set_aside,
    )  # fmt: skip
