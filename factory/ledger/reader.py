"""Reads a workspace's ledger for commands that must start fast (``status``, ``proposals`` …).

It reads an SQLite ledger with the standard library's sqlite3, read-only. It reads any other ledger through SQLAlchemy, with the same SQL.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from factory.core.errors import WorkspaceError
from factory.core.faults import find_fault_in
from factory.core.workspace import Workspace
from factory.ledger.rows import decode_row
from factory.ledger.stored_paths import make_paths_absolute
from factory.ledger.version import GONE, check_version

VERSION = "SELECT value FROM meta WHERE key = 'schema'"


class LedgerReader:
    def __init__(self, workspace: Workspace) -> None:
        """Raises: WorkspaceError when the ledger is missing, damaged or of another version; the errors of ``read``."""
        self._where = f"the ledger of {workspace.root}"
        self._url, self._root = workspace.ledger_url, workspace.root
        self._ledger: Any = None  # the ledger of a server, which is opened at the first read
        if self._url.startswith("sqlite:///"):
            found = self.read(VERSION)
            check_version(found[0]["value"] if found else None, self._where)

    def read(self, sql: str, **parameters: object) -> list[dict[str, Any]]:
        """Return all rows of ``sql`` (``:name`` parameters) as dicts, JSON columns decoded.

        Raises: WorkspaceError; sqlite3.Error for a fault of the machine (``factory.core.faults``).
        """
        if not self._url.startswith("sqlite:///"):
            from factory.ledger.ledger import Ledger, sa

            try:
                self._ledger = self._ledger or Ledger.open(self._url, self._root)
                return self._ledger.read(sql, **parameters)  # type: ignore[no-any-return]
            except sa.exc.DBAPIError as error:
                raise WorkspaceError(
                    "reader.unreachable", "{ledger} cannot be read: {why}", ledger=self._where, why=str(error.orig)
                ) from error
        path = Path(self._url.removeprefix("sqlite:///"))
        if not path.exists():
            raise WorkspaceError(
                "reader.no_file",
                "{ledger} cannot be read: {file} does not exist. {advice}",
                ledger=self._where,
                file=path,
                advice=GONE,
            )
        try:
            connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=30)
            try:
                connection.row_factory = sqlite3.Row
                return [
                    make_paths_absolute(decode_row(dict(row)), self._root)
                    for row in connection.execute(sql, parameters)
                ]
            finally:
                connection.close()
        except sqlite3.Error as error:
            if find_fault_in(error):
                raise
            raise WorkspaceError(
                "reader.unreadable",
                "{ledger} cannot be read: {why}. {advice}",
                ledger=self._where,
                why=str(error),
                advice=GONE,
            ) from error
