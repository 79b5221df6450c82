"""Reads the ledger as it is at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from factory.ledger.rows import decode_row
from factory.ledger.stored_paths import make_paths_absolute


@dataclass(frozen=True)
class Snapshot:
    """One read transaction. All its reads see the ledger at the same moment."""

    connection: sa.Connection
    root: Path | None  # the workspace's folder

    def select_rows(self, statement: sa.Executable, parameters: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            make_paths_absolute(dict(row), self.root)
            for row in self.connection.execute(statement, parameters).mappings()
        ]

    def read(self, sql: str, **parameters: object) -> list[dict[str, Any]]:
        """Return all rows of ``sql``, as ``factory.ledger.rows.SqlReader.read`` does."""
        found = self.connection.execute(sa.text(sql), parameters).mappings()
        return [make_paths_absolute(decode_row(dict(row)), self.root) for row in found]
