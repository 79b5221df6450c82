"""Adds rows to the ledger in the caller's transaction (``with ledger.begin() as tx``)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from factory.ledger.ledger import Ledger, record_event, verdicts
from factory.ledger.rows import Subject
from kernels.contract.message import Message


def insert_row(tx: sa.Connection, table: sa.Table, **values: Any) -> int:
    """Add a row to a table whose key is a number. Returns the new row's key."""
    key = next(iter(table.primary_key.columns))
    return int(tx.execute(table.insert().values(**values).returning(key)).scalar_one())


def find_next_key(tx: sa.Connection, table: sa.Table) -> int:
    """Return the key of the next row of a table. No other writer can take the key, because write transactions run one after another."""
    key = next(iter(table.primary_key.columns))
    return int(tx.execute(sa.select(sa.func.max(key))).scalar() or 0) + 1


def record_verdict(
    tx: sa.Connection,
    gate: str,
    subject: Subject,
    *,
    against: Subject | str | None,
    policy_sha256: str,
    subject_sha256: str,
    outcome: str,
    reasons: Sequence[str],
    evidence: dict[str, Any],
) -> int:
    """Add a verdict. Returns its id. The table ``verdicts`` in ``factory.ledger.ledger`` documents each value."""
    hashes = {"policy_sha256": policy_sha256, "subject_sha256": subject_sha256}
    judged = {
        "outcome": outcome,
        "reasons": [Message.from_json(reason).to_json() for reason in reasons],
        "evidence": evidence,
    }
    return insert_row(
        tx, verdicts, gate=gate, subject=subject, against=against, **hashes, **judged, created_at=time.time()
    )


def record_event_once(
    ledger: Ledger, kind: str, subject: Subject | str, detail: dict[str, Any], again_after: float = math.inf
) -> bool:
    """Record an event, unless the newest event of this kind and subject has the same detail and is younger than ``again_after`` seconds.

    Returns whether the event was recorded.
    """
    sql = "SELECT at, detail FROM events WHERE kind = :kind AND subject = :subject ORDER BY id DESC LIMIT 1"
    newest = ledger.read(sql, kind=kind, subject=str(subject))
    if newest and newest[0]["detail"] == detail and time.time() - newest[0]["at"] < again_after:
        return False
    with ledger.begin() as tx:
        record_event(tx, kind, subject, detail)
    return True
