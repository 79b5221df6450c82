"""The items of a task: records with known keys, each checked, all of them before anything is measured."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field

from factory.core.errors import FactoryError
from factory.core.policy_file import StrictPolicy
from factory.tasks.exact_answer import answer_of
from factory.tasks.reply import program_of
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
    subject: Name = ""
    """What it is about: examples are shown to items of their own subject, and the task's ``header`` can name it."""

    @property
    def key(self) -> str:
        return str(self.id)

    @property
    def cluster(self) -> str:
        return self.source or self.key

    @property
    def asks(self) -> tuple[str, ...]:
        """What is asked: two items that ask the same are one question."""
        raise NotImplementedError

    @property
    def gold(self) -> str:
        """The right answer, to be compared and shown."""
        raise NotImplementedError


Item = TypeVar("Item", bound=TaskItem)


def examples_for(item: TaskItem, examples: Sequence[Item], shots: int) -> Sequence[Item]:
    """The first ``shots`` examples of the item's subject, which are shown before it."""
    return [one for one in examples if one.subject == item.subject][:shots]


class ChoiceItem(TaskItem):
    """A question with answers to choose from."""

    question: Text
    choices: Annotated[list[Text], Field(min_length=2, max_length=len(LETTERS))]
    answer: int | Name
    """The right choice: its place, from 0, its letter or its text."""

    @property
    def ways(self) -> dict[str, int]:
        """By each way in which ``answer`` names one choice (place, letter, text), the choice's place."""
        found: dict[str, int] = {}
        said = str(self.answer)
        if isinstance(self.answer, int):
            if 0 <= self.answer < len(self.choices):
                found["place"] = self.answer
        elif len(said) == 1 and said in LETTERS[: len(self.choices)]:
            found["letter"] = LETTERS.index(said)
        if self.choices.count(said) == 1:
            found["text"] = self.choices.index(said)
        return found

    @property
    def right(self) -> int:
        """The place of the right choice: a number is one, words are a text, or else a letter. Raises: ValueError when it names none, or two."""
        if isinstance(self.answer, str) and self.choices.count(self.answer) > 1:
            raise ValueError(f"answer {self.answer!r} names more than one choice")
        for way in ("place",) if isinstance(self.answer, int) else ("text", "letter"):
            if way in self.ways:
                return self.ways[way]
        raise ValueError(f"answer {self.answer!r} names no choice")

    @property
    def asks(self) -> tuple[str, ...]:
        return (self.question, *self.choices)

    @property
    def gold(self) -> str:
        return self.choices[self.right]


class MathsItem(TaskItem):
    """A question whose answer is a number or a short expression."""

    question: Text
    answer: Text | int | float
    """The last number after '####', in \\boxed{}, or the whole text."""

    @property
    def asks(self) -> tuple[str, ...]:
        return (self.question,)

    @property
    def gold(self) -> str:
        return str(self.answer)


class CodeItem(TaskItem):
    """The beginning of a program, which the model goes on with, and its tests."""

    prompt: Text
    tests: Text
    """Python that is run after the program, and raises where it is wrong."""
    solution: Text | None = None
    """A right continuation: 'factory tasks check' holds the tests to it."""
    begins: str | None = None
    """What the program begins with, before what the model wrote. Default: the prompt, which is code then."""
    libraries: list[Name] = []
    """What the tests and the solution import beside the standard library."""

    @property
    def asks(self) -> tuple[str, ...]:
        return (self.prompt, self.tests)

    @property
    def gold(self) -> str:
        return self.tests  # programs that pass them are right, whatever their text

    def program(self, written: str) -> str:
        """The program that a model's continuation makes, or the one that stands in its fences."""
        return program_of(self.prompt if self.begins is None else self.begins, written)


KINDS: dict[str, type[TaskItem]] = {"multiple_choice": ChoiceItem, "maths": MathsItem, "code": CodeItem}


