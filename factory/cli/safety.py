"""Commands that keep a factory's state safe: ``factory backup``, ``restore`` and ``upgrade``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from factory.cli.app import DEFAULT, AnswerPrinter, JsonOption, WorkspaceOption, app, print_json, register_command
from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.ledger.plant import Plant
from kernels.contract.message import Message


@register_command(app)
def backup(
    plant: Plant,
    say: AnswerPrinter,
    folder: Annotated[
        Path | None,
        typer.Argument(help="An empty folder, for example on another disk (default: a new one in backups/)."),
    ] = None,
    keys: Annotated[
        bool,
        typer.Option("--keys", help="Also copy the key that signs bundles. Needs FOLDER, for example on another disk."),
    ] = False,
) -> None:
    """Copy the ledger, MLflow's database, factory.yaml and the policies, while the factory runs.

    The daemon makes a backup each day, in the workspace's backups/, and keeps the newest 7. After a backup, every change is also written
    to a journal in the backup's folder, which 'factory restore' reads. Data, checkpoints and exports are not copied. A ledger in
    PostgreSQL is not copied either: use pg_dump.
    """
    from factory.backups.backups import make_backup
    from factory.backups.signing_keys import has_private_key

    has = has_private_key(plant.workspace.root)
    if keys and not has:
        raise InputError(
            "safety.no_key",
            "{workspace} has no key yet. The first bundle makes the key: 'factory release --bundle N'",
            workspace=plant.workspace.root,
        )
    if keys and folder is None:
        raise InputError(
            "safety.no_folder",
            "--keys needs a folder, best on another disk. A backup in backups/ is deleted after a week, and is on the same disk as "
            "the key.",
        )
    made, said = make_backup(plant, folder, keys)
    if has and not keys:
        said.append(
            Message(
                "safety.key_not_copied",
                "The backup does not contain the key that signs bundles. To copy the key too: 'factory backup --keys FOLDER'",
            )
        )
    done = Message("safety.backup_made", "backup made: {folder}", folder=made)
    say({"backup": str(made), "notes": said}, (f"  {line}" for line in (done, *said)))


@app.command()
def restore(
    name: Annotated[
        str, typer.Argument(metavar="[BACKUP]", help="A backup's name or folder (default: the newest undamaged one).")
    ] = "",
    where: WorkspaceOption = DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """Restore a lost or damaged ledger from a backup, the backup's journal, and the files in the workspace.

    Stop 'factory run' first. The old ledger is kept in backups/. The command adds a segment that the ledger lacks if the segment's
    folder identifies it. Other folders are moved to set-aside/ and never deleted. The command is safe to repeat and to kill.
    """
    from factory.core.console import Terminal
    from factory.core.progress import SILENT
    from factory.repairs.lost_ledger import describe_next_training_start
    from factory.repairs.lost_ledger import restore_ledger as restore_ledger

    terminal = Terminal()
    done = restore_ledger(where, name, SILENT if as_json else terminal)
    if as_json:
        print_json({"workspace": str(where.resolve()), "done": done})
        return
    for line in done:
        terminal.line(f"  {line}")
    terminal.line(
        Message("safety.restored", "  The ledger is restored. {start}", start=describe_next_training_start(where))
    )


@app.command()
def upgrade(
    where: WorkspaceOption = DEFAULT,
    has_backup: Annotated[
        bool,
        typer.Option("--i-have-a-backup", help="Upgrade a PostgreSQL ledger, of which I made a backup with pg_dump."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Upgrade a workspace of an older factory version to this version. Safe to repeat and to kill.

    Stop 'factory run' first. The ledger gets this version's schema. An SQLite ledger is copied to backups/ first. To go back, copy that
    file to its old place and use the older factory. A PostgreSQL ledger is not copied: make a backup with pg_dump, and then add
    --i-have-a-backup. Ops that the code has and its kernels.yaml does not name are added there as 'auto'.
    """
    from factory.backups.upgrade import upgrade_workspace as upgrade_workspace

    workspace = Workspace.open(where)
    done = upgrade_workspace(workspace, has_backup)
    if as_json:
        print_json({"workspace": str(workspace.root), "done": done})
        return
    nothing = Message("safety.up_to_date", "  The workspace already has this factory's version.")
    print("\n".join(f"  {line}" for line in done) or nothing)
