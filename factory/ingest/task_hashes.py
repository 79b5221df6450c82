"""Records the n-grams of evaluation tasks before a shard is ingested, so that training data cannot share them.

The n-grams are recorded in the same way as a shard's (``hash_index``). An ingest and the repair of a token shard therefore depend only on recorded
data. The n-grams stay recorded after the task file is removed from its folder, so the factory never trains on the items of a former task.
"""

from __future__ import annotations

import numpy as np

from factory.ingest.hash_index import HELD, HashedDocument, get_hashes_path, make_key_prefix, write_hashes
from factory.ingest.reading.streams import make_unreadable_file_error
from factory.ingest.rules.task_folder import list_item_files
from factory.ingest.rules.task_items import hash_item_file, hash_item_ngrams, read_items
from factory.ledger.ledger import record_event
from factory.ledger.plant import Plant


def record_task_ngrams(plant: Plant, n: int) -> int:
    """Record the n-grams of every new data file in ``policies/tasks/``. Returns the number of new files. A second call records nothing.

    Raises: InputError for a file that cannot be read. No shard is ingested then, because a shard might contain items of that file.
    """
    new = 0
    for path in list_item_files(plant.workspace.root / "policies" / "tasks"):
        try:
            subject = f"task:{hash_item_file(path)[:16]}"
        except OSError as error:
            raise make_unreadable_file_error(path, error) from error
        if not _held(plant, subject):
            _hold(plant, subject, n, path.name, [hash_item_ngrams(one, n) for one in read_items(path).records])
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
    prefix = make_key_prefix(subject)
    hashed = (
        HashedDocument(f"{prefix}:{number}", None, np.array(grams, np.uint64), True) for number, grams in of.items()
    )
    write_hashes(plant.workspace.root, subject, hashed)
    with plant.ledger.begin() as tx:
        record_event(tx, HELD, subject, {"name": name, "records": len(items), "ngrams": len(first), "n": n})


def _held(plant: Plant, subject: str) -> bool:
    """Return whether the task file is recorded with its n-grams. A workspace that lost its folders has the event but not the n-grams."""
    sql = "SELECT id FROM events WHERE kind = :kind AND subject = :subject LIMIT 1"
    return (
        bool(plant.ledger.read(sql, kind=HELD, subject=subject))
        and get_hashes_path(plant.workspace.root, subject).exists()
    )
