"""Backups of a workspace, each a folder below ``backups/``:

    2026-01-31T12-00-00/ledger.db  mlflow.db  factory.yaml  policies/  tokenizer/  shards/hashes/  backup.json  journal.jsonl  keys/ (optional)

SQLite's online backup copies a database while other processes write to it. Later commits are appended to the backup's journal
(``factory.ledger.journal``), so a restored ledger has every commit. Data, checkpoints and exports stay in the workspace and are not copied.
The daemon makes a backup each day and keeps the newest ``KEPT`` backups.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from factory.backups.signing_keys import KEYS, copy_signing_keys
from factory.core.errors import FactoryError, InputError, WorkspaceError
from factory.core.faults import BROKEN, NO_WRITE_PERMISSION, find_fault_in
from factory.core.path_removal import remove_path
from factory.core.workspace import Workspace, list_factory_files
from factory.ingest.hash_index import FOLDER
from factory.ledger import journal
from factory.ledger.engine import get_sqlite_file
from factory.ledger.journal import ABOUT, BACKUPS_FOLDER, list_backups
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.version import GONE, SCHEMA_VERSION, check_version
from kernels.contract.files import rename_into_place, write_atomically
from kernels.contract.message import Message

KEPT = 7
OTHERS_SECONDS = 60.0  # the longest wait for the end of another backup
DAY_SECONDS = 86_400.0
LEDGER, MLFLOW = "ledger.db", "mlflow.db"
MLFLOW_TABLE = "alembic_version"
POSTGRESQL_ADVICE = Message(
    "backups.postgresql",
    "The factory does not back up a ledger in PostgreSQL. Make a backup with 'pg_dump', and restore it with "
    "'pg_restore'",
)


class DamagedDatabaseError(WorkspaceError):
    """SQLite reports that a database is damaged."""


def make_backup_timestamp() -> str:
    """Return the present time in the format of backup names, such as '2026-01-31T12-00-00'."""
    return datetime.now(UTC).strftime(journal.NAME_TIME_FORMAT)


def make_backup(plant: Plant, folder: Path | None = None, keys: bool = False) -> tuple[Path, list[str]]:
    """Make a backup in ``folder``, by default in a new folder below the workspace's ``backups/``. Returns the folder and lines for a person.

    ``keys``: also copy the key that signs bundles. After a kill at any moment, the new backup is complete or absent. The same holds for the
    oldest backup, which this function removes.

    Raises: WorkspaceError if the ledger is damaged or in PostgreSQL, or if another process makes a backup; InputError if ``folder`` is not empty.
    """
    if plant.ledger.file is None:
        raise WorkspaceError(POSTGRESQL_ADVICE)
    with plant.workspace.hold_lock("backup", OTHERS_SECONDS):
        return _make_backup(plant, folder, keys)


def _make_backup(plant: Plant, folder: Path | None, keys: bool) -> tuple[Path, list[str]]:
    assert plant.ledger.file is not None
    own = folder is None
    target = (
        plant.workspace.root / BACKUPS_FOLDER / journal.make_backup_name(plant.workspace.root, datetime.now(UTC))
        if folder is None
        else folder.expanduser().resolve()
    )
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise InputError(
            "backups.not_empty", "{folder} is not empty. Choose another folder for the backup", folder=target
        )
    aside = target.with_name(f".backup-{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in (aside, *(target.parent.glob(".backup-*") if own else ())):  # from a backup that was killed
            remove_path(left)
        aside.mkdir()
        said = _fill(plant, aside)
        if keys:
            copy_signing_keys(plant.workspace.root, aside / KEYS)
        if own:
            with journal.hold_journal_lock(plant.workspace.root):
                if plant.ledger.journaled and (backups := list_backups(plant.workspace.root)):
                    journal.append_changes(plant.ledger.file, backups[-1])  # at least up to this backup
                rename_into_place(aside, target)
        else:
            if target.exists():
                target.rmdir()
            rename_into_place(aside, target)
    except OSError as error:
        raise FactoryError(
            "backups.not_made",
            "no backup was made: {file}: {why}",
            why=error.strerror,
            file=str(error.filename),
        ) from error
    finally:
        with suppress(OSError):
            remove_path(aside)
    if own:
        newest = read_backup_info(target)["seq"]
        with plant.ledger.begin() as tx:
            tx.exec_driver_sql("DELETE FROM changes WHERE seq <= ?", (newest,))
        for old in list_backups(plant.workspace.root)[:-KEPT]:
            with suppress(OSError):  # the old backup stays complete, and the next call removes it
                hidden = old.with_name(f".backup-{old.name}")
                os.rename(old, hidden)  # so that half a backup never has the name of a backup
                remove_path(hidden)
    return target, said


def make_or_open_ledger(workspace: Workspace) -> Ledger:
    """Make the ledger of a new workspace, and its first backup. If the workspace has a ledger, open it.

    Raises: WorkspaceError if the ledger is damaged, or if it is missing although the workspace has data, which a new ledger would not know.
    """
    file = get_sqlite_file(workspace.ledger_url)
    empty = file is not None and not (file.exists() and file.stat().st_size)
    left = [name for name in list_factory_files(workspace.root) if name not in (LEDGER, MLFLOW)]
    if empty and left:
        raise WorkspaceError(
            "backups.lost_ledger",
            "{folder} has data of a factory ({found}), but the ledger of that factory is {state}. {advice}",
            folder=workspace.root,
            found=left,
            state="empty" if file and file.exists() else "missing",
            advice=GONE,
        )
    ledger = Ledger.create(workspace.ledger_url, workspace.root)
    check_version(ledger.read_version(), f"the ledger of {workspace.root}")
    back_up_daily(Plant(workspace, ledger))
    return ledger


def back_up_daily(plant: Plant) -> Message | str:
    """Make a backup, unless the newest backup is less than a day old and has this schema. Returns a line for a person; '' without a new backup.

    Raises: as ``make_backup``. For a ledger in PostgreSQL it does nothing.
    """
    if plant.ledger.file is None:
        return ""
    newest = read_backup_info(backups[-1]) if (backups := list_backups(plant.workspace.root)) else {}
    if newest.get("schema") == SCHEMA_VERSION and abs(time.time() - newest["made_at"]) < DAY_SECONDS:
        return ""
    path, said = make_backup(plant)
    if said:
        return Message("backups.made_with_notes", "backup made: {folder}. {notes}", folder=path, notes="; ".join(said))
    return Message("backups.made", "backup made: {folder}", folder=path)


def copy_database(source: Path, target: Path, table: str = "meta") -> None:
    """Copy an SQLite database while other processes may write to it.

    Raises: DamagedDatabaseError if the database is damaged or lacks ``table``; FactoryError if it cannot be copied now.
    """
    try:
        with (
            closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True, timeout=60)) as old,
            closing(sqlite3.connect(target)) as new,
        ):
            old.backup(new)
            new.execute("PRAGMA journal_mode=DELETE")  # one file, no -wal
    # A full disk or a long lock says nothing about the database.
    except sqlite3.OperationalError as error:
        raise FactoryError(
            "backups.not_copied",
            "{database} could not be copied to {folder}: {why}",
            database=source,
            folder=target.parent,
            why=str(error),
        ) from error
    except sqlite3.DatabaseError as error:
        raise _damaged(source, str(error)) from error
    if fault := find_database_damage(target, table):
        raise _damaged(source, fault)


def _damaged(database: Path, why: str) -> DamagedDatabaseError:
    return DamagedDatabaseError("backups.damaged_database", "{database} is damaged: {why}", database=database, why=why)


def find_database_damage(database: Path, table: str = "meta") -> str:
    """Return SQLite's report of damage of a database, or a message if it lacks ``table``; '' if the database is good.

    Raises: sqlite3.OperationalError if the database cannot be checked now, because it is locked, may not be opened, or too many files are open.
    """
    if not database.is_file():
        return Message("backups.no_database", "{database} does not exist", database=database)
    try:
        try:
            found, has = _checked(database, table, "ro")
        except sqlite3.OperationalError as error:
            if find_fault_in(error) != NO_WRITE_PERMISSION:
                raise
            found, has = _checked(database, table, "rw")  # rolls back an interrupted transaction first
    except sqlite3.OperationalError as error:
        if find_fault_in(error) not in (None, BROKEN):
            raise
        return str(error)
    except sqlite3.DatabaseError as error:
        return str(error)
    if found != "ok":
        return found[:300]
    return "" if has else Message("backups.no_table", "the database has no table {table}", table=table)


def _checked(database: Path, table: str, mode: str) -> tuple[str, bool]:
    """Return the result of SQLite's PRAGMA quick_check, and whether the table exists."""
    with closing(sqlite3.connect(f"{database.as_uri()}?mode={mode}", uri=True, timeout=60)) as opened:
        found = " ".join(row[0] for row in opened.execute("PRAGMA quick_check(1)"))
        return found, bool(opened.execute("SELECT 1 FROM sqlite_master WHERE name = ?", [table]).fetchone())


