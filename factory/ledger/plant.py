"""One handle on a factory at work: its workspace, its ledger, and where long work reports to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from factory.core.progress import SILENT, Progress

# Commands name a plant before they know whether they need one, and SQLAlchemy takes half a second to import.
if TYPE_CHECKING:
    from factory.core.workspace import Workspace
    from factory.ledger.ledger import Ledger


@dataclass(frozen=True)
class Plant:
    """What nearly everything that acts on a factory needs. It holds no state of its own, and opens and closes nothing.

    A function that only computes takes what it computes from instead: a policy, rows, a ``Snapshot``.
    """

    workspace: Workspace
    ledger: Ledger
    progress: Progress = SILENT

    def reporting_to(self, progress: Progress) -> Plant:
        """The same factory, reporting elsewhere."""
        return replace(self, progress=progress)

    def say(self, text: str) -> None:
        """One line to whoever watches."""
        self.progress.line(text)
