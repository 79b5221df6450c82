"""What must hold of a whole file of items: its answers are read in one way, and none of its items is shown as an example with its answer."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from factory.tasks.items import ChoiceItem, TaskError, TaskItem

WAYS = {"place": "a place from 0", "letter": "a letter", "text": "the text of a choice"}


def in_one_way(items: Sequence[Any], where: str) -> list[Any]:
    """The items, those of multiple choice with their answers as places; each is known to name a choice.

    Of a file whose answers can be read in two ways, both must say the same. Raises: TaskError naming the first record that is read otherwise
    than those before it, or that two ways read differently.
    """
    if not all(isinstance(item, ChoiceItem) for item in items):
        return list(items)
    common = set(WAYS)
    first = ""  # how the answers before are read, in words
    for number, item in enumerate(items, 1):
        mine = item.ways
        if not common & set(mine):
            raise TaskError(
                f"{where}: the answer of record {number}, {item.answer!r}, is {_or(mine)}, and those before it are {first}: write all answers of a "
                "file in one way"
            )
        common &= set(mine)
        first = _or(common)
    for number, item in enumerate(items, 1):
        read = {way: place for way, place in item.ways.items() if way in common}
        if len(set(read.values())) > 1:
            said = " and ".join(f"{item.choices[place]!r} as {WAYS[way]}" for way, place in read.items())
            raise TaskError(
                f"{where}: the answer of record {number}, {item.answer!r}, names {said}: write the file's answers so that they read "
                "in one way alone"
            )
    way = min(common, key=list(WAYS).index) if items else ""
    return [item.model_copy(update={"answer": item.ways[way]}) for item in items]


def _or(ways: Mapping[str, int] | set[str]) -> str:
    return " or ".join(words for way, words in WAYS.items() if way in ways)


def refuse_shown_items(items: Sequence[TaskItem], shown: Sequence[TaskItem], where: str) -> None:
    """Raises: TaskError when an example asks what a tested item asks, whatever their ids, letters' case, blanks and punctuation."""
    tested = {_asked(item): item for item in reversed(items)}
    for example in shown:
        if (same := tested.get(_asked(example))) is not None:
            raise TaskError(
                f"{where}: example {example.key!r} asks what the tested item {same.key!r} asks, so the prompts would hold its answer: remove it from "
                "the examples, or from the items"
            )


def refuse_shown_records(files: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], shots: int) -> None:
    """Of lm-eval's data files, each with its name, of which ``shots`` records are shown. Raises: TaskError when two records are the same but
    for their id."""
    seen: dict[str, str] = {}
    for name, records in files if shots else ():
        for number, record in enumerate(records, 1):
            text = _words(repr(sorted((key, value) for key, value in record.items() if key != "id")))
            here = f"record {number} of {name}"
            if (other := seen.setdefault(text, here)) != here:
                raise TaskError(
                    f"{here} is {other} under another id, and examples are shown (num_fewshot): a prompt would hold its own "
                    "answer; remove one of them"
                )


def _asked(item: TaskItem) -> tuple[str, ...]:
    first, *rest = item.asks
    return (_words(first), *sorted(map(_words, rest)))


def _words(text: str) -> str:
    """What two copies of a text have in common; signs of mathematics count."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.findall(r"\w+|[-+*/^=<>%$\\]", plain)) or plain.strip()
