"""Implements ``factory upgrade``: makes a backup below ``backups/``, then upgrades the workspace of an older factory."""

from __future__ import annotations

from pathlib import Path

from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory

from agents.core.yaml_edit import set_yaml_value
from factory.backups.backups import back_up_daily, copy_database, make_backup_timestamp
from factory.computing.tuned_kernels import KERNELS
from factory.core.errors import WorkspaceError
from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.core.workspace import Workspace
from factory.git.git_store import RepositoryError, make_commit
from factory.git.repository import (
    advance_branch,
    convert_edits_to_changes,
    get_live_commit,
    read_file_modes,
    read_file_text,
)
from factory.ledger.engine import get_sqlite_file
from factory.ledger.journal import BACKUPS_FOLDER, create_triggers
from factory.ledger.ledger import Ledger, meta, metadata
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.ledger.version import SCHEMA_VERSION, check_version
from factory.training.segment_folder import write_folder_owner
from kernels.contract.choice import AUTO, EVERY_OP, UNTUNED, read_device_section
from kernels.contract.files import rename_into_place
from kernels.contract.message import Message

# alembic's revisions, which upgrade an older ledger in one transaction
MIGRATIONS = Path(__file__).parent / "migrations"


def upgrade_ledger(workspace: Workspace, has_backup: bool) -> list[str]:
    """Upgrade the workspace's ledger. Returns a line for a person; [] if the ledger is up to date.

    After a kill at any moment, the ledger is either unchanged or upgraded. An SQLite ledger is backed up first. ``has_backup``: a person has
    made a backup of a PostgreSQL ledger. Raises: WorkspaceError for a newer ledger, and for a PostgreSQL ledger without a backup.
    """
    ledger = Ledger(workspace.ledger_url, workspace.root)
    found = ledger.read_version()
    if found == SCHEMA_VERSION:
        return []
    if not found or not found.isdigit() or int(found) > int(SCHEMA_VERSION):
        check_version(found, f"the ledger of {workspace.root}")
    where = "a person's backup"
    if ledger.file:
        where = str(_backup(workspace, found or ""))
    elif not has_backup:
        raise WorkspaceError(
            "upgrade.no_backup",
            "The upgrade changes the ledger at {ledger} in place, from schema {schema} to {known}. "
            "Make a backup with 'pg_dump', then run 'factory upgrade --i-have-a-backup'",
            ledger=repr(ledger.engine.url),
            schema=found,
            known=SCHEMA_VERSION,
        )
    script = ScriptDirectory(str(MIGRATIONS), version_locations=[str(MIGRATIONS)])
    made = workspace.root / "root"  # an older factory wrote the workspace's first path, which its ledger contains
    roots = [str(workspace.root), *([made.read_text().strip()] if made.exists() else [])]
    with ledger.begin() as tx:
        # Another process may have upgraded the ledger meanwhile.
        now = tx.execute(meta.select().where(meta.c.key == "schema")).one().value
        with Operations.context(MigrationContext.configure(tx, opts={"roots": roots})):
            for step in reversed(list(script.walk_revisions())):
                if int(step.revision) > int(now):
                    step.module.upgrade()
        create_triggers(tx, metadata)
        tx.execute(meta.update().where(meta.c.key == "schema").values(value=SCHEMA_VERSION))
    return [
        Message(
            "upgrade.done",
            "The ledger is upgraded from schema {before} to schema {schema}. The former ledger is kept in {backup}",
            before=found,
            schema=SCHEMA_VERSION,
            backup=where,
        )
    ]


def make_backup_folder(workspace: Workspace) -> Path:
    """Return the workspace's folder of backups; make it if it does not exist."""
    folder = workspace.root / BACKUPS_FOLDER
    folder.mkdir(exist_ok=True)
    return folder


def _backup(workspace: Workspace, version: str) -> Path:
    """Copy the SQLite ledger, while other processes may write to it. After a kill the copy is complete or absent."""
    # Remove the files of an upgrade that was killed, SQLite's logs too.
    for left in make_backup_folder(workspace).glob(".ledger-*.part*"):
        left.unlink()
    path = make_backup_folder(workspace) / f"ledger-{version}-{make_backup_timestamp()}.db"
    aside = path.with_name(f".{path.name}.part")
    source = get_sqlite_file(workspace.ledger_url)
    assert source is not None
    copy_database(source, aside)
    rename_into_place(aside, path)
    return path


def upgrade_workspace(workspace: Workspace, has_backup: bool = False) -> list[str]:
    """Upgrade a workspace to this factory's version. Returns lines for a person. The call can be repeated, and killed at any moment.

    ``has_backup``: a person has made a backup of a PostgreSQL ledger. Raises: WorkspaceError, before anything has changed.
    """
    with workspace.hold_lock("model-loop"), workspace.hold_lock("code-loop"), workspace.hold_lock("release"):
        done = upgrade_ledger(workspace, has_backup)
        ledger, made = Ledger.open(workspace.ledger_url, workspace.root), workspace.root / "root"
        if done or made.exists():  # older factories wrote the file 'root', and no owner into the folders of segments
            for row in SegmentRow.select(ledger):
                if Path(row.folder).is_dir():
                    write_folder_owner(ledger, row)
            made.unlink(missing_ok=True)
            back_up_daily(Plant(workspace, ledger))
        return done + add_missing_ops(workspace)


def add_missing_ops(workspace: Workspace) -> list[str]:
    """Add ``op: auto`` to the live code's kernels.yaml for each op that the code has and a section does not name. Returns a line, or [].

    An op that is not named runs its reference. The file is committed to the branch that is checked out, so that the next segment's certificate
    compares both choices. If no branch can be moved, the line says what to add by hand.
    """
    repository = workspace.repository
    try:
        live = get_live_commit(repository)
    except RepositoryError as error:
        if is_machine_fault_unrelated_to_files(error):
            raise
        return []  # no git checkout: the code came with this factory
    modes = read_file_modes(repository, live)
    before = read_file_text(repository, live, KERNELS) if KERNELS in modes else ""
    after, added = before, []
    for device in UNTUNED:
        section = read_device_section(before, device)
        for op in EVERY_OP:
            if section and op not in section and f"kernels/{op}/__init__.py" in modes:
                after = set_yaml_value(after, (device, op), AUTO)
                added.append(f"{device}.{op}")
    if not added:
        return []
    changes = convert_edits_to_changes(modes, [(KERNELS, after)])
    try:
        commit = make_commit(
            repository, live, changes, Message("upgrade.commit", "kernels.yaml names {ops}", ops=added)
        )
        assert commit is not None
        advance_branch(repository, live, commit)
    except RepositoryError as error:
        if is_machine_fault_unrelated_to_files(error):
            raise
        return [
            Message(
                "upgrade.ops_missing",
                "{file} in {repository} does not name {ops}, so these ops run their references. Add '{choice}' for each, and commit the file. "
                "The upgrade could not: {reason}",
                file=KERNELS, repository=repository, ops=added, choice=AUTO, reason=error.message,
            )
        ]  # fmt: skip
    return [
        Message(
            "upgrade.ops_added",
            "{file} in {repository} now names {ops} as '{choice}', in commit {commit:.12}. Before, these ops ran their references",
            file=KERNELS, repository=repository, ops=added, choice=AUTO, commit=commit,
        )
    ]  # fmt: skip
