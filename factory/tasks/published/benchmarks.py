"""Which benchmark is this file, and what are its items?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from factory.tasks.published.choices import CHOICES
from factory.tasks.published.form import SHOWN, TESTED, Benchmark, Form
from factory.tasks.published.programs import PROGRAMS


# GSM8K and MATH: questions with a worked answer.
class Gsm8k(Form):
    """``test.jsonl`` of OpenAI's repository, and the Parquet files of ``openai/gsm8k``: the answer's number stands after ``####``."""

    question: str
    answer: str

    def fits(self) -> bool:
        return "####" in self.answer

    def item(self, number: int, about: str) -> dict[str, Any]:
        if not self.fits():
            raise ValueError("its answer has no ####")
        return {"id": number, "question": self.question, "answer": self.answer}


class HendrycksMath(Form):
    """The JSON files of Hendrycks et al. (2021), and tables of the same fields: the solution holds the answer in its last ``\\boxed``."""

    problem: str
    level: str | int
    solution: str
    unique_id: str = ""

    def fits(self) -> bool:
        return "\\boxed" in self.solution or "\\fbox" in self.solution

    def item(self, number: int, about: str) -> dict[str, Any]:
        if not self.fits():
            raise ValueError("its solution has no \\boxed answer")
        return {"id": self.unique_id or number, "question": self.problem, "answer": self.solution}


WORKED = (
    Benchmark("gsm8k", "maths", (Gsm8k,)),  # lm-eval: gsm8k/gsm8k.yaml; our default prompt is its own
    Benchmark(
        "math",  # lm-eval: minerva_math/utils.py (Lewkowycz et al. 2022)
        "maths",
        (HendrycksMath,),
        {"prompt": "Problem:\n{question}\n\nSolution:", "stop": ["Problem:"]},
    ),
)


BENCHMARKS = {one.name: one for one in (*PROGRAMS, *WORKED, *CHOICES)}
TRAINED, ASKED = ("train", "dev"), ("test", "val", "validation")  # what the file of a split is named
_PIECE = re.compile(r"-\d{5}-of-\d{5}$")  # of a Parquet file
_SPLIT = re.compile(rf"(?:^|[-_. ])({'|'.join((*TRAINED, *ASKED))})$", re.IGNORECASE)


class PublishedError(ValueError):
    """A record is none of its benchmark: says which, and why."""


@dataclass(frozen=True)
class PublishedItems:
    """Of one file, as records of ours, each with its number in the file."""

    tested: list[tuple[int, dict[str, Any]]]
    shown: list[tuple[int, dict[str, Any]]]


def recognised(records: Sequence[Mapping[str, Any]]) -> Benchmark | None:
    """The benchmark whose record the first one is; None: of no known one."""
    for benchmark in BENCHMARKS.values() if records else ():
        try:
            if _read(benchmark, records[0]).fits():
                return benchmark
        except PublishedError:
            continue
    return None


def items_of(benchmark: Benchmark, records: Sequence[Mapping[str, Any]], stem: str) -> PublishedItems:
    """The records as items of ours. Raises: PublishedError naming the first that is none of the benchmark."""
    found = PublishedItems([], [])
    about, _ = split_of(stem)
    for number, record in enumerate(records, 1):
        try:
            read = _read(benchmark, record)
            if read.use() == TESTED:
                found.tested.append((number, read.item(number, about)))
            elif read.use() == SHOWN:
                found.shown.append((number, read.example(number, about)))
        except ValueError as error:
            raise PublishedError(f"record {number}: {error}") from None
    return found


def split_of(stem: str) -> tuple[str, str]:
    """(what a file is about, its split), from its name without its suffix; empty where the name does not say.

    >>> split_of("anatomy_test"), split_of("ARC-Easy-Dev"), split_of("test-00000-of-00001"), split_of("HumanEval")
    (('anatomy', 'test'), ('ARC-Easy', 'dev'), ('', 'test'), ('HumanEval', ''))
    """
    stem = _PIECE.sub("", stem)
    found = _SPLIT.search(stem)
    return (stem[: found.start()], found[1].lower()) if found else (stem, "")


def _read(benchmark: Benchmark, record: Mapping[str, Any]) -> Form:
    """The record in the first form that it has. Raises: PublishedError saying what it lacks to be one of the benchmark's."""
    wrong = ""
    for form in benchmark.forms:
        if form.fields() <= set(record):
            try:
                return form.model_validate(record)
            except ValidationError as invalid:
                first = invalid.errors()[0]
                key = ".".join(map(str, first["loc"]))
                wrong = wrong or f"key {key!r}: {first['msg']} (got {str(first['input'])[:60]!r})"
    if not wrong:
        nearest = min(benchmark.forms, key=lambda form: len(form.fields() - set(record)))
        missing = ", ".join(sorted(nearest.fields() - set(record)))
        wrong = f"it is none of {benchmark.name}: {missing} is missing"
    raise PublishedError(wrong)
