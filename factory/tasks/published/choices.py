"""MMLU, ARC and HellaSwag: multiple-choice questions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from factory.tasks.published.record_form import Benchmark, RecordForm

LETTERS = "ABCD"


class MmluCsvRecord(RecordForm):
    """A file of the CSV archive (``anatomy_test.csv``), which has no header. The file's name has the subject."""

    question: str
    A: str
    B: str
    C: str
    D: str
    answer: str

    def make_item(self, number: int, about: str) -> dict[str, Any]:
        if self.answer not in LETTERS:
            raise ValueError(f"answer {self.answer[:40]!r} is not one of A, B, C, D")
        return _mmlu(number, self.question, [self.A, self.B, self.C, self.D], LETTERS.index(self.answer), about)


class MmluParquetRecord(RecordForm):
    """The Parquet files of ``cais/mmlu``, and JSON lines with the same fields."""

    question: str
    subject: str
    choices: list[str]
    answer: int

    def make_item(self, number: int, about: str) -> dict[str, Any]:
        return _mmlu(number, self.question, self.choices, self.answer, self.subject or about)


def _mmlu(number: int, question: str, choices: list[str], answer: int, subject: str) -> dict[str, Any]:
    subject = subject.replace("_", " ")
    return {"id": number, "question": question.strip(), "choices": choices, "answer": answer, "subject": subject}


class _Open(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class _Choice(_Open):
    text: str
    label: str


class _Stem(_Open):
    stem: str
    choices: list[_Choice]


class _Columns(_Open):
    text: list[str]
    label: list[str]


class ArcJsonlRecord(RecordForm):
    """The JSON lines of AI2's archive (``ARC-Easy-Test.jsonl``)."""

    id: str
    question: _Stem
    answerKey: str

    def make_item(self, number: int, about: str) -> dict[str, Any]:
        asked = self.question
        return _arc(
            self.id, asked.stem, [o.text for o in asked.choices], [o.label for o in asked.choices], self.answerKey
        )


class ArcParquetRecord(RecordForm):
    """The Parquet files of ``allenai/ai2_arc``, and JSON lines with the same fields."""

    id: str
    question: str
    choices: _Columns
    answerKey: str

    def make_item(self, number: int, about: str) -> dict[str, Any]:
        return _arc(self.id, self.question, self.choices.text, self.choices.label, self.answerKey)


def _arc(key: str, question: str, texts: list[str], labels: Sequence[str], answer: str) -> dict[str, Any]:
    """An ARC item. Labels and answer are letters in some records and numbers from 1 in others."""
    if list(labels).count(answer) != 1:
        raise ValueError(f"answerKey {answer[:40]!r} is not one of the labels {', '.join(labels)}")
    return {"id": key, "question": question, "choices": texts, "answer": labels.index(answer)}


class HellaSwagRecord(RecordForm):
    """``hellaswag_val.jsonl``, and the Parquet files of ``Rowan/hellaswag``. The published test split has no answers."""

    activity_label: str
    ctx_a: str
    ctx_b: str
    endings: list[str]
    label: int | str
    source_id: str = ""

    def make_item(self, number: int, about: str) -> dict[str, Any]:
        label = str(self.label)
        if not label.isdecimal() or int(label) >= len(self.endings):
            raise ValueError(f"label {label[:40]!r} is not the number of one of {len(self.endings)} endings")
        begun = f"{self.activity_label}: {self.ctx_a} {self.ctx_b.capitalize()}"
        return {
            "id": number,
            "source": self.source_id,  # the video or article; several items share one
            "question": _plain(begun),
            "choices": [_plain(ending) for ending in self.endings],
            "answer": int(label),
        }


def _plain(text: str) -> str:
    """A text without the marks of WikiHow's articles, as in ``hellaswag/utils.py`` of lm-eval.

    >>> _plain("How to nap [title] Lie down [step] Now.  Sleep ")
    'How to nap. Lie down Now. Sleep'
    """
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


CHOICES = (
    Benchmark(
        "mmlu",  # lm-eval: mmlu/default/_default_template_yaml and the description of each subject
        "multiple_choice",
        (MmluParquetRecord, MmluCsvRecord),
        {
            "format": "letter",
            "header": "The following are multiple choice questions (with answers) about {subject}.\n\n",
        },
    ),
    Benchmark(
        "arc", "multiple_choice", (ArcJsonlRecord, ArcParquetRecord)
    ),  # lm-eval: arc/arc_easy.yaml; our default prompt is its own
    Benchmark(
        "hellaswag", "multiple_choice", (HellaSwagRecord,), {"prompt": "{question}"}
    ),  # lm-eval: hellaswag/hellaswag.yaml
)
