"""Anomalies and what became of them, read from the ledger alone.

An anomaly is open until an event ``anomaly_closed`` names it: what was done about it was enough, or a person said so.
``anomaly_diagnosed`` says what the loss doctor found. Both are about the first anomaly of an episode, and name all of it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from factory.ledger.rows import LedgerRow, Reads, SegmentRow, Subject

REPLICAS_APART = "replicas_apart"  # of a segment's end: ranks held other bits of the same weights
DIAGNOSED, CLOSED = "anomaly_diagnosed", "anomaly_closed"
DIAGNOSIS = "diagnosis"  # gate of the verdict on a segment whose anomaly a patch is blamed for
QUARANTINED, MARKED, REWOUND = "documents_quarantined", "release_marked", "segment_rewound"


@dataclass(frozen=True)
class AnomalyRow(LedgerRow):
    noun, source = "anomaly", "anomalies"

    id: int
    segment: int
    step: int
    kind: str
    detail: dict[str, Any] | None


def newest_about(db: Reads, kind: str) -> dict[int, dict[str, Any]]:
    """By anomaly, the detail of the newest event of that kind that names it in ``anomalies``."""
    found: dict[int, dict[str, Any]] = {}
    for row in db.read("SELECT subject, detail FROM events WHERE kind = :kind ORDER BY id", kind=kind):
        detail = row["detail"] | {"lead": Subject.parse(row["subject"]).number}
        found |= dict.fromkeys(row["detail"]["anomalies"], detail)
    return found


def open_anomalies(db: Reads, kinds: Collection[str]) -> list[AnomalyRow]:
    """Those of these kinds that nothing has closed, oldest first."""
    closed = newest_about(db, CLOSED)
    return [row for row in AnomalyRow.select(db) if row.kind in kinds and row.id not in closed]


def undiagnosed(db: Reads, kinds: Collection[str]) -> int | None:
    """The oldest open anomaly that no diagnosis is about, in a segment that still counts."""
    known = newest_about(db, DIAGNOSED)
    counts = {row.id for row in SegmentRow.select(db, "WHERE state = 'done'")}
    return next((row.id for row in open_anomalies(db, kinds) if row.id not in known and row.segment in counts), None)


def open_in(db: Reads, segment: int, kinds: Collection[str]) -> list[AnomalyRow]:
    """The open anomalies of a segment and of all that it goes on from."""
    lineage = {row.id for row in SegmentRow.lineage(db, segment)}
    return [row for row in open_anomalies(db, kinds) if row.segment in lineage]


def every_anomaly(db: Reads) -> list[dict[str, Any]]:
    """All, oldest first, with ``state``: open, diagnosed or closed; ``causes`` and ``how`` it was closed."""
    diagnosed, closed = newest_about(db, DIAGNOSED), newest_about(db, CLOSED)
    found = []
    for row in AnomalyRow.select(db):
        diagnosis, end = diagnosed.get(row.id), closed.get(row.id)
        state = "closed" if end else "diagnosed" if diagnosis else "open"
        found.append(
            row.only("id segment step kind")
            | {
                "state": state,
                "lead": diagnosis and diagnosis["lead"],
                "causes": diagnosis["causes"] if diagnosis else [],
            }
            | {
                "why": diagnosis["why"] if diagnosis else "",
                "guilty": diagnosis["guilty"] if diagnosis else [],
                "how": end and end["how"],
            }
        )
    return found
