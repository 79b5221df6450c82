"""Extracts the answer at the end of a text. The same function reads a model's reply and a worked solution."""

from __future__ import annotations

import re

from factory.tasks.answer_forms import (
    LONGEST,
    Formula,
    Library,
    LiteralText,
    Value,
    is_nonmathematical_text,
    is_same_value,
    parse_answer,
)
from factory.tasks.number_units import UNITS

TAIL = 20_000  # characters at a text's end that are searched for a box
NEAR = 4_000  # characters at a text's end that are searched for a number
MOST_OPEN = 20  # unclosed boxes that are skipped
MOST_WORDS = 60  # characters of an answer in words

_FRACTION = r"\\[dtc]?frac\s*(?:\{[^{}]*\}|\d)\s*(?:\{[^{}]*\}|\d)"
_DIGITS = r"(?:\d{1,3}(?:(?:,|\{,\}\\?!?|,\\!|\\,|\\!|[\u2009\u202f])\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_POWER = r"10\s*\^\s*(?:\{\s*[-+]?\d+\s*\}|[-+]?\d+)|10[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+"
_UNIT = "|".join(sorted((re.escape(word) for word in UNITS if word.isalpha() and word != "in"), key=len, reverse=True))
_LAST = re.compile(
    r"(?<!\\)\$\$.+?\$\$|\\\(.+?\\\)|\\\[.+?\\\]|(?<![\\$])\$(?=[^\s$])[^$\n]*[^$\s\\]\$(?![\d$])"  # TeX
    r"|\\?[(\[{]\s*[^()\[\]{}\n]*\d[^()\[\]{}\n]*[,;][^()\[\]{}\n]*[)\]}]"  # a tuple, an interval, a set
    r"|\d+(?:[/-]\d+){2,}|\d+(?:\.\d+){2,}|\d+(?::\d+)+"  # a date, a version, a ratio
    rf"|(?:(?<![\w)}}\]])[-+−]\s?)?(?:\\?[$€£¥₹][-−]?)?(?:(?:\d+\s*)?{_FRACTION}|\d+\s+\d+/\d+|\d*[½¼¾⅓⅔]|(?:{_DIGITS})\s*(?:\\times|×|\*|x)\s*(?:{_POWER})"
    rf"|{_POWER}|(?<![\w.])(?:{_DIGITS})[eE][-+]?\d+|(?:{_DIGITS})\s*/\s*(?:{_DIGITS})|(?<![A-Za-z_^\\])(?:{_DIGITS})(?!\d|(?:st|nd|rd|th)\b))"
    r"(?:\s*(?:\\?%|per\s?cent\b|°|\^\s*\{?\s*\\circ\s*\}?"
    rf"|\\(?:text|mathrm)\s*\{{[^{{}}]*\}}|(?:(?:square|cubic)\s)?(?:{_UNIT})(?:s|es)?(?![A-Za-z])(?:\s?\^?[23](?!\d))?))?",
    re.DOTALL,
)
_SAID = re.compile(r"(?i)(?:\banswer\b[\s*_»:]*(?:is|=|:|are)[\s*_:]*)(.+)")


def extract_answer(text: str) -> str | None:
    """The answer at the end of a text. None: no answer.

    It is the text after the last ``####``, else in the last ``\\boxed{}``, else after the last "the answer is", else the whole text if it is only an
    answer, else the last number, tuple or formula in dollars.

    >>> (extract_answer("3 + 4 = 7. #### 7"), extract_answer(r"so it is \\boxed{\\frac{1}{2}}."),
    ...  extract_answer("We pay $1,200."), extract_answer("I do not know."))
    ('7', '\\\\frac{1}{2}', 'We pay $1,200.', None)
    """
    if "####" in text:
        line = text.rsplit("####", 1)[1].strip().split("\n", 1)[0].strip()
        return (_boxed(line) or line)[: 4 * LONGEST] or None
    if (boxed := _boxed(text)) is not None:
        return boxed.strip()[: 4 * LONGEST] or None
    tail = text[-NEAR:]
    if said := _SAID.findall(tail):
        first = re.split(
            r"(?<=[^\d])\.\s|\.\s+(?=[A-Z])|\n|\. I hope|\.$|,?\s(?:because|since|which|so)\b", said[-1].strip()
        )[0].strip()
        if len(first) <= LONGEST and _is_answer(first):
            return first
    whole = text.strip()
    if "\n" not in whole and len(whole) <= LONGEST and _is_answer(whole):
        return whole
    found = [one[0].strip() for one in _LAST.finditer(tail)]
    return found[-1][: 4 * LONGEST] if found else None


def is_same_answer(said: str, right: str, library: Library = lambda gold, said: False) -> bool:
    """Are two answers of ``extract_answer`` the same? ``library`` compares formulas.

    >>> is_same_answer("1,200.0", "$1200"), is_same_answer("1/2", "0.5"), is_same_answer("x + 1", "x+1"), is_same_answer("0.3333", "1/3")
    (True, True, True, False)
    """
    ours, theirs = parse_answer(right), parse_answer(said)
    return ours is not None and theirs is not None and is_same_value(ours, theirs, library)


def _is_answer(text: str) -> bool:
    """Is a text only an answer: a value, or a few words without a number?"""
    value: Value | None = parse_answer(text)
    if value is None or isinstance(value, Formula):
        return value is not None
    if isinstance(value, LiteralText) and is_nonmathematical_text(value):
        words = value.text
        return len(words) <= MOST_WORDS and not re.search(r"\d|\\|[.!?]\s|[.!?]$", words) and len(words.split()) <= 2
    return not _prose(text)


def _prose(text: str) -> bool:
    """Does a text hold more than three words?"""
    return len(re.findall(r"[^\W\d_]{2,}", re.sub(r"\\[a-zA-Z]+", " ", text))) > 3


def _boxed(text: str) -> str | None:
    """The content of the last closed ``\\boxed{…}``, or the text after a ``\\boxed`` without braces."""
    text = text[-TAIL:]
    for found in list(re.finditer(r"\\f?boxed\s*(\{?)", text))[: -MOST_OPEN - 1 : -1]:
        if not found[1]:
            if single := re.match(r"\s*([^\s${}\\]+)", text[found.end() :]):
                return single[1]
            continue
        depth = 0
        for at in range(found.end() - 1, len(text)):
            if text[at - 1] != "\\" or text[at - 2 : at] == "\\\\":
                depth += (text[at] == "{") - (text[at] == "}")
            if depth == 0:
                return text[found.end() : at]
    return None
