"""What the daemon does, one action at a time: each is idempotent, and its own transaction records it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from factory.ledger.decisions import decision_on
from factory.ledger.plant import Plant
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


def perform(plant: Plant, action: Action, *, replayed_steps: int | None = None) -> None:
    """Do one action other than ingest. Safe to repeat. ``replayed_steps``: a diagnosis's budget, in place of the policy's.

    Raises: FactoryError, and whatever the machine makes of it.
    """
    subject = action.subject
    if action.kind == "plan_trunk":
        from factory.training.planning import plan_trunk
        from factory.training.tuning import tune_if_new

        tune_if_new(plant.workspace, plant.progress)
        plan_trunk(plant)
        return
    if action.kind == "plan_anneal":
        from factory.training.planning import plan_anneal

        plan_anneal(plant)
        return
    assert isinstance(subject, int)
    if action.kind == "train":
        train(plant, subject)
    elif action.kind == "export":
        from factory.training.exporting import export_candidate

        export_candidate(plant, subject)
    elif action.kind == "judge":
        judge(plant, subject)
    elif action.kind == "diagnose":
        from factory.diagnosis.diagnosing import diagnose_and_act

        diagnose_and_act(plant, subject, replayed_steps)
    elif action.kind == "replicate":
        from factory.replicas.replicating import replicate

        replicate(plant, subject)
    elif action.kind == "word":
        from factory.diagnosis.wording import word_diagnosis

        word_diagnosis(plant, subject)
    elif action.kind == "audit":
        from factory.audit.auditing import audit_and_show
        from factory.audit.reverts import open_reverts

        audit_and_show(plant, subject)
        open_reverts(plant)
    elif action.kind == "release":
        from factory.release.releases import OutOfDate, release

        try:
            release(plant, subject)
        except OutOfDate as error:  # another champion since: what was promoted is judged again, against that one
            plant.progress.line(f"  {error}")
            judge(plant, VerdictRow.get(plant.ledger, subject).number)
    elif action.kind == "finish_release":
        from factory.release.releases import release

        release(plant, ReleaseRow.get(plant.ledger, subject).verdict)
    else:
        raise AssertionError(action)


def train(plant: Plant, segment: int) -> None:
    from factory.audit.keeping import keeping
    from factory.diagnosis.ladder import climbing
    from factory.repairs.mending import mend_inputs
    from factory.retention.cleaning import tidy
    from factory.tracking.tracking import Tracking
    from factory.training.training import run_segment

    row = SegmentRow.get(plant.ledger, segment)
    follower = Tracking.open(plant).follow_segment(row, plant.progress.line)
    follower.begin()
    try:
        with keeping(plant, row), climbing(plant.workspace, row):
            mend = lambda every: mend_inputs(plant, segment, every)
            result = run_segment(plant, segment, follower, mend)
    finally:
        follower.finish()
    tidy(plant)
    loss = result.get("loss")
    if row.kind == "average":
        from factory.ledger.status import describe_average

        plant.progress.line(f"  segment {segment}: {describe_average(result['averaged'])}")
        return
    plant.progress.line(
        f"  segment {segment} ({row.kind}): steps {row.first_step}–{row.last_step}, loss {loss:.3f}"
        if isinstance(loss, float)
        else f"  segment {segment} done"
    )


def judge(plant: Plant, candidate: int) -> int:
    """Evaluate a candidate, judge it, show both in MLflow; returns the verdict's id."""
    from factory.evals.evaluator import evaluate
    from factory.gates.release.gate import decide
    from factory.release.approvals import how_to_answer, register_candidate, waits
    from factory.tracking.outages import shown

    evaluate(plant, candidate)
    verdict = decide(plant, candidate)
    shown(plant.progress.line, lambda: register_candidate(plant, candidate))
    row = VerdictRow.get(plant.ledger, verdict)
    plant.progress.line(f"  candidate {candidate}: {row.outcome.upper()}")
    for reason in row.reasons:
        plant.progress.line(f"    {reason}")
    if decision_on(plant.ledger, row) is None and waits(plant, row):
        plant.progress.line(f"  {how_to_answer(candidate)}")
    return verdict
