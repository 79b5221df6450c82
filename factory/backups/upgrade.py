"""``factory upgrade``: a workspace of an older factory is brought up to this one, after a backup below ``backups/``."""

from __future__ import annotations

from pathlib import Path

from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory

from factory.backups.backups import back_up_daily, copy_database, stamp
from factory.core.errors import WorkspaceError
from factory.core.workspace import Workspace
from factory.ledger.engine import sqlite_file
from factory.ledger.journal import BACKUPS, watch
from factory.ledger.ledger import Ledger, meta, metadata
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.ledger.version import SCHEMA, refuse_other_version
from factory.training.segment_folder import mark_owner
from kernels.contract.files import put_in_place

# Brings an older ledger to this factory's schema: a backup, then alembic's revisions, in one transaction.
MIGRATIONS = Path(__file__).parent / "migrations"


def upgrade_ledger(workspace: Workspace, has_backup: bool) -> list[str]:
    """Upgrade the workspace's ledger; returns what was done, a line each; empty when it is up to date.

    Killed at any moment, the ledger is as before or upgraded. ``has_backup``: a person has one; SQLite gets one here.

    Raises: WorkspaceError for a newer ledger, and for a PostgreSQL ledger without a backup.
    """
    ledger = Ledger(workspace.ledger_url, workspace.root)
    found = ledger.version()
    if found == SCHEMA:
        return []
    if not found or not found.isdigit() or int(found) > int(SCHEMA):
        refuse_other_version(found, f"the ledger of {workspace.root}")
    where = "a person's backup"
    if ledger.file:
        where = str(_backup(workspace, found or ""))
    elif not has_backup:
        raise WorkspaceError(
            f"the ledger at {ledger.engine.url!r} is upgraded from schema {found} to {SCHEMA} in place: make a backup with "
            "pg_dump, then run 'factory upgrade --i-have-a-backup'"
        )
    script = ScriptDirectory(str(MIGRATIONS), version_locations=[str(MIGRATIONS)])
    made = workspace.root / "root"  # where an older factory made the workspace: its ledger names files there
    roots = [str(workspace.root), *([made.read_text().strip()] if made.exists() else [])]
    with ledger.begin() as tx:
        # Another process may have upgraded it.
        now = tx.execute(meta.select().where(meta.c.key == "schema")).one().value
        with Operations.context(MigrationContext.configure(tx, opts={"roots": roots})):
            for step in reversed(list(script.walk_revisions())):
                if int(step.revision) > int(now):
                    step.module.upgrade()
        watch(tx, metadata)
        tx.execute(meta.update().where(meta.c.key == "schema").values(value=SCHEMA))
    return [f"the ledger is of schema {SCHEMA} now (it was {found}; as it was: {where})"]


def backup_folder(workspace: Workspace) -> Path:
    folder = workspace.root / BACKUPS
    folder.mkdir(exist_ok=True)
    return folder


def _backup(workspace: Workspace, version: str) -> Path:
    """A copy of the SQLite ledger, whole or absent, also while others write to it."""
    # By an upgrade that was killed, SQLite's logs of it too.
    for left in backup_folder(workspace).glob(".ledger-*.part*"):
        left.unlink()
    path = backup_folder(workspace) / f"ledger-{version}-{stamp()}.db"
    aside = path.with_name(f".{path.name}.part")
    source = sqlite_file(workspace.ledger_url)
    assert source is not None
    copy_database(source, aside)
    put_in_place(aside, path)
    return path


def upgrade(workspace: Workspace, has_backup: bool = False) -> list[str]:
    """Bring a workspace up to this factory; returns what was done, a line each. Safe to repeat, and to kill.

    ``has_backup``: a person has one of a PostgreSQL ledger. Raises: WorkspaceError; nothing was changed then.
    """
    with workspace.lock("model-loop"), workspace.lock("code-loop"), workspace.lock("release"):
        done = upgrade_ledger(workspace, has_backup)
        ledger, made = Ledger.open(workspace.ledger_url, workspace.root), workspace.root / "root"
        if done or made.exists():  # older factories wrote that file, and no owner into the folders of segments
            for row in SegmentRow.select(ledger):
                if Path(row.folder).is_dir():
                    mark_owner(ledger, row)
            made.unlink(missing_ok=True)
            back_up_daily(Plant(workspace, ledger))
        return done
