"""A workspace as the factory before left it, whose ledger held what documents are compared with."""

from __future__ import annotations

import shutil
from pathlib import Path

import sqlalchemy as sa

from factory.ingest.hash_index import FOLDER, INDEX, list_shards_and_tasks_with_hashes, read_hashes
from factory.ledger.ledger import Ledger, meta


def as_schema_5(root: Path, ledger: Ledger) -> None:
    """Put what lies in files back into the tables of before."""
    with ledger.begin() as tx:
        tx.execute(sa.text("CREATE TABLE near_dup_bands (band INTEGER, hash BIGINT, document TEXT)"))
        blob = "BYTEA" if tx.dialect.name == "postgresql" else "BLOB"
        tx.execute(sa.text(f"CREATE TABLE near_dup_signatures (document TEXT PRIMARY KEY, signature {blob})"))
        tx.execute(sa.text("CREATE TABLE ngrams (hash BIGINT, document TEXT, held_out BOOLEAN)"))
        for row in (
            row
            for _, subject in list_shards_and_tasks_with_hashes(ledger)
            for row in read_hashes(root, subject).to_pylist()
        ):
            if row["signature"] is not None:
                tx.execute(sa.text("INSERT INTO near_dup_signatures VALUES (:key, :signature)"), row)
            for gram in row["grams"]:
                values = {"hash": (gram + 2**63) % 2**64 - 2**63, "key": row["key"], "held_out": row["held_out"]}
                tx.execute(sa.text("INSERT INTO ngrams VALUES (:hash, :key, :held_out)"), values)
        tx.execute(meta.update().where(meta.c.key == "schema").values(value="5"))
    ledger.engine.dispose()
    shutil.rmtree(root / "shards" / FOLDER)
    (root / INDEX).unlink()
