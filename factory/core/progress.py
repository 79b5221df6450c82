"""The protocol with which long work reports its progress. Only the command line draws bars and prints lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class ProgressTask(Protocol):
    """One progress bar: ``advance`` moves the bar, ``note`` sets the text behind it."""

    def advance(self, amount: float = 1, note: str = "") -> None: ...


class Progress(Protocol):
    """Receives the progress of long work: a bar for each task, and single lines."""

    def task(self, title: str, total: float | None = None) -> AbstractContextManager[ProgressTask]: ...

    def line(self, text: str) -> None: ...


class SilentTask:
    def advance(self, amount: float = 1, note: str = "") -> None:
        pass


class SilentProgress:
    """Progress that shows nothing, for tests and ``--json``."""

    @contextmanager
    def task(self, title: str, total: float | None = None) -> Iterator[ProgressTask]:
        yield SilentTask()

    def line(self, text: str) -> None:
        pass


SILENT = SilentProgress()
