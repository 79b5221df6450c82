"""What happened after the newest backup: every row that was added, changed or removed, as lines of ``journal.jsonl`` beside it.

SQLite's triggers note which rows changed in the table ``changes``, in the transaction that changes them; after its commit, ``carry`` appends
these rows as they are then. A line is a batch: ``{"crc32": …, "rows": [[table, row], …], "gone": [[table, key, value], …], "from": 40, "to": 42}``:
the notes after ``from`` until ``to``. Whoever is killed before its line is written, or half way through it, leaves that to the next one. ``replayed``
gives the lines back.

A PostgreSQL ledger has no journal: its server has one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from factory.core.file_lock import LockedError, file_lock

BACKUPS = "backups"
NAME, ABOUT = "journal.jsonl", "backup.json"  # in a backup's folder
TIME = "%Y-%m-%dT%H-%M-%S"  # in a backup's name
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(-\d+)?")
END = re.compile(rb'"to": (\d+)\}\n$')
PATIENCE = 60.0  # as SQLite's


def watch(tx: sa.Connection, metadata: sa.MetaData) -> None:
    """Make the table ``changes`` and the triggers that fill it, where they are not there yet."""
    if tx.dialect.name != "sqlite":
        return
    tx.exec_driver_sql(
        'CREATE TABLE IF NOT EXISTS changes (seq INTEGER PRIMARY KEY AUTOINCREMENT, "table" TEXT, row INTEGER, gone TEXT)'
    )
    for table in metadata.sorted_tables:
        key = key_of(table)
        gone = f'OLD."{key}"' if key else "NULL"
        for when, row, value in (("INSERT", "NEW", "NULL"), ("UPDATE", "NEW", "NULL"), ("DELETE", "OLD", gone)):
            tx.exec_driver_sql(
                f'CREATE TRIGGER IF NOT EXISTS "{when.lower()}_{table.name}" AFTER {when} ON "{table.name}" BEGIN '
                f"INSERT INTO changes (\"table\", row, gone) VALUES ('{table.name}', {row}.rowid, {value}); END"
            )


def key_of(table: sa.Table) -> str:
    """The name of a table's primary key; empty: it has none."""
    return next((column.name for column in table.primary_key.columns), "")


def backups_of(root: Path) -> list[Path]:
    """The folders of the workspace's backups, oldest first; without those whose ``backup.json`` cannot be read."""
    return [path for path in folders_of(root) if about(path)]


def folders_of(root: Path) -> list[Path]:
    """``backups_of``, and what is left of damaged ones: their journals may be whole."""
    return sorted((path for path in (root / BACKUPS).glob("2*") if STAMP.fullmatch(path.name)), key=order_of)


