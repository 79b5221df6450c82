"""Parses an answer in mathematics: a number, a tuple, interval, set or list, a ratio, words, or a formula.

Every form except a formula is compared here, exactly. A library compares formulas in the sandbox (``verifiers``).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from factory.tasks.number_units import NOTHING, UNITS, WordsNextToNumber, parse_words_next_to_number

LONGEST = 200  # most characters of an answer
LARGEST_POWER = 1000  # largest power of ten that is computed
MOST_ITEMS = 30  # most items of a list


@dataclass(frozen=True)
class NumberValue:
    """A number as written: ``60%`` is 60 with ``percent``, and ``5 cm`` is 5 with a unit."""

    figure: Fraction
    percent: bool = False
    number_words: WordsNextToNumber = NOTHING

    @property
    def value(self) -> Fraction:
        return self.figure / 100 if self.percent else self.figure


@dataclass(frozen=True)
class MultiValueAnswer:
    """Several values. ``form``: the brackets; ``{}`` for a set or a list without brackets (order does not count); ``∪`` for a union."""

    form: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class AssignedValue:
    """A value with its name: ``x = 5``."""

    name: str
    value: Value


@dataclass(frozen=True)
class LiteralText:
    """A text that equals only itself: words, ratios, dates, numbers with a base."""

    text: str


@dataclass(frozen=True)
class Formula:
    """A formula as TeX without decimals, for the library."""

    tex: str


Value = NumberValue | MultiValueAnswer | AssignedValue | LiteralText | Formula
Library = Callable[[str, str], bool]  # (gold, said), in TeX: are the formulas equal?

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)"
_FRAC = r"\\frac\{\s*(-?[\d.]+)\s*\}\{\s*(-?[\d.]+)\s*\}"
_POWER = r"10\s*\^\s*(?:\{\s*([-+]?\d{1,5})\s*\}|([-+]?\d{1,5}))"
# A number among words. Groups: sign · fraction · mixed · quotient · power of ten · decimal · percent
_NUMBER = re.compile(
    rf"(?:(?P<sign>[-+])\s*)?(?:(?P<money>[$€£¥₹])\s*)?(?P<inner>[-+]?)(?:"
    rf"(?P<frac>{_FRAC})"
    rf"|(?P<mixed>(\d+)\s*{_FRAC}|(\d+)(?:\s+and)?\s+(\d+)\s*/\s*(\d+))"
    rf"|(?P<times>({_DECIMAL})\s*(?:\\times|\\cdot|\*|x)\s*{_POWER}|{_POWER}|({_DECIMAL})[eE]([-+]?\d{{1,5}}))"
    rf"|(?P<quotient>({_DECIMAL})\s*/\s*({_DECIMAL}))"
    rf"|(?P<decimal>{_DECIMAL}))(?:\s*(?P<percent>%))?"
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SIGNS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "∪": r"\cup ",
    "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "√": r"\sqrt ", "÷": "/", "\u00a0": " ", "，": ", ",
}  # fmt: skip
_BLANKS = r"(?:\{,\}\\?!?|,\\!|\\,|\\!|\\ |[\u2009\u202f])"  # between thousands, in TeX and in print
_PROSE = {  # words of two letters, which are not products of two variables
    "am", "an", "as", "at", "be", "by", "do", "go", "he", "if", "in", "is", "it", "me", "my", "no", "of", "on", "or", "so", "to", "up",
    "us", "we",
}  # fmt: skip
_FUNCTIONS = [
    "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "pi", "max",
    "min", "gcd", "lcm",
]  # fmt: skip


def parse_answer(text: str) -> Value | None:
    """The value of an answer. None: the answer is empty.

    >>> (parse_answer(r"1\\frac12").figure, parse_answer("1{,}200").figure, parse_answer("(1,200)").form,
    ...  parse_answer("60 percent").percent, parse_answer("not 18"))
    (Fraction(3, 2), Fraction(1200, 1), '()', True, LiteralText(text='not 18'))
    """
    if len(text) > 4 * LONGEST or len(plain := _plain(text)) > 2 * LONGEST:
        return LiteralText(text.strip())
    return _read(plain, 0) if plain else None


def is_same_value(gold: Value, said: Value, library: Library) -> bool:
    """Is the value ``said`` the right answer ``gold``?"""
    if isinstance(gold, AssignedValue) and isinstance(said, AssignedValue):
        return gold.name == said.name and is_same_value(gold.value, said.value, library)
    if _is_equation(gold) or _is_equation(said):  # x + y = 5 is y = 5 - x
        gold, said = _equation(gold), _equation(said)
    if isinstance(said, AssignedValue):
        return is_same_value(gold, said.value, library)
    if isinstance(gold, AssignedValue):  # "5" is x = 5; "2x + 1" is not the line y = 2x + 1
        return not isinstance(gold.value, Formula) and is_same_value(gold.value, said, library)
    if isinstance(gold, MultiValueAnswer) or isinstance(said, MultiValueAnswer):
        return _same_items(gold, said, library)
    if isinstance(gold, NumberValue):
        return isinstance(said, NumberValue) and _same_number(gold, said)
    if isinstance(gold, Formula) and isinstance(said, Formula | NumberValue):
        if isinstance(said, NumberValue) and said.number_words.unit:
            return False
        ours, theirs = _tex(gold), _tex(said)
        return ours.replace(" ", "") == theirs.replace(" ", "") or library(ours, theirs)
    return (
        isinstance(said, LiteralText) and isinstance(gold, LiteralText) and _letters(gold.text) == _letters(said.text)
    )


def is_nonmathematical_text(value: Value | None) -> bool:
    """Is it a text with letters that has no mathematical form?"""
    return isinstance(value, LiteralText) and any(letter.isalpha() for letter in value.text)


def _same_number(gold: NumberValue, said: NumberValue) -> bool:
    one, other = gold.number_words, said.number_words
    if one.unit and other.unit:
        if one.unit != other.unit:
            return False
        return gold.value * one.size * one.times == said.value * other.size * other.times
    if one.nouns and other.nouns and not one.nouns & other.nouns:
        return False
    if (one.unit and other.nouns) or (other.unit and one.nouns):
        return False
    if gold.value * one.times == said.value * other.times:
        return True
    # "60 %" counts for 60, and 60 for "60 %". Below 1 the meaning would be ambiguous.
    return gold.percent != said.percent and abs(gold.figure) >= 1 and gold.figure == said.figure


def _same_items(gold: Value, said: Value, library: Library) -> bool:
    ours = gold if isinstance(gold, MultiValueAnswer) else MultiValueAnswer("{}", (gold,))
    theirs = said if isinstance(said, MultiValueAnswer) else MultiValueAnswer("{}", (said,))
    if ours.form != theirs.form or len(ours.values) != len(theirs.values):
        return False
    if ours.form not in ("{}", "∪"):
        found = [is_same_value(one, other, library) for one, other in zip(ours.values, theirs.values)]
        return all(found)
    equal = [[is_same_value(one, other, library) for other in theirs.values] for one in ours.values]
    return _matched(equal)


def _matched(equal: list[list[bool]]) -> bool:
    """Can every row be matched with a different column that is true? (Augmenting paths, Kuhn 1955.)"""
    row_of: dict[int, int] = {}

    def place(row: int, seen: set[int]) -> bool:
        for column, fits in enumerate(equal[row]):
            if fits and column not in seen:
                seen.add(column)
                if column not in row_of or place(row_of[column], seen):
                    row_of[column] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(equal)))


def _is_equation(value: Value) -> bool:
    return isinstance(value, Formula) and re.search(r"[=<>]|\\[lg]e", value.tex) is not None


def _equation(value: Value) -> Value:
    named = isinstance(value, AssignedValue) and isinstance(value.value, Formula | NumberValue)
    return Formula(f"{value.name}={_tex(value.value)}") if isinstance(value, AssignedValue) and named else value


def _tex(value: Value) -> str:
    if isinstance(value, Formula):
        return value.tex
    if isinstance(value, NumberValue):
        exact = value.value * value.number_words.times
        return str(exact) if exact.denominator == 1 else rf"\frac{{{exact.numerator}}}{{{exact.denominator}}}"
    return ""


def _letters(text: str) -> str:
    """Words for comparison: without blanks and case. The case of a single letter counts, because it is a name."""
    text = re.sub(r"\s+", "", text)
    return text if len(text) == 1 else text.casefold()


# -- reading -----------------------------------------------------------------------------------------------------------
def _plain(text: str) -> str:
    """Normalise TeX, Markdown and Unicode to one notation. ``\\text{…}`` becomes «…»."""
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda found: f"^{{{found[0].translate(_SUPERSCRIPTS)}}}", text)
    text = "".join(_vulgar(letter) for letter in text)
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    text = re.sub(rf"(?<![\d.])\d{{1,3}}(?:{_BLANKS}\d{{3}})+(?!\d)", lambda found: re.sub(r"\D", "", found[0]), text)
    text = unicodedata.normalize("NFKC", text)
    text = (
        re.sub(r"\*\*|__|`|\\displaystyle|\\(?:left|right|[Bb]igg?[lr]?)(?![a-zA-Z])", "", text)
        .strip()
        .strip("*_\"'“”")
    )
    text = re.sub(r"\\\[|\\\]|\\\(|\\\)|\$\$", "", text)
    text = re.sub(r"(?<!\\)\$(?=\S)([^$]*[^$\s\\])\$(?!\d)", r"\1", text)  # $x$; "$5 and $6" is money
    text = text.replace(r"\$", "$").replace(r"\%", "%")
    text = re.sub(r"(?i)\bper\s?cent\b|\bpercent(?:age)?\b", "%", text)
    text = re.sub(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}", r"«\1»", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree", "« degrees»", text)
    text = re.sub(
        r"degrees»\s*(«?)\s*([CF])(?![a-z])",
        lambda f: f"degrees {'Celsius' if f[2] == 'C' else 'Fahrenheit'}»{f[1]}",
        text,
    )
    text = re.sub(r"\\[,;:! ]|\\q?quad(?![a-zA-Z])|~", " ", text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(
        r"\\frac\s*(\{[^{}]*\}|\d)\s*(\{[^{}]*\}|\d)",
        lambda f: rf"\frac{{{f[1].strip('{}')}}}{{{f[2].strip('{}')}}}",
        text,
    )
    text = re.sub(r"\s+", " ", text).strip().removeprefix("=").strip()
    return re.sub(r"(?<=[^.])[.,;:]+$", "", text).strip()


def _vulgar(letter: str) -> str:
    if "\u00bc" <= letter <= "\u00be" or "\u2150" <= letter <= "\u215e":  # ½: NFKC makes 11⁄2 of 1½
        return " " + unicodedata.normalize("NFKC", letter).replace("\u2044", "/")
    return letter


def _read(text: str, depth: int) -> Value:
    text = text.strip()
    if depth > 4:
        return LiteralText(text)
    while len(text) > 2 and _encloses(text, "{", "}"):
        text = text[1:-1].strip()  # a group of TeX
    if found := re.fullmatch(r"«?\(([A-Za-z])\)»?", text):
        return LiteralText(found[1])  # a choice
    inner = _bracketed(text, depth)
    if inner is not None:
        return inner
    if (named := _named(text, depth)) is not None:
        return named
    if (number := _number(text)) is not None:
        return number
    if re.fullmatch(r"\d+(?:\.\d+)?(?:\s*:\s*\d+(?:\.\d+)?)+|\d+(?:[/-]\d+){2,}|\d+(?:\.\d+){2,}|\w+_\{?\d+\}?", text):
        return LiteralText(re.sub(r"[\s{}]", "", text))  # a ratio, a date, a number with its base
    if (several := _several(text, depth)) is not None:
        return several
    return _formula(text)


def _bracketed(text: str, depth: int) -> Value | None:
    """The value of a text in brackets: ``(1, 2)``, ``[0, 1)``, ``\\{1, 2\\}``; ``(5)`` is 5. None: not in brackets."""
    parts = re.split(r"\s*\\cup(?![a-zA-Z])\s*", text)
    if 1 < len(parts) <= MOST_ITEMS:
        return MultiValueAnswer("∪", tuple(_read(part, depth + 1) for part in parts))
    if text in ("\\emptyset", "\\varnothing", "\\{\\}", "\\{ \\}", "{}"):
        return MultiValueAnswer("{}", ())
    if text.startswith("\\{") and text.endswith("\\}") and _whole(text[2:-2]):
        return MultiValueAnswer("{}", tuple(_read(part, depth + 1) for part in _split(text[2:-2])))
    if len(text) < 3 or text[0] not in "([" or text[-1] not in ")]" or not _whole(text[1:-1]):
        return None
    parts = _split(text[1:-1])
    if len(parts) == 1:
        return _read(text[1:-1], depth + 1) if text[0] == "(" and text[-1] == ")" else None
    return MultiValueAnswer(text[0] + text[-1], tuple(_read(part, depth + 1) for part in parts))


def _named(text: str, depth: int) -> Value | None:
    """The value of ``x = 5``, ``f(x) = x^2`` or ``x \\in [0, 1]``; for ``3 + 4 = 7`` the last side. None: not such a text."""
    if len(parts := re.split(r"(?<![<>!\\=])=(?!=)|\\in(?![a-zA-Z])", text)) < 2 or not all(
        part.strip() for part in parts
    ):
        return None
    if len(_split(text)) > 1 or re.search(r"[\s»](?:and|or)[\s«]", text):
        return None
    name = parts[0].strip().replace(" (", "(")
    if re.fullmatch(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([a-z]\))?'?|«[^«»]+»", name):
        value = _read(parts[-1], depth + 1)
        return (
            value
            if re.fullmatch(r"(?i)«?(?:the)?(?:final)?answer«?»?", name)
            else AssignedValue(name.strip("«»"), value)
        )
    if not re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", "".join(parts[:-1]))):
        return _read(parts[-1], depth + 1)
    return None


def _several(text: str, depth: int) -> Value | None:
    """The values of a list without brackets: ``1, 2 and 3``, ``x = 1 or x = 2``, ``\\pm 2``. None: not a list, or a part is prose."""
    if found := re.fullmatch(r"(?:\\pm|\+/?-)\s*([^,]+)", text):
        return MultiValueAnswer("{}", (_read(found[1], depth + 1), _read(f"-{found[1]}", depth + 1)))
    spaced = re.sub(r"«\s*(?:,?\s*)(and|or)\s*»", r" \1 ", text)
    parts = [part for one in _split(spaced) for part in re.split(r"(?:^|\s)(?:and|or)\s", f" {one} ") if part.strip()]
    if not 1 < len(parts) <= MOST_ITEMS:
        return None
    values = [_read(part, depth + 1) for part in parts]
    if any(is_nonmathematical_text(value) and len(part.split()) > 2 for value, part in zip(values, parts)):
        return None
    return MultiValueAnswer("{}", tuple(values))


def _number(text: str) -> NumberValue | None:
    """The only number of a text, with the words next to it. None: no number, or several."""
    text = re.sub(r"[«»]", " ", text)
    text = re.sub(r"(?i)(?<![a-z])(?:minus|negative)\s+(?=[\d.$])", "-", text)
    found = _NUMBER.search(text)
    if found is None:
        return None
    before, after = text[: found.start()], text[found.end() :]
    named = re.sub(r"([A-Za-z])\s*\^?\s*\{?[23]\}?(?!\d)", r"\1", after)  # cm^2
    if not _only_words(before) or not _only_words(named):
        return None
    # 2x and x2 are formulas, and so is 3m; 3 m has a unit; 3rd is a place.
    if re.match(r"(?:[A-Za-z]|st|nd|rd|th)(?![a-zA-Z])", after) or re.search(r"[A-Za-z]$", before):
        return None
    letters = re.findall(r"(?<![^\W\d_'’])[^\W\d_](?![^\W\d_'’])", before + " " + named)
    if any(letter not in "aAI" and letter not in UNITS for letter in letters):
        return None
    figure = _figure(found)
    if figure is None:
        return None
    words = parse_words_next_to_number(before + (" " + found["money"] if found["money"] else ""), after)
    if words is None:
        return None
    if found["sign"] and found["inner"]:
        return None
    if "-" in (found["sign"], found["inner"]):
        figure = -figure
    return NumberValue(figure, bool(found["percent"]), words)


def _only_words(text: str) -> bool:
    """Is a text prose and not mathematics: only words, blanks, punctuation, and a bar between units?"""
    return re.fullmatch(r"(?:[^\W\d_]|[\s,;:.'’/¢-]|[$€£¥₹](?=\s*$))*", text) is not None and not re.search(
        r"(?<![^\W\d_])-|-(?![^\W\d_])", text
    )


def _figure(found: re.Match[str]) -> Fraction | None:
    """The figure of a match of ``_NUMBER``, without its sign."""
    if text := found["frac"]:
        above, below = re.fullmatch(_FRAC, text).groups()  # type: ignore[union-attr]
        return _ratio(above, below)
    if text := found["mixed"]:
        whole, above, below = re.findall(r"-?[\d.]+", text.replace("frac", ""))
        part = _ratio(above, below)
        return Fraction(whole) + part if part is not None and 0 <= part < 1 else None
    if text := found["times"]:
        parts = re.fullmatch(
            rf"(?:({_DECIMAL})\s*(?:\\times|\\cdot|\*|x)\s*)?(?:{_POWER})|({_DECIMAL})[eE]([-+]?\d+)", text
        )
        assert parts is not None
        power = int(parts[2] or parts[3] or parts[5])
        ten = Fraction(10) ** power if abs(power) <= LARGEST_POWER else None
        return ten and _decimal(parts[1] or parts[4] or "1") * ten
    if text := found["quotient"]:
        return _ratio(*re.split(r"\s*/\s*", text))
    return _decimal(found["decimal"])


def _decimal(text: str) -> Fraction:
    text = text.replace(",", "")
    return Fraction(f"{text}0" if text.endswith(".") else text)


def _ratio(above: str, below: str) -> Fraction | None:
    if above.count(".") > 1 or below.count(".") > 1 or not re.search(r"\d", above) or not re.search(r"[1-9]", below):
        return None
    return _decimal(above) / _decimal(below)


def _formula(text: str) -> Value:
    """A formula in TeX for the library, without decimals and with braces around exponents; or a ``LiteralText`` if the text is not a formula."""
    text = (
        re.sub(r"«[^«»]*»\s*$", "", text)
        if re.search(r"[^\s«»].*«[^«»]*»\s*$", text) and not re.match(r"\s*«", text)
        else text
    )
    bare = re.sub(r"\\[a-zA-Z]+", " ", text)
    words = [word for word in re.findall(r"[^\W\d_]+", bare) if len(word) > 1]
    unknown = [
        word
        for word in words
        if word not in _FUNCTIONS
        and (len(word) > 2 or word.casefold() in _PROSE or not re.search(r"[\d+*/^=<>\\(-]", text))
    ]
    several = re.search(r"\d\s+\d", text) or re.fullmatch(r"[A-Za-z]", text)  # "1 200" is no product
    strange = re.search(r"[^\w\s+*/^=<>()\[\]{}|!.,'\\&:-]|\\f?boxed", text)
    if "«" in text or unknown or several or strange or not re.search(r"[\w\\]", bare + ("\\" if "\\" in text else "")):
        return LiteralText(re.sub(r"[«»]", "", text).strip())
    text = re.sub(r"\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(rf"(?<![\\a-zA-Z])({'|'.join(_FUNCTIONS)})(?![a-zA-Z])", r"\\\1 ", text)
    text = re.sub(r"\^\s*(-?\d{2,}|-\d)", r"^{\1}", text).replace("**", "^").replace("*", r"\cdot ")
    text = re.sub(r"(?<!\d)(\d+)\.(\d+)|(?<![\d.])\.(\d+)", _exact, text)
    return Formula(text.strip().removeprefix("+"))


def _exact(found: re.Match[str]) -> str:
    whole, part = found[1] or "", found[2] or found[3]
    return rf"\frac{{{int(whole + part)}}}{{{10 ** len(part)}}}"


def _encloses(text: str, opens: str, closes: str) -> bool:
    return text.startswith(opens) and text.endswith(closes) and _whole(text[1:-1])


def _whole(text: str) -> bool:
    """Are the brackets of a text balanced? An interval may close with another kind of bracket."""
    depth = 0
    for letter in re.sub(r"\\[{}]", "", text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _split(text: str) -> list[str]:
    """The parts of a text between commas or semicolons outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter in ",;" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts] if all(part.strip() for part in parts) else [text]
