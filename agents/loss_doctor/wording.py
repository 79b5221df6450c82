"""A language model words a diagnosis: sentences, each with the arm or fact of the record that it rests on. It decides nothing.

What contradicts the record is dropped and counted. The check is of names, outcomes, numbers and causes, not of meaning, so that whoever
shows a claim shows beside it what the record itself says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agents.core.untrusted import one_line, quoted
from agents.llm.client import Client
from agents.loop.role import DraftError, read_object, text
from agents.loop.tools import TEXT, tool
from agents.loss_doctor.causes import TABLE
from agents.loss_doctor.prompts import MOST_CHARS, MOST_CLAIMS, SYSTEM

AGENT = "loss-doctor"
EXPLAIN = "explain"
READ = 4 * MOST_CLAIMS  # claims of one answer that are read at all
CLAIM = {
    "type": "object",
    "properties": {"says": TEXT, "rests_on": TEXT, "shows": TEXT},
    "required": ["says", "rests_on", "shows"],
}
TOOLS = (tool(EXPLAIN, "Explain the diagnosis.", ("claims",), claims={"type": "array", "items": CLAIM}),)

CAUSES = sorted({cause for _, causes, _ in TABLE for cause in causes})
PLAIN = re.compile(r"[\w\s.,;:()'’“”\"%×+–—=-]+")  # no markup, no address, no shell
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
COUNTS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
GONE = r"gone|clears|cleared|disappear\w*|vanish\w*|absent|fixes|fixed|cures|cured|removes|removed|resolves|resolved"
THERE = r"(?:is|was|be) there|still there|stays|stayed|remain\w*|persist\w*|recur\w*|reappear\w*|unchanged|fires|fired"
NEGATED = r"\b(?:(?:not|no|never|nothing|none|neither|cannot|\w+n['’]t)\W+(?:\w+\W+){0,3})?"
OUTCOME = re.compile(rf"(?P<negation>{NEGATED})\b(?:(?P<gone>{GONE})|(?P<there>{THERE}))\b", re.IGNORECASE)


@dataclass(frozen=True)
class ArmShown:
    """What the record says of an arm: ``there``, ``gone``, ``unclear`` or ``not run``."""

    shows: str
    steps: int = 0  # replayed


@dataclass(frozen=True)
class DiagnosisFacts:
    """All that the model gets, and all that a claim may rest on. Each value of ``facts`` is one bounded line."""

    causes: tuple[str, ...]  # as the table named them
    facts: Mapping[str, str]
    arms: Mapping[str, ArmShown]
    documents: tuple[tuple[str, str], ...] = ()  # name and the beginning of the text: a claim cannot rest on one

    def about(self, name: str) -> tuple[str, str] | None:
        """What the record says of an arm or a fact, and all words that a sentence may take numbers from; None: it has none of that name.

        >>> DiagnosisFacts(("rate",), {"steps": "7 to 9"}, {"fp32": ArmShown("there", 4)}).about("fp32")
        ('there', 'fp32: it is there; 4 steps')
        """
        if arm := self.arms.get(name):
            return arm.shows, f"{name}: it is {arm.shows}; {arm.steps} steps"
        return (self.facts[name], f"{name} {self.facts[name]}") if name in self.facts else None


@dataclass(frozen=True)
class Claim:
    """A sentence of the model's, and what the record says of the arm or fact that it rests on."""

    says: str
    rests_on: str
    shows: str


@dataclass(frozen=True)
class Wording:
    """``dropped``: why, one line for each claim that is not shown."""

    claims: tuple[Claim, ...] = ()
    dropped: tuple[str, ...] = ()


def word(client: Client, label: str, facts: DiagnosisFacts) -> Wording:
    """One exchange. Raises: LlmError where there is no answer; DraftError for one that cannot be read."""
    reply = client.ask(label, [{"role": "system", "content": SYSTEM}, {"role": "user", "content": _told(facts)}], TOOLS)
    called = [call.arguments for call in reply.tool_calls if call.name == EXPLAIN]
    return read_wording(called[0] if called else reply.text, facts)


