"""The daemon under real faults: it reports each fault once, waits, continues afterwards, and never ends by itself."""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from factory.core.errors import ConfigError, DiskFullError
from factory.core.workspace import Workspace
from factory.duties.back_off import RetryingDutyTaskRunner
from factory.duties.duty import Duty, always_due
from factory.duties.runner import run_daemon, run_duty_pass
from factory.ingest.inbox import ingest_inbox_file, list_complete_files
from factory.ledger.file_events import SMALL_VOCABULARY, read_waiting_inbox_files
from factory.ledger.ledger import Ledger, record_event, segments
from factory.ledger.plant import Plant
from factory.retrying.failure_waits import FailureWaits
from factory.retrying.trainer_deaths import request_retry
from factory.status.waiting import list_failing_actions
from tests.support.failing.deaths import plan_row
from tests.support.failing.nights import Listener, enough, fill, impatient, run_until, small_disk

TEXT = "A sentence that is long enough to be kept as a document of its own, and not the only one. " * 12


@pytest.fixture(autouse=True)
def _little_text_is_enough(ledger: Ledger) -> None:
    allow_little_text(ledger)


def allow_little_text(ledger: Ledger) -> None:
    """Record that a person allows a tokenizer from a sentence or two."""
    with ledger.begin() as tx:
        record_event(tx, SMALL_VOCABULARY, "tokenizer", {"by": "ada"})


def drop(workspace: Workspace, name: str, text: str = TEXT) -> None:
    """Put a shard into the inbox, with a modification time a minute ago."""
    path = workspace.inbox / name
    path.write_text(f"{name}: {text}")
    os.utime(path, (time.time() - 60,) * 2)


def events(ledger: Ledger, what: str) -> list[tuple[str, str]]:
    rows = ledger.read("SELECT kind, detail FROM events WHERE subject = 'daemon' ORDER BY id")
    return [(row["kind"], row["detail"]["error"]) for row in rows if row["detail"].get("what") == what]


def test_a_backup_without_disk_space_stops_no_other_duty(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(workspace.root / "backups" / "ledger.db"))

    monkeypatch.setattr("factory.backups.backups.copy_database", full)
    drop(workspace, "shard.txt")
    listener = Listener()
    listener.on["shard.txt: 1 row; 1 document"] = enough
    run_until(workspace, ledger, listener)
    assert listener.count("back_up failed") == 1 and "the disk is full" in "".join(listener.lines), listener.lines
    assert not list((workspace.root / "backups").glob(".*"))


