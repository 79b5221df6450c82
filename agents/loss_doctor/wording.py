"""A language model explains a diagnosis in sentences. Each sentence names the arm or fact of the record that it rests on. The model decides nothing.

A claim that contradicts the record is dropped and counted. The check covers names, outcomes, numbers and causes, not meaning. Therefore a
claim is always shown beside the record's own words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agents.core.untrusted import fold_to_one_line
from agents.llm.client import LlmClient
from agents.loop.role import DraftError, parse_arguments, read_text
from agents.loop.tools import TEXT, make_tool
from agents.loss_doctor.causes import TABLE
from agents.loss_doctor.prompts import MOST_CHARS, MOST_CLAIMS, SYSTEM, make_task_message
from kernels.contract.message import Message

AGENT = "loss-doctor"
EXPLAIN = "explain"
READ = 4 * MOST_CLAIMS  # more claims of one answer are not read
CLAIM = {
    "type": "object",
    "properties": {"says": TEXT, "rests_on": TEXT, "shows": TEXT},
    "required": ["says", "rests_on", "shows"],
}
TOOLS = (make_tool(EXPLAIN, "Explain the diagnosis.", ("claims",), claims={"type": "array", "items": CLAIM}),)

CAUSES = sorted({cause for _, causes, _ in TABLE for cause in causes})
PLAIN = re.compile(r"[\w\s.,;:()'’“”\"%×+–—=-]+")  # no markup, no addresses, no shell commands
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
COUNTS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
GONE = r"gone|clears|cleared|disappear\w*|vanish\w*|absent|fixes|fixed|cures|cured|removes|removed|resolves|resolved"
THERE = r"(?:is|was|be) there|still there|stays|stayed|remain\w*|persist\w*|recur\w*|reappear\w*|unchanged|fires|fired"
NEGATED = r"\b(?:(?:not|no|never|nothing|none|neither|cannot|\w+n['’]t)\W+(?:\w+\W+){0,3})?"
OUTCOME = re.compile(rf"(?P<negation>{NEGATED})\b(?:(?P<gone>{GONE})|(?P<there>{THERE}))\b", re.IGNORECASE)


@dataclass(frozen=True)
class ArmResult:
    """An arm's outcome in the record: ``there``, ``gone``, ``unclear`` or ``not run``."""

    shows: str
    steps: int = 0  # replayed


@dataclass(frozen=True)
class DiagnosisFacts:
    """The record that the model gets, and that a claim may rest on. Each value of ``facts`` is one short line."""

    causes: tuple[str, ...]  # as the table named them
    facts: Mapping[str, str]
    arms: Mapping[str, ArmResult]
    documents: tuple[tuple[str, str], ...] = ()  # name and beginning of the text; a claim cannot rest on these

    def look_up_fact(self, name: str) -> tuple[str, str] | None:
        """The value of an arm or a fact, and the words from which a sentence may take numbers; None if the record has none of that name.

        >>> DiagnosisFacts(("rate",), {"steps": "7 to 9"}, {"fp32": ArmResult("there", 4)}).look_up_fact("fp32")
        ('there', 'fp32: it is there; 4 steps')
        """
        if arm := self.arms.get(name):
            return arm.shows, f"{name}: it is {arm.shows}; {arm.steps} steps"
        return (self.facts[name], f"{name} {self.facts[name]}") if name in self.facts else None


@dataclass(frozen=True)
class Claim:
    """A sentence of the model, and the record's value of the arm or fact that it rests on."""

    says: str
    rests_on: str
    shows: str


@dataclass(frozen=True)
class CheckedWording:
    """The claims that hold. ``dropped``: one reason for each claim that does not."""

    claims: tuple[Claim, ...] = ()
    dropped: tuple[str, ...] = ()


def ask_for_wording(client: LlmClient, label: str, facts: DiagnosisFacts) -> CheckedWording:
    """Ask the model once. Raises: LlmError if no answer came; DraftError if the answer cannot be read."""
    called = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": _task(facts)}]
    reply = client.ask(label, called, TOOLS)
    claims = [call.arguments for call in reply.tool_calls if call.name == EXPLAIN]
    return check_wording(claims[0] if claims else reply.text, facts)


