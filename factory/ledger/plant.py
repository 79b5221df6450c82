"""Defines one object for a factory: its workspace, its ledger and the receiver of progress."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from factory.core.progress import SILENT, Progress

# Commands use Plant in their signatures, but SQLAlchemy takes half a second to import.
if TYPE_CHECKING:
    from factory.core.workspace import Workspace
    from factory.ledger.ledger import Ledger


@dataclass(frozen=True)
class Plant:
    """The workspace, ledger and receiver of progress of a factory. Most functions that act on a factory take a plant. It has no state of its own.

    A function that only computes takes its inputs instead: a policy, rows, a ``Snapshot``.
    """

    workspace: Workspace
    ledger: Ledger
    progress: Progress = SILENT

    def with_progress(self, progress: Progress) -> Plant:
        """Return the same plant with another receiver of progress."""
        return replace(self, progress=progress)

    def print_line(self, text: str) -> None:
        """Print one line, usually a ``Message``, to the receiver of progress."""
        self.progress.line(text)
