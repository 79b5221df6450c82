"""Two backups at once: the second waits, and does not remove the first one's files. Files of a killed backup are removed, never read."""

from __future__ import annotations

import pytest

from factory.backups import upgrade
from factory.backups.backups import make_backup
from factory.core.errors import WorkspaceError
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.repairs.lost_ledger import _take_up
from tests.support.messages import refused


def test_a_backup_in_progress_is_left_unchanged(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("factory.backups.backups.OTHERS_SECONDS", 0.0)
    half = workspace.root / "backups" / ".backup-of-another"
    half.mkdir(parents=True)
    with workspace.hold_lock("backup"), refused("workspace.in_use", WorkspaceError, lock="backup"):
        make_backup(Plant(workspace, ledger))
    assert half.is_dir()
    made, _ = make_backup(Plant(workspace, ledger))  # no process holds the lock: the other backup was killed
    assert made.is_dir() and not half.exists()


def test_an_upgrade_removes_the_files_of_a_killed_upgrade(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second upgrade in the same second would use the same name: SQLite would then read the old copy's journal."""
    folder = upgrade.make_backup_folder(workspace)
    monkeypatch.setattr(upgrade, "make_backup_timestamp", lambda: "now")
    for ending in ("", "-journal", "-wal"):
        (folder / f".ledger-2-now.db.part{ending}").write_bytes(b"of a killed upgrade")
    made = upgrade._backup(workspace, "2")
    assert [path.name for path in folder.iterdir()] == [made.name] and made.read_bytes().startswith(b"SQLite format 3")


def test_a_restore_leaves_a_half_written_token_shard_unchanged(workspace: Workspace, ledger: Ledger) -> None:
    half = workspace.shards / ".writing-7" / "manifest.json"
    half.parent.mkdir()
    half.write_text("{")
    assert _take_up(Plant(workspace, ledger)) == [] and half.exists()
