"""Progress of long work, as one small protocol, so that no module below the command line draws anything itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Task(Protocol):
    """One bar: ``advance`` moves it, ``note`` sets the words behind it."""

    def advance(self, amount: float = 1, note: str = "") -> None: ...


class Progress(Protocol):
    """Where long work reports to: a bar a task, and single lines."""

    def task(self, title: str, total: float | None = None) -> AbstractContextManager[Task]: ...

    def line(self, text: str) -> None: ...


class SilentTask:
    def advance(self, amount: float = 1, note: str = "") -> None:
        pass


class Silent:
    """Progress that shows nothing: tests, ``--json``."""

    @contextmanager
    def task(self, title: str, total: float | None = None) -> Iterator[Task]:
        yield SilentTask()

    def line(self, text: str) -> None:
        pass


SILENT = Silent()
