"""The version of the ledger's tables that this factory reads and writes."""

from __future__ import annotations

from factory.core.errors import WorkspaceError

SCHEMA = "6"  # the newest revision of factory/backups/migrations


GONE = "stop 'factory run', then 'factory restore' makes it again from its backups, or from the workspace's folders"  # of a lost ledger
NO_TABLES = "is its server up? A backup that pg_dump made brings a lost one back; in an empty workspace 'factory init' makes one"


def refuse_other_version(found: str | None, where: str) -> None:
    """Raises: WorkspaceError that says what to do."""
    if found == SCHEMA:
        return
    if found and found.isdigit() and int(found) < int(SCHEMA):
        what = "stop 'factory run' and run 'factory upgrade', which makes a backup first"
    elif found and found.isdigit():
        what = "use the newer factory that wrote it"
    else:
        raise WorkspaceError(f"{where} has no version, so it is damaged: {GONE}")
    raise WorkspaceError(f"{where} is of version {found}; this factory reads version {SCHEMA}: {what}")