@pytest.mark.parametrize(
    "error",
    [PermissionError(errno.EACCES, "Permission denied", "shards/raw"), BlockingIOError(errno.EAGAIN, "fork"), MemoryError()],
    ids=repr,
)  # fmt: skip
def test_a_fault_of_the_machine_is_not_blamed_on_the_file(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    drop(workspace, "shard.txt")
    path = workspace.inbox / "shard.txt"
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr("factory.ingest.inbox.move_ingested_file", fails)
        ingest_inbox_file(Plant(workspace, ledger), path)
    assert not read_waiting_inbox_files(ledger) and list(list_complete_files(Plant(workspace, ledger), 0)) == [path]
    ingest_inbox_file(Plant(workspace, ledger), path)
    assert not list(workspace.inbox.iterdir())


def test_a_task_with_a_lasting_fault_does_not_block_other_tasks(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every pass the trainer reports a full disk. The errand is the first of each pass, and ends the pass."""
    now = [0.0]
    back_off, turns = RetryingDutyTaskRunner(Plant(workspace, ledger)), []
    back_off.backoff = FailureWaits(1.0, 600.0, lambda: now[0])

    def train() -> None:
        raise DiskFullError("segment 1: the disk is full")

    while now[0] < 3600:
        now[0] += 5.0
        if not back_off.is_too_early_for_pass():
            try:
                back_off.try_task("train 1", train)
                back_off.try_task("judge 1", lambda: turns.append(now[0]))
                back_off.record_pass_end()
            except DiskFullError as error:
                back_off.record_pass_failure(error)
    assert len(turns) > 10, turns


def test_success_after_a_failure_of_an_earlier_daemon_is_reported(workspace: Workspace, ledger: Ledger) -> None:
    number = plan_row(ledger, kind="anneal", state="done").id
    first = Listener()
    first.on[f"export {number} failed"] = enough
    run_until(workspace, ledger, first)
    assert [one["what"] for one in list_failing_actions(ledger)] == [f"export {number}"]
    back_off = RetryingDutyTaskRunner(Plant(workspace, ledger, second := Listener()))
    assert back_off.try_task(f"export {number}", lambda: None) and not list_failing_actions(ledger)
    assert second.lines[-1].strip().startswith(f"export {number} works again")


def test_a_persons_retry_request_ends_all_waits(workspace: Workspace, ledger: Ledger) -> None:
    number = plan_row(ledger, kind="anneal", state="done").id
    listener = Listener()
    listener.on[f"export {number} failed"] = lambda: threading.Timer(0.5, mend).start()

    def mend() -> None:
        with ledger.begin() as tx:
            tx.execute(segments.update().values(state="rewound"))
        assert request_retry(ledger, None, "ada").code == "retrying.retry_all"

    listener.on["no longer due"] = enough
    run_until(workspace, ledger, listener, 86400.0)
    assert listener.count("next try in 24.0 h") == 1


def test_an_unreadable_policy_stops_only_the_duties_that_read_it(workspace: Workspace, ledger: Ledger) -> None:
    policy = workspace.root / "policies" / "anomalies.yaml"
    policy.parent.mkdir(exist_ok=True)
    policy.write_text("stepps: 4\n")
    listener = Listener()
    listener.on["stepps"] = lambda: drop(workspace, "shard.txt")
    listener.on["shard.txt: 1 row; 1 document"] = lambda: threading.Timer(0.5, policy.unlink).start()
    listener.on["check if diagnose is due works again"] = enough
    with pytest.raises(ConfigError):
        run_daemon(Plant(workspace, ledger, Listener()), once=True)
    run_until(workspace, ledger, listener)
    assert listener.count(" failed: ") == 1 and "did you mean 'steps'?" in listener.lines[0], listener.lines


def test_a_duty_that_always_raises_is_reported_once_and_others_continue(workspace: Workspace, ledger: Ledger) -> None:
    """One duty raises in ``due``, others raise in ``do``."""
    turns: list[str] = []
    passes = [0]

    def raises(*_: object) -> Any:
        raise RuntimeError("it is broken")

    def once_a_pass(name: str) -> Duty:
        do = lambda _, subject: turns.append(f"{name} {subject}")
        return Duty(name, "", lambda look: [passes[0]] if f"{name} {passes[0]}" not in turns else [], do)

    table = (
        Duty("tidy", "", always_due, raises, each="pass"),
        Duty("sort", "", raises, raises),
        once_a_pass("cook"),
        Duty("wash", "", lambda look: [1, 2], raises),
        once_a_pass("serve"),
    )
    now = [0.0]
    back_off = RetryingDutyTaskRunner(Plant(workspace, ledger, listener := Listener()))
    back_off.backoff = FailureWaits(10.0, 600.0, lambda: now[0])
    for _ in range(12):
        now[0] += 5.0
        passes[0] += 1
        assert run_duty_pass(Plant(workspace, ledger), attempts=back_off, duties=table) == 2
        back_off.record_pass_end()
    assert turns == [f"{name} {number}" for number in range(1, 13) for name in ("cook", "serve")]
    names = ["tidy", "check if sort is due", "wash 1", "wash 2"]
    assert [line.partition(" failed: ")[0].strip() for line in listener.lines] == names, "each is said once"
    assert all("RuntimeError: it is broken" in line and "errors.log" in line for line in listener.lines)
    tries = (workspace.logs / "errors.log").read_text()
    assert [tries.count(f" {name}\n") for name in names] == [3] * 4, (
        "at 5, 15 and 35 s of sixty: it rests longer each time"
    )
    with pytest.raises(RuntimeError):
        run_duty_pass(Plant(workspace, ledger), duties=table)


def test_the_daemon_waits_for_a_locked_ledger(workspace: Workspace, ledger: Ledger) -> None:
    other = sqlite3.connect(workspace.root / "ledger.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    drop(workspace, "shard.txt")
    listener = Listener()
    listener.on["the ledger is locked by another process: end the process that locks the ledger"] = lambda: (
        threading.Timer(1.5, other.rollback).start()
    )
    listener.on["a pass works again"] = enough
    run_until(workspace, impatient(Ledger(workspace.ledger_url)), listener)
    assert listener.count("is locked") == 1 and listener.count("shard.txt: 1 row; 1 document") == 1, listener.lines
    assert [kind for kind, _ in events(ledger, "a pass")] == ["pass_failed", "works_again"]
    assert not list(workspace.inbox.iterdir())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "16m") as folder:
        yield folder


def test_the_daemon_waits_for_a_full_disk(disk: Path) -> None:
    workspace = Workspace.create(disk / "workspace")
    ledger = Ledger.create(workspace.ledger_url)
    allow_little_text(ledger)
    drop(workspace, "first.txt")
    listener = Listener()
    listener.on["first.txt: 1 row; 1 document"] = lambda: (drop(workspace, "shard.txt"), fill(disk))
    listener.on["the disk is full"] = lambda: threading.Timer(1.0, (disk / "ballast").unlink).start()
    listener.on["a pass works again"] = enough
    run_until(workspace, ledger, listener)
    said = [line for line in listener.lines if "the disk is full" in line]
    assert len(said) == 1 and "free some disk space" in said[0] and "at least every 60 s" in said[0]
    assert listener.count("shard.txt: 1 row") == 1, listener.lines
    assert not list(workspace.inbox.iterdir())
    assert [(row["state"], row["rows"]) for row in ledger.read("SELECT state, rows FROM shards")] == [
        ("ingested", 1)
    ] * 2
    assert events(ledger, "a pass")[-1][0] == "works_again"


def test_the_daemon_waits_for_file_handles(workspace: Workspace, ledger: Ledger) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    listener = Listener()

    def give() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    def take() -> None:
        # Which 0, 1 and 2 have: no file can be opened any more.
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))

    drop(workspace, "first.txt")
    listener.on["first.txt: 1 row; 1 document"] = take
    listener.on["no more files can be opened"] = lambda: threading.Timer(1.0, give).start()
    listener.on["a pass works again"] = enough
    try:
        run_until(workspace, ledger, listener)
    finally:
        give()
    assert listener.count("programs. The factory waits") == 1, listener.lines


@pytest.mark.parametrize("jump", [-10 * 86400.0, 400 * 86400.0])
def test_a_jump_of_the_clock_stops_no_duty(
    workspace: Workspace, ledger: Ledger, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = plan_row(ledger, kind="anneal", state="done").id
    clock = time.time
    listener = Listener()

    def leap() -> None:
        monkeypatch.setattr(time, "time", lambda: clock() + jump)
        drop(workspace, "shard.txt")

    def mend() -> None:
        with ledger.begin() as tx:
            tx.execute(segments.update().values(state="rewound"))

    listener.on[f"export {number} failed"] = leap
    listener.on["shard.txt: 1 row; 1 document"] = mend
    listener.on["no longer due"] = enough
    run_until(workspace, ledger, listener)
    assert listener.count("failed") == 2, listener.lines


@pytest.mark.parametrize(("recurs", "times"), [(True, 6), (False, 3)])
def test_only_a_recurring_duty_may_repeat_the_same_subject_many_times(
    recurs: bool, times: int, workspace: Workspace, ledger: Ledger
) -> None:
    """A program drops a file of the same name whenever the daemon took the last one."""
    taken: list[object] = []
    due = lambda look: [workspace.inbox / "new.jsonl"] if len(taken) < 6 else []
    duty = Duty("take", "", due, lambda plant, path: taken.append(path), recurs=recurs)
    run_duty_pass(
        Plant(workspace, ledger, Listener()), duties=(duty,), attempts=RetryingDutyTaskRunner(Plant(workspace, ledger))
    )
    assert len(taken) == times
