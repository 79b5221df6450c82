"""Two backups at once: the second waits, and does not take the first one's half for what a kill left."""

from __future__ import annotations

import pytest

from factory.backups.backups import make_backup
from factory.core.errors import WorkspaceError
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger


def test_a_backup_that_is_being_made_is_left_alone(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("factory.backups.backups.OTHERS_SECONDS", 0.0)
    half = workspace.root / "backups" / ".backup-of-another"
    half.mkdir(parents=True)
    with workspace.lock("backup"), pytest.raises(WorkspaceError, match=r"holds backup\.lock"):
        make_backup(workspace, ledger)
    assert half.is_dir()
    made, _ = make_backup(workspace, ledger)  # the other one was killed
    assert made.is_dir() and not half.exists()
