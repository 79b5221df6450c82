"""What an agent returns: edits as data, and a hypothesis that a measurement can refute."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from agents.core.untrusted import one_line

QUALITY = "quality"  # kind of target, ``quality:<recipe key>``: a better model, not a faster step


@dataclass(frozen=True)
class Edit:
    """A file's whole new text; ``path`` is relative to the repository's root."""

    path: str
    new_text: str


@dataclass(frozen=True)
class Proposal:
    """``predicted_gain``: the whole training step's time before over after (1.12: 12 % more work in the same time); for a target
    of quality, how many bits per byte on held-out documents better the gate's runs end.

    The hypothesis says what was measured, what follows for the whole step, and what would refute it.
    """

    agent: str
    target: str  # what it improves: ``kernel:<op>``, ``recipe:compile``, ``quality:<key>``, ``undo:<proposal>``
    title: str
    hypothesis: str
    predicted_gain: float
    edits: tuple[Edit, ...]

    def __post_init__(self) -> None:
        """Make each text one bounded line: they go into commit messages, terminals and reports."""
        for name, limit in (("agent", 60), ("target", 200), ("title", 200), ("hypothesis", 4000)):
            object.__setattr__(self, name, one_line(getattr(self, name), limit))

    @property
    def patch_id(self) -> str:
        """A hash of the edits alone."""
        digest = hashlib.sha256()
        for edit in sorted(self.edits, key=lambda e: e.path):
            for part in (edit.path, edit.new_text):
                encoded = part.encode(
                    "utf-8", "surrogatepass"
                )  # half a surrogate pair has an id too, by which scope refuses it
                digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return digest.hexdigest()


def is_quality(target: str) -> bool:
    return target.startswith(f"{QUALITY}:")


def gain_words(target: str, gain: float) -> str:
    """A predicted gain with its unit."""
    return f"{gain:.4f} bits per byte better" if is_quality(target) else f"{gain:.3f}× on the whole step"
