"""Replaces personal data and secrets by placeholders that keep the text's shape and belong to nobody.

| kind   | matches                                                          | becomes                                |
|--------|------------------------------------------------------------------|----------------------------------------|
| email  | an address at a domain that can exist (not example.com and such) | email@example.com (RFC 2606)           |
| ip     | a public IPv4 address in dotted form                             | 192.0.2.1 (RFC 5737)                   |
| phone  | an international (+…) or North American number                   | +1 555 0100 100                        |
| card   | 13–19 digits in groups that pass the Luhn check                  | 0000 0000 0000 0000                    |
| secret | AWS, GitHub, Slack, Google, OpenAI keys; private key blocks      | <SECRET>                               |

Names of people stay: licence headers name authors on purpose.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_EMAIL = re.compile(
    r"(?<![\w.+-])[A-Za-z0-9][A-Za-z0-9._%+-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.){1,5}[A-Za-z]{2,24}(?![\w-])"
)
_NO_MAIL = re.compile(r"(?:^|\.)(?:example(?:\.(?:com|org|net))?|invalid|test|localhost|local)$", re.IGNORECASE)
_IP = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\.?\w)")
_PHONE = re.compile(
    r"(?<![\w.+-])"
    r"(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?(?:\d{2,4}[ .-]?){2,4}\d{2,4}|(?:\(\d{3}\) ?|\d{3}[.-])\d{3}[.-]\d{4})"
    r"(?![\w.-]?\d)"
)
_CARD = re.compile(r"(?<![\w.-])\d{4}(?:([ -])\d{4}\1\d{4}\1\d{1,7}|([ -])\d{6}\2\d{5}|\d{9,15})(?![\w-])(?!\.\d)")
_PRIVATE_KEY = r"(?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----"
_SECRET = re.compile(
    rf"-----BEGIN {_PRIVATE_KEY}.*?(?:-----END {_PRIVATE_KEY}|\Z)"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{36,}\b|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|\bAIza[0-9A-Za-z_-]{35}\b|\bsk-(?:proj-)?[A-Za-z0-9_-]{32,}",
    re.DOTALL,
)
_SECRET_SIGNS = ("PRIVATE KEY", "AKIA", "ASIA", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "xox", "AIza", "sk-")
_DIGITS = re.compile(r"\D")


def replace_personal_data(text: str, kinds: Iterable[str]) -> tuple[str, dict[str, int]]:
    """Return (the text with all data of ``kinds`` replaced, the number of replacements by kind)."""
    counts: Counter[str] = Counter()

    def one(match: re.Match[str]) -> str:
        found = match.group(0)
        if found == kind.placeholder or not kind.counts(found):
            return found
        counts[name] += 1
        return kind.placeholder

    for name in kinds:
        kind = _KINDS[name]
        if any(sign in text for sign in kind.signs):
            text = kind.pattern.sub(one, text)
    return text, dict(counts)


def has_valid_check_digit(digits: str) -> bool:
    """Return whether the check digit of a card number is right (ISO/IEC 7812-1, annex B)."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + place % 2)
        total += value - 9 * (value > 9)
    return total % 10 == 0


def _is_public(dotted: str) -> bool:
    try:
        return ipaddress.IPv4Address(dotted).is_global
    except ValueError:  # this is not an address: a part is above 255, or has a leading zero
        return False


def _is_card(found: str) -> bool:
    digits = _DIGITS.sub("", found)
    return 13 <= len(digits) <= 19 and len(set(digits)) > 1 and digits[0] in "3456" and has_valid_check_digit(digits)


@dataclass(frozen=True)
class _Kind:
    """One kind of data. A text without any of the ``signs`` has no data of this kind. ``counts`` returns whether a match of the pattern really is
    data of this kind."""

    pattern: re.Pattern[str]
    placeholder: str
    signs: tuple[str, ...] = ("",)
    counts: Callable[[str], bool] = bool


_KINDS = {
    "email": _Kind(_EMAIL, "email@example.com", ("@",), lambda found: not _NO_MAIL.search(found.split("@", 1)[1])),
    "ip": _Kind(_IP, "192.0.2.1", (".",), _is_public),
    "phone": _Kind(_PHONE, "+1 555 0100 100", counts=lambda found: 9 <= len(_DIGITS.sub("", found)) <= 15),
    "card": _Kind(_CARD, "0000 0000 0000 0000", counts=_is_card),
    "secret": _Kind(_SECRET, "<SECRET>", _SECRET_SIGNS),
}