def read_records(kind: str, records: Sequence[Any], where: str) -> list[Any]:
    """The items of a file. Raises: TaskError naming the record and the key; a doubled id or item; an answer or tests that are none."""
    items: list[Any] = []
    asked: dict[tuple[str, ...], int] = {}
    for number, item in _parsed(kind, enumerate(records, 1), where, doubled_choices=False):
        first = asked.setdefault(item.asks, number)
        if first != number:
            _refuse_doubled(items[first - 1], item, f"{where}: records {first} and {number} ask the same")
        items.append(item)
    return items


def _parsed(
    kind: str, records: Iterable[tuple[int, Any]], where: str, doubled_choices: bool
) -> Iterator[tuple[int, Any]]:
    """Each numbered record as an item. Raises: TaskError for one that is none, or whose id is there already."""
    ids: dict[str, int] = {}
    for number, record in records:
        item = parse(KINDS[kind], record, f"{where}, record {number}", TaskError)
        if (first := ids.setdefault(item.key, number)) != number:
            raise TaskError(f"{where}: id {item.key!r} appears twice, in records {first} and {number}")
        if words := _fault(item, doubled_choices):
            raise TaskError(f"{where}, record {number}: {words}")
        yield number, item


def read_published(
    kind: str, records: Sequence[tuple[int, Any]], where: str, doubled_choices: bool
) -> tuple[list[Any], list[str]]:
    """(the items of a published file, what is to be said of them), from (number of the record, the record as ours).

    What such a file asks twice is measured twice, so that scores compare with those of others, and counts as one for errors. In letter format
    ``doubled_choices`` harm nothing. Raises: TaskError as ``read_records``.
    """
    items: list[Any] = []
    asked: dict[tuple[str, ...], Any] = {}
    again: list[str] = []
    for _, item in _parsed(kind, records, where, doubled_choices):
        other = asked.setdefault(item.asks, item)
        if other is not item:
            two = "" if other.gold == item.gold else ", with another answer"
            again.append(f"{item.key!r} asks what {other.key!r} does{two}")
            item = item.model_copy(update={"source": other.cluster})
        items.append(item)
    more = f", and {len(again) - 1} more" if len(again) > 1 else ""
    return items, [f"item {again[0]}{more}: they count as one"] if again else []


def _refuse_doubled(first: TaskItem, second: TaskItem, where: str) -> None:
    if first.gold != second.gold:
        said = f"{first.gold[:60]!r} and {second.gold[:60]!r}"
        raise TaskError(f"{where} and have two answers, {said}: remove the one that is wrong")
    if first.cluster != second.cluster:
        raise TaskError(f"{where}: remove one, or give both one 'source', so that they count as one")


def _fault(item: TaskItem, doubled_choices: bool) -> str:
    """Why an item with all its keys is none; '': it is one."""
    if isinstance(item, CodeItem):
        return _no_tests(item.tests)
    if isinstance(item, ChoiceItem | MathsItem) and not item.question.strip():
        return "it has no question"
    if isinstance(item, ChoiceItem):
        if not all(choice.strip() for choice in item.choices):
            return "a choice is blank"
        if len(set(item.choices)) < len(item.choices) and not doubled_choices:
            return "two of its choices are the same"
        try:
            item.right  # noqa: B018  (it raises)
        except ValueError as error:
            return str(error)
    if isinstance(item, MathsItem):
        said = str(item.answer)
        none = not said.strip() or (isinstance(item.answer, float) and not math.isfinite(item.answer))
        if none or ("####" in said and not answer_of(said)):
            return "it has no answer"
    return ""


def _no_tests(tests: str) -> str:
    """Why every program, or none, would pass; '': neither."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of the tests' own escapes
            if not ast.parse(tests).body:
                return "its tests test nothing: every program would pass"
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"its tests are no Python, so no program would pass: {str(error)[:100]}"
    return ""
