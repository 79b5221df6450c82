"""Reads the decisions of people about candidates from the ledger, and which candidates wait for a decision.

A decision is an event about a verdict, with the hash of the judged export. A rejection is final: later approvals of the verdict do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

from factory.ledger.anomalies import list_rewound_segments_of_lineage
from factory.ledger.rows import CandidateRow, ReleaseRow, SqlReader, Subject, VerdictRow, find_champion

APPROVED, REJECTED = "approved", "rejected"  # events about a verdict: {sha256, by, why}
OVERRIDDEN = (
    "overridden"  # event about a 'hold' verdict whose candidate a person releases: {sha256, evidence_sha256, by, why}
)
WITHDRAWN = "withdrawn"  # event about a release that was decided but never published: {why, candidate}; earlier overrides no longer count
REFUSED = "approval_refused"  # event about a candidate: a person's request in MLflow, and why the factory refused it
APPROVED_BY_POLICY = "policy"  # the approver of a release that needed no person


@dataclass(frozen=True)
class Decision:
    word: str  # APPROVED | REJECTED | OVERRIDDEN
    by: str
    why: str

    def __str__(self) -> str:
        return f"{self.word} by {self.by}" + (f": {self.why}" if self.why else "")


def find_decision(db: SqlReader, verdict: VerdictRow) -> Decision | None:
    """Return the rejection of the export that a verdict judged, else its newest approval or override, or None if nobody decided."""
    newest, gone = None, _withdrawn_at(db, verdict)
    sql = "SELECT id, kind, detail FROM events WHERE kind IN (:yes, :no, :over) AND subject = :subject ORDER BY id"
    for row in db.read(sql, yes=APPROVED, no=REJECTED, over=OVERRIDDEN, subject=str(Subject("verdict", verdict.id))):
        if row["kind"] == OVERRIDDEN and row["id"] < gone:
            continue
        if row["detail"]["sha256"] == verdict.subject_sha256:
            newest = Decision(row["kind"], str(row["detail"]["by"]), str(row["detail"].get("why", "")))
            if newest.word == REJECTED:
                return newest
    return newest


def find_override(db: SqlReader, verdict: VerdictRow) -> dict[str, str] | None:
    """Return the valid override of the export that a verdict judged: {by, why, sha256 of the export, evidence_sha256}, or None."""
    sql = "SELECT detail FROM events WHERE kind = :over AND subject = :subject AND id > :gone ORDER BY id DESC"
    about = {"over": OVERRIDDEN, "subject": str(Subject("verdict", verdict.id)), "gone": _withdrawn_at(db, verdict)}
    for row in db.read(sql, **about):
        detail = row["detail"]
        if detail["sha256"] == verdict.subject_sha256:
            return {key: str(detail[key]) for key in ("by", "why", "sha256", "evidence_sha256")}
    return None


def _withdrawn_at(db: SqlReader, verdict: VerdictRow) -> int:
    """Return the number of the newest event that withdrew a release of a verdict's candidate, or 0."""
    rows = db.read("SELECT id, detail FROM events WHERE kind = :kind ORDER BY id DESC", kind=WITHDRAWN)
    return next((int(row["id"]) for row in rows if row["detail"].get("candidate") == verdict.subject_number), 0)


def was_export_rejected(db: SqlReader, verdict: VerdictRow) -> bool:
    """Return whether a person rejected the same export under any verdict. If so, a new verdict alone does not release the export."""
    rows = db.read("SELECT detail FROM events WHERE kind = :no AND subject LIKE 'verdict:%'", no=REJECTED)
    return any(row["detail"]["sha256"] == verdict.subject_sha256 for row in rows)


def list_undecided_verdicts(db: SqlReader) -> list[VerdictRow]:
    """Return the verdicts, oldest first, that promote a candidate over the current champion and wait for a person's decision.

    Only the newest verdict of each candidate counts. Candidates that are released or whose training was rewound are left out.
    """
    best = find_champion(db)
    against = str(Subject("candidate", best.candidate)) if best else None
    released = {row.candidate for row in ReleaseRow.select(db)}
    newest = "SELECT MAX(id) FROM verdicts WHERE gate = 'release' GROUP BY subject"
    return [
        row
        for row in VerdictRow.select(db, f"WHERE outcome = 'promote' AND id IN ({newest}) ORDER BY id")
        if row.against == against
        and row.subject_number not in released
        and find_decision(db, row) is None
        and not list_rewound_segments_of_lineage(db, CandidateRow.get(db, row.subject_number).segment)
    ]
