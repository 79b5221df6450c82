"""The journal of the newest backup: lines of ``journal.jsonl`` with each row that was added, changed or removed since the backup.

Triggers of SQLite note each changed row in the table ``changes``, in the same transaction. After the commit ``append_to_newest_backup`` appends these
rows to the journal. A line of the journal is a batch:
``{"crc32": …, "rows": [[table, row], …], "gone": [[table, key, value], …], "from": 40, "to": 42}``. It has the notes after ``from`` up to ``to``.
After a kill the next process appends the missing batches. ``read_batches`` yields the batches.

A PostgreSQL ledger has no journal in the workspace, because its server keeps its own.
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

from factory.core.file_lock import LockedError, hold_file_lock
from kernels.contract.message import Message

BACKUPS_FOLDER = "backups"
NAME, ABOUT = "journal.jsonl", "backup.json"  # files of a backup's folder
NAME_TIME_FORMAT = "%Y-%m-%dT%H-%M-%S"  # the format of the time in a backup's name
BACKUP_NAME = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(-\d+)?")
END = re.compile(rb'"to": (\d+)\}\n$')
PATIENCE = 60.0  # seconds to wait for a lock, the same as for SQLite's


def create_triggers(tx: sa.Connection, metadata: sa.MetaData) -> None:
    """Make the table ``changes`` and the triggers that fill it, unless they exist."""
    if tx.dialect.name != "sqlite":
        return
    tx.exec_driver_sql(
        'CREATE TABLE IF NOT EXISTS changes (seq INTEGER PRIMARY KEY AUTOINCREMENT, "table" TEXT, row INTEGER, gone TEXT)'
    )
    for table in metadata.sorted_tables:
        key = get_primary_key_name(table)
        gone = f'OLD."{key}"' if key else "NULL"
        for when, row, value in (("INSERT", "NEW", "NULL"), ("UPDATE", "NEW", "NULL"), ("DELETE", "OLD", gone)):
            tx.exec_driver_sql(
                f'CREATE TRIGGER IF NOT EXISTS "{when.lower()}_{table.name}" AFTER {when} ON "{table.name}" BEGIN '
                f"INSERT INTO changes (\"table\", row, gone) VALUES ('{table.name}', {row}.rowid, {value}); END"
            )


def get_primary_key_name(table: sa.Table) -> str:
    """Return the name of the column of a table's primary key, or '' if the table has none."""
    return next((column.name for column in table.primary_key.columns), "")


def list_backups(root: Path) -> list[Path]:
    """Return the folders of the workspace's backups that have a readable ``backup.json``, oldest first."""
    return [path for path in list_backup_folders(root) if read_backup_info(path)]


def list_backup_folders(root: Path) -> list[Path]:
    """Return all backup folders, oldest first. Damaged backups are included, because their journals may be intact."""
    return sorted(
        (path for path in (root / BACKUPS_FOLDER).glob("2*") if BACKUP_NAME.fullmatch(path.name)),
        key=make_backup_sort_key,
    )


