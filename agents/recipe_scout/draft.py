"""The model's answer as a ``Proposal`` that changes the recipe, or what is wrong with it."""

from __future__ import annotations

import re
from typing import Any

from agents.core.proposal import QUALITY, Edit, Proposal
from agents.core.untrusted import one_line
from agents.core.yaml_edit import Scalar, change_recipe, values, written
from agents.loop.role import DraftError, number, read_object, text
from agents.recipe_scout.course import Course
from agents.recipe_scout.prompts import MOST_CHANGES
from agents.recipe_scout.scout import AGENT
from trainer.contract.errors import RecipeError

MOST_PREDICTED = 1.0  # bits per byte; no record supports more
WORD = re.compile(r"[A-Za-z0-9_-]{1,40}")


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
