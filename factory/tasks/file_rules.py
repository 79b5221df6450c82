"""Rules for a whole file of items: all answers are read in the same way, and no tested item is also shown as an example."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from factory.tasks.items import ChoiceItem, TaskError, TaskItem

WAYS = {"place": "a place from 0", "letter": "a letter", "text": "the text of a choice"}


def replace_answers_with_choice_indices(items: Sequence[Any], where: str) -> list[Any]:
    """Return the items. In multiple choice, the place of the right choice replaces the answer as written. Each answer must name a choice.

    Raises: TaskError naming the first record whose answer needs another reading (place, letter, text) than the records before it, or whose
    answer names two different choices in two readings.
    """
    if not all(isinstance(item, ChoiceItem) for item in items):
        return list(items)
    common = set(WAYS)
    first = ""  # the possible readings of the answers so far, for a message
    for number, item in enumerate(items, 1):
        mine = item.choice_indices_by_reading
        if not common & set(mine):
            raise TaskError(
                "file_rules.mixed_answers",
                "{file}, record {record}: the answer {answer!r} is {way}, but earlier answers are {earlier}. Write all answers in the same way",
                file=where, record=number, answer=item.answer, way=_or(mine), earlier=first,
            )  # fmt: skip
        common &= set(mine)
        first = _or(common)
    for number, item in enumerate(items, 1):
        read = {way: place for way, place in item.choice_indices_by_reading.items() if way in common}
        if len(set(read.values())) > 1:
            raise TaskError(
                "file_rules.ambiguous_answer",
                "{file}, record {record}: the answer {answer!r} can mean several choices: {choices}. Write each "
                "answer so that it means one choice",
                file=where, record=number, answer=item.answer,
                choices=[f"{item.choices[place]!r} as {WAYS[way]}" for way, place in read.items()],
            )  # fmt: skip
    way = min(common, key=list(WAYS).index) if items else ""
    return [item.model_copy(update={"answer": item.choice_indices_by_reading[way]}) for item in items]


def _or(ways: Mapping[str, int] | set[str]) -> str:
    return " or ".join(words for way, words in WAYS.items() if way in ways)


def refuse_examples_among_items(items: Sequence[TaskItem], examples: Sequence[TaskItem], where: str) -> None:
    """Raises: TaskError if an example asks the same question as a tested item. Ids, case, blanks and punctuation do not count."""
    tested = {_asked(item): item for item in reversed(items)}
    for example in examples:
        if (same := tested.get(_asked(example))) is not None:
            raise TaskError(
                "file_rules.shown_item",
                "{file}: example {example!r} asks the same question as item {item!r}, so prompts would contain the "
                "item's answer. Remove one of the two",
                file=where, example=example.key, item=same.key,
            )  # fmt: skip


def refuse_repeated_records(files: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], shots: int) -> None:
    """Check lm-eval's data files, (name, records) each, if ``shots`` examples are shown. Raises: TaskError if two records differ only in their id."""
    seen: dict[str, str] = {}
    for name, records in files if shots else ():
        for number, record in enumerate(records, 1):
            text = _words(repr(sorted((key, value) for key, value in record.items() if key != "id")))
            here = f"record {number} of {name}"
            if (other := seen.setdefault(text, here)) != here:
                raise TaskError(
                    "file_rules.same_record",
                    "{record} and {other} differ only in their id. If a prompt shows one of them as an example "
                    "(num_fewshot), the prompt contains the answer of the other. Remove one of the two records",
                    record=here, other=other,
                )  # fmt: skip


def _asked(item: TaskItem) -> tuple[str, ...]:
    first, *rest = item.question_texts
    return (_words(first), *sorted(map(_words, rest)))


def _words(text: str) -> str:
    """A text reduced to its words and mathematical signs, for comparing two copies."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.findall(r"\w+|[-+*/^=<>%$\\]", plain)) or plain.strip()
