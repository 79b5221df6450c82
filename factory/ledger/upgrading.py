"""Brings an older ledger to this factory's schema: a backup, then alembic's revisions, in one transaction."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory

from factory.core.errors import WorkspaceError
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, meta
from factory.ledger.version import SCHEMA, refuse_other_version
from kernels.contract.files import sync_folder

MIGRATIONS = Path(__file__).parent / "migrations"


def upgrade_ledger(workspace: Workspace, has_backup: bool) -> list[str]:
    """Upgrade the workspace's ledger; returns what was done, a line each; empty when it is up to date.

    Killed at any moment, the ledger is as before or upgraded. ``has_backup``: a person has one; SQLite gets one here.

    Raises: WorkspaceError for a newer ledger, and for a PostgreSQL ledger without a backup.
    """
    ledger = Ledger(workspace.ledger_url)
    found = ledger.version()
    if found == SCHEMA:
        return []
    if not found or not found.isdigit() or int(found) > int(SCHEMA):
        refuse_other_version(found, f"the ledger of {workspace.root}")
    where = "a person's backup"
    if ledger.engine.dialect.name == "sqlite":
        where = str(_backup(workspace, found or ""))
    elif not has_backup:
        raise WorkspaceError(
            f"the ledger at {ledger.engine.url!r} is upgraded from schema {found} to {SCHEMA} in place: make a backup with "
            "pg_dump, then run 'factory upgrade --i-have-a-backup'"
        )
    script = ScriptDirectory(str(MIGRATIONS), version_locations=[str(MIGRATIONS)])
    with ledger.begin() as tx:
        now = (
            tx.execute(meta.select().where(meta.c.key == "schema")).one().value
        )  # another process may have upgraded it
        with Operations.context(MigrationContext.configure(tx)):
            for step in reversed(list(script.walk_revisions())):
                if int(step.revision) > int(now):
                    step.module.upgrade()
        tx.execute(meta.update().where(meta.c.key == "schema").values(value=SCHEMA))
    return [f"the ledger is of schema {SCHEMA} now (it was {found}; as it was: {where})"]


def backup_folder(workspace: Workspace) -> Path:
    folder = workspace.root / "backups"
    folder.mkdir(exist_ok=True)
    return folder


def stamp() -> str:
    """The time in a backup's name: '2026-01-31T12-00-00'."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")


def _backup(workspace: Workspace, version: str) -> Path:
    """A copy of the SQLite ledger, whole or absent, also while others write to it."""
    for left in backup_folder(workspace).glob(".ledger-*.part"):  # by an upgrade that was killed
        left.unlink()
    path = backup_folder(workspace) / f"ledger-{version}-{stamp()}.db"
    aside = path.with_name(f".{path.name}.part")
    source = Path(workspace.ledger_url.removeprefix("sqlite:///")).resolve()
    with (
        closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True, timeout=30)) as ledger,
        closing(sqlite3.connect(aside)) as copy,
    ):
        ledger.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")  # one file, no -wal
    with open(aside, "rb+") as file:
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)
    return path
