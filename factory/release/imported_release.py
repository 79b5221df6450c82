"""Makes an imported model release 0, by a named rule and without the gate: there is no earlier model to compare it with.

The rule "imported" is recorded as a verdict with the gate and the outcome of that name. Later candidates are judged against this release, domain by
domain, so a candidate that forgot what the imported model knew is held or rejected like any candidate that is worse than the champion.
"""

from __future__ import annotations

import time

from factory.core.workspace import PATIENCE
from factory.ledger.imported_model import read_import_plan
from factory.ledger.ledger import record_event, releases
from factory.ledger.plant import Plant
from factory.ledger.rows import IMPORT, CandidateRow, ReleaseRow, SegmentRow, SqlReader, Subject
from factory.ledger.writing import insert_row, record_verdict
from factory.release.releases import publish_release
from kernels.contract.message import Message

IMPORTED = "imported"  # the outcome of the verdict
NUMBER = 0


def find_unreleased_import(db: SqlReader) -> list[int]:
    """The candidate of the imported model, if it is not a published release yet."""
    rows = CandidateRow.select(
        db,
        f"WHERE segment IN (SELECT id FROM segments WHERE kind = '{IMPORT}') AND NOT EXISTS "
        "(SELECT 1 FROM releases r WHERE r.candidate = candidates.id AND r.state = 'published')",
    )
    return [row.id for row in rows]


def release_imported_model(plant: Plant, candidate: int) -> int:
    """Make the candidate of an imported model release 0 and champion. Returns 0. A second call finishes an interrupted release.

    Raises: InputError when the export has changed since it was made.
    """
    with plant.workspace.hold_lock("release", PATIENCE):
        known = ReleaseRow.find_first(plant.ledger, "WHERE candidate = :candidate", candidate=candidate)
        if known is None:
            _decide(plant, CandidateRow.get(plant.ledger, candidate))
        publish_release(plant, NUMBER)
    return NUMBER


def _decide(plant: Plant, candidate: CandidateRow) -> None:
    segment = SegmentRow.get(plant.ledger, candidate.segment)
    plan = read_import_plan(plant.ledger, segment.id)
    why = Message(
        "imported_release.rule",
        "The rule 'imported' makes {model} release {release}. No gate has judged it. Later candidates are compared with it.",
        model=plan["name"], release=NUMBER,
    )  # fmt: skip
    evidence = {"rule": IMPORTED, "name": plan["name"], "files": plan["files"], "licence": plan["licence"]["name"]}
    subject = Subject("candidate", candidate.id)
    with plant.ledger.begin() as tx:
        verdict = record_verdict(
            tx, IMPORT, subject, against=None, policy_sha256="", subject_sha256=candidate.export_sha256, outcome=IMPORTED, reasons=[why],
            evidence=evidence,
        )  # fmt: skip
        values = {"candidate": candidate.id, "verdict": verdict, "state": "decided", "approved_by": None}
        insert_row(tx, releases, number=NUMBER, created_at=time.time(), **values)
        record_event(tx, "release_decided", Subject("release", NUMBER), {"candidate": candidate.id, "verdict": verdict})
