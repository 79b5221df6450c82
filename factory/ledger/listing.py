"""Plain SQL reads for the commands a person runs all day (``status``, ``proposals`` …).

The embedded ledger is read with the standard library's sqlite3, read-only: importing SQLAlchemy costs about 0.35 s of the half second
that ``factory status`` may take. Any other ledger URL goes through SQLAlchemy, with the same SQL.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from factory.core.errors import WorkspaceError
from factory.core.workspace import Workspace

JSON_COLUMNS = frozenset(
    {"counts", "domains", "result", "summary", "reasons", "evidence", "detail", "plan", "content", "recipe_json"}
)


def rows(workspace: Workspace, sql: str, **parameters: Any) -> list[dict[str, Any]]:
    """All rows of ``sql`` (``:name`` parameters) as dicts, JSON columns decoded.

    Raises: WorkspaceError when there is no ledger, or it cannot be read.
    """
    url = workspace.ledger_url
    try:
        if url.startswith("sqlite:///"):
            path = Path(url.removeprefix("sqlite:///"))
            connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=30)
            try:
                connection.row_factory = sqlite3.Row
                found = [dict(row) for row in connection.execute(sql, parameters)]
            finally:
                connection.close()
        else:
            from factory.ledger.ledger import Ledger, sa

            try:
                found = Ledger.open(url).rows(sa.text(sql), parameters)
            except sa.exc.DBAPIError as error:
                raise WorkspaceError(f"the ledger of {workspace.root} cannot be read: {error.orig}") from error
    except sqlite3.Error as error:
        raise WorkspaceError(f"the ledger of {workspace.root} cannot be read: {error}; run 'factory doctor'") from error
    for row in found:
        for key in JSON_COLUMNS & row.keys():
            if isinstance(row[key], str) and row[key][:1] in ("{", "["):
                row[key] = json.loads(row[key])
    return found
