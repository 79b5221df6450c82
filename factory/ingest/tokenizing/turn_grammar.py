"""Reads the turns of a chat back from its text, by what a template writes between two turns.

The texts between turns are learned, not parsed from the template: short chats of plain words are encoded and decoded, and the text between two of
the words is what stands between two such turns. What is read back is a proposal. The caller encodes it again and compares every id.
A separate file, because it knows texts and roles only, and neither ids nor templates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, product

_START, _END = "start", "end"
_WORDS = (
    "apple",
    "river",
    "stone",
    "cloud",
    "tiger",
    "bread",
)  # one a turn; a tokenizer of any language can write them
_ROLES = ("system", "user", "assistant", "tool")
_BEFORE: tuple[tuple[str, ...], ...] = ((), ("user",), ("user", "assistant"), ("system", "user", "assistant"))
_SHAPES = (*(("user",), ("system",)), *((*before, *pair) for pair in product(_ROLES, _ROLES) for before in _BEFORE))
Turns = list[tuple[str, str]]


class TurnGrammar:
    """The texts between turns, by the roles before and after."""

    def __init__(self, write: Callable[[list[dict[str, str]]], str | None]) -> None:
        """``write``: the text of a chat as it is decoded from its ids, with special tokens; None if the template refuses the chat."""
        self._between: dict[str, dict[str, set[str]]] = {}
        for shape in _SHAPES:
            words = _WORDS[: len(shape)]
            text = write([{"role": role, "content": word} for role, word in zip(shape, words, strict=True)])
            if text is not None:
                self._learn(shape, words, text)

    def _learn(self, shape: Sequence[str], words: Sequence[str], text: str) -> None:
        gaps, rest = [], text
        for word in words:
            gap, found, rest = rest.partition(word)
            if not found:
                return
            gaps.append(gap)
        for (before, after), gap in zip(pairwise((_START, *shape, _END)), (*gaps, rest), strict=True):
            self._between.setdefault(before, {}).setdefault(after, set()).add(gap)

    def read(self, text: str) -> Turns | None:
        """Return (role, content) of each turn of a text; None if the text is not of this form."""
        starts = [
            (gap, role) for role, gaps in self._between.get(_START, {}).items() for gap in gaps if text.startswith(gap)
        ]
        # Of two roles with the same beginning the user's is taken: such a template writes the system prompt into the user's turn.
        for gap, role in sorted(starts, key=lambda entry: (-len(entry[0]), entry[1] == "system")):
            if turns := self._read_on(text[len(gap) :], role):
                return turns
        return None

    def _read_on(self, rest: str, role: str) -> Turns | None:
        turns: Turns = []
        while True:
            ways = [
                (at, -len(gap), role_after, gap)
                for role_after, gaps in self._between.get(role, {}).items()
                for gap in gaps
                if (at := len(rest) - len(gap) if role_after == _END else rest.find(gap) if gap else -1) >= 0
                and (role_after != _END or rest.endswith(gap))
            ]
            if not ways:
                return None
            at, _, following, gap = min(ways)
            turns.append((role, rest[:at]))
            if following == _END:
                return turns
            rest, role = rest[at + len(gap) :], following
