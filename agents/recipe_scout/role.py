"""The recipe scout as a language model: the same record, edits and gate as the scout without one. Its answer becomes a ``Proposal`` that changes the
recipe, or what is wrong with it. Everything in its instructions that comes from files or other people is marked as data.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from agents.core.proposal import QUALITY, Edit, Proposal, gain_words
from agents.core.untrusted import one_line, quoted
from agents.core.workbench import Workbench
from agents.core.yaml_edit import Scalar, change_recipe, values, written
from agents.loop import tools
from agents.loop.prompts import MATERIAL
from agents.loop.role import Aim, DraftError, JsonObject, TargetError, number, read_object, text
from agents.loop.tools import NUMBER, PROPOSE, READING, TEXT, tool
from agents.recipe_scout.changes import all_changes
from agents.recipe_scout.course import Course
from agents.recipe_scout.scout import AGENT, tried
from trainer.contract.errors import RecipeError

MOST_CHANGES = 3  # of one proposal: the effects of many changes cannot be separated

RULES = f"""You are the recipe scout of a factory that trains language models without ever stopping. You make the model learn more from the
same tokens by changing one value of its recipe, or up to {MOST_CHANGES} that belong together (such as the batch and the rate).

How you work: read the record of the trunk and what was tried before; then call `propose` once with the changed values, a hypothesis that
a measurement can refute, and the gain that you predict. When it is not valid you learn why, and may propose again, a few times.

How a change is judged, by measurements it cannot touch: from the trunk's last checkpoint the recipe as it is and as proposed are
trained on the same data, a pair of runs for each of several fresh seeds, each ended by an anneal to a rate of zero. Then held-out
documents are scored in bits per byte. The mean gain over domains must be shown with confidence, exceed what other seeds alone make,
cost no domain more than a margin, and neither memory nor tokens per second beyond a bound. Each further try on the same keys needs
more confidence: propose what you expect to work, not what might.

A change that only helps the first steps after it, or that trades one domain for another, will not be kept. Tokens trained on are what
counts, not steps: half the batch gets twice the steps."""
SYSTEM = f"{RULES}\n\n{MATERIAL}"


def task(course: Course, keys: Sequence[str], asked: str, evidence: str, rounds: int) -> str:
    """The first message: what may be changed, how long it is judged, and the evidence."""
    wanted = f"One of the changed keys must be {asked}.\n" if asked else ""
    return (
        f"Recipe: {course.path}, at step {course.step} of its trunk, after {course.tokens:.3g} positions. Each of the gate's runs has about "
        f"{course.judged_tokens:.3g} more. A mean gain below {course.least_gain:g} bits per byte is not kept: predict at least that.\n"
        f"{wanted}Keys that may be changed: {', '.join(keys)}.\nYou have {rounds} proposals.\n\n{evidence}"
    )


MOST_PREDICTED = 1.0  # bits per byte; no record supports more
WORD = re.compile(r"[A-Za-z0-9_-]{1,40}")
MOST_IDEAS = 12
CHANGE = {
    "type": "object",
    "properties": {"key": TEXT, "value": {"type": ["number", "string"]}},
    "required": ["key", "value"],
}
TOOLS = (
    *READING,
    tool("record", "The trunk's course: losses, gradients, anomalies, slopes."),
    tool("ideas", "Changes that simple rules suggest, with the gain that they predict."),
    tool("earlier_proposals", "Which changes were tried before, and why they were kept or not."),
    tool(
        PROPOSE,
        "Propose the change.",
        ("changes", "hypothesis", "predicted_gain"),
        changes={"type": "array", "items": CHANGE},
        hypothesis=TEXT | {"description": "what the record shows, what the change does to learning, what follows"},
        predicted_gain=NUMBER | {"description": "bits per byte on held-out documents, such as 0.01"},
    ),
)


class RecipeScout:
    """``agents.loop.role.Role`` over a trunk's course. ``asked``: a key that a person named, or ''."""

    name = AGENT
    system = SYSTEM
    tools: Sequence[JsonObject] = TOOLS

    def __init__(self, course: Course, workbench: Workbench, asked: str = "") -> None:
        self.course, self.workbench, self.asked = course, workbench, asked

    def aim(self, rounds: int) -> Aim | str:
        """Raises: TargetError for a key that may not be changed, or that no recipe has."""
        course = self.course
        keys = [key for key in values(course.recipe) if course.may_change(key)]
        if self.asked and self.asked not in keys:
            near = difflib.get_close_matches(self.asked, keys, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(keys)}"
            raise TargetError(f"target {self.asked!r} is not a key of the recipe that may be changed; {hint}")
        if not keys:
            return "the recipe gate allows no key of the recipe to be changed"
        text = self.workbench.read(course.path)
        lines = len(text.splitlines())
        recipe = tools.authors(self.workbench, course.path, 1, lines) + quoted(course.path, text, 40_000)
        evidence = "\n\n".join((recipe, self.record(), self.ideas(), self.earlier_proposals()))
        about = f"recipe {course.recipe.name} at step {course.step}, a loss that falls by {course.slope:.3f} bits per byte for e times the tokens"
        return Aim(task(course, keys, self.asked, evidence, rounds), about, {})

    def answer(self, facts: JsonObject, tool: str, arguments: str) -> str:
        known: dict[str, Callable[..., str]] = {
            "list_files": lambda: tools.list_files(self.workbench),
            "read_file": partial(tools.read_file, self.workbench),
            "record": self.record,
            "ideas": self.ideas,
            "earlier_proposals": self.earlier_proposals,
        }
        return tools.answered(known, tool, arguments)

    def draft(self, facts: JsonObject, arguments: str, tried: str) -> Proposal:
        """Raises: DraftError."""
        return read_change(arguments, self.course, self.workbench.read(self.course.path), self.asked)

    def check(self, facts: JsonObject, draft: Proposal) -> str:
        """Scope and static stage."""
        return tools.problems_of(self.workbench.check(draft.edits))

    def record(self) -> str:
        course = self.course
        slopes = ", ".join(f"{name} {slope:.3f}" for name, slope in course.domain_slopes.items())
        scale = f"{course.noise_scale:,.0f}" if course.noise_scale else "not measured"
        words = [
            f"bits per byte that the loss falls by for e times the tokens: {course.slope:.3f}; by domain: {slopes}",
            f"gradient noise scale: {scale} supervised tokens; a step has {course.supervised:,.0f}",
            f"{course.clipped:.0%} of the later steps were clipped; the z-loss is {course.z_share:.2%} of the loss",
            f"anomalies that a lower rate may avoid: {course.trouble}",
            *course.sample,
        ]
        return quoted("record of the trunk", "\n".join(words))

    def ideas(self) -> str:
        rate_tried = tried(self.course.recipe.optimizer.lr, self.workbench.history(f"{QUALITY}:optimizer.lr"))
        found = [c for c in all_changes(self.course, rate_tried) if self.course.may_change(c.key)][:MOST_IDEAS]
        words = [f"{c.words}: {gain_words(f'{QUALITY}:{c.key}', c.gain)}, because {c.why}" for c in found]
        return quoted("what simple rules suggest", "\n".join(words) or "nothing")

    def earlier_proposals(self) -> str:
        return tools.earlier(self.workbench.history(f"{QUALITY}:"))


