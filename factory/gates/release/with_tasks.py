"""The tasks' part of a release verdict: a pure function, applied to what ``judge`` said of the held-out documents."""

from __future__ import annotations

from factory.gates.release.judge import HOLD, PROMOTE, REJECT, Verdict
from factory.gates.release.policy import ReleasePolicy
from factory.tasks.comparing import TaskEvidence, reasons


def with_tasks(policy: ReleasePolicy, verdict: Verdict, evidence: TaskEvidence) -> Verdict:
    """The verdict with what the tasks show: it never gets better by them."""
    against, missing, facts = reasons(evidence, policy.clusters_min)
    if against:
        return Verdict(REJECT, (*against, *verdict.reasons, *missing, *facts))
    if missing and verdict.outcome == PROMOTE:
        return Verdict(HOLD, (*missing, *verdict.reasons, *facts))
    return Verdict(verdict.outcome, (*verdict.reasons, *missing, *facts))
