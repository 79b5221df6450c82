"""What the name of a licence says: SPDX expressions, as the specification (3.0.1, annex B) reads them.

``AND`` binds more than ``OR``, and ``WITH`` more than both; names are compared without regard to case and blanks. A name may be of several words,
which SPDX does not know: data policies list such. What reads as no expression is one name. Spellings of one licence are one (``spdx_ids``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

from factory.ingest.rules.spdx_ids import spdx_id

A = TypeVar("A")
DEEPEST = 20  # parentheses within parentheses
_TOKEN = re.compile(r"[()]|[^\s()]+")


@lru_cache(maxsize=4096)
def folded(name: str | None) -> str:
    """A name as it is compared with others: by its SPDX id, where it is a spelling of one; '' where there is none.

    >>> folded("  CC-BY-4.0 "), folded("Apache 2.0"), folded("Public-Domain"), folded("My  Own"), folded(None)
    ('cc-by-4.0', 'apache-2.0', 'public domain', 'my own', '')
    """
    return spdx_id(name or "") or " ".join((name or "").split()).casefold()


@dataclass(frozen=True)
class LicenceReader(Generic[A]):
    """What names come to: by what is ``known`` of a folded name, and ``unknown`` of any other. ``all_of``: of licences that hold together,
    ``one_of``: of those among which one may choose.

    >>> reader = LicenceReader({"mit": 2, "gpl": 1, "gpl with x": 3, "public domain": 4}, 0, min, max)
    >>> [reader.read(name) for name in ("mit", "MIT AND GPL", "(mit or gpl) and MIT", "MIT OR GPL AND other")]
    [2, 1, 2, 2]
    >>> [reader.read(name) for name in ("GPL WITH X", "GPL WITH other", "Public Domain OR other", "MIT OR (GPL", "MIT, GPL")]
    [3, 1, 4, 0, 0]
    """

    known: dict[str, A]
    unknown: A
    all_of: Callable[[Sequence[A]], A]
    one_of: Callable[[Sequence[A]], A]

    def read(self, name: str) -> A:
        if (whole := folded(name)) in self.known:
            return self.known[whole]
        if spdx_id(name):  # 'GPL v3 or later' is one name
            return self.unknown
        tokens = _TOKEN.findall(name)
        try:
            found = self._either(tokens, 0)
        except ValueError:
            return self.unknown
        return self.unknown if tokens else found

    def _either(self, tokens: list[str], depth: int) -> A:
        """Reads from the beginning of ``tokens``, and takes away what it read. Raises: ValueError for what is no expression."""
        parts = [self._both(tokens, depth)]
        while _took(tokens, "OR"):
            parts.append(self._both(tokens, depth))
        return self.one_of(parts)

    def _both(self, tokens: list[str], depth: int) -> A:
        parts = [self._simple(tokens, depth)]
        while _took(tokens, "AND"):
            parts.append(self._simple(tokens, depth))
        return self.all_of(parts)

    def _simple(self, tokens: list[str], depth: int) -> A:
        if _took(tokens, "("):
            if depth == DEEPEST:
                raise ValueError
            found = self._either(tokens, depth + 1)
            if not _took(tokens, ")"):
                raise ValueError
            return found
        name = _name(tokens)
        # An exception adds permissions: a licence with one that is not listed allows at least what it allows without.
        whole = f"{name} with {_name(tokens)}" if _took(tokens, "WITH") else name
        return self.known.get(whole, self.known.get(name, self.unknown))


def _took(tokens: list[str], token: str) -> bool:
    """Operators are upper case or lower case."""
    return bool(tokens) and tokens[0] in (token, token.lower()) and bool(tokens.pop(0))


def _name(tokens: list[str]) -> str:
    words: list[str] = []
    while tokens and tokens[0] not in ("(", ")", "AND", "and", "OR", "or", "WITH", "with"):
        words.append(tokens.pop(0))
    if not words:
        raise ValueError
    return folded(" ".join(words))
