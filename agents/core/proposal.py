"""What an agent returns: edits as data, and a hypothesis that a measurement can refute."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from agents.core.untrusted import fold_to_one_line

QUALITY = (
    "quality"  # the kind of a target ``quality:<recipe key>``, whose aim is a better model rather than a faster step
)


@dataclass(frozen=True)
class Edit:
    """A file's whole new text; ``path`` is relative to the repository's root."""

    path: str
    new_text: str


@dataclass(frozen=True)
class Proposal:
    """A patch that an agent proposes. ``predicted_gain``: the time of a whole step before the patch divided by the time after it (1.12: 12 %
    more work in the same time). For a target of quality, it is the gain of the gate's runs on held-out documents, in bits per byte.

    The hypothesis names the measurement, its consequence for the whole step, and the result that would refute it.
    """

    agent: str
    target: str  # ``kernel:<op>``, ``recipe:compile``, ``quality:<key>``, ``undo:<proposal>``
    title: str
    hypothesis: str
    predicted_gain: float
    edits: tuple[Edit, ...]

    def __post_init__(self) -> None:
        """Make each text one bounded line, because the texts go into commit messages, terminals and reports."""
        for name, limit in (("agent", 60), ("target", 200), ("title", 200), ("hypothesis", 4000)):
            object.__setattr__(self, name, fold_to_one_line(getattr(self, name), limit))

    @property
    def patch_id(self) -> str:
        """A hash of the edits alone."""
        return hash_edits(self.edits)


def hash_edits(edits: Iterable[Edit]) -> str:
    """A hash of edits, whatever their order."""
    digest = hashlib.sha256()
    for edit in sorted(edits, key=lambda e: e.path):
        for part in (edit.path, edit.new_text):
            encoded = part.encode(
                "utf-8", "surrogatepass"
            )  # a text with half a surrogate pair needs an id too; the scope stage refuses it by that id
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


def is_quality_target(target: str) -> bool:
    return target.startswith(f"{QUALITY}:")


def format_gain(target: str, gain: float) -> str:
    """A predicted gain as text, with its unit."""
    return f"{gain:.4f} bits per byte better" if is_quality_target(target) else f"{gain:.3f}× on the whole step"
