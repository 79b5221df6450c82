"""Shows progress: as bars on a terminal, as plain lines in a log."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from agents.core.untrusted import shorten_text
from factory.core.progress import ProgressTask

LONGEST_LINE = 20_000  # characters
WIDTH = 150  # of tables without a terminal


def make_table_console() -> Console:
    """Return a console for tables, ``WIDTH`` characters wide if the output is not a terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDTH)


class _Bar:
    def __init__(self, bars: Progress, identifier: TaskID) -> None:
        self.bars, self.identifier = bars, identifier

    def advance(self, amount: float = 1, note: str = "") -> None:
        self.bars.update(self.identifier, advance=amount)
        if note:
            self.bars.update(self.identifier, note=note)


class _PlainTask:
    """A task without a terminal. It prints a line at least every eight seconds, and one more at the end of long work."""

    EVERY = 8.0

    def __init__(self, terminal: Terminal, title: str, total: float | None) -> None:
        self.terminal, self.title, self.total = terminal, title, total
        self.done, self.note, self.started = 0.0, "", time.monotonic()
        self.shown = -1.0
        self.over = threading.Event()
        self.beat = threading.Thread(target=self._repeat, daemon=True)
        self.beat.start()

    def advance(self, amount: float = 1, note: str = "") -> None:
        self.done += amount
        self.note = note or self.note

    def _repeat(self) -> None:
        """Print a line every few seconds, also while the work itself reports nothing, as a compiler does."""
        while not self.over.wait(0.5):
            if time.monotonic() - self.terminal.last_line_at >= self.EVERY:
                self.say()

    def close(self) -> None:
        self.over.set()
        self.beat.join()
        long = time.monotonic() - self.started >= self.EVERY
        if self.done != self.shown and (self.done or long):
            self.say()

    def say(self) -> None:
        self.shown = self.done
        part = f"{self.done:.0f}/{self.total:.0f}" if self.total else f"{self.done:.0f}" if self.done else ""
        words = " ".join(filter(None, (self.title, part, self.note)))
        self.terminal.line(f"  {words} ({time.monotonic() - self.started:.0f} s)")


class Terminal:
    """Implements ``factory.core.progress.Progress``: progress bars on a terminal, plain lines without a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, stderr=False)
        self.bars: Progress | None = None
        self._tasks, self._lock = 0, threading.Lock()
        self.last_line_at = time.monotonic()  # when the last line was printed
        # If true, a line that cannot be printed (because of a full disk or a closed pipe) is dropped without an error.
        self.keeps_on = False

    def line(self, text: str) -> None:
        """Print a line. Control characters are shown as �, since an agent may have written the text."""
        self.last_line_at = time.monotonic()
        with contextlib.suppress(*((OSError,) if self.keeps_on else ())):
            self.console.print(shorten_text(text, LONGEST_LINE), markup=False, emoji=False, soft_wrap=True)
            if not self.console.is_terminal:
                sys.stdout.flush()

    def print_heading(self, text: str) -> None:
        self.console.print(f"\n[bold]{text}[/bold]", soft_wrap=True)

    @contextmanager
    def task(self, title: str, total: float | None = None) -> Iterator[ProgressTask]:
        if not self.console.is_terminal:
            plain = _PlainTask(self, title, total)
            try:
                yield plain
            finally:
                plain.close()
            return
        bars = self._begun()
        try:
            yield _Bar(bars, bars.add_task(title, total=total, note=""))
        finally:
            with self._lock:
                self._tasks -= 1
                if not self._tasks:
                    bars.stop()
                    self.bars = None

    def _begun(self) -> Progress:
        """Return the progress bars that the tasks of all threads share."""
        with self._lock:
            if self.bars is None:
                columns = (
                    TextColumn("  {task.description:<28}"),
                    BarColumn(30),
                    MofNCompleteColumn(),
                    TimeElapsedColumn(),
                    TimeRemainingColumn(),
                    TextColumn("{task.fields[note]}"),
                )
                self.bars = Progress(*columns, console=self.console)
                self.bars.start()
            self._tasks += 1
            return self.bars
