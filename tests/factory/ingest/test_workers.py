"""Real worker processes of ingest that hang or are killed, as by an OOM killer. Nothing of a file is stored or lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from factory.core.workspace import Workspace
from factory.ingest import chain
from factory.ingest.inbox import ingest_inbox_file, list_complete_files
from factory.ingest.worker import WorkerDiedError, WorkerPool
from factory.ledger.file_events import read_waiting_inbox_files
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.retrying.policy import RetryPolicy
from factory.retrying.trainer_deaths import request_retry
from factory.status.waiting import list_items_waiting_for_person
from tests.support.factory.inbox import exactly, put, rows, trained_on
from tests.support.factory.made_up_text import use_small_vocabulary
from tests.support.messages import refused, the
from tests.support.said import Said


@pytest.fixture(autouse=True)
def small_vocabulary(workspace: Workspace) -> None:
    use_small_vocabulary(workspace)


def workers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "spawn_main" in " ".join(child.cmdline()):
                found.append(child)
    return found


@contextmanager
def killer() -> Iterator[None]:
    """Kills each worker that appears."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.01):
            for worker in workers():
                with contextlib.suppress(psutil.Error):
                    worker.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def slowly(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_workers_that_hang_are_killed(tmp_path: Path) -> None:
    policy = RetryPolicy(hung_times=2, hung_seconds=1.0, start_seconds=600.0)
    with WorkerPool(2, tmp_path, policy) as pool:
        results = pool.map(slowly, [(0.01,)] * 100)
        assert next(results) == 0.01
        stopped = workers()
        for worker in stopped:
            os.kill(worker.pid, signal.SIGSTOP)
        with refused("ingest.workers_hung", WorkerDiedError):
            list(results)
    assert stopped and not [worker for worker in stopped if worker.is_running()]


def test_a_result_that_arrives_just_after_the_timeout_is_used(tmp_path: Path) -> None:
    """The result comes after ``result`` timed out, and before ``done`` is called."""

    class Late(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            if timeout is not None:
                self.set_result(3)
                raise TimeoutError
            return super().result()

    class Dog:
        restart_clock = staticmethod(lambda: None)
        find_hang = staticmethod(lambda done: "")

    assert WorkerPool._result(cast(Any, None), Late(), cast(Any, Dog()), 0) == 3


def test_time_spent_outside_the_work_does_not_count_as_a_hang(tmp_path: Path) -> None:
    """Time in which nothing waits for a chunk does not count."""
    with WorkerPool(1, tmp_path, RetryPolicy(hung_times=2, hung_seconds=2.0, start_seconds=600.0)) as pool:
        for count, _ in enumerate(pool.map(slowly, [(0.01,)] * 6)):
            time.sleep(3.0 if count == 1 else 0.0)


def test_a_file_whose_workers_die_is_tried_again_and_then_waits(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "_WORTH_WORKERS", 0)
    policy = workspace.root / "policies" / "retries.yaml"
    policy.parent.mkdir(exist_ok=True)
    policy.write_text("first_wait_seconds: 1000\n")
    path, said = put(workspace, rows(0, 20)), Said()
    with killer():
        ingest_inbox_file(Plant(workspace, ledger, said), path)
        why = the([the(said.lines, "ingest.stays").data["why"]], "ingest.worker_died_again").data
        assert why["why"].code == "ingest.worker_killed"
        assert (why["wait"], why["number"], why["tries"]) == ("10 min", 2, 3)
        assert read_waiting_inbox_files(ledger)["a.jsonl"]["deaths"] == 1 and not list(
            list_complete_files(Plant(workspace, ledger))
        ), "it rests"
        policy.write_text("first_wait_seconds: 0.001\n")
        for _ in range(2):
            time.sleep(0.01)
            assert list(list_complete_files(Plant(workspace, ledger))) == [path]
            ingest_inbox_file(Plant(workspace, ledger, said), path)
    time.sleep(0.01)
    last = the([said.lines[-1].data["why"]], "ingest.worker_died_last")
    assert last.data["tries"] == 3 and not list(list_complete_files(Plant(workspace, ledger)))
    (told,) = [one for one in list_items_waiting_for_person(workspace, ledger) if "a.jsonl" in str(one)]
    assert "factory retry" in str(told)
    assert path.exists() and not trained_on(ledger)
    request_retry(ledger, None, "me")
    assert list(list_complete_files(Plant(workspace, ledger))) == [path]
    ingest_inbox_file(Plant(workspace, ledger, said), path)
    assert trained_on(ledger) == exactly(20) and not path.exists()


def test_other_files_do_not_wait_for_a_file_whose_workers_die(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "_WORTH_WORKERS", 0)
    path, said = put(workspace, rows(0, 20)), Said()
    with killer():
        ingest_inbox_file(Plant(workspace, ledger, said), path)
    put(workspace, rows(20, 20), "b.jsonl")
    (other,) = list_complete_files(Plant(workspace, ledger))
    ingest_inbox_file(Plant(workspace, ledger, said), other)
    assert other.name == "b.jsonl" and path.exists()
    put(workspace, rows(0, 20))  # changed: it is another file
    assert list(list_complete_files(Plant(workspace, ledger))) == [path]
