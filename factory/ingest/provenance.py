"""What became of a document: by its own id or by its key, for ever."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from factory.core.errors import InputError
from factory.ledger.ledger import Ledger, documents, held_out, shards, token_shards

_MANY = 20


def document(ledger: Ledger, id_or_key: str) -> dict[str, Any]:
    """A document's shard, fate, rule, matched document, token shard, and whether it is held out.

    Raises: InputError when no document has this id or key, or when several have the id (their keys are named).
    """
    row = ledger.one(sa.select(documents).where(documents.c.key == id_or_key))
    if row is None:
        rows = ledger.rows(
            sa.select(documents).where(documents.c.id == id_or_key).order_by(documents.c.key).limit(_MANY)
        )
        if not rows:
            raise InputError(f"no document {id_or_key!r} was ever ingested: give its id, or its key '<shard>:<row>'")
        if len(rows) > 1:
            keys = ", ".join(f"{found['key']} ({found['fate']})" for found in rows)
            raise InputError(f"several documents have the id {id_or_key!r}: name one by its key: {keys}")
        row = rows[0]
    shard = ledger.one(sa.select(shards).where(shards.c.sha256 == row["shard"]))
    assert shard
    found: dict[str, Any] = dict(row)
    found["shard"] = {key: shard[key] for key in ("sha256", "name", "path", "state", "ingested_at")}
    found["matched"] = _brief(ledger, row["matched"]) if row["matched"] else None
    found["token_shard"] = (
        ledger.one(sa.select(token_shards.c.id, token_shards.c.path).where(token_shards.c.id == row["token_shard"]))
        if row["token_shard"]
        else None
    )
    found["held_out"] = ledger.one(sa.select(held_out.c.key).where(held_out.c.key == row["key"])) is not None
    return found


def fates(ledger: Ledger, *, shard: str | None = None) -> list[dict[str, Any]]:
    """How many documents met which fate by which rule, in all or of one shard (its SHA-256)."""
    columns = (documents.c.domain, documents.c.fate, documents.c.rule)
    statement = sa.select(*columns, sa.func.count().label("documents")).group_by(*columns).order_by(*columns)
    return ledger.rows(statement.where(documents.c.shard == shard) if shard else statement)


def _brief(ledger: Ledger, key: str) -> dict[str, Any] | None:
    c = documents.c
    return ledger.one(sa.select(c.key, c.id, c.domain, c.source, c.fate, c.shard).where(c.key == key))
