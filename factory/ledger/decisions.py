"""What people decided about candidates, and which candidates still wait for them. Read from the ledger alone.

A decision is an event about a verdict, bound to the hash of what was judged. A rejection stays: no later approval of the same verdict counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from factory.ledger.anomalies import rewound_in
from factory.ledger.rows import CandidateRow, Reads, ReleaseRow, Subject, VerdictRow, champion

APPROVED, REJECTED = "approved", "rejected"  # events about a verdict: {sha256, by, why}
OVERRIDDEN = "overridden"  # event about a verdict that holds, released all the same: {sha256, evidence_sha256, by, why}
WITHDRAWN = "withdrawn"  # event about a release that was decided and never public: {why, candidate}; an override of before counts no more
REFUSED = "approval_refused"  # event about a candidate: what a person asked for in MLflow, and why it was not done
BY_POLICY = "policy"  # who approved a release for which the verdict was enough


@dataclass(frozen=True)
class Decision:
    word: str  # APPROVED | REJECTED | OVERRIDDEN
    by: str
    why: str

    def __str__(self) -> str:
        return f"{self.word} by {self.by}" + (f": {self.why}" if self.why else "")


def decision_on(db: Reads, verdict: VerdictRow) -> Decision | None:
    """The rejection of exactly what a verdict judged, else its newest approval or override; None: nobody decided."""
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


def override_on(db: Reads, verdict: VerdictRow) -> dict[str, str] | None:
    """{by, why, sha256 of the export, evidence_sha256} of a person's override of exactly what a verdict judged; None: there is none that stands."""
    sql = "SELECT detail FROM events WHERE kind = :over AND subject = :subject AND id > :gone ORDER BY id DESC"
    about = {"over": OVERRIDDEN, "subject": str(Subject("verdict", verdict.id)), "gone": _withdrawn_at(db, verdict)}
    for row in db.read(sql, **about):
        detail = row["detail"]
        if detail["sha256"] == verdict.subject_sha256:
            return {key: str(detail[key]) for key in ("by", "why", "sha256", "evidence_sha256")}
    return None


def _withdrawn_at(db: Reads, verdict: VerdictRow) -> int:
    """The newest event that withdrew a release of a verdict's candidate; 0: none did."""
    rows = db.read("SELECT id, detail FROM events WHERE kind = :kind ORDER BY id DESC", kind=WITHDRAWN)
    return next((int(row["id"]) for row in rows if row["detail"].get("candidate") == verdict.number), 0)


def rejected_before(db: Reads, verdict: VerdictRow) -> bool:
    """Did a person reject the same export, by whatever verdict? Then a new verdict alone does not release it."""
    rows = db.read("SELECT detail FROM events WHERE kind = :no AND subject LIKE 'verdict:%'", no=REJECTED)
    return any(row["detail"]["sha256"] == verdict.subject_sha256 for row in rows)


def undecided(db: Reads) -> list[VerdictRow]:
    """The newest verdict of each candidate that it promotes over the champion of now, where nothing was released and nobody decided yet.

    Oldest first. A candidate whose training was rewound is not among them.
    """
    best = champion(db)
    against = str(Subject("candidate", best.candidate)) if best else None
    released = {row.candidate for row in ReleaseRow.select(db)}
    newest = "SELECT MAX(id) FROM verdicts WHERE gate = 'release' GROUP BY subject"
    return [
        row
        for row in VerdictRow.select(db, f"WHERE outcome = 'promote' AND id IN ({newest}) ORDER BY id")
        if row.against == against
        and row.number not in released
        and decision_on(db, row) is None
        and not rewound_in(db, CandidateRow.get(db, row.number).segment)
    ]