def check_wording(arguments: str, facts: DiagnosisFacts) -> CheckedWording:
    """The claims of an answer that hold, in its order. The rest of the answer is not read. Raises: DraftError.

    >>> import json
    >>> facts = DiagnosisFacts(("rate",), {"kind": "loss_spike"}, {"fp32": ArmResult("there")})
    >>> true = {"says": "It stays in fp32.", "rests_on": "fp32", "shows": "there"}
    >>> found = check_wording(json.dumps({"claims": [true, {"says": "It is the disk.", "rests_on": "me", "shows": "gone"}]}), facts)
    >>> found.claims, found.dropped
    ((Claim(says='It stays in fp32.', rests_on='fp32', shows='there'),), ('the claim rests on an arm or a fact that the record does not have',))
    """
    raw = parse_arguments(arguments).get("claims")
    if not isinstance(raw, list):
        raise DraftError("loss_doctor.no_claims", "'claims' is not a list.")
    claims: list[Claim] = []
    dropped: list[str] = []
    for given in raw[:READ]:
        found = _claim(given, facts)
        if isinstance(found, Claim) and len(claims) < MOST_CLAIMS:
            claims.append(found)
        else:
            dropped.append(_beyond(MOST_CLAIMS) if isinstance(found, Claim) else found)
    dropped += [_beyond(READ)] * len(raw[READ:])
    return CheckedWording(tuple(claims), tuple(dropped))


def _claim(raw: object, facts: DiagnosisFacts) -> Claim | Message:
    """A claim that holds, or the reason to drop it. The reason is the factory's text, never the model's."""
    if not isinstance(raw, dict):
        return Message("loss_doctor.not_an_object", "the claim is not a JSON object")
    try:
        name, says, shown = (read_text(raw, key).strip() for key in ("rests_on", "says", "shows"))
    except DraftError as error:
        return Message.from_json(error.message)
    if (known := facts.look_up_fact(name)) is None:
        return Message(
            "loss_doctor.no_such_evidence", "the claim rests on an arm or a fact that the record does not have"
        )
    shows, words = known
    if _same(shown) != _same(shows):
        return Message("loss_doctor.other_value", "the claim's outcome of '{name}' differs from the record", name=name)
    if not says or len(says) > MOST_CHARS:
        return Message(
            "loss_doctor.wrong_length",
            "the claim's sentence is empty, or longer than {most} characters",
            most=MOST_CHARS,
        )
    says = fold_to_one_line(says, MOST_CHARS)
    if not PLAIN.fullmatch(says):
        return Message("loss_doctor.not_plain", "the claim's sentence is not plain text")
    bare = _without(says, [name])
    if other := next((arm for arm in facts.arms if _names(bare, arm) and arm not in name), None):
        return Message(
            "loss_doctor.other_arm",
            "the claim's sentence names '{other}', but the claim rests on '{name}'",
            other=other,
            name=name,
        )
    if cause := next((cause for cause in CAUSES if cause not in facts.causes and _names(bare, cause)), None):
        return Message(
            "loss_doctor.other_cause",
            "the claim's sentence names the cause '{cause}', which the diagnosis does not name",
            cause=cause,
        )
    if not _outcomes(bare) <= _outcomes(words):
        return Message(
            "loss_doctor.other_outcome",
            "the claim's sentence states another outcome than the record of '{name}'",
            name=name,
        )
    if not all(_is_one_of(number, NUMBER.findall(words)) for number in _numbers(bare)):
        return Message(
            "loss_doctor.other_number",
            "the claim's sentence has a number that the record of '{name}' does not have",
            name=name,
        )
    return Claim(says, name, shows)


def _beyond(most: int) -> Message:
    return Message(
        "loss_doctor.beyond", "the claim comes after the limit of {most} claims, so it is not used", most=most
    )


def _same(value: str) -> str:
    return " ".join(value.split()).casefold()


def _names(sentence: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", sentence, re.IGNORECASE) is not None


def _without(sentence: str, names: Sequence[str]) -> str:
    for name in names:
        sentence = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", " ", sentence, flags=re.IGNORECASE)
    return sentence


def _outcomes(sentence: str) -> set[str]:
    """The outcomes that a sentence states. A negation before an outcome makes it the other one.

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
    """True if a number is one of the known numbers, rounded to its own digits.

    >>> _is_one_of("9.3", ["9.284"]), _is_one_of("9.5", ["9.284"])
    (True, False)
    """
    digits = len(number.partition("e")[0].partition(".")[2])
    return any(float(number) == float(other) or float(number) == round(float(other), digits) for other in known)


def _task(facts: DiagnosisFacts) -> str:
    arms = "\n".join(f"{name}: {arm.shows}; {arm.steps} steps replayed" for name, arm in facts.arms.items())
    named = "\n".join(f"{name}: {value}" for name, value in facts.facts.items())
    others = [cause for cause in CAUSES if cause not in facts.causes]
    return make_task_message(facts.causes, others, named, arms, facts.documents)