def read_backup_info(backup: Path) -> dict[str, Any]:
    """Return the content of a backup's backup.json. Raises: InputError if the folder is not a backup."""
    if found := journal.read_backup_info(backup):
        return found
    raise InputError(
        "backups.not_a_backup", "{folder} is not a backup: it has no readable {file}", folder=backup, file=ABOUT
    )


def _fill(plant: Plant, aside: Path) -> list[str]:
    assert plant.ledger.file is not None
    said: list[str] = []
    copy_database(plant.ledger.file, aside / LEDGER)
    (
        aside / journal.NAME
    ).touch()  # ``rename_into_place`` flushes the name; ``journal.append_changes`` flushes the content
    if (mlflow := get_sqlite_file(plant.workspace.mlflow_uri)) and mlflow.exists():
        try:
            copy_database(mlflow, aside / MLFLOW, MLFLOW_TABLE)
        except DamagedDatabaseError as error:
            (aside / MLFLOW).unlink(missing_ok=True)
            said.append(
                Message(
                    "backups.without_mlflow",
                    "The backup lacks MLflow's database: {why}. To rebuild the database, stop 'factory run', then "
                    "run 'factory check --repair'",
                    why=error.message,
                )
            )
    shutil.copyfile(plant.workspace.root / "factory.yaml", aside / "factory.yaml")
    if (policies := plant.workspace.root / "policies").is_dir():
        shutil.copytree(policies, aside / "policies")
    if plant.workspace.tokenizer.is_dir():
        shutil.copytree(plant.workspace.tokenizer, aside / "tokenizer")
    _copy_hashes(plant.workspace.root, aside)  # after the ledger, so that all files that it names exist
    with closing(sqlite3.connect(aside / LEDGER)) as copy:
        sequence = copy.execute("SELECT seq FROM sqlite_sequence WHERE name = 'changes'").fetchone()
        meta = dict(copy.execute("SELECT key, value FROM meta").fetchall())
    facts = {"made_at": time.time(), "identity": meta["identity"], "schema": meta["schema"]}
    write_atomically(aside / ABOUT, json.dumps(facts | {"seq": sequence[0] if sequence else 0}, indent=1))
    return said


