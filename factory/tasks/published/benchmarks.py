"""Recognises the published file of a benchmark and reads its items."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from factory.tasks.published.choices import CHOICES
from factory.tasks.published.programs import PROGRAMS
from factory.tasks.published.record_form import SHOWN, TESTED, Benchmark, RecordForm
from kernels.contract.message import CodedError, Message


# GSM8K and MATH: questions with a worked answer.
class Gsm8k(RecordForm):
    """``test.jsonl`` of OpenAI's repository, and the Parquet files of ``openai/gsm8k``. The answer's number is after ``####``."""

    question: str
    answer: str

    def belongs_to_benchmark(self) -> bool:
        return "####" in self.answer

    def make_item(self, number: int, about: str) -> dict[str, Any]:
        if not self.belongs_to_benchmark():
            raise ValueError("the answer has no ####")
        return {"id": number, "question": self.question, "answer": self.answer}


class HendrycksMath(RecordForm):
    """The JSON files of Hendrycks et al. (2021), and tables of the same fields. The answer is in the solution's last ``\\boxed``."""

    problem: str
    level: str | int
    solution: str
    unique_id: str = ""

    def belongs_to_benchmark(self) -> bool:
        return "\\boxed" in self.solution or "\\fbox" in self.solution

    def make_item(self, number: int, about: str) -> dict[str, Any]:
        if not self.belongs_to_benchmark():
            raise ValueError("the solution has no \\boxed answer")
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
TRAINED, ASKED = ("train", "dev"), ("test", "val", "validation")  # names of splits in file names
_PIECE = re.compile(r"-\d{5}-of-\d{5}$")  # the end of a Parquet file's name
_SPLIT = re.compile(rf"(?:^|[-_. ])({'|'.join((*TRAINED, *ASKED))})$", re.IGNORECASE)


class PublishedError(CodedError):
    """A record does not have the benchmark's form. The message says which record and why."""


@dataclass(frozen=True)
class PublishedItems:
    """The items of a published file as records of the factory, each with its number in the file."""

    tested: list[tuple[int, dict[str, Any]]]
    shown: list[tuple[int, dict[str, Any]]]


def recognise_benchmark(records: Sequence[Mapping[str, Any]]) -> Benchmark | None:
    """The benchmark whose form the first record has. None: no known benchmark."""
    for benchmark in BENCHMARKS.values() if records else ():
        try:
            if _read(benchmark, records[0]).belongs_to_benchmark():
                return benchmark
        except PublishedError:
            continue
    return None


def convert_records(benchmark: Benchmark, records: Sequence[Mapping[str, Any]], stem: str) -> PublishedItems:
    """The records as items of the factory. Raises: PublishedError naming the first record that does not have the benchmark's form."""
    found = PublishedItems([], [])
    about, _ = parse_subject_and_split(stem)
    for number, record in enumerate(records, 1):
        try:
            read = _read(benchmark, record)
            if read.classify_record_use() == TESTED:
                found.tested.append((number, read.make_item(number, about)))
            elif read.classify_record_use() == SHOWN:
                found.shown.append((number, read.make_example(number, about)))
        except (ValueError, PublishedError) as error:
            reason = error.message if isinstance(error, PublishedError) else str(error)
            raise PublishedError(
                "benchmarks.odd_record", "record {record}: {reason}", record=number, reason=reason
            ) from None
    return found


def parse_subject_and_split(stem: str) -> tuple[str, str]:
    """(subject, split) from a file's name without its suffix. Each is empty if the name does not have it.

    >>> (parse_subject_and_split("anatomy_test"),
    ...  parse_subject_and_split("ARC-Easy-Dev"),
    ...  parse_subject_and_split("test-00000-of-00001"),
    ...  parse_subject_and_split("HumanEval"))
    (('anatomy', 'test'), ('ARC-Easy', 'dev'), ('', 'test'), ('HumanEval', ''))
    """
    stem = _PIECE.sub("", stem)
    found = _SPLIT.search(stem)
    return (stem[: found.start()], found[1].lower()) if found else (stem, "")


def _read(benchmark: Benchmark, record: Mapping[str, Any]) -> RecordForm:
    """The record in the first form that it fits. Raises: PublishedError naming the first invalid or missing key."""
    wrong: Message | None = None
    for form in benchmark.forms:
        if form.list_required_fields() <= set(record):
            try:
                return form.model_validate(record)
            except ValidationError as invalid:
                first = invalid.errors()[0]
                key = ".".join(map(str, first["loc"]))
                wrong = wrong or Message(
                    "benchmarks.odd_key",
                    "key {key!r}: {reason} (got {given!r})",
                    key=key,
                    reason=first["msg"],
                    given=str(first["input"])[:60],
                )
    if wrong:
        raise PublishedError(wrong)
    nearest = min(benchmark.forms, key=lambda form: len(form.list_required_fields() - set(record)))
    missing = sorted(nearest.list_required_fields() - set(record))
    raise PublishedError(
        "benchmarks.missing_keys",
        "the records lack these keys of {benchmark}: {keys}",
        benchmark=benchmark.name,
        keys=missing,
    )
