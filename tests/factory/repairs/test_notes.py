"""The factory's own notes, damaged in each way: passes, ``status`` and ``check`` still work, and the ledger loses nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from factory.cli.app import print_error_and_get_exit_code
from factory.core.faults import find_fault_in
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.repairs.token_shards import VerifiedShardRecord
from factory.retrying.daemon_requests import PausedError
from tests.support.factory.command import command_here
from tests.support.plants.release_scene import add_verdict

Copy = Callable[[], tuple[Workspace, Ledger]]
NOTES = (
    "backups/*/backup.json", "backups/*/journal.jsonl", "logs/doing.json", "logs/disk.jsonl", "logs/daemon.log", "cache/hashed.json",
    "cache/serve.json", "exports/serving.json", "model-loop.lock", "segments/00001-trunk/owner.json",
    "segments/00001-trunk/result.json", "segments/00001-trunk/metrics.jsonl", "segments/00001-trunk/anomalies.jsonl",
)  # fmt: skip
MADE_AGAIN = ("model-loop.lock", "exports/serving.json")  # a folder in their place stops the daemon
COUNTED = "SELECT (SELECT COUNT(*) FROM documents) AS documents, (SELECT COUNT(*) FROM segments WHERE state = 'done') AS segments"


def _gone(path: Path) -> None:
    path.unlink()


def _folder(path: Path) -> None:
    """It can be neither read nor replaced."""
    path.unlink()
    path.mkdir()


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _torn(path: Path) -> None:
    held = path.read_bytes()
    path.write_bytes(held[: len(held) // 2])


def _of_another_kind(path: Path) -> None:
    path.write_text("[null, 7]\n")


def _no_text(path: Path) -> None:
    path.write_bytes(b"\xff\x00\x80{" * 9)


@pytest.mark.sample("_folder", "_torn")
@pytest.mark.parametrize(
    "damage", [_gone, _folder, _empty, _torn, _of_another_kind, _no_text], ids=lambda one: one.__name__
)
@pytest.mark.slow("a daemon for each note")
def test_a_damaged_note_of_the_factory_does_not_stop_passes_status_or_check(
    copied: Copy, damage: Callable[[Path], None]
) -> None:
    workspace, ledger = copied()
    add_verdict(ledger, 1, "reject")  # nothing is judged here
    run = lambda *words: command_here(*words, home=workspace)
    assert run("pause").exit_code == 0  # nothing is trained here
    (workspace.root / "cache").mkdir(exist_ok=True)
    (workspace.exports / "serving.json").write_text("{}")
    (workspace.root / "cache" / "serve.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "pid": 1}))
    assert run("run", "--once").exit_code == 1  # paused
    noted = VerifiedShardRecord(workspace)
    noted.record_verified_shards(Path(row["path"]) for row in ledger.read("SELECT path FROM token_shards"))
    before = ledger.read(COUNTED)
    for note in NOTES:
        damage(sorted(workspace.root.glob(note))[-1])
    for words in (("run", "--once"), ("status",), ("check",), ("run", "--once")):
        error = run(*words).exception
        assert error is None or isinstance(error, SystemExit) or print_error_and_get_exit_code(error) is not None, (
            f"{words}: no message for {error!r}"
        )
    if damage is _folder:  # a person moves away the folder that the error names
        assert find_fault_in(error) and "model-loop.lock" in str(error)
        for note in MADE_AGAIN:
            (workspace.root / note).rmdir()
    assert isinstance(run("run", "--once").exception, PausedError)
    assert not (workspace.logs / "errors.log").exists()
    assert Ledger.open(workspace.ledger_url, workspace.root).read(COUNTED) == before
