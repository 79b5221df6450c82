"""The rules a document must pass, by domain. Each is a function ``(text, rules) -> reason | None``; its name is the
rule's.

The thresholds are in the data policy under the names given here. The rules for code follow StarCoder's and The Stack
v2's (line lengths, alphabetic share, encoded data, generated files); those for prose follow Gopher's repetition rules
at the line level (Rae et al. 2021, table A1). datatrove's filters are not used: their word splitter is slow, and their
repetition and quality thresholds (at least 50 words, stop words) drop most docstrings and chats.
"""

from __future__ import annotations

import re
import symtable
import warnings
from collections.abc import Callable

from factory.ingest.rules.policy import DomainRules

_ENCODED = re.compile(r"[A-Za-z0-9+/=]{80,}|(?:\\x[0-9a-fA-F]{2}){16,}|(?:0x[0-9a-fA-F]{2,}[\s,]+){16,}")
_GENERATED = re.compile(
    r"auto-?\s?generated|generated (?:by|from|automatically|file)|@generated|do not (?:edit|modify)", re.IGNORECASE
)
_LETTERS = re.compile(r"[^\W\d_]+")
_BLANKS = re.compile(r"\s+")
_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1a\x7f\ufffd]")
_CONTROL_SHARE = 0.001
_HEAD_LINES = 8  # a generated file says so at its top

Filter = Callable[[str, DomainRules], "str | None"]


def too_short(text: str, rules: DomainRules) -> str | None:
    size = len(text)
    return f"{size} characters, at least {rules.min_chars} are needed" if size < rules.min_chars else None


def too_long(text: str, rules: DomainRules) -> str | None:
    size = len(text)
    return f"{size} characters, at most {rules.max_chars} are allowed" if size > rules.max_chars else None


def binary(text: str, rules: DomainRules) -> str | None:
    """Control characters and U+FFFD: binary data, or text that was decoded with the wrong encoding."""
    count = len(_CONTROL.findall(text))
    return f"{count} control or replacement characters" if count > _CONTROL_SHARE * len(text) else None


def long_lines(text: str, rules: DomainRules) -> str | None:
    if len(text) <= rules.max_line:
        return None
    longest = max(map(len, text.split("\n")))
    return f"a line of {longest} characters, at most {rules.max_line} are allowed" if longest > rules.max_line else None


def low_alphabetic(text: str, rules: DomainRules) -> str | None:
    if rules.min_alphabetic == 0:
        return None
    letters = sum(map(len, _LETTERS.findall(text)))
    visible = len(text) - sum(map(len, _BLANKS.findall(text)))
    share = letters / max(visible, 1)
    return (
        f"{share:.0%} letters, at least {rules.min_alphabetic:.0%} are needed" if share < rules.min_alphabetic else None
    )


def repetition(text: str, rules: DomainRules) -> str | None:
    """Share of non-blank lines that repeat an earlier one (Gopher's duplicate line fraction)."""
    if rules.max_repeated_lines == 1:
        return None
    lines = [line for line in text.split("\n") if line.strip()]
    share = 1 - len(set(lines)) / max(len(lines), 1)
    if share > rules.max_repeated_lines and len(lines) >= 4:
        return f"{share:.0%} of the lines repeat others, at most {rules.max_repeated_lines:.0%} is allowed"
    return None


def encoded_data(text: str, rules: DomainRules) -> str | None:
    if rules.max_encoded == 1:
        return None
    share = sum(m.end() - m.start() for m in _ENCODED.finditer(text)) / max(len(text), 1)
    if share > rules.max_encoded:
        return f"{share:.0%} looks like encoded data, at most {rules.max_encoded:.0%} is allowed"
    return None


def generated(text: str, rules: DomainRules) -> str | None:
    if rules.generated:
        return None
    head = "\n".join(text[:4000].split("\n")[:_HEAD_LINES])
    found = _GENERATED.search(head)
    return f"says at its top {found.group(0)!r}" if found else None


# Cheap rules first, and a specific one before a general one: the first that fires is reported.
FILTERS: tuple[Filter, ...] = (
    too_short, too_long, binary, long_lines, low_alphabetic, repetition, encoded_data, generated,
)  # fmt: skip


def first_failure(text: str, rules: DomainRules) -> tuple[str, str] | None:
    """(rule, reason) of the first rule that the text breaks, cheap rules first; None when it passes all."""
    for rule in FILTERS:
        reason = rule(text, rules)
        if reason is not None:
            return rule.__name__, reason
    return None


def does_not_parse(text: str) -> str | None:
    """For Python sources. Separate from the other filters because it is slow (5 MB/s)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            symtable.symtable(text, "<document>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        return f"not Python: {str(error)[:120]}"
    return None