def about(backup: Path) -> dict[str, Any]:
    """``backup.json``: when it was made, the ledger's identity and schema, the number of its newest change; empty when it cannot be read."""
    try:
        found = json.loads((backup / ABOUT).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and {"made_at", "identity", "schema", "seq"} <= found.keys() else {}


def next_name(root: Path, now: datetime) -> str:
    """The name of a backup made ``now`` (UTC): its time; after a clock that went back, or in the same second, the newest's and a number.
    A folder that is no backup any more keeps its name.

    So the order of the names is the order in which the backups were made: '2026-01-31T12-00-00', '2026-01-31T12-00-00-1', ….
    """
    stem, number = now.strftime(TIME), 0
    if (backups := backups_of(root)) and stem <= order_of(backups[-1])[0]:
        stem, number = order_of(backups[-1])
        number += 1
    names = (f"{stem}-{n}" if n else stem for n in itertools.count(number))
    return next(name for name in names if not (root / BACKUPS / name).exists())


def order_of(backup: Path) -> tuple[str, int]:
    """In what order backups were made: '2026-01-31T12-00-00-7' -> ('2026-01-31T12-00-00', 7)."""
    return backup.name[:19], int(backup.name[20:] or 0)


def carry(database: Path, root: Path) -> None:
    """Append what changed since the journal's end. Where there is no backup yet, nothing is.

    A disk that is full, or another process that holds the journal for long, loses nothing: the next call appends it.
    """
    if backups := backups_of(root):
        with contextlib.suppress(OSError, ValueError, LockedError, sqlite3.Error), journal_lock(root):
            append(database, backups[-1])


@contextlib.contextmanager
def journal_lock(root: Path) -> Iterator[None]:
    """One writes to the journal at a time. Raises: LockedError."""
    with file_lock(root / BACKUPS / "journal.lock", PATIENCE):
        yield


def append(database: Path, backup: Path) -> None:
    """``carry`` into one backup's journal; the caller holds the lock. Raises: OSError; sqlite3.Error."""
    path = backup / NAME
    since, whole = _end(path, about(backup).get("seq", 0))
    with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=PATIENCE)) as ledger:
        ledger.row_factory = sqlite3.Row
        ledger.execute("BEGIN")
        sequence = ledger.execute("SELECT seq FROM sqlite_sequence WHERE name = 'changes'").fetchone()
        if since > (sequence[0] if sequence else 0):  # of another ledger, whose place this one took
            since = 0
        notes = ledger.execute('SELECT seq, "table", row, gone FROM changes WHERE seq > ? ORDER BY seq', [since])
        newest = since
        rows: dict[tuple[str, int], None] = {}
        gone: dict[tuple[str, str], None] = {}
        for seq, table, row, key in notes.fetchall():
            newest = seq
            rows[table, row] = None
            if key is not None:
                gone[table, key] = None
        if newest == since:
            return
        found = []  # as text: an ingest adds many rows
        for table, row in rows:
            for held in ledger.execute(f'SELECT rowid AS "rowid", * FROM "{table}" WHERE rowid = ?', [row]):
                found.append(json.dumps([table, dict(held)]))
    listed, gone_rows = ", ".join(found), json.dumps([list(one) for one in gone])
    batch = f'"rows": [{listed}], "gone": {gone_rows}, "from": {since}, "to": {newest}}}'.encode()
    crc32 = zlib.crc32(batch, zlib.crc32(b"{"))
    encoded = b'{"crc32": %d, %b\n' % (crc32, batch)
    with open(path, "ab") as out:
        out.write(encoded if whole else b"\n" + encoded)
        out.flush()
        os.fsync(out.fileno())


def replayed(journal: Path) -> Iterator[dict[str, Any]]:
    """The batches of a journal; a torn line is passed over: what was in it is in the next one."""
    yield from (batch for batch in _lines(journal) if batch)


def damage_of(journal: Path) -> str:
    """What of a journal cannot be read though it was written whole; empty: nothing. A line that a kill tore is none: the next one holds it."""
    unread, last = False, about(journal.parent).get("seq")
    for batch in _lines(journal):
        if batch is None:
            unread = True
            continue
        begins = batch.get("from")
        if last is not None and begins is not None:
            unread = begins > last  # there is a gap, whether or not a line stands in it
        if unread:
            break
        last = batch["to"]
    if not unread:
        return ""
    return f"{journal} is damaged: a line of it cannot be read, and what was in it is lost"


def _lines(journal: Path) -> Iterator[dict[str, Any] | None]:
    """Each whole line; None for one that is not as it was written. Lines from before there was a 'crc32' are taken as they are."""
    if not journal.exists():
        return
    with open(journal, "rb") as lines:
        for line in lines:
            batch = None
            with contextlib.suppress(ValueError, RecursionError):
                batch = json.loads(line)
            if isinstance(batch, dict) and {"rows", "gone", "to"} <= batch.keys():
                crc32 = batch.pop("crc32", None)
                yield batch if crc32 is None or crc32 == _crc32(batch) else None
            elif line.endswith(b"\n") and line.strip():
                yield None


def _crc32(batch: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(batch).encode())


def _end(path: Path, base: int) -> tuple[int, bool]:
    """(newest note in the journal, or of the backup; does the journal end with a whole line?)"""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 64))
            tail = file.read()
    except FileNotFoundError:
        return base, True
    if not tail:
        return base, True
    if found := END.search(tail):
        return int(found.group(1)), True
    return max((batch["to"] for batch in replayed(path)), default=base), tail.endswith(b"\n")
