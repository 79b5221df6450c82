"""``judge_audit(policy, evidence) -> Verdict``: the decision on a window as a pure function.

Evidence is what the replays measured (``auditing.gather``); distances of weights are ‖difference‖ / ‖how far the window moved them‖. What
could not be measured is 'hold'; 'reject' needs a difference that a second replay of the same code does not have.

Apart because it is the pure decision, and imports nothing that measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from factory.audit.policy import AuditPolicy
from factory.gates.release.judge import HOLD, PROMOTE, REJECT, Verdict


def judge_audit(policy: AuditPolicy, evidence: Mapping[str, Any]) -> Verdict:
    """promote: live training did what the code without the patches does."""
    if why := evidence.get("missing"):
        return Verdict(HOLD, (str(why),))
    found = differences(policy, evidence)
    if not found:
        return Verdict(PROMOTE, (_agreement(policy, evidence),))
    again = evidence.get("again")
    if not isinstance(again, Mapping) or again.get("missing"):
        return Verdict(
            HOLD, (f"a difference was not confirmed: {(again or {}).get('missing', 'no second replay')}", *found)
        )
    repeats = bool(again.get("same_bits")) or float(again.get("drift", math.inf)) <= float(evidence.get("drift", 0)) / 2
    if not repeats:
        return Verdict(HOLD, ("the code without the patches does not repeat itself on this machine", *found))
    return Verdict(REJECT, tuple(found))


def differences(policy: AuditPolicy, evidence: Mapping[str, Any]) -> list[str]:
    """What live training did otherwise, beyond what the patches' rounding explains; a sentence each."""
    if evidence.get("same_bits") and not evidence.get("told"):
        return []
    found = [str(words) for words in evidence.get("told") or ()]
    if evidence.get("same_bits"):
        return found
    if evidence.get("exact"):
        found.append(
            "weights or moments differ in some bits, which the patch did not do when it was judged, and live code does every time"
        )
    drift, control = evidence.get("drift"), evidence.get("control_drift")
    if drift is None or control is None:
        return found
    share = allowed_share(policy, evidence)
    if not drift <= share * control:
        found.append(
            f"the weights are {drift:.2g} away from the replay's (relative to how far the {evidence['steps']} steps moved them); at most "
            f"{share * control:.2g} is allowed, {share:.2g} of what leaving out one step causes"
        )
    return found


def allowed_share(policy: AuditPolicy, evidence: Mapping[str, Any]) -> float:
    """Of what leaving out one step causes: by how far the patches' weights ended in the gate, after ``gate_steps`` steps.

    >>> of = lambda claimed: allowed_share(AuditPolicy(), {"claimed": claimed, "gate_steps": 10, "steps": 20})
    >>> of(0.0), of(0.03), of(0.4), of(None)
    (0.1, 0.24, 0.5, 0.5)
    """
    claimed = evidence.get("claimed")
    if claimed is None:
        return policy.most
    longer = max(1.0, evidence["steps"] / max(1, evidence.get("gate_steps") or 1))
    return min(policy.most, max(policy.least, policy.times * claimed * longer))


def _agreement(policy: AuditPolicy, evidence: Mapping[str, Any]) -> str:
    if evidence.get("same_bits"):
        return f"the same to the last bit over {evidence['steps']} steps"
    share = allowed_share(policy, evidence)
    return (
        f"the weights are {evidence['drift']:.2g} away from the replay's after {evidence['steps']} steps; at most "
        f"{share * evidence['control_drift']:.2g} is allowed, {share:.2g} of what leaving out one step causes"
    )
