"""A release without a judge: its rows as the gate and the saga leave them."""

from __future__ import annotations

import time

from factory.ledger.ledger import Ledger, candidates, checkpoints, releases, verdicts
from factory.ledger.rows import SegmentRow


def release_of(ledger: Ledger, segment: int) -> int:
    """The rows of a release, as the gate and the saga leave them."""
    row = SegmentRow.get(ledger, segment)
    (checkpoint,) = ledger.select_rows(checkpoints.select().where(checkpoints.c.segment == segment))
    number = len(ledger.select_rows(releases.select())) + 1
    with ledger.begin() as tx:
        made = {"candidate": number, "created_at": time.time()}
        tx.execute(
            candidates.insert().values(
                id=number,
                segment=row.id,
                checkpoint=checkpoint["id"],
                export_path="e",
                export_sha256="e",
                created_at=0.0,
            )
        )
        tx.execute(
            verdicts.insert().values(
                id=number, gate="release", subject=f"candidate:{number}", policy_sha256="p", subject_sha256="e", outcome="promote",
                reasons=["better"], evidence={}, created_at=0.0,
            )
        )  # fmt: skip
        tx.execute(releases.insert().values(number=number, verdict=number, state="published", **made))
    return number
