"""Checks that the ledger's tables have the version that this factory reads and writes."""

from __future__ import annotations

from factory.core.errors import WorkspaceError
from kernels.contract.message import Message

SCHEMA_VERSION = "6"  # the newest revision of factory/backups/migrations

# The advice for a lost ledger, in an SQLite file or on a server.
GONE = Message(
    "version.restore",
    "Stop 'factory run', then run 'factory restore', which makes the ledger again from its backups or "
    "from the workspace's folders",
)
SERVER_ADVICE = Message(
    "version.no_tables",
    "Check that the ledger's server runs. If the ledger is lost, restore it from a backup that 'pg_dump' made. If the "
    "workspace is empty, run 'factory init'",
)


def check_version(found: str | None, where: str) -> None:
    """Raise WorkspaceError, with the remedy, if the version ``found`` in the ledger ``where`` is not this factory's."""
    if found == SCHEMA_VERSION:
        return
    if not (found and found.isdigit()):
        raise WorkspaceError(
            "version.none", "{ledger} has no version, so it is damaged. {advice}", ledger=where, advice=GONE
        )
    if int(found) < int(SCHEMA_VERSION):
        raise WorkspaceError(
            "version.older",
            "{ledger} is of version {version}, and this factory reads version {known}. "
            "Stop 'factory run' and run 'factory upgrade', which makes a backup first",
            ledger=where,
            version=found,
            known=SCHEMA_VERSION,
        )
    raise WorkspaceError(
        "version.newer",
        "{ledger} is of version {version}, and this factory reads version {known}. Use the newer factory that wrote the ledger",
        ledger=where,
        version=found,
        known=SCHEMA_VERSION,
    )
