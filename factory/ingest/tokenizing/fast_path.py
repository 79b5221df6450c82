"""A faster way to the ids of ASCII text, for byte-level BPE tokenizers whose split pattern is known.

On ASCII text a split pattern of the library equals a pattern of Python's ``re``, and a table of known pieces then makes encoding some three
times as fast. Nothing is taken on trust: ``find_fast_path`` compares the ids with the library's on ``PROVING_TEXTS``, and a tokenizer with
one difference gets no fast path. Tests compare on more.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from factory.ingest.tokenizing.tokenizer_probes import PROBES

PIECES_AT_MOST = 300_000  # a larger table of pieces is cleared
LONGEST_PIECE = 64  # characters; longer pieces are not put in the table
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_LINES = re.compile(r"(?<=\n)(?=\S)")  # of patterns in which blanks before a line end belong to its piece
_WORDS = re.compile(r"(?<=\S)(?=\n)")  # of patterns in which no piece has a line end after another character


@dataclass(frozen=True)
class SplitRule:
    """A split pattern. ``ascii``: the pattern for ASCII text. ``cut``: places at which a text can be cut, because no piece spans them."""

    ascii: re.Pattern[str]
    cut: re.Pattern[str]


def _rule(pattern: str, cut: re.Pattern[str]) -> SplitRule:
    return SplitRule(re.compile(pattern, re.ASCII), cut)


# The patterns by their text in tokenizer.json: Qwen2 and Qwen2.5; Llama 3; GPT-2; SmolLM2 (digits alone, then GPT-2).
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {QWEN_SPLIT: "qwen", QWEN_SPLIT.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?"): "llama3"}
_RULES = {
    "qwen": _rule(
        r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
        r"|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        _LINES,
    ),
    "llama3": _rule(
        r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
        r"|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{1,3}| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        _LINES,
    ),
    "gpt2": _rule(r"'(?:[stmd]|re|ve|ll)|\x20?[A-Za-z]+|\x20?[0-9]+|\x20?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", _WORDS),
    "digits gpt2": _rule(r"'(?:[stmd]|re|ve|ll)|\x20?[A-Za-z]+|[0-9]|\x20?[^\sA-Za-z0-9]+|\s+(?![^\s0-9])|\s+", _WORDS),
}

# llama.cpp has the patterns that split text in its code, and the key ``tokenizer.ggml.pre`` names one of them. llama.cpp's converter finds the name
# by a hash of the ids of a sample text, so it knows only published vocabularies. Here the name follows from the pattern itself. The second value says
# whether llama.cpp then looks up whole words first, as ``ignore_merges`` of tokenizer.json does (llama.cpp, src/llama-vocab.cpp).
SPLIT_NAMES = {
    "qwen": ("qwen2", False),
    "llama3": ("llama-bpe", True),
    "gpt2": ("gpt-2", False),
    "digits gpt2": ("smollm", False),
}


def get_split_rule(name: str) -> SplitRule:
    """Return the rule of a split pattern that ``name_split`` knows."""
    return _RULES[name]


class FastPath:
    """Encodes ASCII text by a table of known pieces, and other text by the library, between two places where a text can be cut."""

    def __init__(
        self, inner: tokenizers.Tokenizer, rule: SplitRule, others: Callable[[str], list[int]], added: list[str]
    ) -> None:
        """``others``: encodes any text. ``added``: texts that the library takes out before it splits a text."""
        self._inner, self._rule, self._others = inner, rule, others
        self._added = re.compile("|".join(map(re.escape, added))) if added else None
        self._pieces: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        if self._added is not None and self._added.search(text):
            return self._others(text)
        if text.isascii():
            return self._ascii_ids(text)
        ids: list[int] = []
        for segment in self._rule.cut.split(text):
            ids += self._ascii_ids(segment) if segment.isascii() else self._others(segment)
        return ids

    def _ascii_ids(self, text: str) -> list[int]:
        known = self._pieces
        if len(known) > PIECES_AT_MOST:
            known = self._pieces = {}
        ids: list[int] = []
        for piece in self._rule.ascii.findall(text):
            found = known.get(piece)
            if found is None:
                ((spelled, _),) = _BYTES.pre_tokenize_str(piece)
                found = [token.id for token in self._inner.model.tokenize(spelled)]
                if len(piece) <= LONGEST_PIECE:
                    known[piece] = found
            ids += found
        return ids


def find_fast_path(
    inner: tokenizers.Tokenizer, library: Mapping[str, Any], others: Callable[[str], list[int]]
) -> FastPath | None:
    """Return the fast path of a tokenizer, if it has a known split pattern and gives the library's ids on ``PROVING_TEXTS``; else None.

    ``inner`` and ``library``: the tokenizer, and its tokenizer.json. ``others``: encodes any text by the library.
    """
    model = library["model"]
    steps = _steps(library.get("normalizer"), "normalizers")
    rule = _RULES.get(name_split(library) or "")
    if rule is None or model.get("type") != "BPE" or any(step.get("type") != "NFC" for step in steps):
        return None
    if (
        model.get("dropout")
        or model.get("byte_fallback")
        or model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix")
    ):
        return None
    added = [token["content"] for token in library["added_tokens"] if not token["special"]]
    fast = FastPath(inner, rule, others, added)
    if any(fast.encode(text) != others(text) for text in (*PROVING_TEXTS, *(f"a {text} b{text}" for text in added))):
        return None
    return FastPath(inner, rule, others, added)  # with an empty table


def _steps(part: Any, key: str) -> list[Mapping[str, Any]]:
    if not isinstance(part, dict):
        return []
    return list(part[key]) if part.get("type") == "Sequence" else [part]


def name_split(library: Mapping[str, Any]) -> str | None:
    """Return the name of a tokenizer.json's split pattern: 'qwen', 'llama3', 'gpt2' or 'digits gpt2' (SmolLM2); None for any other."""
    steps = _steps(library.get("pre_tokenizer"), "pretokenizers")
    kinds = [step.get("type") for step in steps]
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    own_pattern = last.get("use_regex", True)
    if kinds == ["Split", "ByteLevel"] and not own_pattern:
        split = steps[0]
        if split.get("behavior") == "Isolated" and not split.get("invert"):
            return _PATTERNS.get(str(split["pattern"].get("Regex")))
    if kinds == ["ByteLevel"] and own_pattern:
        return "gpt2"
    if kinds == ["Digits", "ByteLevel"] and own_pattern and steps[0].get("individual_digits"):
        return "digits gpt2"
    return None


def spell_split(name: str) -> dict[str, Any]:
    """Return the part ``pre_tokenizer`` of a tokenizer.json, for a name that ``name_split`` gives."""
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": name.endswith("gpt2")}
    if name == "gpt2":
        return last
    first: dict[str, Any] = {"type": "Digits", "individual_digits": True}
    if name != "digits gpt2":
        (pattern,) = (pattern for pattern, other in _PATTERNS.items() if other == name)
        first = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [first, last]}


def _proving_texts() -> tuple[str, ...]:
    """Texts that mix words, digits, contractions, blanks, line ends and other scripts at random; the same in every process."""
    draw = random.Random(31)
    parts = (
        "the", "HTTP", "x", "'s", "'LL", "'re", "1", "42", "2024", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", ".", "...",
        "(", "){", "_", "--", '"',
        "\x0b", "\x1c", "é", "e\u0301", "日本", "👩\u200d👧", "\u00a0", "\u2028", "ſ", "½", "٣",
    )  # fmt: skip
    return tuple("".join(draw.choices(parts, k=draw.randint(1, 24))) for _ in range(1500))


PROVING_TEXTS = (*PROBES, *_proving_texts())
