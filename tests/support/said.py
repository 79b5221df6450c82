"""Records progress: the lines that a person would read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from factory.core.progress import ProgressTask, SilentTask


class Said:
    """The lines in order. ``at_task`` is called with the title of each task that begins."""

    def __init__(self, at_task: Callable[[str], object] = lambda title: None) -> None:
        self.lines: list[str] = []
        self.at_task = at_task

    def line(self, text: str) -> None:
        self.lines.append(text)

    @contextmanager
    def task(self, title: str, total: float | None = None) -> Iterator[ProgressTask]:
        self.at_task(title)
        yield SilentTask()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def about(self, words: str) -> list[str]:
        """Return the lines that contain these words."""
        return [line for line in self.lines if words in line]