def read_change(arguments: str, course: Course, recipe: str, required: str) -> Proposal:
    """The proposal of a call of ``propose``. ``recipe``: the text to edit; ``required``: a key that must be changed, or ''.

    Raises: DraftError.
    """
    raw = read_object(arguments)
    hypothesis = one_line(text(raw, "hypothesis"), 2000)
    if not hypothesis:
        raise DraftError("hypothesis must not be empty")
    gain = number(raw, "predicted_gain")
    if not course.least_gain <= gain <= MOST_PREDICTED:
        raise DraftError(
            f"predicted_gain is {gain:g} bits per byte; it lies between {course.least_gain:g} and {MOST_PREDICTED:g}"
        )
    before = values(course.recipe)
    new_values = _changes(raw.get("changes"), course)
    if required and required not in new_values:
        raise DraftError(f"one of the changed keys must be {required}")
    new = recipe
    for key, value in new_values.items():
        try:
            new, made = change_recipe(new, key.split("."), value)
        except RecipeError as error:
            raise DraftError(f"{key} cannot be {written(value)}: {one_line(str(error), 300)}") from None
    after = values(made)
    if differing := {key for key in before | after if before.get(key) != after.get(key)} ^ set(new_values):
        raise DraftError(f"the recipe has these values already, or others would change: {', '.join(sorted(differing))}")
    words_of_each = [
        f"{key} {written(before[key]) if key in before else 'unset'} → {written(value)}"
        for key, value in new_values.items()
    ]
    title = f"recipe {course.recipe.name}: {' and '.join(words_of_each)}{' together' if len(words_of_each) > 1 else ''}"
    words = (
        f"{hypothesis} Predicted: {gain:.4f} bits per byte better on held-out documents, the mean over domains, after the anneal that ends "
        f"each of the gate's runs. No gain beyond the noise of seeds, or a domain that gets worse, refutes the change; less than "
        f"{gain / 2:.4f} refutes the prediction."
    )
    return Proposal(AGENT, f"{QUALITY}:{'+'.join(sorted(new_values))}", title, words, gain, (Edit(course.path, new),))


def _changes(raw: Any, course: Course) -> dict[str, Scalar]:
    if not isinstance(raw, list) or not 1 <= len(raw) <= MOST_CHANGES:
        raise DraftError(f"changes is a list of one to {MOST_CHANGES} changes")
    found: dict[str, Scalar] = {}
    for count, change in enumerate(raw, 1):
        if not isinstance(change, dict):
            raise DraftError(f"change {count} is not an object")
        key, value = text(change, "key", f"change {count}: "), change.get("value")
        if not course.may_change(key) or not all(WORD.fullmatch(part) for part in key.split(".")):
            raise DraftError(f"change {count}: {one_line(ascii(key), 80)} is not a key that may be changed")
        if isinstance(value, str) and not WORD.fullmatch(value):
            raise DraftError(f"change {count}: the value of {key} is neither a number nor a word")
        found[key] = value if isinstance(value, str) else _plain(number(change, "value"))
    return found


def _plain(value: float) -> float | int:
    """A whole number as an int: a model may write 8.0 for a count."""
    return int(value) if value == int(value) and abs(value) < 1e9 else value
