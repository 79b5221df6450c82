"""The daemon in this process, until a line that it says ends it."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

from factory.core.progress import SilentProgress
from factory.core.workspace import Workspace
from factory.duties.runner import run_daemon
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from tests.support.patience import PATIENCE_S


class EnoughSaid(BaseException):
    """Ends the daemon as a signal does."""


class Listener(SilentProgress):
    """Keeps what is said, and acts on words: ``on["disk is full"] = free``. An action happens once."""

    def __init__(self, **_: Any) -> None:
        self.lines: list[str] = []
        self.on: dict[str, Callable[[], object]] = {}

    def line(self, text: str) -> None:
        self.lines.append(text)
        for words in [words for words in self.on if words in text]:
            self.on.pop(words)()

    def count(self, words: str) -> int:
        return sum(words in line for line in self.lines)


def enough() -> None:
    raise EnoughSaid


def run_until(workspace: Workspace, ledger: Ledger, listener: Listener, first: float = 0.0) -> None:
    """The daemon with waits of hundredths of a second, until ``enough`` was called by the listener. ``first``: seconds of every wait."""
    policies = workspace.root / "policies"
    policies.mkdir(exist_ok=True)
    waits = {"first_wait_seconds": first or 0.05, "longest_wait_seconds": first or 0.2}
    (policies / "retries.yaml").write_text(yaml.safe_dump(waits))
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(PATIENCE_S)
    try:
        run_daemon(Plant(workspace, ledger, listener), every=0.02)
    except EnoughSaid:
        return
    except TooLongError:
        raise AssertionError(f"it was never said: {list(listener.on)}; but: {listener.lines}") from None
    finally:
        signal.alarm(0)
    raise AssertionError("the daemon ended by itself")


class TooLongError(BaseException):
    """Nothing that the daemon catches."""


def too_long(*_: object) -> None:
    raise TooLongError


def impatient(ledger: Ledger) -> Ledger:
    """The ledger, which waits for a lock for a tenth of a second in place of a minute."""

    @sa.event.listens_for(ledger.engine, "connect")
    def _(connection: sqlite3.Connection, _record: object) -> None:
        connection.execute("PRAGMA busy_timeout=100")

    return ledger


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """An empty disk, mounted there."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip("this user may mount no disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> None:
    """With a file that takes all that is left."""
    with open(folder / "ballast", "wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(b"x" * size) == size:
                    pass
            except OSError:
                continue
