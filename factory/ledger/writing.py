"""Rows are added to the ledger in the caller's transaction (``with ledger.begin() as tx``)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from factory.ledger.ledger import verdicts
from factory.ledger.rows import Subject


def insert(tx: sa.Connection, table: sa.Table, **values: Any) -> int:
    """Add a row to a table whose key is a number; returns the key."""
    key = next(iter(table.primary_key.columns))
    return int(tx.execute(table.insert().values(**values).returning(key)).scalar_one())


def next_key(tx: sa.Connection, table: sa.Table) -> int:
    """The key that the next row of a table gets: transactions that write are serial."""
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
    """Add a verdict; returns its id. The table documents each value."""
    hashes = {"policy_sha256": policy_sha256, "subject_sha256": subject_sha256}
    judged = {"outcome": outcome, "reasons": list(reasons), "evidence": evidence}
    return insert(tx, verdicts, gate=gate, subject=subject, against=against, **hashes, **judged, created_at=time.time())
