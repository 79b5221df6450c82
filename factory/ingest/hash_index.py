"""Stores the hashes with which later documents are compared: MinHash signatures, and hashes of runs of words.

Each shard and each task file has a file of hashes, ``shards/hashes/<name>.parquet``, with one row for each document. Ingest writes the file
before the ledger records the shard, and never changes the file later. ``index.db`` is an index of all these files, in the order in which the
ledger recorded them. ``index.db`` may be removed at any time. The next process that reads the index adds the missing files to
it. That process rebuilds the index if it is damaged, or has a file that the ledger does not know (after a restore).
"""

from __future__ import annotations

import io
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from factory.core.errors import WorkspaceError
from factory.core.path_removal import remove_path
from factory.ingest.rules.near_duplicates import PERMUTATIONS, hash_bands
from factory.ingest.rules.word_hashes import Hashes
from factory.ledger.engine import DAMAGED
from factory.ledger.ledger import Ledger
from kernels.contract.files import sync_folder, write_atomically
from kernels.contract.message import Message

FOLDER, INDEX = "hashes", "index.db"  # FOLDER is below ``shards/``, INDEX is in the workspace
HELD = "task_items_held"  # event: the items of a task file are recorded (``task_hashes``)
PATIENCE = 600.0  # seconds to wait while another process writes the index
_AT_ONCE = 5000  # values in one query
_COLUMNS = pa.schema(
    [
        ("key", pa.string()),
        ("signature", pa.binary()),  # little-endian uint32; null for a task's item
        ("grams", pa.list_(pa.uint64())),
        ("held_out", pa.bool_()),
    ]
)
_TABLES = """
CREATE TABLE IF NOT EXISTS sources (event INTEGER PRIMARY KEY, subject TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS documents (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, signature BLOB);
CREATE TABLE IF NOT EXISTS bands (hash INTEGER, document INTEGER, PRIMARY KEY (hash, document)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sampled (hash INTEGER, document INTEGER, PRIMARY KEY (hash, document)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS held_out (hash INTEGER, document INTEGER, PRIMARY KEY (hash, document)) WITHOUT ROWID;
"""
_FOUND = "SELECT h.hash, d.key FROM json_each(?) v JOIN {} h ON h.hash = v.value JOIN documents d ON d.id = h.document ORDER BY h.hash, d.id"


@dataclass(frozen=True)
class HashedDocument:
    """The hashes of one document. ``signature`` is None for a task's item. ``grams`` are all n-grams of a held-out document, or a sample of the
    n-grams of any other document."""

    key: str
    signature: npt.NDArray[np.uint32] | None
    grams: Hashes
    held_out: bool


def get_hashes_path(root: Path, subject: str) -> Path:
    """Return the path of a file of hashes in the workspace ``root``. ``subject`` is the subject of the event that recorded the file: 'shard:ab12…'
    or 'task:ab12…'."""
    return root / "shards" / FOLDER / f"{make_key_prefix(subject)}.parquet"


def make_key_prefix(subject: str) -> str:
    """Return the prefix of the keys of the rows of a shard or a task file: the part before the colon and the row's number.

    >>> make_key_prefix("shard:00112233"), make_key_prefix("task:00112233")
    ('00112233', 'task-00112233')
    """
    return subject.replace(":", "-", 1).removeprefix("shard-")


def write_hashes(root: Path, subject: str, documents: Iterable[HashedDocument]) -> None:
    """Write the hashes of a shard or a task file, completely or not at all. Raises: OSError."""
    rows = list(documents)
    columns = {
        "key": [one.key for one in rows],
        "signature": [None if one.signature is None else one.signature.astype("<u4").tobytes() for one in rows],
        "grams": [one.grams for one in rows],
        "held_out": [one.held_out for one in rows],
    }
    made = io.BytesIO()
    table = pa.table(columns, schema=_COLUMNS)
    pq.write_table(table, made, compression="zstd", use_dictionary=False, write_page_checksum=True)
    path = get_hashes_path(root, subject)
    path.parent.mkdir(exist_ok=True)
    for left in path.parent.glob(f".{path.name}.*.part"):  # files of a process that was killed while it wrote
        left.unlink(missing_ok=True)
    write_atomically(path, made.getvalue())
    sync_folder(path.parent.parent)  # needed too if a killed process made the folder


def read_hashes(root: Path, subject: str) -> pa.Table:
    """Read the hashes of a shard or a task file. Raises: WorkspaceError when the file of hashes is missing or damaged."""
    path = get_hashes_path(root, subject)
    try:
        return pq.read_table(path, schema=_COLUMNS, page_checksum_verification=True)
    except FileNotFoundError:
        why = Message("ingest.hashes_gone", "the file is missing")
    except (pa.ArrowException, OSError) as error:
        why = Message("ingest.hashes_damaged", "the file is damaged: {error}", error=str(error)[:200])
    raise WorkspaceError(
        "ingest.no_hashes",
        "{path}: {why}. Ingest needs this file to compare new documents with old ones. Put the file back. Or stop 'factory "
        "run' and run 'factory check --repair', which makes the file again from the raw shard",
        path=path,
        why=why,
    )


def list_shards_and_tasks_with_hashes(ledger: Ledger) -> list[tuple[int, str]]:
    """Return (event, subject) of all shards and task files that have hashes, in the order in which the ledger recorded them."""
    sql = "SELECT MIN(id) AS id, subject FROM events WHERE kind IN ('ingested', :held) GROUP BY subject ORDER BY 1"
    return [(row["id"], row["subject"]) for row in ledger.read(sql, held=HELD)]


