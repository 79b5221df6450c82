"""Shards in the inbox, and what became of their documents."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

import sqlalchemy as sa

from factory.core.workspace import Workspace
from factory.ingest.inbox import ingest_inbox_file, list_complete_files, update_inbox
from factory.ledger.ledger import Ledger, documents
from factory.ledger.plant import Plant
from tests.support.factory.made_up_text import prose
from tests.support.said import Said


def rows(first: int, count: int) -> bytes:
    made = ({"id": f"d{i}", "text": prose(i), "source": f"s{i}", "license": "MIT"} for i in range(first, first + count))
    return b"".join(json.dumps(row).encode() + b"\n" for row in made)


def put(workspace: Workspace, data: bytes, name: str = "a.jsonl", age: float = 10.0) -> Path:
    path = workspace.inbox / name
    path.write_bytes(data)
    os.utime(path, (time.time() - age,) * 2)
    return path


def trained_on(ledger: Ledger) -> Counter[str]:
    """How often each document counts: trained on or held out."""
    found = ledger.select_rows(sa.select(documents.c.id).where(documents.c.fate.in_(["train", "held_out"])))
    return Counter(row["id"] for row in found)


def exactly(count: int) -> Counter[str]:
    return Counter(f"d{i}" for i in range(count))


def one_pass(workspace: Workspace, ledger: Ledger, said: Said | None = None, settle: float = 2.0) -> Said:
    """As the daemon makes one, of the inbox alone."""
    said = said or Said()
    update_inbox(Plant(workspace, ledger, said), settle)
    while path := next(list_complete_files(Plant(workspace, ledger), settle), None):
        ingest_inbox_file(Plant(workspace, ledger, said), path)
    return said
