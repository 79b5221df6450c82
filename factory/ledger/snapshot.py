"""Reads of the ledger that all see it at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from factory.ledger.places import located
from factory.ledger.rows import decoded


@dataclass(frozen=True)
class Snapshot:
    """One read transaction."""

    connection: sa.Connection
    root: Path | None  # of the workspace

    def rows(self, statement: sa.Executable, parameters: dict[str, Any]) -> list[dict[str, Any]]:
        return [located(dict(row), self.root) for row in self.connection.execute(statement, parameters).mappings()]

    def read(self, sql: str, **parameters: object) -> list[dict[str, Any]]:
        """As ``factory.ledger.rows`` reads."""
        found = self.connection.execute(sa.text(sql), parameters).mappings()
        return [located(decoded(dict(row)), self.root) for row in found]
