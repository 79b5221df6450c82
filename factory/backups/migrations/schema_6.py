"""Moves the hashes by which documents are compared from the ledger to one file for each shard (``factory.ingest.hash_index``)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
import sqlalchemy as sa
from alembic import op

from factory.ingest.hash_index import HELD, HashedDocument, make_key_prefix, write_hashes
from factory.ledger.ledger import events

revision = "6"
down_revision = "5"


def upgrade() -> None:
    tx = op.get_bind()
    root = Path(op.get_context().opts["roots"][0])
    (root / "shards").mkdir(exist_ok=True)
    held = sa.select(events.c.subject, events.c.detail).where(events.c.kind == HELD).order_by(events.c.id)
    ngrams = {subject: detail["ngrams"] for subject, detail in tx.execute(held)}
    ingested = tx.execute(sa.select(events.c.subject).where(events.c.kind == "ingested")).scalars()
    subjects = {make_key_prefix(subject): subject for subject in (*ingested, *ngrams)}
    for prefix, documents in groupby(_documents(tx), lambda one: one.key.partition(":")[0]):
        if subject := subjects.pop(prefix, ""):
            found = sorted(documents, key=lambda one: int(one.key.partition(":")[2]))
            count = sum(len(one.grams) for one in found)
            if ngrams.get(subject, count) == count:  # else the next ingest holds the task's items again
                write_hashes(root, subject, found)
    for subject in subjects.values():  # shards without hashed documents
        if not ngrams.get(subject):
            write_hashes(root, subject, ())
    for name in ("near_dup_bands", "near_dup_signatures", "ngrams"):
        op.drop_table(name)


def _documents(tx: sa.Connection) -> Iterator[HashedDocument]:
    """Yield the documents with their hashes, in the order of their keys."""
    by_bytes = ' COLLATE "C"' if tx.dialect.name == "postgresql" else ""
    sql = (
        "SELECT * FROM (SELECT document, signature, NULL AS hash, NULL AS held_out FROM near_dup_signatures UNION ALL "
        f"SELECT document, NULL, hash, held_out FROM ngrams) AS rows ORDER BY document{by_bytes}"
    )
    for key, rows in groupby(tx.execute(sa.text(sql).execution_options(stream_results=True)), lambda row: row[0]):
        signature, grams, is_held = None, [], False
        for _, blob, value, held in rows:
            if blob is not None:
                signature = np.frombuffer(blob, "<u4")
            else:
                grams.append(value)
                is_held = bool(held)
        yield HashedDocument(key, signature, np.array(grams, np.int64).astype(np.uint64), is_held)
