"""The rules that a document must pass. Each rule is a function ``(text, rules) -> reason | None``. ``FILTERS`` has the rules by name.

The data policy has the thresholds of each domain. The rules for code follow StarCoder's and The Stack v2's (line
lengths, alphabetic share, encoded data, generated files). The rules for prose follow Gopher's repetition rules at the line
level (Rae et al. 2021, table A1). datatrove's filters are not used: their word splitter is slow, and their repetition and
quality thresholds (at least 50 words, stop words) drop most docstrings and chats.
"""

from __future__ import annotations

import re
import symtable
import warnings
from collections.abc import Callable

from factory.ingest.rules.policy import DomainRules
from kernels.contract.message import Message

_ENCODED = re.compile(r"[A-Za-z0-9+/=]{80,}|(?:\\x[0-9a-fA-F]{2}){16,}|(?:0x[0-9a-fA-F]{2,}[\s,]+){16,}")
_GENERATED = re.compile(
    "|".join(
        (r"auto-?\s?generated", "generated (?:by|from|automatically|file)", "@generated", "do not (?:edit|modify)")
    ),
    re.IGNORECASE,
)
_LETTERS = re.compile(r"[^\W\d_]+")
_BLANKS = re.compile(r"\s+")
_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1a\x7f\ufffd]")
_CONTROL_SHARE = 0.001
_HEAD_LINES = 8  # lines at the top of a file in which a notice "generated" counts

Filter = Callable[[str, DomainRules], "Message | None"]


def check_min_length(text: str, rules: DomainRules) -> Message | None:
    if (size := len(text)) >= rules.min_chars:
        return None
    return Message(
        "filters.too_short",
        "the text has {size:,|character|characters}, but at least {limit} are needed",
        size=size,
        limit=rules.min_chars,
    )


def check_max_length(text: str, rules: DomainRules) -> Message | None:
    if (size := len(text)) <= rules.max_chars:
        return None
    return Message(
        "filters.too_long",
        "the text has {size} characters, but at most {limit} are allowed",
        size=size,
        limit=rules.max_chars,
    )


def check_control_characters(text: str, rules: DomainRules) -> Message | None:
    """Refuse control characters and U+FFFD. They are signs of binary data, or of text that was decoded with the wrong encoding."""
    if (count := len(_CONTROL.findall(text))) <= _CONTROL_SHARE * len(text):
        return None
    return Message("filters.binary", "the text has {count} control or replacement characters", count=count)


def check_line_length(text: str, rules: DomainRules) -> Message | None:
    if len(text) <= rules.max_line or (longest := max(map(len, text.split("\n")))) <= rules.max_line:
        return None
    return Message(
        "filters.long_lines",
        "the longest line has {longest} characters, but at most {limit} are allowed",
        longest=longest,
        limit=rules.max_line,
    )


def check_letter_share(text: str, rules: DomainRules) -> Message | None:
    if rules.min_alphabetic == 0:
        return None
    letters = sum(map(len, _LETTERS.findall(text)))
    visible = len(text) - sum(map(len, _BLANKS.findall(text)))
    if (share := letters / max(visible, 1)) >= rules.min_alphabetic:
        return None
    return Message(
        "filters.low_alphabetic",
        "{share:.0%} of the characters are letters, but at least {limit:.0%} are needed",
        share=share,
        limit=rules.min_alphabetic,
    )


def check_repeated_lines(text: str, rules: DomainRules) -> Message | None:
    """Limit the share of non-blank lines that repeat an earlier line (Gopher's duplicate line fraction)."""
    if rules.max_repeated_lines == 1:
        return None
    lines = [line for line in text.split("\n") if line.strip()]
    share = 1 - len(set(lines)) / max(len(lines), 1)
    if share > rules.max_repeated_lines and len(lines) >= 4:
        return Message(
            "filters.repetition",
            "{share:.0%} of the lines repeat earlier lines, but at most {limit:.0%} is allowed",
            share=share,
            limit=rules.max_repeated_lines,
        )
    return None


def check_encoded_data(text: str, rules: DomainRules) -> Message | None:
    if rules.max_encoded == 1:
        return None
    share = sum(m.end() - m.start() for m in _ENCODED.finditer(text)) / max(len(text), 1)
    if share > rules.max_encoded:
        return Message(
            "filters.encoded_data",
            "{share:.0%} of the text looks like encoded data, but at most {limit:.0%} is allowed",
            share=share,
            limit=rules.max_encoded,
        )
    return None


def check_generated_notice(text: str, rules: DomainRules) -> Message | None:
    if rules.generated:
        return None
    head = "\n".join(text[:4000].split("\n")[:_HEAD_LINES])
    found = _GENERATED.search(head)
    return (
        Message(
            "filters.generated",
            "a program generated this file: the first lines contain {words!r}",
            words=found.group(0),
        )
        if found
        else None
    )


# Cheap rules come first, and specific rules come before general rules, because only the first broken rule is reported.
FILTERS: dict[str, Filter] = {
    "too_short": check_min_length,
    "too_long": check_max_length,
    "binary": check_control_characters,
    "long_lines": check_line_length,
    "low_alphabetic": check_letter_share,
    "repetition": check_repeated_lines,
    "encoded_data": check_encoded_data,
    "generated": check_generated_notice,
}


def find_first_broken_rule(text: str, rules: DomainRules) -> tuple[str, Message] | None:
    """Return (rule, reason) of the first rule that the text breaks, or None if it passes all rules."""
    for name, rule in FILTERS.items():
        reason = rule(text, rules)
        if reason is not None:
            return name, reason
    return None


def check_python_syntax(text: str) -> Message | None:
    """Return why a text is not valid Python, or None. This rule is separate from the others because it is slow (5 MB/s)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            symtable.symtable(text, "<document>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        return Message("filters.does_not_parse", "the text is not valid Python: {error}", error=str(error)[:120])
    return None
