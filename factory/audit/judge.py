"""``judge_audit(policy, evidence) -> Verdict`` decides on the audit of a window. It is a pure function, and imports nothing that measures.

``audit_segment.gather_audit_evidence`` measures the evidence. Distances of weights are ‖difference‖ / ‖movement during the window‖. If a
measurement is missing, the verdict is 'hold'. 'reject' needs a difference that two replays of the same code do not have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from factory.audit.policy import AuditPolicy
from factory.gates.release.judge import HOLD, PROMOTE, REJECT, Verdict
from kernels.contract.message import Message


def judge_audit(policy: AuditPolicy, evidence: Mapping[str, Any]) -> Verdict:
    """Return the verdict. 'promote' means that live training did the same as the code without the patches."""
    if why := evidence.get("missing"):
        return Verdict(HOLD, (Message.from_json(why),))
    found = find_differences(policy, evidence)
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
    """Return a message for each difference of live training that the rounding of the patches does not explain."""
    if evidence.get("same_bits") and not evidence.get("told"):
        return []
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
    drift, control = evidence.get("drift"), evidence.get("control_drift")
    if drift is None or control is None:
        return found
    share = compute_allowed_distance_share(policy, evidence)
    if not drift <= share * control:
        found.append(
            Message(
                "audit.weights_apart",
                "After {steps} steps, the live weights and the replay's are too far apart. Their distance is "
                "{drift:.2g} of the way that the weights moved in these steps; at most {allowed:.2g} is allowed. Leaving out one step "
                "makes a distance, and the limit is {share:.2g} times this distance.",
                drift=drift, steps=evidence["steps"], allowed=share * control, share=share,
            )
        )  # fmt: skip
    return found


def compute_allowed_distance_share(policy: AuditPolicy, evidence: Mapping[str, Any]) -> float:
    """Return the allowed distance of the weights, as a share of the effect of leaving out one step.

    The allowed distance grows with the distance that the patches' weights had in the gate.

    >>> of = lambda claimed: compute_allowed_distance_share(AuditPolicy(), {"claimed": claimed, "gate_steps": 10, "steps": 20})
    >>> of(0.0), of(0.03), of(0.4), of(None)
    (0.1, 0.24, 0.5, 0.5)
    """
    claimed = evidence.get("claimed")
    if claimed is None:
        return policy.most
    longer = max(1.0, evidence["steps"] / max(1, evidence.get("gate_steps") or 1))
    return min(policy.most, max(policy.least, policy.times * claimed * longer))


def _agreement(policy: AuditPolicy, evidence: Mapping[str, Any]) -> Message:
    if evidence.get("same_bits"):
        return Message(
            "audit.same_bits",
            "After {steps} steps, the live run and the replay have the same results, bit for bit.",
            steps=evidence["steps"],
        )
    share = compute_allowed_distance_share(policy, evidence)
    return Message(
        "audit.agrees",
        "After {steps} steps, the live weights and the replay's are close enough. Their distance is {drift:.2g} of the way "
        "that the weights moved in these steps; at most {allowed:.2g} is allowed. Leaving out one step makes a distance, and the "
        "limit is {share:.2g} times this distance.",
        drift=evidence["drift"], steps=evidence["steps"], allowed=share * evidence["control_drift"], share=share,
    )  # fmt: skip
