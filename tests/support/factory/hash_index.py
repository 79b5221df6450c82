"""The rows of ``index.db``, by what it holds."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

from factory.ingest.hash_index import HashIndex
from factory.ledger.ledger import Ledger

_ROWS = "SELECT h.hash, d.id, d.key FROM {} h JOIN documents d ON d.id = h.document ORDER BY 1, 2"
_QUERIES = {
    "sources": "SELECT event, subject FROM sources ORDER BY event",
    "signatures": "SELECT id, key, hex(signature) FROM documents ORDER BY id",
    "bands": _ROWS.format("bands"),
    "sampled": _ROWS.format("sampled"),
    "held_out n-grams": _ROWS.format("held_out"),
}


def indexed(ledger: Ledger) -> dict[str, list[Any]]:
    """Once it is up to date."""
    index = HashIndex(ledger)
    index.read_held_out_ngrams()
    with closing(sqlite3.connect(index.file)) as file:
        return {name: file.execute(sql).fetchall() for name, sql in _QUERIES.items()}
