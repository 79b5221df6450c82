"""The tokenizer's own library, in which no text can spell a special token.

A tokenizer's library matches special tokens in any text, and a switch that turns this off for all of a string cannot be used for a chat: a
chat's template writes special tokens, and its messages may spell them. Even with the switch, a model whose vocabulary lists ``<s>`` finds it
in text. So this copy of the tokenizer has another spelling of each special token, its mark. The ids stay. Text that spells ``<s>`` is then
ordinary text everywhere, and a mark is the token. Every other rule (normalisers, split patterns, blanks around added tokens) is the library's.

A mark is nine letters of Old South Arabian: caseless letters without compositions, which no normaliser changes. The first six depend on the
tokenizer; a text that has these six in a row is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers

from factory.core.errors import InputError

_FIRST, _LETTERS = 0x10A60, 29  # Old South Arabian, U+10A60 to U+10A7C
_HEAD, _TAIL = 6, 3  # letters that all marks share, and letters of one mark


class SpellsMarkError(InputError):
    """The error of a text that has the letters with which a marked library writes special tokens."""


class MarkedLibrary:
    """A tokenizer in which each special token is written as its mark. Several threads may use it at the same time."""

    def __init__(self, library: Mapping[str, Any], special: Mapping[str, int]) -> None:
        """``library``: the content of tokenizer.json. ``special``: the id of each special token. Raises: InputError."""
        self.head = _letters(int(hashlib.sha256(json.dumps(sorted(special)).encode()).hexdigest(), 16), _HEAD)
        self.marks = {text: self.head + _letters(number, _TAIL) for number, text in enumerate(sorted(special))}
        self._text_of = {mark: text for text, mark in self.marks.items()}
        try:
            self.inner = tokenizers.Tokenizer.from_str(json.dumps(_renamed(library, self.marks)))
        except Exception as error:  # the library raises plain Exception
            raise _unmarkable(str(error)[:200]) from error
        self.inner.no_truncation()
        self.inner.no_padding()
        if wrong := [text for text, number in special.items() if self.inner.token_to_id(self.marks[text]) != number]:
            raise _unmarkable(repr(wrong[:3]))
        # As the library matches them: the leftmost first, of those the longest.
        self._special = _any_of(self.marks)
        self._mark = _any_of(self._text_of)

    def encode(self, text: str) -> tokenizers.Encoding:
        """Encode a text in which marks are special tokens, without the tokens that frame a document. Raises: ``SpellsMarkError`` never; see
        ``refuse_marks``."""
        return self.inner.encode(text, add_special_tokens=False)

    def refuse_marks(self, text: str) -> None:
        """Raise ``SpellsMarkError`` if a text that is not from a template has the letters of a mark."""
        if not text.isascii() and self.head in text:
            raise SpellsMarkError(
                "ingest.spells_mark",
                "the text contains the letters {letters!r}, with which this factory writes special tokens",
                letters=self.head,
            )

    def write_marks(self, rendered: str) -> str:
        """Return a text with each special token written as its mark."""
        return self._special.sub(lambda match: self.marks[match.group()], rendered)

    def write_names(self, marked: str) -> str:
        """Return a text with each mark written as its special token. The inverse of ``write_marks``."""
        return self._mark.sub(lambda match: self._text_of[match.group()], marked)

    def find_special(self, rendered: str) -> list[tuple[int, int, str]]:
        """Return (start, stop, token) of each special token in a text that a template wrote, in order."""
        return [(match.start(), match.end(), match.group()) for match in self._special.finditer(rendered)]

    def find_marks(self, marked: str) -> list[tuple[int, int]]:
        """Return (start, stop) of each mark in a text, in order."""
        return [match.span() for match in self._mark.finditer(marked)]

    def find_spelled(self, text: str) -> re.Match[str] | None:
        """Return the first place of a text that spells a special token."""
        return self._special.search(text)

    def replace_spelled(self, text: str, replace: Callable[[str], str]) -> str:
        """Return a text with each spelled special token replaced."""
        return self._special.sub(lambda match: replace(match.group()), text)

    def decode(self, ids: Sequence[int], keep_special: bool = False) -> str:
        """Return the text of ids, without special tokens, or with each as its mark."""
        return str(self.inner.decode(list(ids), skip_special_tokens=not keep_special))


def _letters(number: int, count: int) -> str:
    found = []
    for _ in range(count):
        number, letter = divmod(number, _LETTERS)
        found.append(chr(_FIRST + letter))
    return "".join(found)


def _any_of(texts: Mapping[str, Any]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _unmarkable(reason: str) -> InputError:
    return InputError(
        "ingest.unmarkable_tokenizer",
        "The special tokens of the tokenizer cannot be told apart from text ({reason}), so documents could spell them. Use a tokenizer.json that "
        "the library 'tokenizers' wrote",
        reason=reason,
    )


def _renamed(library: Mapping[str, Any], marks: Mapping[str, str]) -> dict[str, Any]:
    """Return tokenizer.json with the special tokens renamed wherever it names them, and without a post-processor."""
    model = dict(library["model"])
    vocabulary = model["vocab"]
    if isinstance(vocabulary, Mapping):
        model["vocab"] = {marks.get(token, token): number for token, number in vocabulary.items()}
    else:
        model["vocab"] = [[marks.get(piece, piece), score] for piece, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = marks.get(model["unk_token"], model["unk_token"])
    if merges := model.get("merges"):  # a merge that makes or uses a special token applies only to text that spells it
        pairs = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in merges]
        joined = [(pair, "".join(pair)) for pair in pairs]
        model["merges"] = [
            list(pair) for pair, both in joined if both not in marks and not any(part in marks for part in pair)
        ]
    added = [
        token | {"content": marks[token["content"]]} if token["content"] in marks else token
        for token in library["added_tokens"]
    ]
    return {
        **library,
        "model": model,
        "added_tokens": added,
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
