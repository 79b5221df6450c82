"""Finds everything in the ledger that people are not shown yet, and shows it in MLflow and on pages.

Each ``ShowableKind`` here finds its unshown things from the ledger alone, and can show one of them. An event records each thing that was shown.
So MLflow is opened only if it lacks something. A thing may be new, or may be missing because a process was killed, MLflow did not answer, or its
database was lost. Pages are written first, because they do not need MLflow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import sqlalchemy as sa

from factory.core.workspace import PATIENCE
from factory.ledger.anomalies import DIAGNOSED, EXPLAINED, read_newest_details_by_anomaly
from factory.ledger.file_events import MLFLOW_REMADE, RETIRED
from factory.ledger.ledger import exchanges
from factory.ledger.plant import Plant
from factory.ledger.rows import ON_CANDIDATES, ReleaseRow, RunRow, SegmentRow, SqlReader, Subject, VerdictRow
from factory.runs.arm_runner import correct_run_state
from factory.show.mlflow.outages import TrackingError, describe_single_failure, show_unless_outage
from factory.show.mlflow.releases import show_releases
from factory.show.mlflow.runs import (
    ARM_SHOWN,
    CLOSED,
    DIAGNOSIS_SHOWN,
    PROFILE_SHOWN,
    RUN_DELETED,
    SHOWN,
    MlflowTracking,
)
from factory.show.mlflow.store import check_store_writable
from factory.show.pages import anomaly_page, proposal_report, release_report
from kernels.contract.message import Message

ThingsBySubject = Mapping[
    str, tuple[Any, dict[str, Any]]
]  # by subject: a thing, and the detail of the event that records its showing


@dataclass(frozen=True)
class ShowableKind:
    """A kind of thing to show. ``behind`` finds the things not shown yet, from the ledger alone. ``show`` shows one, and is safe to repeat."""

    name: str
    behind: Callable[[Plant, SqlReader], Iterable[Any]]
    show: Callable[[Plant, MlflowTracking, Any], object]


def show_unshown_items(plant: Plant) -> None:
    """Show everything that is not shown yet. A thing that cannot be shown now is reported once; the others are shown, and a later call retries.

    Raises: the errors of a fault of the machine.
    """
    tracking = MlflowTracking.open(plant)
    with plant.ledger.snapshot() as db:
        pages, rest = ([(one, [*one.behind(plant, db)]) for one in showings] for showings in (PAGES, IN_MLFLOW))
    for showing, behind in pages:
        for one in behind:
            _alone(plant, tracking, showing, one)
    if any(behind for _, behind in rest):
        show_unless_outage(plant.progress.line, partial(_in_mlflow, plant, tracking, rest))


def _in_mlflow(plant: Plant, tracking: MlflowTracking, rest: Sequence[tuple[ShowableKind, list[Any]]]) -> bool:
    """Raises: TrackingError; WorkspaceError while another process shows."""
    with plant.workspace.hold_lock(
        "tracking", PATIENCE
    ):  # without the lock, two processes could send the same thing twice
        check_store_writable(plant.workspace)
        for showing, behind in rest:
            for one in behind:
                _ = tracking.client  # raises if MLflow does not answer, so that it is not asked again for each thing
                _alone(plant, tracking, showing, one)
        _ = tracking.client
    return True


_refused: set[tuple[Path, str]] = set()  # messages that this process has printed


def _alone(plant: Plant, tracking: MlflowTracking, showing: ShowableKind, one: Any) -> None:
    """Show one thing. An error that concerns only this thing (a deleted run, a missing branch) is printed once per process.

    Raises: TrackingError where MLflow does not answer; the errors of a fault of the machine.
    """
    try:
        showing.show(plant, tracking, one)
    except Exception as error:
        if isinstance(error, TrackingError):
            _ = tracking.client  # raises if MLflow does not answer at all
        message = Message(
            "unshown_items.not_shown",
            "  One of the {kind} cannot be shown: {reason}",
            kind=showing.name,
            reason=describe_single_failure(error),
        )
        said = plant.workspace.root, message
        if said not in _refused:
            _refused.add(said)
            plant.print_line(said[1])


# -- pages --------------------------------------------------------------------------------------------------------------
def _dated(page: Path, newest: float) -> None:
    """Make a page at least as new as its content. Otherwise, after the clock was set back, each pass would write the page again."""
    if page.stat().st_mtime < newest:
        os.utime(page, (newest + 0.001,) * 2)


def _candidates_without_page(plant: Plant, db: SqlReader) -> list[tuple[int, float]]:
    """(candidate, time of the verdict or release) of judged candidates whose page is missing or older than the verdict or release."""
    judged = VerdictRow.select(db, f"WHERE {ON_CANDIDATES} ORDER BY id")
    found: dict[int, float] = {}
    released = {row.candidate: row for row in ReleaseRow.select(db)} if judged else {}
    for verdict in judged:
        page, release = release_report.report_path(plant, verdict.subject_number), released.get(verdict.subject_number)
        newest = max(verdict.created_at, release.created_at if release else 0.0)
        if not page.is_file() or page.stat().st_mtime < newest or (release and release.report is None):
            found[verdict.subject_number] = max(newest, found.get(verdict.subject_number, 0.0))
    return [*found.items()]


def _proposals_without_page(plant: Plant, db: SqlReader) -> list[int]:
    sql = "SELECT number FROM proposals WHERE verdict IS NOT NULL AND report IS NULL ORDER BY number"
    return [row["number"] for row in db.read(sql)]


def _diagnoses(db: SqlReader) -> list[tuple[int, float, dict[str, Any]]]:
    """(newest event, its time, detail) of the newest diagnosis of each episode. The event records the diagnosis or its explanation by an LLM."""
    sql = (
        "SELECT MAX(id) AS id, MAX(at) AS at, subject FROM events WHERE kind IN (:diagnosed, :worded) GROUP BY subject"
    )
    newest = {row["subject"]: row for row in db.read(sql, diagnosed=DIAGNOSED, worded=EXPLAINED)}
    if not newest:
        return []
    details = {detail["lead"]: detail for detail in read_newest_details_by_anomaly(db, DIAGNOSED).values()}
    about = [(newest[str(Subject("anomaly", lead))], details[lead]) for lead in sorted(details)]
    return [(row["id"], row["at"], detail) for row, detail in about if detail.get("report")]


def _diagnoses_without_page(plant: Plant, db: SqlReader) -> list[tuple[dict[str, Any], float]]:
    """(detail, time) of diagnoses whose page is missing or older than the newest event."""
    found = [(anomaly_page.diagnosis_page_path(plant, detail), at, detail) for _, at, detail in _diagnoses(db)]
    return [(detail, at) for page, at, detail in found if not page.is_file() or page.stat().st_mtime < at]


# -- MLflow -------------------------------------------------------------------------------------------------------------
def _unclosed(plant: Plant, db: SqlReader) -> list[int]:
    """Segments that ended and whose MLflow runs are still open. A segment whose run was retired is not shown again."""
    ended = db.read("SELECT id FROM segments WHERE state <> 'planned' ORDER BY id")
    left = _untold(db, CLOSED, {f"segment:{row['id']}": (row["id"], {}) for row in ended})
    retired = {row["detail"].get("segment") for row in _retired_runs(db)} if left else set()
    return [number for number in left if number not in retired]


def _close(plant: Plant, tracking: MlflowTracking, number: int) -> None:
    follower = tracking.follow_segment(SegmentRow.get(plant.ledger, number), plant.progress.line)
    while follower.poll():
        pass
    follower.finish()


def _any_judged(plant: Plant, db: SqlReader) -> list[None]:
    """[None] if a candidate was judged, else []. Each pass compares MLflow, because people move aliases and delete versions there."""
    return [None] if VerdictRow.find_first(db, f"WHERE {ON_CANDIDATES}") else []


def _unshown_proposals(plant: Plant, db: SqlReader) -> list[int]:
    """Proposals whose run does not show their current state."""
    sql = "SELECT number, state FROM proposals WHERE state NOT IN ('drafted', 'written', 'failed') ORDER BY number"
    states = {row["number"]: row["state"] for row in db.read(sql)}
    return _untold(db, SHOWN, {f"proposal:{number}": (number, {"state": state}) for number, state in states.items()})


def _unshown_diagnoses(plant: Plant, db: SqlReader) -> list[tuple[int, dict[str, Any]]]:
    found: ThingsBySubject = {f"diagnosis:{event}": ((event, detail), {}) for event, _, detail in _diagnoses(db)}
    return _untold(db, DIAGNOSIS_SHOWN, found)


def _show_diagnosis(plant: Plant, tracking: MlflowTracking, one: tuple[int, dict[str, Any]]) -> None:
    event, detail = one
    segment, page = SegmentRow.get(plant.ledger, detail["segment"]), anomaly_page.diagnosis_page_path(plant, detail)
    tracking.tag_diagnosis(segment, event, detail["causes"], detail["why"], page)


def _unshown_profiles(plant: Plant, db: SqlReader) -> list[int]:
    rows: ThingsBySubject = {
        f"profile:{row['id']}": (row, {}) for row in db.read("SELECT id, path FROM profiles ORDER BY id")
    }
    return [row["id"] for row in _untold(db, PROFILE_SHOWN, rows) if Path(row["path"]).is_file()]


def _unshown_arms(plant: Plant, db: SqlReader) -> list[RunRow]:
    rows = [
        row for row in map(correct_run_state, RunRow.select(db, "ORDER BY started_at, id")) if row.state != "running"
    ]
    return _untold(db, ARM_SHOWN, {f"arm:{row.id}": (row, {"state": row.state, "at": row.started_at}) for row in rows})


def _undeleted(plant: Plant, db: SqlReader) -> list[list[str]]:
    """The names of all retired runs as one list, because each removal in MLflow takes seconds."""
    names = [PurePosixPath(row["subject"]).name for row in _retired_runs(db)]
    left = _untold(db, RUN_DELETED, {f"run:{name}": (name, {}) for name in names})
    return [left] if left else []


def _retired_runs(db: SqlReader) -> list[dict[str, Any]]:
    sql = "SELECT subject, detail FROM events WHERE kind = :kind AND subject LIKE 'run:%' ORDER BY id"
    return db.read(sql, kind=RETIRED)


def _untraced(plant: Plant, db: SqlReader) -> list[dict[str, Any]]:
    if not sa.inspect(plant.ledger.engine).has_table(exchanges.name):  # an older ledger has no such table
        return []
    return db.read("SELECT * FROM exchanges WHERE trace IS NULL AND file IS NOT NULL ORDER BY id")


def _untold(db: SqlReader, kind: str, wanted: ThingsBySubject) -> list[Any]:
    """The things whose newest event of this kind does not have the wanted detail. Events before MLflow's database was remade do not count."""
    if not wanted:
        return []
    rows = db.read(
        "SELECT subject, detail FROM events WHERE kind = :kind AND id > "
        "(SELECT COALESCE(MAX(id), 0) FROM events WHERE kind = :remade) ORDER BY id",
        kind=kind,
        remade=MLFLOW_REMADE,
    )
    told = {row["subject"]: row["detail"] for row in rows}
    return [one for subject, (one, detail) in wanted.items() if told.get(subject) != detail]


