"""The items of a task: records with known keys. All of them are checked before anything is measured."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field

from factory.core.errors import FactoryError
from factory.core.policy_file import StrictPolicy
from factory.tasks.exact_answer import extract_answer
from factory.tasks.reply import extract_program
from kernels.contract.message import Message
from kernels.contract.strict import parse

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
Text = Annotated[str, Field(min_length=1, max_length=200_000)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class TaskError(FactoryError):
    """A task cannot be measured: its file is wrong, or a number is missing. Nothing was recorded."""

    exit_code = 2


def make_repeated_id_message(where: str, name: str, first: int, second: int) -> Message:
    """The message that two records of a file have the same id."""
    return Message(
        "items.repeated_id",
        "{file}: records {first} and {second} have the same id {id!r}",
        file=where,
        first=first,
        second=second,
        id=name,
    )


def make_unreadable_file_message(path: object, error: Exception) -> Message:
    """The message that a file of a task cannot be read."""
    return Message("items.unreadable", "{file} cannot be read: {reason}", file=str(path), reason=str(error))


class TaskItem(StrictPolicy):
    """The keys of every item."""

    id: Name | int
    """The item's id, unique in its file."""
    source: Name = ""
    """The document that the item was made from. Items of one source are often right or wrong together, so they count as one cluster.
    Default: the id."""
    subject: Name = ""
    """The item's subject. Examples are shown before items of their own subject, and the task's ``header`` can name the subject."""

    @property
    def key(self) -> str:
        return str(self.id)

    @property
    def cluster(self) -> str:
        return self.source or self.key

    @property
    def question_texts(self) -> tuple[str, ...]:
        """The texts of the question. Two items with the same texts are the same question."""
        raise NotImplementedError

    @property
    def right_answer(self) -> str:
        """The right answer, for comparison and for messages."""
        raise NotImplementedError


Item = TypeVar("Item", bound=TaskItem)


def select_examples(item: TaskItem, examples: Sequence[Item], shots: int) -> Sequence[Item]:
    """The examples before an item: the first ``shots`` of its subject."""
    return [one for one in examples if one.subject == item.subject][:shots]


class ChoiceItem(TaskItem):
    """A question with answers to choose from."""

    question: Text
    choices: Annotated[list[Text], Field(min_length=2, max_length=len(LETTERS))]
    answer: int | Name
    """The right choice: its place (from 0), its letter or its text."""

    @property
    def choice_indices_by_reading(self) -> dict[str, int]:
        """The place of the choice that ``answer`` names, for each reading of ``answer`` (place, letter, text) that names one choice."""
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
    def right_choice_index(self) -> int:
        """The place of the right choice. A number is a place. A text is the choice's text or else its letter.

        Raises: ValueError if the answer names no choice or several.
        """
        if isinstance(self.answer, str) and self.choices.count(self.answer) > 1:
            raise ValueError(f"answer {self.answer!r} names more than one choice")
        for way in ("place",) if isinstance(self.answer, int) else ("text", "letter"):
            if way in self.choice_indices_by_reading:
                return self.choice_indices_by_reading[way]
        raise ValueError(f"answer {self.answer!r} names no choice")

    @property
    def question_texts(self) -> tuple[str, ...]:
        return (self.question, *self.choices)

    @property
    def right_answer(self) -> str:
        return self.choices[self.right_choice_index]


class MathsItem(TaskItem):
    """A question whose answer is a number or a short expression."""

    question: Text
    answer: Text | int | float
    """The answer: after '####', in \\boxed{}, or the whole text."""

    @property
    def question_texts(self) -> tuple[str, ...]:
        return (self.question,)

    @property
    def right_answer(self) -> str:
        return str(self.answer)


class CodeItem(TaskItem):
    """The beginning of a program for the model to continue, and the program's tests."""

    prompt: Text
    tests: Text
    """Python code that runs after the program. It raises if the program is wrong."""
    solution: Text | None = None
    """A right continuation. 'factory tasks check' checks that it passes the tests."""
    begins: str | None = None
    """The program's text before the model's continuation. Default: the prompt, which must then be code."""
    libraries: list[Name] = []
    """The modules outside the standard library that tests and solution import."""

    @property
    def question_texts(self) -> tuple[str, ...]:
        return (self.prompt, self.tests)

    @property
    def right_answer(self) -> str:
        return self.tests  # every program that passes them is right

    def make_program_of_reply(self, reply: str) -> str:
        """The program of a model's reply: the prompt and its continuation, or the code in the reply's fences."""
        return extract_program(self.prompt if self.begins is None else self.begins, reply)


KINDS: dict[str, type[TaskItem]] = {"multiple_choice": ChoiceItem, "maths": MathsItem, "code": CodeItem}


