"""Puts the items of evaluation tasks among the n-grams that training data may not share, before a shard is ingested.

Their n-grams are recorded as a shard's are (``compared``), so that an ingest, and the repair of a token shard, stay functions of what is
recorded. They stay there when the file leaves the folder: what was an exam once is not trained on.
"""

from __future__ import annotations

import numpy as np

from factory.core.errors import InputError
from factory.ingest.compared import HELD, HashedDocument, hashes_file, prefix_of, write_hashes
from factory.ingest.rules.task_folder import item_files
from factory.ingest.rules.task_items import item_ngrams, items_sha256, read_items
from factory.ledger.ledger import record
from factory.ledger.plant import Plant


def hold_task_items(plant: Plant, n: int) -> int:
    """Record the n-grams of every data file of ``policies/tasks/`` that is new; returns how many files were. Idempotent.

    Raises: InputError for a file that cannot be read: nothing is ingested that might hold its items.
    """
    new = 0
    for path in item_files(plant.workspace.root / "policies" / "tasks"):
        try:
            subject = f"task:{items_sha256(path)[:16]}"
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
        if not _held(plant, subject):
            _hold(plant, subject, n, path.name, [item_ngrams(one, n) for one in read_items(path).records])
            new += 1
    return new


def _hold(plant: Plant, subject: str, n: int, name: str, items: list[np.ndarray]) -> None:
    first: dict[int, int] = {}
    for number, grams in enumerate(items, 1):
        for gram in grams.tolist():
            first.setdefault(gram, number)
    of: dict[int, list[int]] = {}
    for gram, number in first.items():
        of.setdefault(number, []).append(gram)
    prefix = prefix_of(subject)
    hashed = (
        HashedDocument(f"{prefix}:{number}", None, np.array(grams, np.uint64), True) for number, grams in of.items()
    )
    write_hashes(plant.workspace.root, subject, hashed)
    with plant.ledger.begin() as tx:
        record(tx, HELD, subject, {"name": name, "records": len(items), "ngrams": len(first), "n": n})


def _held(plant: Plant, subject: str) -> bool:
    """Whole: of a workspace whose folders were lost the ledger has the event without the n-grams."""
    sql = "SELECT id FROM events WHERE kind = :kind AND subject = :subject LIMIT 1"
    return (
        bool(plant.ledger.read(sql, kind=HELD, subject=subject)) and hashes_file(plant.workspace.root, subject).exists()
    )
