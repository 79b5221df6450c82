"""``judge_audit(policy, evidence) -> Verdict`` decides on the audit of a window. It is a pure function, and imports nothing that measures.

``audit_segment.gather_audit_evidence`` measures the evidence. Distances of weights are ‖difference‖ / ‖movement during the window‖, those of moments
‖difference‖ / ‖moments‖. If a measurement is missing, the verdict is 'hold'. 'reject' needs a difference that two replays of the same code do not
have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from factory.audit.policy import AuditPolicy
from factory.gates.release.judge import HOLD, PROMOTE, REJECT, Verdict
from kernels.contract.message import Message

LEAST_OF_MOMENTS = 1e-6  # share of the moments' size: a smaller distance is always allowed


def judge_audit(policy: AuditPolicy, evidence: Mapping[str, Any]) -> Verdict:
    """Return the verdict. 'promote' means that live training did the same as the code without the patches."""
    if why := evidence.get("missing"):
        return Verdict(HOLD, (Message.from_json(why),))
    found = find_differences(policy, evidence)
    if not found and is_hidden_by_rounding(policy, evidence):
        hidden = Message(
            "audit.hidden_by_rounding",
            "These {steps} steps show too little. Rounding alone makes a distance of {rounding:.2g} of the way that the weights moved, "
            "and wrong steps could hide in it. No later try changes this. Shorter windows have less rounding: lower checkpoint_every in the recipe.",
            steps=evidence["steps"], rounding=_rounding(evidence),
        )  # fmt: skip
        return Verdict(HOLD, (hidden,))
    if not found:
        return Verdict(PROMOTE, (_agreement(policy, evidence),))
    again = evidence.get("again")
    if not isinstance(again, Mapping) or again.get("missing"):
        no_replay = Message("audit.no_second_replay", "a second replay is missing")
        why = (again or {}).get("missing", no_replay)
        unconfirmed = Message(
            "audit.not_confirmed", "The audit found a difference, but could not confirm it: {why}.", why=why
        )
        return Verdict(HOLD, (unconfirmed, *found))
    repeats = bool(again.get("same_bits")) or float(again.get("drift", math.inf)) <= float(evidence.get("drift", 0)) / 2
    if not repeats:
        unsteady = Message(
            "audit.not_repeatable",
            "Two replays of the code without the patches gave different results on this machine.",
        )
        return Verdict(HOLD, (unsteady, *found))
    return Verdict(REJECT, tuple(found))


def find_differences(policy: AuditPolicy, evidence: Mapping[str, Any]) -> list[Message]:
    """Return a message for each difference of live training that rounding does not explain."""
    found = [Message.from_json(one) for one in evidence.get("told") or ()]
    if evidence.get("same_bits"):
        return found
    if evidence.get("exact"):
        found.append(
            Message(
                "audit.bits_differ",
                "Some bits of the weights or of the optimizer's moments differ between the live run and the replay. "
                "No bit should differ: the patch changed no bits when the gate judged it, and the live code gives "
                "the same bits each time.",
            )
        )
    drift = evidence.get("drift")
    if drift is None or not evidence.get("rounding"):
        return found
    allowed = compute_allowed_distance(policy, evidence)
    if not drift <= allowed:
        found.append(
            Message(
                "audit.weights_apart",
                "After {steps} steps, the live weights and the replay's are too far apart. Their distance is "
                "{drift:.2g} of the way that the weights moved in these steps; at most {allowed:.2g} is allowed, because rounding makes a "
                "distance of {rounding:.2g}.",
                drift=drift, steps=evidence["steps"], allowed=allowed, rounding=_rounding(evidence),
            )
        )  # fmt: skip
    for kind, apart in sorted((evidence.get("moments") or {}).items()):
        rounding = max(one["moments"].get(kind, 0.0) for one in evidence["rounding"])
        if not apart <= (most := max(LEAST_OF_MOMENTS, policy.times * rounding)):
            found.append(
                Message(
                    "audit.moments_apart",
                    "After {steps} steps, the optimizer's values of {kind} in the live run and in the replay are too far apart. Their distance is "
                    "{apart:.2g} of their size; at most {allowed:.2g} is allowed, because rounding makes a distance of {rounding:.2g}.",
                    kind=kind, apart=apart, steps=evidence["steps"], allowed=most, rounding=rounding,
                )
            )  # fmt: skip
    return found


def compute_allowed_distance(policy: AuditPolicy, evidence: Mapping[str, Any]) -> float:
    """Return the allowed distance of the weights, as a share of the way that they moved in the window.

    Only replays of the code without the patches decide it. What a patch did in the gate does not.

    >>> of = lambda *shares: compute_allowed_distance(AuditPolicy(), {"steps": 20, "rounding": [{"drift": share} for share in shares]})
    >>> of(0.0), of(1e-4), of(1e-4, 3e-4)
    (5e-06, 0.0004, 0.0012)
    """
    return float(max(policy.least / max(1, evidence["steps"]), policy.times * _rounding(evidence)))


def is_hidden_by_rounding(policy: AuditPolicy, evidence: Mapping[str, Any]) -> bool:
    """Return whether rounding alone allows a distance of a large part of the way, so that agreement of the weights shows little."""
    if evidence.get("same_bits") or not evidence.get("rounding"):
        return False
    return compute_allowed_distance(policy, evidence) > policy.most


def _rounding(evidence: Mapping[str, Any]) -> float:
    return float(max(one["drift"] for one in evidence["rounding"]))


def _agreement(policy: AuditPolicy, evidence: Mapping[str, Any]) -> Message:
    if average := evidence.get("average"):
        return Message(
            "audit.average_agrees",
            "The live average and the average that was made again differ by {errors:.2g} rounding errors. At most {allowed:g} are allowed.",
            **average,
        )
    if evidence.get("same_bits"):
        return Message(
            "audit.same_bits",
            "After {steps} steps, the live run and the replay have the same results, bit for bit.",
            steps=evidence["steps"],
        )
    return Message(
        "audit.agrees",
        "After {steps} steps, the live weights and the replay's are close enough. Their distance is {drift:.2g} of the way "
        "that the weights moved in these steps; at most {allowed:.2g} is allowed, because rounding makes a distance of {rounding:.2g}.",
        drift=evidence["drift"], steps=evidence["steps"], allowed=compute_allowed_distance(policy, evidence), rounding=_rounding(evidence),
    )  # fmt: skip