def parse_items(kind: str, records: Sequence[Any], where: str) -> list[Any]:
    """The items of a file. Raises: TaskError naming the record and the key, for an invalid record or a repeated id or question."""
    items: list[Any] = []
    asked: dict[tuple[str, ...], int] = {}
    for number, item in _parsed(kind, enumerate(records, 1), where, allow_equal_choices=False):
        first = asked.setdefault(item.question_texts, number)
        if first != number:
            _refuse_doubled(items[first - 1], item, {"file": where, "first": first, "second": number})
        items.append(item)
    return items


def _parsed(
    kind: str, records: Iterable[tuple[int, Any]], where: str, allow_equal_choices: bool
) -> Iterator[tuple[int, Any]]:
    """Each numbered record as an item. Raises: TaskError for an invalid record or a repeated id."""
    ids: dict[str, int] = {}
    for number, record in records:
        item = parse(KINDS[kind], record, f"{where}, record {number}", TaskError)
        if (first := ids.setdefault(item.key, number)) != number:
            raise TaskError(make_repeated_id_message(where, item.key, first, number))
        if fault := _fault(item, allow_equal_choices):
            raise TaskError(
                "items.odd_record", "{file}, record {record}: {fault}", file=where, record=number, fault=fault
            )
        yield number, item


def parse_published_items(
    kind: str, records: Sequence[tuple[int, Any]], where: str, allow_equal_choices: bool
) -> tuple[list[Any], list[Message]]:
    """(the items of a published file, notes about them). ``records``: (number in the file, record in the factory's form).

    A repeated question stays in the file, so that scores compare with published scores, but its copies share a cluster. ``allow_equal_choices``
    allows equal choices, which do no harm in letter format. Raises: TaskError like ``parse_items``.
    """
    items: list[Any] = []
    asked: dict[tuple[str, ...], Any] = {}
    again: list[tuple[Any, Any]] = []
    for _, item in _parsed(kind, records, where, allow_equal_choices):
        other = asked.setdefault(item.question_texts, item)
        if other is not item:
            again.append((item, other))
            item = item.model_copy(update={"source": other.cluster})
        items.append(item)
    return items, [_repeated_note(again)] if again else []


def _repeated_note(again: Sequence[tuple[TaskItem, TaskItem]]) -> Message:
    item, other = again[0]
    data = {"count": len(again), "item": item.key, "other": other.key}
    if item.right_answer == other.right_answer:
        return Message(
            "items.repeated_question",
            "{count:,|question is|questions are} repeated. Copies of a question count as one question. First: "
            "item {item!r} repeats {other!r}",
            **data,
        )
    return Message(
        "items.repeated_with_other_answer",
        "{count:,|question is|questions are} repeated. Copies of a question count as one question. First: "
        "item {item!r} repeats {other!r} with another answer",
        **data,
    )


def _refuse_doubled(first: TaskItem, second: TaskItem, place: dict[str, Any]) -> None:
    if first.right_answer != second.right_answer:
        raise TaskError(
            "items.two_answers",
            "{file}: records {first} and {second} ask the same question but have two answers, {answers}. Remove the wrong record",
            **place, answers=[repr(one.right_answer[:60]) for one in (first, second)],
        )  # fmt: skip
    if first.cluster != second.cluster:
        raise TaskError(
            "items.same_question",
            "{file}: records {first} and {second} ask the same question. Remove one, or give both the same 'source', so that they count as one",
            **place,
        )


def _fault(item: TaskItem, allow_equal_choices: bool) -> Message | None:
    """Why an item that has all its keys is invalid. None: it is valid."""
    if isinstance(item, CodeItem):
        return _no_tests(item.tests)
    if isinstance(item, ChoiceItem | MathsItem) and not item.question.strip():
        return Message("items.no_question", "The question is empty")
    if isinstance(item, ChoiceItem):
        if not all(choice.strip() for choice in item.choices):
            return Message("items.blank_choice", "A choice is empty")
        if len(set(item.choices)) < len(item.choices) and not allow_equal_choices:
            return Message("items.same_choices", "Two choices are the same")
        try:
            item.right_choice_index  # noqa: B018  (it raises)
        except ValueError as error:
            return Message("items.odd_answer", "{reason}", reason=str(error))
    if isinstance(item, MathsItem):
        said = str(item.answer)
        none = not said.strip() or (isinstance(item.answer, float) and not math.isfinite(item.answer))
        if none or ("####" in said and not extract_answer(said)):
            return Message("items.no_answer", "The answer is missing")
    return None


def _no_tests(tests: str) -> Message | None:
    """Why tests would pass every program or no program. None: they are valid."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes in the tests
            if not ast.parse(tests).body:
                return make_empty_tests_message()
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Message(
            "items.odd_tests",
            "The tests are not valid Python, so no program would pass: {reason}",
            reason=str(error)[:100],
        )
    return None


def make_empty_tests_message() -> Message:
    """The message that every program passes the tests."""
    return Message("items.empty_tests", "The tests test nothing, so every program would pass")
