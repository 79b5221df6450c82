"""Worker processes of ingest that are killed, as by an OOM killer, or hang: real ones. Nothing of a file is stored or lost then."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from factory.core.workspace import Workspace
from factory.ingest import chain
from factory.ingest.inbox import arrived, take
from factory.ledger.files import held
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.retrying.tries import retry
from factory.watching.waiting import waiting
from tests.support.factory.inbox import exactly, put, rows, trained_on
from tests.support.factory.made_up_text import use_small_vocabulary
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


def test_a_file_whose_workers_die_is_tried_again_and_then_waits(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one worker, at once; the others do not wait for it."""
    monkeypatch.setattr(chain, "_WORTH_WORKERS", 0)
    path, said = put(workspace, rows(0, 20)), Said()
    with killer():
        take(Plant(workspace, ledger, said), path)
    assert said.about(
        "was killed, most likely because memory ran out; nothing was stored; it is tried again, with one worker"
    )
    assert said.about("free some memory and run 'factory retry'") and not list(arrived(Plant(workspace, ledger)))
    (told,) = [one for one in waiting(workspace, ledger) if "a.jsonl" in str(one)]
    assert "factory retry" in str(told) and held(ledger)["a.jsonl"]["refused"]
    other = put(workspace, rows(20, 20), "b.jsonl")
    assert list(arrived(Plant(workspace, ledger))) == [other] and path.exists() and not trained_on(ledger)
    retry(ledger, None, "me")
    assert list(arrived(Plant(workspace, ledger))) == [path, other]
    take(Plant(workspace, ledger, said), path)
    assert trained_on(ledger) == exactly(20) and not path.exists()
