"""The answer of a worked solution in mathematics, and whether two are the same: exactly, as numbers where both are."""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST = 200  # characters of an answer; no digits are counted beyond
_NUMBER = re.compile(r"[-+−]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?%?")
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")


def answer_of(text: str) -> str | None:
    """The answer that a text ends with: after its last ``####``, in its last ``\\boxed{}``, else its last number; None without any.

    >>> answer_of("3 + 4 = 7. #### 7"), answer_of(r"so it is \\boxed{\\frac{1}{2}}."), answer_of("That makes $1,200 in all."), answer_of("no idea")
    ('7', '\\\\frac{1}{2}', '$1,200', None)
    """
    if "####" in text:
        said = text.rsplit("####", 1)[1].strip()
        return said.splitlines()[0].strip()[:LONGEST] if said else None
    if (boxed := _boxed(text)) is not None:
        return boxed.strip()[:LONGEST] or None
    numbers = _NUMBER.findall(text[-20_000:])
    return numbers[-1][:LONGEST] if numbers else None


def same_answer(said: str, right: str) -> bool:
    """Are two answers equal, as numbers or else letter for letter, blanks and TeX's dollars apart?

    >>> same_answer("1,200.0", "$1200"), same_answer("1/2", "0.5"), same_answer("x + 1", "x+1"), same_answer("0.3333", "1/3")
    (True, True, True, False)
    """
    ours, theirs = number_of(said), number_of(right)
    if ours is not None or theirs is not None:
        return ours == theirs
    return _plain(said) == _plain(right)


def number_of(text: str) -> Fraction | None:
    """The number that a whole text writes; None when it is none."""
    plain = _FRACTION.sub(r"(\1)/(\2)", _plain(text)[:LONGEST]).replace("−", "-").lstrip("+")
    plain = plain.replace("(", "").replace(")", "").replace("$", "").replace("\\%", "%").removesuffix(".")
    share = plain.endswith("%")
    plain = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", plain.removesuffix("%"))
    if not re.fullmatch(r"-?(?:\d+(?:\.\d*)?|\.\d+)(?:/\d+)?", plain):
        return None
    above, _, below = plain.partition("/")
    if below and not int(below):
        return None
    return Fraction(above) / Fraction(below or 1) / (100 if share else 1)


def _plain(text: str) -> str:
    return re.sub(r"\s+|\\[,;!]|\\left|\\right", "", text).strip("$")


def _boxed(text: str) -> str | None:
    """What stands in the last ``\\boxed{…}`` that is closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for at in range(start + 6, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[start + 7 : at]
    return None
