"""Benchmarks in the form in which each is published, with items of our own: what users drop into ``policies/tasks/``."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

COUNT = 9


def human_eval() -> list[dict[str, Any]]:
    return [
        {
            "task_id": f"HumanEval/{n}",
            "prompt": f'def scaled_{n}(values):\n    """Return every value of a list multiplied by {n}, in the same order as before.\n    """\n',
            "entry_point": f"scaled_{n}",
            "canonical_solution": f"    return [value * {n} for value in values]\n",
            "test": f"\n\nMETADATA = {{'author': 'ours'}}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == [{n}, {2 * n}]\n",
        }
        for n in range(COUNT)
    ]


def mbpp(first: int = 1, last: int = 22) -> list[dict[str, Any]]:
    """Tasks 2, 3 and 4 are those that are shown, 11 to 22 those that are tested."""
    return [
        {
            "text": f"Write a function to raise a number by {n}.",
            "code": f"def raised_{n}(x):\r\n  return math.floor(x + {n})",
            "task_id": n,
            "test_setup_code": "import math",
            "test_list": [f"assert raised_{n}({x}) == {x + n}" for x in range(3)],
            "challenge_test_list": [],
        }
        for n in range(first, last + 1)
    ]


def sanitized_mbpp() -> list[dict[str, Any]]:
    return [
        {
            "source_file": "ours.ipynb",
            "task_id": one["task_id"],
            "prompt": one["text"],
            "code": one["code"],
            "test_imports": [one["test_setup_code"]],
            "test_list": one["test_list"],
        }
        for one in mbpp()
    ]


def gsm8k(first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "question": f"A ferry carries {n} cars on each trip. How many cars does it carry on 3 trips?",
            "answer": f"Each trip carries {n} cars.\nThree trips carry 3*{n} = <<3*{n}={3 * n}>>{3 * n} cars.\n#### {3 * n}",
        }
        for n in range(first, first + COUNT)
    ]


def hendrycks_math(count: int = COUNT) -> list[dict[str, Any]]:
    return [
        {
            "problem": f"What is ${n} + \\frac{{1}}{{2}}$?",
            "level": "Level 1",
            "type": "Prealgebra",
            "solution": f"Over one denominator, ${n} = \\frac{{{2 * n}}}{{2}}$, so the sum is $\\boxed{{\\frac{{{2 * n + 1}}}{{2}}}}$.",
        }
        for n in range(count)
    ]


def mmlu_rows(first: int = 0, count: int = COUNT) -> list[list[str]]:
    """Question, the four choices, the letter of the answer."""
    rows = []
    for n in range(first, first + count):
        shelves = [f"shelf {n + step}" for step in range(4)]
        rows.append(
            [f"On which shelf does the catalogue\nkeep volume {n}, as counted from zero?", *shelves, "ABCD"[n % 4]]
        )
    return rows


def mmlu_table(subjects: tuple[str, ...], first: int = 0, count: int = COUNT) -> list[dict[str, Any]]:
    return [
        {"question": f"{row[0]} ({subject})", "subject": subject, "choices": row[1:5], "answer": "ABCD".index(row[5])}
        for subject in subjects
        for row in mmlu_rows(first, count)
    ]


def arc_lines(first: int = 0) -> list[dict[str, Any]]:
    """Labels are letters in some items and numbers from 1 in others."""
    items = []
    for n in range(first, first + COUNT):
        labels = "1234" if n % 3 == 0 else "ABCD"
        listed = [
            {"text": f"the {word} lamp", "label": label}
            for word, label in zip(("red", "blue", "green", "white"), labels)
        ]
        asked = {"stem": f"Which lamp of harbour {n} burns when a ship may enter?", "choices": listed}
        items.append({"id": f"Harbour_{n}", "question": asked, "answerKey": labels[n % 4]})
    return items


def arc_table(first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "id": one["id"],
            "question": one["question"]["stem"],
            "choices": {key: [choice[key] for choice in one["question"]["choices"]] for key in ("text", "label")},
            "answerKey": one["answerKey"],
        }
        for one in arc_lines(first)
    ]


def hella_swag() -> list[dict[str, Any]]:
    return [
        {
            "ind": n,
            "activity_label": "Mending a net",
            "ctx_a": f"A fisherman sits on crate {n} [title] He looks for the hole.",
            "ctx_b": "the man",
            "ctx": f"A fisherman sits on crate {n} [title] He looks for the hole. the man",
            "split": "val",
            "split_type": "indomain",
            "label": n % 4,
            "endings": [
                "ties the torn threads together.  Then he rests.",
                "paints the crate [step] blue.",
                f"throws {n} oranges at the moon.",
                "turns into a lighthouse.",
            ],
            "source_id": f"activitynet~v_{n // 2}",
        }
        for n in range(COUNT)
    ]


def big_code_bench(libs: str = "['json', 'collections']") -> list[dict[str, Any]]:
    return [
        {
            "task_id": f"BigCodeBench/{n}",
            "complete_prompt": (
                "import json\nfrom collections import Counter\n\ndef task_func(text):\n"
                f'    """\n    Count the letters of a text, {n} times each, as JSON.\n    """\n'
            ),
            "instruct_prompt": f"Count the letters of a text, {n} times each, as JSON.",
            "canonical_solution": f"    return json.dumps({{key: {n} * count for key, count in Counter(text).items()}})",
            "code_prompt": "import json\nfrom collections import Counter\ndef task_func(text):\n",
            "test": (
                "import unittest\nclass TestCases(unittest.TestCase):\n"
                f"    def test_one(self):\n        self.assertEqual(json.loads(task_func('aab')), {{'a': {2 * n}, 'b': {n}}})\n"
                "    def test_none(self):\n        self.assertEqual(task_func(''), '{}')\n"
            ),
            "entry_point": "task_func",
            "doc_struct": "{}",
            "libs": libs,
        }
        for n in range(COUNT)
    ]


def write(path: Path, records: list[Any]) -> Path:
    """As the file's name says: lines or a list of JSON, CSV without a header (of lists), Parquet; packed where it ends with .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(records), path)
        return path
    if name.endswith(".csv"):
        text = io.StringIO()
        csv.writer(text).writerows(records)
        data = text.getvalue().encode()
    elif name.endswith(".jsonl"):
        data = "".join(json.dumps(record) + "\n" for record in records).encode()
    else:
        data = json.dumps(records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


FILES: dict[str, tuple[str, list[Any]]] = {
    "HumanEval.jsonl.gz": ("humaneval", human_eval()),
    "openai_humaneval.parquet": ("humaneval", human_eval()),
    "mbpp.jsonl": ("mbpp", mbpp()),
    "sanitized-mbpp.json": ("mbpp", sanitized_mbpp()),
    "gsm8k_test.jsonl": ("gsm8k", gsm8k()),
    "math.jsonl.gz": ("math", hendrycks_math()),
    "harbour_law_test.csv": ("mmlu", mmlu_rows()),
    "mmlu.parquet": ("mmlu", mmlu_table(("harbour_law", "tides"))),
    "ARC-Easy-Test.jsonl": ("arc", arc_lines()),
    "arc_challenge.parquet": ("arc", arc_table()),
    "hellaswag_val.jsonl.gz": ("hellaswag", hella_swag()),
    "hellaswag.parquet": ("hellaswag", [{**one, "label": str(one["label"])} for one in hella_swag()]),
    "BigCodeBench.jsonl.gz": ("bigcodebench", big_code_bench()),
    "bigcodebench.parquet": ("bigcodebench", big_code_bench()),
}
"""By the name of the file: (the benchmark, its records)."""
