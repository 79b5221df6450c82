"""What MLflow was not told because a process was killed, it did not answer, or its database was lost: a segment's run, a decision that its
proposal's run does not show, the verdict of an audit, a diagnosis. (Candidates: ``factory.release.releases.reconcile``.)

Each showing is recorded as an event, so that a pass finds what is missing in the ledger alone, and opens MLflow only for that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject, VerdictRow
from factory.tracking.outages import shown
from factory.tracking.tracking import AUDITED, CLOSED, DIAGNOSIS_SHOWN, SHOWN, Tracking

REMADE = "mlflow_remade"  # event: its database was lost, and is an older one or empty


def show_missed(plant: Plant, say: Callable[[str], None]) -> None:
    """Close the runs of segments that ended, and show decided proposals as they are. What fails is said, and tried at the next call."""
    tracking = Tracking.open(plant)
    for number in _unclosed(plant.ledger):
        follower = tracking.follow_segment(SegmentRow.get(plant.ledger, number), say)
        if shown(say, partial(getattr, tracking, "client")) is None:
            return
        while follower.poll():
            pass
        follower.finish()
    for number in _unshown(plant.ledger):
        shown(say, partial(tracking.proposal_run, number))
    for verdict in VerdictRow.select(plant.ledger, "WHERE gate = 'audit' ORDER BY id"):
        if str(Subject("verdict", verdict.id)) not in _newest(plant.ledger, AUDITED):
            shown(say, partial(tracking.segment_audited, verdict))
    for event, detail in _undiagnosed(plant.ledger):
        page = (plant.ledger.root or Path()) / detail["report"]
        if page.is_file():
            segment = SegmentRow.get(plant.ledger, detail["segment"])
            shown(say, partial(tracking.segment_diagnosed, segment, event, detail["causes"], detail["why"], page))


def _unclosed(ledger: Ledger) -> list[int]:
    sql = "SELECT id FROM segments s WHERE state <> 'planned' ORDER BY id"
    closed = set(_newest(ledger, CLOSED))
    return [row["id"] for row in ledger.read(sql) if f"segment:{row['id']}" not in closed]


def _unshown(ledger: Ledger) -> list[int]:
    sql = """SELECT p.number, p.state FROM proposals p JOIN tracked_runs t ON t.subject = 'proposal:' || p.number
        WHERE p.state IN ('judged', 'approved', 'rejected', 'reverted') ORDER BY p.number"""
    shown = _newest(ledger, SHOWN)
    return [
        row["number"] for row in ledger.read(sql) if shown.get(f"proposal:{row['number']}") != {"state": row["state"]}
    ]


def _undiagnosed(ledger: Ledger) -> list[tuple[int, dict[str, Any]]]:
    """(number of its event, what it says) of the newest diagnosis of each episode that MLflow does not show."""
    told = _newest(ledger, DIAGNOSIS_SHOWN)
    rows = ledger.read("SELECT id, subject, detail FROM events WHERE kind = 'anomaly_diagnosed' ORDER BY id")
    newest = {row["subject"]: (row["id"], row["detail"]) for row in rows}
    return [found for found in newest.values() if f"diagnosis:{found[0]}" not in told and "report" in found[1]]


def _newest(ledger: Ledger, kind: str) -> dict[str, Any]:
    """subject → the detail of its newest event of a kind, since MLflow's database was made anew."""
    rows = ledger.read(
        "SELECT subject, detail FROM events WHERE kind = :kind AND id > "
        "(SELECT COALESCE(MAX(id), 0) FROM events WHERE kind = :remade) ORDER BY id",
        kind=kind,
        remade=REMADE,
    )
    return {row["subject"]: row["detail"] for row in rows}
