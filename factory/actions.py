"""What the daemon does, one action at a time: each is idempotent, and its own transaction records it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.ledger.decisions import decision_on
from factory.ledger.ledger import Ledger
from factory.ledger.rows import ReleaseRow, SegmentRow, VerdictRow


@dataclass(frozen=True)
class Action:
    kind: str  # finish_release | train | ingest | release | judge | export | plan_anneal | plan_trunk | audit | diagnose | word | replicate
    subject: int | Path | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, str(self.subject or ""))))

    @classmethod
    def parse(cls, words: str) -> Self:
        """An action on a number, as it prints itself.

        >>> Action.parse("judge 3")
        Action(kind='judge', subject=3)
        """
        kind, _, number = words.partition(" ")
        return cls(kind, int(number))


def perform(
    workspace: Workspace, ledger: Ledger, action: Action, progress: Progress, *, replayed_steps: int | None = None
) -> None:
    """Do one action other than ingest. Safe to repeat. ``replayed_steps``: a diagnosis's budget, in place of the policy's.

    Raises: FactoryError, and whatever the machine makes of it.
    """
    subject = action.subject
    if action.kind == "plan_trunk":
        from factory.training.planning import plan_trunk
        from factory.training.tuning import tune_if_new

        tune_if_new(workspace, progress)
        plan_trunk(workspace, ledger, progress=progress)
        return
    if action.kind == "plan_anneal":
        from factory.training.planning import plan_anneal

        plan_anneal(workspace, ledger, progress)
        return
    assert isinstance(subject, int)
    if action.kind == "train":
        train(workspace, ledger, subject, progress)
    elif action.kind == "export":
        from factory.training.exporting import export_candidate

        export_candidate(workspace, ledger, subject)
    elif action.kind == "judge":
        judge(workspace, ledger, subject, progress)
    elif action.kind == "diagnose":
        from factory.diagnosis.diagnosing import diagnose_and_act

        diagnose_and_act(workspace, ledger, subject, progress, replayed_steps)
    elif action.kind == "replicate":
        from factory.replicas.replicating import replicate

        replicate(workspace, ledger, subject, progress)
    elif action.kind == "word":
        from factory.diagnosis.wording import word_diagnosis

        word_diagnosis(workspace, ledger, subject, progress)
    elif action.kind == "audit":
        from factory.audit.auditing import audit_and_show
        from factory.audit.reverts import open_reverts

        audit_and_show(workspace, ledger, subject, progress)
        open_reverts(workspace, ledger, progress)
    elif action.kind == "release":
        from factory.release.releases import OutOfDate, release

        try:
            release(workspace, ledger, subject, progress)
        except OutOfDate as error:  # another champion since: what was promoted is judged again, against that one
            progress.line(f"  {error}")
            judge(workspace, ledger, VerdictRow.get(ledger, subject).number, progress)
    elif action.kind == "finish_release":
        from factory.release.releases import release

        release(workspace, ledger, ReleaseRow.get(ledger, subject).verdict, progress)
    else:
        raise AssertionError(action)


def train(workspace: Workspace, ledger: Ledger, segment: int, progress: Progress) -> None:
    from factory.audit.keeping import keeping
    from factory.diagnosis.ladder import climbing
    from factory.repairs.mending import mend_inputs
    from factory.retention.cleaning import tidy
    from factory.tracking.tracking import Tracking
    from factory.training.training import run_segment

    row = SegmentRow.get(ledger, segment)
    follower = Tracking.open(workspace, ledger).follow_segment(row, progress.line)
    follower.begin()
    try:
        with keeping(workspace, ledger, row, progress), climbing(workspace, row):
            mend = lambda every: mend_inputs(workspace, ledger, segment, progress, every)
            result = run_segment(workspace, ledger, segment, progress, follower, mend)
    finally:
        follower.finish()
    tidy(workspace, ledger, progress)
    loss = result.get("loss")
    if row.kind == "average":
        from factory.ledger.status import describe_average

        progress.line(f"  segment {segment}: {describe_average(result['averaged'])}")
        return
    progress.line(
        f"  segment {segment} ({row.kind}): steps {row.first_step}–{row.last_step}, loss {loss:.3f}"
        if isinstance(loss, float)
        else f"  segment {segment} done"
    )


def judge(workspace: Workspace, ledger: Ledger, candidate: int, progress: Progress) -> int:
    """Evaluate a candidate, judge it, show both in MLflow; returns the verdict's id."""
    from factory.evals.evaluator import evaluate
    from factory.gates.release.gate import decide
    from factory.release.approvals import how_to_answer, register_candidate, waits
    from factory.tracking.outages import shown

    evaluate(workspace, ledger, candidate, progress)
    verdict = decide(workspace, ledger, candidate, progress)
    shown(progress.line, lambda: register_candidate(workspace, ledger, candidate))
    row = VerdictRow.get(ledger, verdict)
    progress.line(f"  candidate {candidate}: {row.outcome.upper()}")
    for reason in row.reasons:
        progress.line(f"    {reason}")
    if decision_on(ledger, row) is None and waits(workspace, ledger, row):
        progress.line(f"  {how_to_answer(candidate)}")
    return verdict
