"""The key that signs bundles: '--keys' copies the key, a backup without the key says so, and a restore brings the key back."""

from __future__ import annotations

import stat
from pathlib import Path

from factory.backups.backups import make_backup
from factory.backups.signing_keys import KEY, KEYS
from factory.bundles.signing import ensure_private_key
from factory.core.progress import SILENT
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.repairs.lost_ledger import restore_ledger
from tests.support.factory.command import command_here
from tests.support.messages import the

LEFT_OUT = "does not contain the key"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_key_is_copied_with_keys_and_restored(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    def run(*words: object) -> str:
        done = command_here(*map(str, words), home=workspace)
        return done.output + str(done.exception or "")

    elsewhere = tmp_path / "other-disk"
    assert "has no key yet" in run("backup", "--keys", elsewhere) and not elsewhere.exists()
    assert LEFT_OUT not in run("backup")
    key = ensure_private_key(workspace.root)
    held = key.read_bytes()
    assert LEFT_OUT in run("backup") and not list((workspace.root / "backups").rglob(KEY))
    assert "--keys needs a folder" in run("backup", "--keys")

    assert LEFT_OUT not in run("backup", "--keys", elsewhere)
    assert (elsewhere / KEYS / KEY).read_bytes() == held
    assert (mode(elsewhere / KEYS), mode(elsewhere / KEYS / KEY)) == (0o700, 0o600)

    for path in key.parent.iterdir():
        path.unlink()
    restore_ledger(workspace.root, "", SILENT)  # none of the workspace's own backups has the key
    assert not key.exists()
    assert (
        the(restore_ledger(workspace.root, str(elsewhere), SILENT), "signing_keys.restored").data["backup"] == elsewhere
    )
    assert key.read_bytes() == held and mode(key) == 0o600 and mode(key.parent) == 0o700

    key.unlink()
    other = ensure_private_key(workspace.root).read_bytes()
    restore_ledger(workspace.root, str(elsewhere), SILENT)
    assert key.read_bytes() == other != held  # an existing key is left unchanged


def test_the_daily_backup_does_not_mention_the_key(workspace: Workspace, ledger: Ledger) -> None:
    ensure_private_key(workspace.root)
    _, said = make_backup(Plant(workspace, ledger))
    assert said == []
