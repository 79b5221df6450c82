"""The daemon's log has whole lines and a bounded size, and can be followed. A full disk does not stop the daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from factory.core.progress import SILENT
from factory.core.workspace import Workspace
from factory.status import daemon_log
from factory.status.daemon_log import FILES, NAME, LoggedProgress, format_log_entry, read_log_entries
from factory.status.daemon_state import TASK_NOTE
from tests.support.factory.command import factory
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S


def test_the_log_has_lines_and_tasks_in_order(workspace: Workspace) -> None:
    progress = LoggedProgress(workspace, SILENT)
    progress.line("  a shard \udce9 came")
    with progress.task("trunk 0–20", 20):
        assert json.loads((workspace.logs / TASK_NOTE).read_text())["task"] == "trunk 0–20"
        with progress.task("measuring"):
            assert json.loads((workspace.logs / TASK_NOTE).read_text())["task"] == "measuring"
        assert json.loads((workspace.logs / TASK_NOTE).read_text())["task"] == "trunk 0–20"
    assert json.loads((workspace.logs / TASK_NOTE).read_text())["task"] == ""
    found = read_log_entries(workspace, 10)
    assert [(one["kind"], one["text"]) for one in found] == [
        ("said", "a shard \\udce9 came"), ("began", "trunk 0–20"), ("began", "measuring"), ("ended", "measuring"), ("ended", "trunk 0–20"),
    ]  # fmt: skip
    assert read_log_entries(workspace, 2) == found[-2:] and read_log_entries(workspace, 0) == []
    assert format_log_entry(found[1])[:2] == "20" and format_log_entry(found[1]).endswith("  begins: trunk 0–20")
    assert format_log_entry(found[-1]).endswith("  ended: trunk 0–20 (0 s)")


def test_log_files_are_rotated_at_their_size_limit(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_log, "FILE_BYTES", 1000)
    progress = LoggedProgress(workspace, SILENT)
    for number in range(100):
        progress.line(f"line {number}")
    files = sorted(path.name for path in workspace.logs.glob(f"{NAME}*"))
    assert files == [NAME, *(f"{NAME}.{n}" for n in range(1, FILES))]
    assert all(path.stat().st_size <= 1000 for path in workspace.logs.glob(f"{NAME}*"))
    numbers = [int(one["text"].split()[1]) for one in read_log_entries(workspace, 1000)]
    assert numbers == list(range(numbers[0], 100)) and len(numbers) > 20


def test_a_log_that_cannot_be_written_does_not_stop_the_daemon(workspace: Workspace) -> None:
    progress = LoggedProgress(workspace, SILENT)
    (workspace.logs / NAME).unlink(missing_ok=True)
    (workspace.logs / NAME).mkdir()
    (workspace.logs / TASK_NOTE).unlink()
    (workspace.logs / TASK_NOTE).mkdir()
    progress.line("nobody reads this")
    with progress.task("work goes on"):
        pass


def test_following_the_log_continues_over_a_rotation(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_log, "FILE_BYTES", 600)
    progress = LoggedProgress(workspace, SILENT)
    progress.line("before")
    home = ["-w", str(workspace.root)]
    assert factory("log", *home).stdout.endswith("  before\n")
    command = [sys.executable, "-m", "factory", "log", "--follow", "--json", "-n", "1", *home]
    following = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    giving_up = threading.Timer(PATIENCE_S, following.kill)
    giving_up.start()
    try:
        assert following.stdout and json.loads(following.stdout.readline())["text"] == "before"
        progress.line("first")
        assert json.loads(following.stdout.readline())["text"] == "first"
        for some in (range(4), range(4, 8), range(8, 12)):  # a file holds more: at most one is renamed meanwhile
            for number in some:
                progress.line(f"line {number}")
            assert [json.loads(following.stdout.readline())["text"] for _ in some] == [f"line {n}" for n in some]
        assert (workspace.logs / f"{NAME}.1").exists(), "it was renamed meanwhile"
    finally:
        giving_up.cancel()
        following.terminate()
        following.communicate()


def test_the_daemon_writes_its_log_and_factory_log_prints_it(workspace: Workspace, tmp_path: Path) -> None:
    home = ["-w", str(workspace.root)]
    assert factory("init", "--no-tune", *home).returncode == 0
    (workspace.inbox / "bad.jason").write_text("x")
    done = factory("run", "--once", *home)
    assert "QUARANTINED" in done.stdout, done.stderr
    assert "QUARANTINED" in factory("log", *home).stdout