def _copy_hashes(root: Path, aside: Path) -> None:
    """Put the files with hashes of documents into a backup: by hard links, since the files never change, or by copies where links are impossible."""
    folder = aside / "shards" / FOLDER
    folder.mkdir(parents=True)
    for path in (root / "shards" / FOLDER).glob("[!.]*.parquet"):
        try:
            os.link(path, folder / path.name)
        except OSError:
            shutil.copyfile(path, folder / path.name)


def restore_document_hashes(root: Path, backup: Path) -> int:
    """Copy the files with hashes of documents that the workspace ``root`` lacks. Returns their number; an old backup has none. Raises: OSError."""
    folder = root / "shards" / FOLDER
    lacking = [path for path in (backup / "shards" / FOLDER).glob("*.parquet") if not (folder / path.name).exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in lacking:
        write_atomically(folder / path.name, path.read_bytes())
    return len(lacking)


def find_backup(workspace: Workspace, name: str) -> Path:
    """Return the folder of the backup with this path, or with this name below ``backups/``. Raises: InputError that lists the known backups."""
    for path in (workspace.root / BACKUPS_FOLDER / name, Path(name).expanduser().resolve()):
        if (path / ABOUT).is_file():
            return path
    raise InputError(
        "backups.unknown_backup",
        "no backup is named {backup!r}. {folder} has: {known}",
        backup=name,
        folder=workspace.root / BACKUPS_FOLDER,
        known=[path.name for path in list_backups(workspace.root)] or "no backup",
    )
