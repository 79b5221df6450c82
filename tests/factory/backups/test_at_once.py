"""Two backups at once: the second waits, and does not take the first one's half for what a kill left. What a kill left is removed, never read."""

from __future__ import annotations

import pytest

from factory.backups import upgrade
from factory.backups.backups import make_backup
from factory.core.errors import WorkspaceError
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.repairs.lost_ledger import _take_up


def test_a_backup_that_is_being_made_is_left_alone(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("factory.backups.backups.OTHERS_SECONDS", 0.0)
    half = workspace.root / "backups" / ".backup-of-another"
    half.mkdir(parents=True)
    with workspace.lock("backup"), pytest.raises(WorkspaceError, match=r"holds backup\.lock"):
        make_backup(Plant(workspace, ledger))
    assert half.is_dir()
    made, _ = make_backup(Plant(workspace, ledger))  # the other one was killed
    assert made.is_dir() and not half.exists()


def test_an_upgrade_begins_its_copy_without_the_logs_of_one_that_was_killed(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed and begun again within a second, it would give the new copy the name, and so the journal, of the old one."""
    folder = upgrade.backup_folder(workspace)
    monkeypatch.setattr(upgrade, "stamp", lambda: "now")
    for ending in ("", "-journal", "-wal"):
        (folder / f".ledger-2-now.db.part{ending}").write_bytes(b"of a killed upgrade")
    made = upgrade._backup(workspace, "2")
    assert [path.name for path in folder.iterdir()] == [made.name] and made.read_bytes().startswith(b"SQLite format 3")


def test_a_token_shard_that_is_not_whole_is_no_work_that_a_restore_sets_aside(
    workspace: Workspace, ledger: Ledger
) -> None:
    half = workspace.shards / ".writing-7" / "manifest.json"
    half.parent.mkdir()
    half.write_text("{")
    assert _take_up(Plant(workspace, ledger)) == [] and half.exists()
