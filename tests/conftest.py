"""Real parts for every test: a real workspace with a real SQLite ledger in a temporary folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from factory.ledger import Ledger
from factory.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.create(tmp_path / "workspace")


@pytest.fixture
def ledger(workspace: Workspace) -> Ledger:
    return Ledger.create(workspace.ledger_url)
