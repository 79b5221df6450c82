"""Puts the items of evaluation tasks among the n-grams that training data may not share, before a shard is ingested.

Their n-grams lie in the ledger, so that an ingest, and the repair of a token shard, stay functions of the shard, the policy and the ledger.
They stay there when the file leaves the folder: what was an exam once is not trained on.
"""

from __future__ import annotations

import numpy as np
import sqlalchemy as sa

from factory.core.errors import InputError
from factory.ingest.rules.task_folder import item_files, not_read
from factory.ingest.rules.task_items import item_ngrams, items_sha256, read_items
from factory.ledger.ledger import Ledger, ngrams, record
from factory.ledger.plant import Plant

HELD = "task_items_held"  # event
NOT_READ = "task_file_not_read"  # event
AT_ONCE = 20_000  # rows in one statement


def hold_task_items(plant: Plant, n: int) -> int:
    """Record the n-grams of every data file of ``policies/tasks/`` that is new; returns how many files were. Idempotent. A file there that cannot
    hold a task's items here, by its name, is said once.

    Raises: InputError for a file that cannot be read: nothing is ingested that might hold its items.
    """
    new = 0
    for path in item_files(plant.workspace.root / "policies" / "tasks"):
        try:
            subject = f"task:{items_sha256(path)[:16]}"
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
        if not _held(plant.ledger, subject):
            _hold(plant.ledger, subject, n, path.name, [item_ngrams(one, n) for one in read_items(path).records])
            new += 1
    for path in not_read(plant.workspace.root / "policies" / "tasks"):
        subject = f"task-file:{path.name}"
        if not plant.ledger.read(
            "SELECT id FROM events WHERE kind = :kind AND subject = :subject LIMIT 1", kind=NOT_READ, subject=subject
        ):
            plant.progress.line(
                f"  policies/tasks/{path.name} is not read, and what it holds is not kept out of training data (docs/TASKS.md)"
            )
            with plant.ledger.begin() as tx:
                record(tx, NOT_READ, subject, {"name": path.name})
    return new


def task_prefix(subject: str) -> str:
    """What the keys of a file's items begin with, up to the colon before the record's number, from the subject of its event."""
    return subject.replace(":", "-", 1)


def _hold(ledger: Ledger, subject: str, n: int, name: str, items: list[np.ndarray]) -> None:
    first: dict[int, int] = {}
    for number, grams in enumerate(items, 1):
        for gram in grams.astype(np.int64).tolist():
            first.setdefault(gram, number)
    prefix = task_prefix(subject)
    rows = [{"hash": gram, "document": f"{prefix}:{number}", "held_out": True} for gram, number in first.items()]
    with ledger.begin() as tx:
        tx.execute(ngrams.delete().where(ngrams.c.held_out, ngrams.c.document.startswith(f"{prefix}:")))
        for start in range(0, len(rows), AT_ONCE):
            tx.execute(ngrams.insert(), rows[start : start + AT_ONCE])
        record(tx, HELD, subject, {"name": name, "records": len(items), "ngrams": len(rows), "n": n})


def _held(ledger: Ledger, subject: str) -> bool:
    """Whole: a ledger that was restored from a backup and its journal has the event without the n-grams."""
    sql = "SELECT detail FROM events WHERE kind = :kind AND subject = :subject ORDER BY id DESC LIMIT 1"
    told = ledger.read(sql, kind=HELD, subject=subject)
    if not told:
        return False
    mine = ngrams.c.held_out & ngrams.c.document.startswith(f"{task_prefix(subject)}:")
    found = ledger.one(sa.select(sa.func.count().label("count")).where(mine))
    return bool(found and found["count"] == told[0]["detail"]["ngrams"])
