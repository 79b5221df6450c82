"""The recipe scout as a language model. It gets the same record and changes as the scout without one, and the same gate judges its proposal.
The model's answer, which is untrusted, is read as a ``Proposal`` that changes the recipe.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from agents.core.proposal import QUALITY, Edit, Proposal, format_gain
from agents.core.untrusted import fold_to_one_line, quote_as_data
from agents.core.workbench import Workbench
from agents.core.yaml_edit import Scalar, change_recipe_value, flatten_recipe, format_yaml_value
from agents.loop import tools
from agents.loop.role import (
    AgentTask,
    DraftError,
    JsonObject,
    TargetError,
    make_known_names_hint,
    make_nearest_name_hint,
    parse_arguments,
    read_number,
    read_text,
)
from agents.recipe_scout import prompts
from agents.recipe_scout.changes import suggest_changes
from agents.recipe_scout.scout import AGENT, describe_refuting_result, find_rejected_directions
from agents.recipe_scout.training_record import TrainingRecord
from kernels.contract.message import Message
from trainer.contract.errors import RecipeError

MOST_PREDICTED = 1.0  # bits per byte; no record supports more
WORD = re.compile(r"[A-Za-z0-9_-]{1,40}")
MOST_IDEAS = 12


class RecipeScout:
    """The ``Role`` of the recipe scout, for the record of a trunk. ``asked``: a key that a person named, or ''."""

    name = AGENT
    system = prompts.SYSTEM
    tools: Sequence[JsonObject] = prompts.TOOLS

    def __init__(self, record: TrainingRecord, workbench: Workbench, asked: str = "") -> None:
        self.record, self.workbench, self.asked = record, workbench, asked

    def choose_task(self, rounds: int) -> AgentTask | str:
        """The recipe with its record. Raises: TargetError if ``asked`` is a key that may not be changed, or that no recipe has."""
        record = self.record
        keys = [key for key in flatten_recipe(record.recipe) if record.may_change(key)]
        if self.asked and self.asked not in keys:
            near = difflib.get_close_matches(self.asked, keys, n=1)
            raise TargetError(
                "recipe_scout.not_changeable",
                "target {target!r} is not a key of the recipe that may be changed. {hint}",
                target=self.asked,
                hint=make_nearest_name_hint(near[0]) if near else make_known_names_hint(keys),
            )
        if not keys:
            return Message(
                "recipe_scout.no_key", "The policy of the recipe gate does not allow any key of the recipe to change."
            )
        text = self.workbench.read(record.path)
        lines = len(text.splitlines())
        recipe = tools.describe_agent_written_lines(self.workbench, record.path, 1, lines) + quote_as_data(
            record.path, text, 40_000
        )
        evidence = "\n\n".join(
            (
                recipe,
                self.describe_training_record(),
                self.describe_suggested_changes(),
                self.describe_earlier_proposals(),
            )
        )
        about = Message(
            "recipe_scout.aim",
            "recipe {recipe} at step {step}: each time the number of trained tokens grows by a factor of e (2.72), the "
            "loss falls by {slope:.3f} bits per byte",
            recipe=record.recipe.name,
            step=record.step,
            slope=record.slope,
        )
        return AgentTask(prompts.make_task_message(record, keys, self.asked, evidence, rounds), about, {})

    def answer_tool_call(self, facts: JsonObject, tool: str, arguments: str) -> str:
        known: dict[str, Callable[..., str]] = {
            "list_files": lambda: tools.list_files(self.workbench),
            "read_file": partial(tools.read_file, self.workbench),
            "record": self.describe_training_record,
            "ideas": self.describe_suggested_changes,
            "earlier_proposals": self.describe_earlier_proposals,
        }
        return tools.answer_tool_call(known, tool, arguments)

    def make_proposal(self, facts: JsonObject, arguments: str, tried: Sequence[str]) -> Proposal:
        """Raises: DraftError."""
        return read_change(arguments, self.record, self.workbench.read(self.record.path), self.asked)

    def check_proposal(self, facts: JsonObject, draft: Proposal) -> str:
        """The problems that the stages scope and static find; '' if none."""
        return tools.quote_problems(self.workbench.check(draft.edits))

    def describe_training_record(self) -> str:
        return quote_as_data("record of the trunk", "\n".join(prompts.format_training_record(self.record)))

    def describe_suggested_changes(self) -> str:
        rate_tried = find_rejected_directions(
            self.record.recipe.optimizer.lr, self.workbench.list_earlier_proposals(f"{QUALITY}:optimizer.lr")
        )
        found = [c for c in suggest_changes(self.record, rate_tried) if self.record.may_change(c.key)][:MOST_IDEAS]
        words = [
            Message(
                "recipe_scout.idea",
                "{change}: predicted gain {gain}. The reason: {why}",
                change=c.title,
                gain=format_gain(f"{QUALITY}:{c.key}", c.gain),
                why=c.why,
            )
            for c in found
        ]
        return quote_as_data("ideas of simple rules", "\n".join(words) or "nothing")

    def describe_earlier_proposals(self) -> str:
        return tools.quote_earlier_proposals(self.workbench.list_earlier_proposals(f"{QUALITY}:"))


def read_change(arguments: str, record: TrainingRecord, recipe: str, required: str) -> Proposal:
    """The proposal that a call of ``propose`` makes. ``recipe``: the text to edit. ``required``: a key that must be changed, or ''.

    Raises: DraftError.
    """
    raw = parse_arguments(arguments)
    hypothesis = fold_to_one_line(read_text(raw, "hypothesis"), 2000)
    if not hypothesis:
        raise DraftError("recipe_scout.no_hypothesis", "hypothesis must not be empty.")
    gain = read_number(raw, "predicted_gain")
    if not record.least_gain <= gain <= MOST_PREDICTED:
        raise DraftError(
            "recipe_scout.gain_out_of_range",
            "predicted_gain is {gain:g} bits per byte. It must lie between {least:g} and {most:g}.",
            gain=gain,
            least=record.least_gain,
            most=MOST_PREDICTED,
        )
    before = flatten_recipe(record.recipe)
    new_values = _changes(raw.get("changes"), record)
    if required and required not in new_values:
        raise DraftError("recipe_scout.required_key", "One of the changed keys must be {key}.", key=required)
    new = recipe
    for key, value in new_values.items():
        try:
            new, made = change_recipe_value(new, key.split("."), value)
        except RecipeError as error:
            raise DraftError(
                "recipe_scout.wrong_value",
                "{key} cannot be {value}: {problem}",
                key=key,
                value=format_yaml_value(value),
                problem=fold_to_one_line(str(error), 300),
            ) from None
    after = flatten_recipe(made)
    if differing := {key for key in before | after if before.get(key) != after.get(key)} ^ set(new_values):
        raise DraftError(
            "recipe_scout.other_keys",
            "Each key that you name must get a new value, and no other key may change. These keys break the rule: {keys}.",
            keys=sorted(differing),
        )
    words_of_each = [
        f"{key} {format_yaml_value(before[key]) if key in before else 'unset'} → {format_yaml_value(value)}"
        for key, value in new_values.items()
    ]
    title = f"recipe {record.recipe.name}: {' and '.join(words_of_each)}{' together' if len(words_of_each) > 1 else ''}"
    words = Message(
        "recipe_scout.written_hypothesis",
        "{hypothesis} Prediction: in the gate's runs, the change lowers the loss on held-out documents by {gain:.4f} "
        "bits per byte (mean over domains, after each run's final anneal). {refuted}",
        hypothesis=hypothesis,
        gain=gain,
        refuted=describe_refuting_result(gain),
    )
    return Proposal(AGENT, f"{QUALITY}:{'+'.join(sorted(new_values))}", title, words, gain, (Edit(record.path, new),))


def _changes(raw: Any, record: TrainingRecord) -> dict[str, Scalar]:
    if not isinstance(raw, list) or not 1 <= len(raw) <= prompts.MOST_CHANGES:
        raise DraftError(
            "recipe_scout.no_changes", "changes must be a list of one to {most} changes.", most=prompts.MOST_CHANGES
        )
    found: dict[str, Scalar] = {}
    for count, change in enumerate(raw, 1):
        if not isinstance(change, dict):
            raise DraftError("recipe_scout.not_a_change", "change {number} is not an object.", number=count)
        key, value = read_text(change, "key", f"change {count}: "), change.get("value")
        if not record.may_change(key) or not all(WORD.fullmatch(part) for part in key.split(".")):
            raise DraftError(
                "recipe_scout.wrong_key",
                "change {number}: {key} is not a key that may be changed.",
                number=count,
                key=fold_to_one_line(ascii(key), 80),
            )
        if isinstance(value, str) and not WORD.fullmatch(value):
            raise DraftError(
                "recipe_scout.neither",
                "change {number}: the value of {key} is neither a number nor a word.",
                number=count,
                key=key,
            )
        found[key] = value if isinstance(value, str) else _plain(read_number(change, "value"))
    return found


def _plain(value: float) -> float | int:
    """A whole number becomes an int, because a model may write 8.0 for a count."""
    return int(value) if value == int(value) and abs(value) < 1e9 else value