def read_backup_info(backup: Path) -> dict[str, Any]:
    """Return the content of ``backup.json`` (time, identity and schema of the ledger, number of its newest change), or {} if it is unreadable."""
    try:
        found = json.loads((backup / ABOUT).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and {"made_at", "identity", "schema", "seq"} <= found.keys() else {}


def make_backup_name(root: Path, now: datetime) -> str:
    """Return the name of a backup that is made ``now`` (UTC). Sorted by ``make_backup_sort_key``, the names are in the order of creation.

    The name is the time: '2026-01-31T12-00-00'. If a backup was made in the same second, or the clock went back, the name is the newest backup's
    name with a number: '2026-01-31T12-00-00-1'. The names of damaged backups are not used again.
    """
    stem, number = now.strftime(NAME_TIME_FORMAT), 0
    if (backups := list_backups(root)) and stem <= make_backup_sort_key(backups[-1])[0]:
        stem, number = make_backup_sort_key(backups[-1])
        number += 1
    names = (f"{stem}-{n}" if n else stem for n in itertools.count(number))
    return next(name for name in names if not (root / BACKUPS_FOLDER / name).exists())


def make_backup_sort_key(backup: Path) -> tuple[str, int]:
    """Return a key that sorts backups by age: '2026-01-31T12-00-00-7' -> ('2026-01-31T12-00-00', 7)."""
    return backup.name[:19], int(backup.name[20:] or 0)


def append_to_newest_backup(database: Path, root: Path) -> None:
    """Append the changes since the journal's end to the journal of the newest backup, if a backup exists.

    If the disk is full, or another process holds the journal for long, the next call appends the changes.
    """
    if backups := list_backups(root):
        with contextlib.suppress(OSError, ValueError, LockedError, sqlite3.Error), hold_journal_lock(root):
            append_changes(database, backups[-1])


@contextlib.contextmanager
def hold_journal_lock(root: Path) -> Iterator[None]:
    """Let only one process at a time write to the journal. Raises: LockedError."""
    with hold_file_lock(root / BACKUPS_FOLDER / "journal.lock", PATIENCE):
        yield


def append_changes(database: Path, backup: Path) -> None:
    """Append the changes to one backup's journal. The caller holds the lock. Raises: OSError; sqlite3.Error."""
    path = backup / NAME
    since, whole = _end(path, read_backup_info(backup).get("seq", 0))
    with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=PATIENCE)) as ledger:
        ledger.row_factory = sqlite3.Row
        ledger.execute("BEGIN")
        sequence = ledger.execute("SELECT seq FROM sqlite_sequence WHERE name = 'changes'").fetchone()
        if since > (
            sequence[0] if sequence else 0
        ):  # the journal belongs to a former ledger, which this ledger replaced
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
        found = []  # kept as text, because an ingest adds many rows
        for table, row in rows:
            for held in ledger.execute(f'SELECT rowid AS "rowid", * FROM "{table}" WHERE rowid = ?', [row]):
                found.append(json.dumps([table, dict(held)]))
    listed, gone_rows = ", ".join(found), json.dumps([list(one) for one in gone])
    notes_range = f'"from": {since}, "to": {newest}'
    batch = f'"rows": [{listed}], "gone": {gone_rows}, {notes_range}}}'.encode()
    crc32 = zlib.crc32(batch, zlib.crc32(b"{"))
    encoded = b'{"crc32": %d, %b\n' % (crc32, batch)
    with open(path, "ab") as out:
        out.write(encoded if whole else b"\n" + encoded)
        out.flush()
        os.fsync(out.fileno())


def read_batches(journal: Path) -> Iterator[dict[str, Any]]:
    """Yield the batches of a journal. A line that was written only in part is skipped, because the next line has its changes."""
    yield from (batch for batch in _lines(journal) if batch)


def describe_journal_damage(journal: Path) -> Message | str:
    """Describe the damage of a journal, or return ''. A line that a kill cut off is not damage, because the next line has its changes."""
    unread, last = False, read_backup_info(journal.parent).get("seq")
    for batch in _lines(journal):
        if batch is None:
            unread = True
            continue
        begins = batch.get("from")
        if last is not None and begins is not None:
            unread = begins > last  # there is a gap, and the changes in it are lost
        if unread:
            break
        last = batch["to"]
    if not unread:
        return ""
    return Message(
        "journal.damaged",
        "{journal} is damaged: the changes in an unreadable line are lost",
        journal=journal,
    )


def _lines(journal: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the batch of each complete line, or None for a damaged line. Old lines without a 'crc32' are not checked."""
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
    """Return (number of the newest note in the journal, or ``base`` if it is empty, whether the journal ends with a complete line)."""
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
    return max((batch["to"] for batch in read_batches(path)), default=base), tail.endswith(b"\n")
