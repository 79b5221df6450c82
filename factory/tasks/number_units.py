"""The words next to a number in an answer: units, which are converted and compared, and nouns."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# words for a unit → (what the unit measures, its size in that quantity's base unit)
_TABLE: dict[str, tuple[str, int | str]] = {
    "mm millimeter millimetre": ("length", "1/1000"), "cm centimeter centimetre": ("length", "1/100"), "dm": ("length", "1/10"),
    "m meter metre": ("length", 1), "km kilometer kilometre": ("length", 1000), "inch inches in": ("inch", 1), "ft foot feet": ("inch", 12),
    "yd yard": ("inch", 36), "mi mile": ("inch", 63360), "mg milligram": ("mass", "1/1000"), "g gram": ("mass", 1),
    "kg kilogram": ("mass", 1000), "oz ounce": ("ounce", 1), "lb lbs pound": ("ounce", 16), "ml mL milliliter": ("volume", "1/1000"),
    "millilitre": ("volume", "1/1000"),
    "l L liter litre": ("volume", 1), "s sec second": ("time", 1), "min minute": ("time", 60), "h hr hour": ("time", 3600),
    "day": ("time", 86400), "week": ("time", 604800), "month": ("month", 1), "year yr": ("month", 12), "degree deg": ("degree", 1),
    "radian rad": ("radian", 1), "cent ¢": ("dollar", "1/100"), "dollar USD $": ("dollar", 1), "euro EUR €": ("euro", 1),
    "£ GBP": ("pound sterling", 1), "yen JPY ¥": ("yen", 1), "rupee ₹ INR": ("rupee", 1), "Hz hertz": ("hertz", 1),
    "mph": ("inch/time", "63360/3600"), "kmh kph": ("length/time", "1000/3600"),
}  # fmt: skip
UNITS = {word: (what, Fraction(size)) for words, (what, size) in _TABLE.items() for word in words.split()}
TIMES = {
    "dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
_SILENT = {
    "a", "about", "again", "all", "altogether", "an", "answer", "approximately", "are", "around", "as", "asked", "at", "be", "by", "days'",
    "each", "equals", "every", "exactly", "final", "finally", "for", "from", "had", "has", "have", "he", "her", "his", "hence", "i", "in",
    "is", "it", "its", "left", "made", "of", "on", "only", "our", "per", "result", "she", "so", "sum", "that", "the", "their", "them",
    "there", "therefore", "they", "this", "thus", "to", "total", "totally", "was", "we", "were", "which", "will", "with", "would", "you",
    "your",
}  # fmt: skip
# With one of these words next to it, a number is not the answer.
_ALTERS = {
    "above", "below", "between", "cubed", "divided", "either", "except", "fewer", "fifth", "fifths", "fourth", "fourths", "half", "halves",
    "least", "less", "minus", "more", "most", "negative", "neither", "never", "no", "non", "nor", "not", "or", "over", "plus", "quarter",
    "quarters", "squared", "tenth", "tenths", "than", "third", "thirds", "times", "twice", "under", "unless", "unlike", "without",
}  # fmt: skip


@dataclass(frozen=True)
class WordsNextToNumber:
    """The meaning of the words next to a number."""

    unit: str = ""  # what the unit measures: "length", "length^2", "length/time"; "": no unit
    size: Fraction = Fraction(1)  # of the unit, in base units
    times: int = 1  # a factor such as "million"
    nouns: frozenset[str] = frozenset()


NOTHING = WordsNextToNumber()


def parse_words_next_to_number(before: str, after: str) -> WordsNextToNumber | None:
    """The meaning of the words before and after a number. None if they make it another number (``not 18``, ``18 and a half``).

    >>> parse_words_next_to_number("", "cm^2").unit, parse_words_next_to_number("", "million dollars").times
    ('length^2', 1000000)
    >>> sorted(parse_words_next_to_number("She has", "red apples").nouns), parse_words_next_to_number("not", "")
    (['apple', 'red'], None)
    """
    words = _words(before) + _words(after)
    if any(word.casefold() in _ALTERS or word.casefold().endswith("n't") for word in words):
        return None
    times = 1
    after = after.strip(" ,;:.-")
    while (first := re.match(r"[A-Za-z]+", after)) and _singular(first[0].casefold()) in TIMES:
        times *= TIMES[_singular(first[0].casefold())]
        after = after[first.end() :].removeprefix(" of ").strip(" ,;:.-")
    unit, size, rest = _unit(after)
    if not unit and before.strip():
        last = before.split()[-1]
        if last in "$€£¥₹":
            unit, size, before = *UNITS[last], before.rstrip()[: -len(last)]
    nouns = {_singular(word.casefold()) for word in _words(rest)} - _SILENT
    return WordsNextToNumber(unit, size, times, frozenset(nouns))


def _unit(text: str) -> tuple[str, Fraction, str]:
    """The unit at the beginning of a text: (what it measures, its size, the rest of the text)."""
    found = re.match(
        r"(?:(square|sq\.?|cubic|cu\.?)\s+)?([A-Za-z]+|[¢€£¥₹$])\.?(?:\s*\^?\s*\{?\s*([23])\s*\}?)?"
        r"(?:\s*(?:/|per)\s*(?:an?\s+)?([A-Za-z]+))?",
        text,
    )
    if found is None or (known := _known(found[2])) is None:
        return "", Fraction(1), text
    if found[2] == "in" and text[found.end() :].strip(" .,;"):  # "18 in all"
        return "", Fraction(1), text
    what, size = known
    power = int(found[3] or {"s": 2, "c": 3}.get((found[1] or " ")[0], 1))
    unit, size = (f"{what}^{power}" if power > 1 else what), size**power
    if found[4]:
        what, lower = _known(found[4]) or (_singular(found[4].casefold()), Fraction(1))
        unit, size = f"{unit}/{what}", size / lower
    return unit, size, text[found.end() :]


def _known(word: str) -> tuple[str, Fraction] | None:
    if word in UNITS or len(word) < 3:
        return UNITS.get(word)
    word = word.casefold()
    return UNITS.get(word) or UNITS.get(_singular(word))


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)?", text)


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 3 else word