def read_wording(arguments: str, facts: DiagnosisFacts) -> Wording:
    """The claims of an answer that hold, in its order. Whatever else it holds is not read. Raises: DraftError.

    >>> import json
    >>> facts = DiagnosisFacts(("rate",), {"kind": "loss_spike"}, {"fp32": ArmShown("there")})
    >>> true = {"says": "It stays in fp32.", "rests_on": "fp32", "shows": "there"}
    >>> found = read_wording(json.dumps({"claims": [true, {"says": "It is the disk.", "rests_on": "me", "shows": "gone"}]}), facts)
    >>> found.claims, found.dropped
    ((Claim(says='It stays in fp32.', rests_on='fp32', shows='there'),), ('it rests on nothing that the record has',))
    """
    raw = read_object(arguments).get("claims")
    if not isinstance(raw, list):
        raise DraftError("claims is not a list")
    claims: list[Claim] = []
    dropped: list[str] = []
    for given in raw[:READ]:
        found = _claim(given, facts)
        if isinstance(found, Claim) and len(claims) < MOST_CLAIMS:
            claims.append(found)
        else:
            dropped.append(found if isinstance(found, str) else f"it comes after {MOST_CLAIMS} others")
    dropped += [f"it comes after {READ} others"] * len(raw[READ:])
    return Wording(tuple(claims), tuple(dropped))


def _claim(raw: object, facts: DiagnosisFacts) -> Claim | str:
    """A claim that holds, or why it is dropped. What is returned in words is the factory's own, never the model's."""
    if not isinstance(raw, dict):
        return "it is not an object"
    try:
        name, says, shown = (text(raw, key).strip() for key in ("rests_on", "says", "shows"))
    except DraftError as error:
        return str(error)
    if (known := facts.about(name)) is None:
        return "it rests on nothing that the record has"
    shows, words = known
    if _same(shown) != _same(shows):
        return f"it has another outcome of '{name}' than the record"
    if not says or len(says) > MOST_CHARS:
        return f"its sentence is empty, or longer than {MOST_CHARS} characters"
    says = one_line(says, MOST_CHARS)
    if not PLAIN.fullmatch(says):
        return "its sentence is not plain text"
    bare = _without(says, [name])
    if other := next((arm for arm in facts.arms if _names(bare, arm) and arm not in name), None):
        return f"its sentence names '{other}', and rests on '{name}'"
    if cause := next((cause for cause in CAUSES if cause not in facts.causes and _names(bare, cause)), None):
        return f"its sentence names the cause '{cause}', which the table did not"
    if not _outcomes(bare) <= _outcomes(words):
        return f"its sentence says another outcome than '{name}' had"
    if not all(_is_one_of(number, NUMBER.findall(words)) for number in _numbers(bare)):
        return f"its sentence has a number that '{name}' has not"
    return Claim(says, name, shows)


def _same(value: str) -> str:
    return " ".join(value.split()).casefold()


def _names(sentence: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", sentence, re.IGNORECASE) is not None


def _without(sentence: str, names: Sequence[str]) -> str:
    for name in names:
        sentence = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", " ", sentence, flags=re.IGNORECASE)
    return sentence


def _outcomes(sentence: str) -> set[str]:
    """Which outcomes a sentence states; a negation before one makes it the other.

    >>> sorted(_outcomes("It stays in bf16.")), sorted(_outcomes("It is not yet gone.")), sorted(_outcomes("Nothing clears it."))
    (['there'], ['there'], ['there'])
    """
    found = set()
    for match in OUTCOME.finditer(sentence):
        found.add("gone" if bool(match["gone"]) != bool(match["negation"]) else "there")
    return found


def _numbers(sentence: str) -> list[str]:
    """The numbers of a sentence; counts in words as digits.

    >>> _numbers("Two documents from step 118.")
    ['118', '2']
    """
    counted = [str(n) for n, count in enumerate(COUNTS, 2) if _names(sentence, count)]
    return NUMBER.findall(sentence) + counted


def _is_one_of(number: str, known: Sequence[str]) -> bool:
    """Is a number one of those, rounded to the digits that it has?

    >>> _is_one_of("9.3", ["9.284"]), _is_one_of("9.5", ["9.284"])
    (True, False)
    """
    digits = len(number.partition("e")[0].partition(".")[2])
    return any(float(number) == float(other) or float(number) == round(float(other), digits) for other in known)


def _told(facts: DiagnosisFacts) -> str:
    """The model's task, each part bounded and marked as data."""
    arms = "\n".join(f"{name}: {arm.shows}; {arm.steps} steps replayed" for name, arm in facts.arms.items())
    named = "\n".join(f"{name}: {value}" for name, value in facts.facts.items())
    parts = [quoted("facts", named), quoted("arms: what the anomaly is in each", arms or "none was replayed")]
    parts += [quoted(f"the beginning of a document, {name}", beginning, 1000) for name, beginning in facts.documents]
    others = ", ".join(cause for cause in CAUSES if cause not in facts.causes)
    parts.append(f"The cause is: {' or '.join(facts.causes)}. Causes that no sentence may name: {others}.")
    return "\n\n".join(parts)
