"""Duties that export, judge and release a finished anneal. An interrupted release is finished first.

A separate file, because each topic of duties is one file.
"""

from __future__ import annotations

from factory.duties.duty import Duty, DutyState
from factory.evals.evaluator import evaluate_candidate
from factory.gates.release.gate import judge_candidate
from factory.ledger.anomalies import list_rewound_segments_of_lineage
from factory.ledger.decisions import find_decision, was_export_rejected
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, ReleaseRow, SegmentRow, SqlReader, VerdictRow
from factory.release.approvals import describe_waiting_candidate, is_decision_by_person_needed, is_release_automatic
from factory.release.releases import OutOfDateVerdictError, release_candidate
from factory.training.exporting import export_candidate
from kernels.contract.message import Message


def find_unexported_segments(db: SqlReader) -> list[int]:
    """Return the finished anneals and averages that have no candidate."""
    rows = SegmentRow.select(
        db,
        "WHERE kind <> 'trunk' AND state = 'done' AND NOT EXISTS (SELECT 1 FROM candidates c WHERE c.segment = segments.id) ORDER BY id",
    )
    return [row.id for row in rows]


def _unfinished(state: DutyState) -> list[int]:
    """Return the releases that are not yet published."""
    return [row.number for row in ReleaseRow.select(state.db, "WHERE state <> 'published' ORDER BY number")]


def _unjudged(state: DutyState) -> list[int]:
    judged = "(SELECT 1 FROM verdicts v WHERE v.gate = 'release' AND v.subject = 'candidate:' || candidates.id)"
    return [row.id for row in CandidateRow.select(state.db, f"WHERE NOT EXISTS {judged} ORDER BY id")]


def _promoted(state: DutyState) -> list[int]:
    """Return the newest verdict, if it promotes, is not released, and needs no approval under the policy."""
    verdict = VerdictRow.find_first(state.db, "WHERE gate = 'release' ORDER BY id DESC")
    if verdict is None or verdict.outcome != "promote":
        return []
    if ReleaseRow.select(state.db, "WHERE verdict = :verdict", verdict=verdict.id):
        return []
    if list_rewound_segments_of_lineage(
        state.db, CandidateRow.get(state.db, verdict.subject_number).segment
    ) or was_export_rejected(state.db, verdict):
        return []
    return [verdict.id] if is_release_automatic(state.plant.workspace) else []


def _finish(plant: Plant, number: int) -> None:
    release_candidate(plant, ReleaseRow.get(plant.ledger, number).verdict)


def _release(plant: Plant, verdict: int) -> None:
    try:
        release_candidate(plant, verdict)
    except OutOfDateVerdictError as error:  # the champion changed since, so the candidate is judged against the new one
        plant.print_line(f"  {error}")
        judge_one_candidate(plant, VerdictRow.get(plant.ledger, verdict).subject_number)


def judge_one_candidate(plant: Plant, candidate: int) -> int:
    """Evaluate a candidate and judge it. Returns the verdict's id."""
    evaluate_candidate(plant, candidate)
    verdict = judge_candidate(plant, candidate)
    row = VerdictRow.get(plant.ledger, verdict)
    plant.print_line(
        Message(
            "duties.judged",
            "  candidate {candidate}: {verdict}",
            candidate=candidate,
            verdict=row.outcome.upper(),
            outcome=row.outcome,
        )
    )
    for reason in row.reasons:
        plant.print_line(f"    {reason}")
    if find_decision(plant.ledger, row) is None and is_decision_by_person_needed(plant, row):
        plant.print_line(f"  {describe_waiting_candidate(candidate)}")
    return verdict


FINISH_RELEASE = Duty(
    "finish_release", Message("duties.finish_release", "finish an interrupted release"), _unfinished, _finish
)
EXPORT = Duty(
    "export",
    Message("duties.export", "export an anneal or an average as a candidate"),
    lambda state: find_unexported_segments(state.db),
    export_candidate,
    fills_disk=True,
)
RELEASE = Duty(
    "release", Message("duties.release", "release a promoted candidate that needs no approval"), _promoted, _release
)
JUDGE = Duty(
    "judge",
    Message("duties.judge", "evaluate a candidate and judge it against the champion"),
    _unjudged,
    judge_one_candidate,
)