PAGES = (
    ShowableKind(
        "candidates' pages",
        _candidates_without_page,
        lambda plant, _, one: _dated(release_report.write_report(plant, one[0]), one[1]),
    ),
    ShowableKind(
        "proposals' pages",
        _proposals_without_page,
        lambda plant, _, one: proposal_report.write_proposal_report(plant, one),
    ),
    ShowableKind(
        "diagnoses' pages",
        _diagnoses_without_page,
        lambda plant, _, one: _dated(anomaly_page.write_diagnosis_page(plant, one[0]), one[1]),
    ),
)
IN_MLFLOW = (
    ShowableKind("segments", _unclosed, _close),
    ShowableKind("releases", _any_judged, lambda plant, tracking, _: show_releases(plant, tracking)),
    ShowableKind("proposals", _unshown_proposals, lambda _, tracking, one: tracking.update_proposal_run(one)),
    ShowableKind("diagnoses", _unshown_diagnoses, _show_diagnosis),
    ShowableKind("profiles", _unshown_profiles, lambda _, tracking, one: tracking.update_profile_run(one)),
    ShowableKind("runs", _unshown_arms, lambda plant, tracking, row: tracking.update_arm_run(row, plant.progress.line)),
    ShowableKind(
        "exchanges", _untraced, lambda plant, tracking, row: tracking.store_exchange_trace(row, plant.print_line)
    ),
    ShowableKind("retired runs", _undeleted, lambda _, tracking, names: tracking.delete_runs(names)),
)
