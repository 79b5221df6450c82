"""The items of a task: records with known keys, each checked, all of them before anything is measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from factory.core.errors import FactoryError
from factory.core.policy_file import StrictPolicy
from trainer.contract.strict import parse

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
Text = Annotated[str, Field(min_length=1, max_length=200_000)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class TaskError(FactoryError):
    """A task could not be measured: its file is wrong, or a number is missing. Nothing was recorded."""

    exit_code = 2


class TaskItem(StrictPolicy):
    """What every item has."""

    id: Name | int
    """Of the item, once in its file."""
    source: Name = ""
    """The document that it was made from: items of one source are right and wrong together, and count as one cluster. Default: the id."""

    @property
    def key(self) -> str:
        return str(self.id)

    @property
    def cluster(self) -> str:
        return self.source or self.key


class ChoiceItem(TaskItem):
    """A question with answers to choose from."""

    question: Text
    choices: Annotated[list[Text], Field(min_length=2, max_length=len(LETTERS))]
    answer: int | Name
    """The right choice: its place, from 0, its letter or its text."""

    @property
    def right(self) -> int:
        """The place of the right choice. Raises: ValueError when ``answer`` names none, or two."""
        if isinstance(self.answer, int):
            named = [self.answer] if 0 <= self.answer < len(self.choices) else []
        else:
            named = [at for at, choice in enumerate(self.choices) if choice == self.answer]
            if not named and len(self.answer) == 1 and self.answer in LETTERS[: len(self.choices)]:
                named = [LETTERS.index(self.answer)]
        if len(named) != 1:
            raise ValueError(f"answer {self.answer!r} names {'no' if not named else 'more than one'} choice")
        return named[0]


class MathsItem(TaskItem):
    """A question whose answer is a number or a short expression."""

    question: Text
    answer: Text | int | float
    """The last number after '####', in \\boxed{}, or the whole text."""


class CodeItem(TaskItem):
    """The beginning of a program, which the model goes on with, and its tests."""

    prompt: Text
    tests: Text
    """Python that is run after the program, and raises where it is wrong."""
    solution: Text | None = None
    """A right continuation: 'factory tasks check' holds the tests to it."""


KINDS: dict[str, type[TaskItem]] = {"multiple_choice": ChoiceItem, "maths": MathsItem, "code": CodeItem}


def read_records(kind: str, records: Sequence[Any], where: str) -> list[Any]:
    """The items of a file. Raises: TaskError naming the record and the key; a doubled id; an answer that is none."""
    items: list[Any] = []
    seen: dict[str, int] = {}
    for number, record in enumerate(records, 1):
        item = parse(KINDS[kind], record, f"{where}, record {number}", TaskError)
        if (first := seen.setdefault(item.key, number)) != number:
            raise TaskError(f"{where}: id {item.key!r} appears twice, in records {first} and {number}")
        if isinstance(item, ChoiceItem):
            if len(set(item.choices)) < len(item.choices):
                raise TaskError(f"{where}, record {number}: two of its choices are the same")
            try:
                item.right  # noqa: B018  (it raises)
            except ValueError as error:
                raise TaskError(f"{where}, record {number}: {error}") from None
        if isinstance(item, MathsItem) and (
            not str(item.answer).strip() or (isinstance(item.answer, float) and not math.isfinite(item.answer))
        ):
            raise TaskError(f"{where}, record {number}: it has no answer")
        items.append(item)
    return items
