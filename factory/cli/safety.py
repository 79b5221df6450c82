"""What keeps a factory's state safe: ``backup``, ``restore``, ``upgrade``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from factory.cli.app import DEFAULT, AsJson, Say, Where, app, command, print_json
from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.ledger.plant import Plant


@command(app)
def backup(
    plant: Plant,
    say: Say,
    folder: Annotated[
        Path | None, typer.Argument(help="An empty folder, on another disk say (default: a new one in backups/).")
    ] = None,
    keys: Annotated[
        bool,
        typer.Option("--keys", help="Copy the key that signs bundles too: it needs a folder, on another disk say."),
    ] = False,
) -> None:
    """Copy the ledger, MLflow's database, factory.yaml and the policies, while the factory runs.

    The daemon does it each day, into the workspace's backups/, and keeps the newest 7. Between two backups every change is written to a
    journal beside the newest, which 'factory restore' reads. Data, checkpoints and exports are not copied. A ledger in PostgreSQL is
    not copied either: use pg_dump.
    """
    from factory.backups.backups import make_backup
    from factory.backups.keys import has_key

    has = has_key(plant.workspace.root)
    if keys and not has:
        raise InputError(f"{plant.workspace.root} has no key yet: the first 'factory release --bundle' makes one")
    if keys and folder is None:
        raise InputError(
            "--keys needs a folder, on another disk say: what is in backups/ goes after a week, and lies beside the key"
        )
    made, said = make_backup(plant, folder, keys)
    if has and not keys:
        said.append("the key that signs bundles is not in it: 'factory backup --keys FOLDER' copies it too")
    say({"backup": str(made), "notes": said}, (f"  {line}" for line in (f"backup made: {made}", *said)))


@app.command()
def restore(
    name: Annotated[
        str, typer.Argument(metavar="[BACKUP]", help="A backup's name or folder (default: the newest good one).")
    ] = "",
    where: Where = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Make a lost or damaged ledger again: a backup, what its journal holds since, and what lies in the workspace's folders.

    Stop 'factory run' first. The ledger as it was is kept in backups/. Segments that are not in the ledger are taken up where their
    folder proves what they are; what proves nothing is moved to set-aside/, never deleted. Safe to repeat, and to kill at any moment.
    """
    from factory.core.console import Terminal
    from factory.core.progress import SILENT
    from factory.repairs.lost_ledger import restore as restore_ledger
    from factory.repairs.lost_ledger import starts_at

    terminal = Terminal()
    done = restore_ledger(where, name, SILENT if as_json else terminal)
    if as_json:
        print_json({"workspace": str(where.resolve()), "done": done})
        return
    for line in done:
        terminal.line(f"  {line}")
    terminal.line(f"  the ledger is restored: {starts_at(where)}")


@app.command()
def upgrade(
    where: Where = DEFAULT,
    has_backup: Annotated[
        bool, typer.Option("--i-have-a-backup", help="Upgrade a PostgreSQL ledger: I made a backup with pg_dump.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring a workspace of an older factory up to this one. Safe to repeat, and to kill at any moment.

    Stop 'factory run' first. The ledger gets this factory's schema. An SQLite ledger is copied to the workspace's backups/ folder before;
    to go back, copy it to its old place and use the older factory. A ledger in PostgreSQL is not copied: make a backup with pg_dump and
    say so with --i-have-a-backup.
    """
    from factory.backups.upgrade import upgrade as upgrade_workspace

    workspace = Workspace.open(where)
    done = upgrade_workspace(workspace, has_backup)
    if as_json:
        print_json({"workspace": str(workspace.root), "done": done})
        return
    print(
        "\n".join(f"  {line}" for line in done) or "  nothing to upgrade: this workspace is of this factory's version"
    )
