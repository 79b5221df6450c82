"""The version of the ledger's tables that this factory reads and writes."""

from __future__ import annotations

from factory.core.errors import WorkspaceError

SCHEMA = "2"  # the newest revision of factory/ledger/migrations


def refuse_other_version(found: str | None, where: str) -> None:
    """Raises: WorkspaceError that says what to do."""
    if found == SCHEMA:
        return
    if found and found.isdigit() and int(found) < int(SCHEMA):
        what = "run 'factory upgrade', which makes a backup first"
    elif found and found.isdigit():
        what = "use the newer factory that wrote it"
    else:
        raise WorkspaceError(f"{where} has no version: it is damaged; put a copy from backups/ in its place")
    raise WorkspaceError(f"{where} is of version {found}; this factory reads version {SCHEMA}: {what}")
