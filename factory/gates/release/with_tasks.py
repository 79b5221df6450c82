"""The tasks' part of a release verdict: a pure function, applied to what ``judge`` said of the held-out documents."""

from __future__ import annotations

from dataclasses import replace

from factory.gates.release.judge import Verdict, decided
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.reasons import Reason
from factory.tasks.comparing import TaskEvidence, reasons


def with_tasks(policy: ReleasePolicy, verdict: Verdict, evidence: TaskEvidence) -> Verdict:
    """The verdict with what the tasks show: it never gets better by them."""
    shown, found = reasons(evidence, policy.clusters_min), verdict.found
    against = [Reason("task_violated", words) for words in shown.against]
    missing = [Reason("task_not_measured", words, evidence.remedies.get(words, "")) for words in shown.not_measured]
    missing += [Reason("task_not_shown", words, SHOW) for words in shown.not_shown]
    return decided(
        replace(
            found,
            against=(*against, *found.against),
            missing=(*missing, *found.missing),
            facts=(*found.facts, *shown.facts),
        )
    )


SHOW = (
    "train on ('factory run'), or allow the task a wider margin (as 'factory config set tasks tasks.NAME.margin 0.05')."
)