class HashIndex:
    """The index of all recorded hashes, ``index.db`` of the workspace. Each query first brings the index up to date.

    Raises: WorkspaceError when a file of hashes is missing or damaged.
    """

    def __init__(self, ledger: Ledger) -> None:
        assert ledger.root
        self._ledger, self._root = ledger, ledger.root
        self.file = ledger.root / INDEX

    def find_documents_by_band(self, hashes: Iterable[int]) -> list[tuple[int, str]]:
        """Return (hash of a band, key) of all documents with one of these bands, oldest first."""
        return self._found("bands", hashes)

    def find_training_documents_by_ngram(self, grams: Iterable[int]) -> list[tuple[int, str]]:
        """Return (n-gram, key) of each document that is not held out and has one of these n-grams in its sample."""
        return self._found("sampled", grams)

    def read_signatures(self, keys: Sequence[str]) -> dict[str, npt.NDArray[np.uint32]]:
        sql = "SELECT d.key, d.signature FROM json_each(?) v JOIN documents d ON d.key = v.value"
        return {key: np.frombuffer(blob, "<u4").astype(np.uint32) for key, blob in self._rows(sql, list(keys))}

    def read_held_out_ngrams(self) -> list[tuple[str, Hashes]]:
        """Return (key, all n-grams) of every held-out document."""
        grams: dict[str, list[int]] = {}
        sql = "SELECT d.key, h.hash FROM held_out h JOIN documents d ON d.id = h.document"
        for key, value in self._rows(sql):
            grams.setdefault(key, []).append(value)
        return [(key, np.array(grams[key], np.int64).astype(np.uint64)) for key in sorted(grams)]

    def delete_index_files(self) -> None:
        """Delete the index. The next query rebuilds it. A process that still has the old index open may damage the new one when it ends. Then the
        next query rebuilds the index once more."""
        for ending in ("", "-wal", "-shm"):
            remove_path(self.file.with_name(self.file.name + ending))

    def _found(self, table: str, hashes: Iterable[int]) -> list[tuple[int, str]]:
        signed = np.fromiter(hashes, np.uint64).astype(np.int64).tolist()
        return [(value % 2**64, key) for value, key in self._rows(_FOUND.format(table), signed)]

    def _rows(self, sql: str, values: list[Any] | None = None) -> list[tuple[Any, ...]]:
        batches = [[]] if values is None else [
            [json.dumps(values[start : start + _AT_ONCE])] for start in range(0, len(values), _AT_ONCE)
        ]  # fmt: skip

        def read() -> list[tuple[Any, ...]]:
            with closing(self._up_to_date()) as index:
                return [row for batch in batches for row in index.execute(sql, batch)]

        return self._anew_if_damaged(read)

    def _anew_if_damaged(self, read: Callable[[], list[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
        try:
            return read()
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF not in DAMAGED:
                raise
        self.delete_index_files()
        return read()

    def _up_to_date(self) -> sqlite3.Connection:
        index = self._opened()
        held, wanted = (
            index.execute("SELECT event, subject FROM sources ORDER BY event").fetchall(),
            list_shards_and_tasks_with_hashes(self._ledger),
        )
        if (
            wanted[: len(held)] != held
        ):  # the index is emptied and not deleted, because another process may have it open
            with index:
                index.execute("BEGIN IMMEDIATE")
                for table in ("sources", "documents", "bands", "sampled", "held_out"):
                    index.execute(f"DELETE FROM {table}")
            held = []
        for event, subject in wanted[len(held) :]:
            table = read_hashes(self._root, subject)
            with index:
                index.execute("BEGIN IMMEDIATE")
                if index.execute("INSERT OR IGNORE INTO sources VALUES (?, ?)", (event, subject)).rowcount:
                    _add(index, table)
        return index

    def _opened(self) -> sqlite3.Connection:
        index = sqlite3.connect(self.file, timeout=PATIENCE, isolation_level=None)
        try:
            index.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; {_TABLES}")
        except sqlite3.Error:
            index.close()
            raise
        return index


def _add(index: sqlite3.Connection, table: pa.Table) -> None:
    """Append the rows of one file to the index."""
    (before,) = index.execute("SELECT COALESCE(MAX(id), 0) FROM documents").fetchone()
    keys, blobs = table["key"].to_pylist(), table["signature"].to_pylist()
    ids = np.arange(before + 1, before + 1 + len(keys))
    index.executemany("INSERT INTO documents VALUES (?, ?, ?)", zip(ids.tolist(), keys, blobs))
    joined = np.frombuffer(b"".join(blob for blob in blobs if blob is not None), "<u4").reshape(-1, PERMUTATIONS)
    own = hash_bands(joined)
    signed = ids[[blob is not None for blob in blobs]]
    _insert(index, "bands", own.ravel(), np.repeat(signed, own.shape[1]))
    lists = table["grams"].combine_chunks()
    grams, owners = np.asarray(lists.flatten()), np.repeat(np.arange(len(keys)), np.asarray(lists.value_lengths()))
    is_held = np.asarray(table["held_out"].to_pylist(), bool)[owners]
    for name, chosen in (("held_out", is_held), ("sampled", ~is_held)):
        _insert(index, name, grams[chosen], ids[owners[chosen]])


def _insert(index: sqlite3.Connection, table: str, hashes: Hashes, ids: npt.NDArray[np.int64]) -> None:
    order = np.argsort(hashes.astype(np.int64), kind="stable")  # neighbours in the table lie on one page
    pairs: Iterator[tuple[int, int]] = zip(hashes[order].astype(np.int64).tolist(), ids[order].tolist())
    index.executemany(f"INSERT OR IGNORE INTO {table} VALUES (?, ?)", pairs)
