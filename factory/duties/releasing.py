"""Duties that export, judge and release a finished anneal. An interrupted release is finished first.

A separate file, because each topic of duties is one file.
"""

from __future__ import annotations

from factory.duties.duty import Duty, DutyState
from factory.evals.evaluator import evaluate_candidate
from factory.gates.release.gate import judge_candidate
from factory.ledger.anomalies import list_rewound_segments_of_lineage
from factory.ledger.decisions import find_decision, was_export_rejected
from factory.ledger.imported_model import find_import
from factory.ledger.plant import Plant
from factory.ledger.rows import (
    IMPORT,
    ON_CANDIDATES,
    CandidateRow,
    EvaluationRow,
    ReleaseRow,
    SegmentRow,
    SqlReader,
    VerdictRow,
)
from factory.release.approvals import describe_waiting_candidate, is_decision_by_person_needed, is_release_automatic
from factory.release.imported_release import find_unreleased_import, release_imported_model
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
    imported = f"(SELECT 1 FROM segments s WHERE s.id = candidates.segment AND s.kind = '{IMPORT}')"
    judged = f"(SELECT 1 FROM verdicts v WHERE v.{ON_CANDIDATES} AND v.subject = 'candidate:' || candidates.id)"
    return [
        row.id
        for row in CandidateRow.select(state.db, f"WHERE NOT EXISTS {judged} AND NOT EXISTS {imported} ORDER BY id")
    ]


def _unmeasured_import(state: DutyState) -> list[int]:
    """Return the candidate of the imported model if it was never measured and documents of the sealed half exist."""
    row = find_import(state.db) if state.plant.workspace.config.import_from else None
    candidate = CandidateRow.find_first(state.db, "WHERE segment = :segment", segment=row.id) if row else None
    if candidate is None or EvaluationRow.find_newest(state.db, candidate.id) is not None:
        return []
    return [candidate.id] if state.db.read("SELECT key FROM held_out WHERE sealed LIMIT 1") else []


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
    row = ReleaseRow.get(plant.ledger, number)
    if VerdictRow.get(plant.ledger, row.verdict).gate == IMPORT:
        release_imported_model(plant, row.candidate)
    else:
        release_candidate(plant, row.verdict)


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
RELEASE_IMPORT = Duty(
    "release_import",
    Message("duties.release_import", "make an imported model release 0"),
    lambda state: find_unreleased_import(state.db) if state.plant.workspace.config.import_from else [],
    release_imported_model,
)
MEASURE_IMPORT = Duty(
    "measure_import",
    Message(
        "duties.measure_import",
        "measure the imported model, the baseline of all candidates, as soon as documents are held out",
    ),
    _unmeasured_import,
    evaluate_candidate,
)
JUDGE = Duty(
    "judge",
    Message("duties.judge", "evaluate a candidate and judge it against the champion"),
    _unjudged,
    judge_one_candidate,
)
