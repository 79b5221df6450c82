"""What an agent hands back: edits as data, and a hypothesis that a measurement can refute."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """A file's whole new text; ``path`` is relative to the repository's root."""

    path: str
    new_text: str


@dataclass(frozen=True)
class Proposal:
    """``predicted_gain``: the whole training step's time before over after (1.12: the step gets 12 % more done in
    the same time).

    The hypothesis says what was measured, what follows for the whole step, and what would refute it.
    """

    agent: str
    target: str  # what it improves: ``kernel:<op>``
    title: str
    hypothesis: str
    predicted_gain: float
    edits: tuple[Edit, ...]
