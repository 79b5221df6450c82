"""Which audits wait to be done, and what became of those that were: read from the ledger alone."""

from __future__ import annotations

import time
from typing import Any

from factory.audit.drawing import DRAWN, AuditWindow
from factory.audit.policy import AuditPolicy
from factory.code_loop.revalidating import AUDIT
from factory.ledger.rows import Reads, SegmentRow, Subject, VerdictRow


def waiting(db: Reads, policy: AuditPolicy) -> list[int]:
    """The segments whose audit should be done now, oldest first."""
    drawn = {
        Subject.parse(row["subject"]).number
        for row in db.read("SELECT subject FROM events WHERE kind = :kind", kind=DRAWN)
    }
    return [number for number in sorted(drawn) if _waits(db, number, policy)]


def _waits(db: Reads, number: int, policy: AuditPolicy) -> bool:
    window = AuditWindow.of(db, number)
    if window is None or not window.steps or SegmentRow.get(db, number).state != "done":
        return False
    newest = VerdictRow.newest(db, AUDIT, Subject("segment", number))
    if newest is None:
        return True
    due = time.time() >= newest.created_at + policy.again_after_seconds
    return newest.outcome == "hold" and due and tries(db, number) < policy.tries


def tries(db: Reads, number: int) -> int:
    """How often the audit of a segment was judged, 'hold' included."""
    which = "WHERE gate = :gate AND subject = :subject"
    return len(VerdictRow.select(db, which, gate=AUDIT, subject=str(Subject("segment", number))))


def every_audit(ledger: Reads) -> list[dict[str, Any]]:
    """All that was drawn, oldest first: segment, window, patches, and the verdict where there is one."""
    subjects = dict.fromkeys(
        row["subject"] for row in ledger.read("SELECT subject FROM events WHERE kind = :kind ORDER BY id", kind=DRAWN)
    )
    found = []
    for subject in map(Subject.parse, subjects):
        window, verdict = AuditWindow.of(ledger, subject.number), VerdictRow.newest(ledger, AUDIT, subject)
        if window is not None and window.steps:
            judged = verdict.with_evidence(ledger) if verdict else None
            found.append({"segment": subject.number, **vars(window), "verdict": judged})
    return found
