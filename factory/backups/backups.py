"""Backups of a workspace: the ledger, MLflow's database, ``factory.yaml``, policies, tokenizer and what later documents are compared with, in a
folder below ``backups/``.

    2026-01-31T12-00-00/ledger.db  mlflow.db  factory.yaml  policies/  tokenizer/  shards/hashes/  backup.json  journal.jsonl  keys/ (if asked for)

SQLite's own online backup copies a database while others write to it. What is committed after a backup is appended to its journal
(``factory.ledger.journal``), so that a lost ledger is made again as it was at the last commit. Data, checkpoints and exports are not
copied: they lie in the workspace. The daemon makes a backup each day, and the newest ``KEPT`` stay.
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

from factory.backups.keys import KEYS, copy_keys
from factory.core.errors import FactoryError, InputError, WorkspaceError
from factory.core.faults import BROKEN, READ_ONLY, fault_of
from factory.core.removal import remove
from factory.core.workspace import Workspace, work_in
from factory.ingest.compared import FOLDER
from factory.ledger import journal
from factory.ledger.engine import sqlite_file
from factory.ledger.journal import ABOUT, BACKUPS, backups_of
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.version import GONE, SCHEMA, refuse_other_version
from kernels.contract.files import put_in_place, write_atomically

KEPT = 7
OTHERS_SECONDS = 60.0  # that another backup may take
DAY_SECONDS = 86_400.0
LEDGER, MLFLOW = "ledger.db", "mlflow.db"
MLFLOW_TABLE = "alembic_version"
PG_DUMP = "the ledger is in PostgreSQL, which this factory does not copy: make a backup with 'pg_dump', and put it back with 'pg_restore'"


class NotWhole(WorkspaceError):
    """A database that SQLite itself calls damaged."""


def stamp() -> str:
    """The time as it stands in the names of what is kept below ``backups/``: '2026-01-31T12-00-00'."""
    return datetime.now(UTC).strftime(journal.TIME)


def make_backup(plant: Plant, folder: Path | None = None, keys: bool = False) -> tuple[Path, list[str]]:
    """Make a backup, in ``folder`` or below the workspace's ``backups/``; returns its folder and what a person should know, a line each.

    ``keys``: with the key that signs bundles.

    Killed at any moment, it is whole or absent, and so is the oldest, whose place it takes.

    Raises: WorkspaceError when the ledger is damaged or in PostgreSQL, or another backup is being made; InputError.
    """
    if plant.ledger.file is None:
        raise WorkspaceError(PG_DUMP)
    with plant.workspace.lock("backup", OTHERS_SECONDS):
        return _make_backup(plant, folder, keys)


def _make_backup(plant: Plant, folder: Path | None, keys: bool) -> tuple[Path, list[str]]:
    assert plant.ledger.file is not None
    own = folder is None
    target = (
        plant.workspace.root / BACKUPS / journal.next_name(plant.workspace.root, datetime.now(UTC))
        if folder is None
        else folder.expanduser().resolve()
    )
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise InputError(f"{target} is not empty: name another folder for the backup")
    aside = target.with_name(f".backup-{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in (aside, *(target.parent.glob(".backup-*") if own else ())):  # of one that was killed
            remove(left)
        aside.mkdir()
        said = _fill(plant, aside)
        if keys:
            copy_keys(plant.workspace.root, aside / KEYS)
        if own:
            with journal.journal_lock(plant.workspace.root):
                if plant.ledger.journaled and (backups := backups_of(plant.workspace.root)):
                    journal.append(plant.ledger.file, backups[-1])  # up to this backup, at least
                put_in_place(aside, target)
        else:
            if target.exists():
                target.rmdir()
            put_in_place(aside, target)
    except OSError as error:
        raise FactoryError(f"no backup was made: {error.strerror} ({error.filename})") from error
    finally:
        with suppress(OSError):
            remove(aside)
    if own:
        newest = about(target)["seq"]
        with plant.ledger.begin() as tx:
            tx.exec_driver_sql("DELETE FROM changes WHERE seq <= ?", (newest,))
        for old in backups_of(plant.workspace.root)[:-KEPT]:
            with suppress(OSError):  # it stays whole, and is the oldest again next time
                hidden = old.with_name(f".backup-{old.name}")
                os.rename(old, hidden)  # half a backup has no name of one
                remove(hidden)
    return target, said


def make_ledger(workspace: Workspace) -> Ledger:
    """The ledger of a new workspace, and its first backup; one that is there is opened.

    Raises: WorkspaceError when it is damaged, or is gone and the workspace holds its work: a new one would not know it.
    """
    file = sqlite_file(workspace.ledger_url)
    empty = file is not None and not (file.exists() and file.stat().st_size)
    left = [name for name in work_in(workspace.root) if name not in (LEDGER, MLFLOW)]
    if empty and left:
        raise WorkspaceError(
            f"{workspace.root} holds a factory's {', '.join(left)}, and its ledger is {'empty' if file and file.exists() else 'gone'}: "
            f"{GONE}"
        )
    ledger = Ledger.create(workspace.ledger_url, workspace.root)
    refuse_other_version(ledger.version(), f"the ledger of {workspace.root}")
    back_up_daily(Plant(workspace, ledger))
    return ledger


def back_up_daily(plant: Plant) -> str:
    """Make a backup when the newest is older than a day or of another schema, or there is none; returns a line, empty when there was nothing to do.

    Raises: as ``make_backup``, but not for a ledger in PostgreSQL.
    """
    if plant.ledger.file is None:
        return ""
    newest = about(backups[-1]) if (backups := backups_of(plant.workspace.root)) else {}
    if newest.get("schema") == SCHEMA and abs(time.time() - newest["made_at"]) < DAY_SECONDS:
        return ""
    path, said = make_backup(plant)
    return "; ".join((f"backup made: {path}", *said))


def copy_database(source: Path, target: Path, table: str = "meta") -> None:
    """A copy of an SQLite database that must have a table, also while others write to it. Raises: NotWhole when it is damaged."""
    try:
        with (
            closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True, timeout=60)) as old,
            closing(sqlite3.connect(target)) as new,
        ):
            old.backup(new)
            new.execute("PRAGMA journal_mode=DELETE")  # one file, no -wal
    # The disk is full, a lock is held for long: nothing is known of the database.
    except sqlite3.OperationalError as error:
        raise FactoryError(f"{source} could not be copied to {target.parent}: {error}") from error
    except sqlite3.DatabaseError as error:
        raise NotWhole(f"{source} is damaged: {error}") from error
    if fault := database_damage(target, table):
        raise NotWhole(f"{source} is damaged: {fault}")


def database_damage(database: Path, table: str = "meta") -> str:
    """What SQLite finds wrong with the file of a database that must have a table; empty: nothing.

    Raises: sqlite3.OperationalError when nothing can be known of it now: it is locked, may not be opened, no handle is left.
    """
    if not database.is_file():
        return f"there is no {database}"
    try:
        try:
            found, has = _checked(database, table, "ro")
        except sqlite3.OperationalError as error:
            if fault_of(error) != READ_ONLY:
                raise
            found, has = _checked(database, table, "rw")  # a transaction that was cut off is rolled back first
    except sqlite3.OperationalError as error:
        if fault_of(error) not in (None, BROKEN):
            raise
        return str(error)
    except sqlite3.DatabaseError as error:
        return str(error)
    if found != "ok":
        return found[:300]
    return "" if has else f"it has no table {table}"


def _checked(database: Path, table: str, mode: str) -> tuple[str, bool]:
    """(what ``quick_check`` says, is the table there)."""
    with closing(sqlite3.connect(f"{database.as_uri()}?mode={mode}", uri=True, timeout=60)) as opened:
        found = " ".join(row[0] for row in opened.execute("PRAGMA quick_check(1)"))
        return found, bool(opened.execute("SELECT 1 FROM sqlite_master WHERE name = ?", [table]).fetchone())


def about(backup: Path) -> dict[str, Any]:
    """``journal.about``. Raises: InputError."""
    if found := journal.about(backup):
        return found
    raise InputError(f"{backup} is not a backup: it has no {ABOUT}, or none that can be read")


def _fill(plant: Plant, aside: Path) -> list[str]:
    assert plant.ledger.file is not None
    said = []
    copy_database(plant.ledger.file, aside / LEDGER)
    (aside / journal.NAME).touch()  # its name is flushed with the folder; what is appended flushes its content
    if (mlflow := sqlite_file(plant.workspace.mlflow_uri)) and mlflow.exists():
        try:
            copy_database(mlflow, aside / MLFLOW, MLFLOW_TABLE)
        except NotWhole as error:
            (aside / MLFLOW).unlink(missing_ok=True)
            said.append(
                f"MLflow's database is not in it: {error}; 'factory check --repair' (stop 'factory run' first) makes it again"
            )
    shutil.copyfile(plant.workspace.root / "factory.yaml", aside / "factory.yaml")
    if (policies := plant.workspace.root / "policies").is_dir():
        shutil.copytree(policies, aside / "policies")
    if plant.workspace.tokenizer.is_dir():
        shutil.copytree(plant.workspace.tokenizer, aside / "tokenizer")
    _copy_hashes(plant.workspace.root, aside)  # after the ledger: those that it names are there by then
    with closing(sqlite3.connect(aside / LEDGER)) as copy:
        sequence = copy.execute("SELECT seq FROM sqlite_sequence WHERE name = 'changes'").fetchone()
        meta = dict(copy.execute("SELECT key, value FROM meta").fetchall())
    facts = {"made_at": time.time(), "identity": meta["identity"], "schema": meta["schema"]}
    write_atomically(aside / ABOUT, json.dumps(facts | {"seq": sequence[0] if sequence else 0}, indent=1))
    return said


def _copy_hashes(root: Path, aside: Path) -> None:
    """They never change: a link takes no room, and there is a copy where the file system makes none."""
    folder = aside / "shards" / FOLDER
    folder.mkdir(parents=True)
    for path in (root / "shards" / FOLDER).glob("[!.]*.parquet"):
        try:
            os.link(path, folder / path.name)
        except OSError:
            shutil.copyfile(path, folder / path.name)


def put_back_hashes(root: Path, backup: Path) -> int:
    """Copy into the workspace ``root`` those that it lacks; returns how many. A backup of before has none. Raises: OSError."""
    folder = root / "shards" / FOLDER
    lacking = [path for path in (backup / "shards" / FOLDER).glob("*.parquet") if not (folder / path.name).exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in lacking:
        write_atomically(folder / path.name, path.read_bytes())
    return len(lacking)


def find_backup(workspace: Workspace, name: str) -> Path:
    """A backup by its folder, or its name below ``backups/``. Raises: InputError that lists those there are."""
    for path in (workspace.root / BACKUPS / name, Path(name).expanduser().resolve()):
        if (path / ABOUT).is_file():
            return path
    known = ", ".join(path.name for path in backups_of(workspace.root)) or "none"
    raise InputError(f"no backup {name!r}; {workspace.root / BACKUPS} holds: {known}")
