"""``factory upgrade``."""

from __future__ import annotations

from typing import Annotated

import typer

from factory.cli.app import DEFAULT, AsJson, Where, app, print_json
from factory.core.workspace import Workspace


@app.command()
def upgrade(
    where: Where = DEFAULT,
    has_backup: Annotated[
        bool, typer.Option("--i-have-a-backup", help="Upgrade a PostgreSQL ledger: I made a backup with pg_dump.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring a workspace of an older factory up to this one. Safe to repeat, and to kill at any moment.

    Stop 'factory run' first. The ledger gets this factory's schema, and a workspace's own policies/agents.yaml its
    format. An SQLite ledger and the file are copied to the workspace's backups/ folder before; to go back, copy them to their
    old places and use the older factory. A ledger in PostgreSQL is not copied: make a backup with pg_dump and say so
    with --i-have-a-backup.
    """
    from factory.upgrade import upgrade as upgrade_workspace

    workspace = Workspace.open(where)
    done = upgrade_workspace(workspace, has_backup)
    if as_json:
        print_json({"workspace": str(workspace.root), "done": done})
        return
    print(
        "\n".join(f"  {line}" for line in done) or "  nothing to upgrade: this workspace is of this factory's version"
    )
