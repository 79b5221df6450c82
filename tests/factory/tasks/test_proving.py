"""A task is proven before it counts. A task whose scores would mean nothing is refused, with the item that shows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from factory.core.progress import SILENT
from factory.ledger.ledger import events
from factory.tasks.items import CodeItem, TaskError
from factory.tasks.measuring import measure_task
from factory.tasks.policy import TasksPolicy
from factory.tasks.proving import EVENT, is_proven, make_programs_without_answer, prove_task
from factory.tasks.task_file import load_task
from tests.support.factory.exports import FilledPlant
from tests.support.factory.task_files import choice_items, programs, sums, write_lm_eval_task, write_task
from tests.support.messages import refused, says

POLICY = TasksPolicy()


def prove_written_task(plant: FilledPlant, items: list[dict[str, Any]], **keys: Any) -> None:
    prove_task(plant.ledger, load_task(write_task(plant.workspace, "asked", items, **keys), POLICY), POLICY, SILENT)


def test_right_answers_score_1_and_answers_without_information_score_chance(plant: FilledPlant) -> None:
    choices = choice_items(12, 4)
    for keys in ({}, {"format": "letter"}):
        found = prove_task(
            plant.ledger, load_task(write_task(plant.workspace, "c", choices, **keys), POLICY), POLICY, SILENT
        )
        assert (found.gold, found.chance) == (1.0, 0.25)
        assert found.blind["always the first"] == sum(item["answer"] == 0 for item in choices) / 12
    mixed = [{**item, "choices": item["choices"][: 2 + n % 2], "answer": n % 2} for n, item in enumerate(choices)]
    found = prove_task(plant.ledger, load_task(write_task(plant.workspace, "c", mixed), POLICY), POLICY, SILENT)
    assert found.chance == pytest.approx((1 / 2 + 1 / 3) / 2)
    answers = [
        5,
        5,
        "1/2",
        r"\frac{3}{4}",
        "x^2+1",
        r"It is \boxed{(1,2)}",
        "9 - 1 = 8\n#### 8",
        "18 dollars",
        "no solution",
        r"\text{Monday}",
    ]
    golds = [{**item, "answer": answer} for item, answer in zip(sums(), answers)]
    found = prove_task(
        plant.ledger, load_task(write_task(plant.workspace, "m", golds, kind="maths"), POLICY), POLICY, SILENT
    )
    assert (found.gold, found.empty, found.blind) == (1.0, 0.0, {"always '5'": 0.2})
    half = [{k: v for k, v in item.items() if k != "solution" or n % 2} for n, item in enumerate(programs())]
    found = prove_task(
        plant.ledger, load_task(write_task(plant.workspace, "p", half, kind="code"), POLICY), POLICY, SILENT
    )
    assert (found.gold, found.empty, found.without_solution) == (None, 0.0, 4)


# Tests that test nothing, in a file of tests that do, and what they are of a program that returns None.
CASES = "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(add3(1), 99)\n"
TESTS = [
    "def check(candidate):\n    assert candidate(1) == 99\n",
    CASES,
    f"{CASES}unittest.main(argv=['x'], exit=False)\n",
    "import sys\nsys.exit(0)\nassert add3(1) == 99\n",
    "def test_add():\n    assert add3(1) == 99\n",
    "try:\n    assert add3(1) == 99\nexcept Exception:\n    pass\n",
    "assert callable(add3)\n",
]


def test_tests_that_test_nothing_are_refused_with_their_item(plant: FilledPlant) -> None:
    whole = load_task(write_task(plant.workspace, "asked", programs(), kind="code"), POLICY)
    for tests in TESTS:
        task = replace(whole, items=(whole.items[3].model_copy(update={"tests": tests}),))
        with refused("proving.empty_program", TaskError, item="add3"):
            prove_task(plant.ledger, task, POLICY, SILENT)


def test_empty_programs_are_valid_python() -> None:
    """Each is valid Python, so it fails by its tests and not by a syntax error."""
    for prompt, begins, solution in (
        ("def f(x):\n", None, "    return x\n"), ("def f(x):\n    '''Doc.'''\n", None, "    return x\n"),
        ("Write f.", "", "def f(x):\n    return x\n"),
        ("def f(x):\n\t", None, "return x\n"), ("class A:\n    def f(self):\n", None, "        return 1\n"), ("def f(x):\n", None, None),
    ):  # fmt: skip
        item = CodeItem(id=1, prompt=prompt, begins=begins, tests="f(1)", solution=solution)
        found = dict(make_programs_without_answer(item))
        compile(found["returns None"], "program", "exec")
        compile(found["raises"], "program", "exec")
        run: dict[str, Any] = {}
        exec(found["returns None"], run)
        if "f" in run:
            assert run["f"](1) is None


@pytest.mark.parametrize(
    ("keys", "items", "code", "data"),
    [
        ({"format": "letter"}, [{**item, "choices": [item["choices"][item["answer"]], "x", "y"], "answer": 0} for item in choice_items()],
         "same_place", {"items": 12, "place": 0}),
        ({}, [{**item, "choices": ["x", item["choices"][item["answer"]]], "answer": 1} for item in choice_items()],
         "length_tells", {"rule": "always the longest", "items": 12}),
        ({"kind": "maths"}, [{**item, "answer": 5} for item in sums()], "same_answer", {"items": 10, "answer": "5"}),
        ({"kind": "maths"}, [{**item, "answer": "no answer" if item["id"] == 4 else 7} for item in sums()],
         "empty_reply", {"item": "4", "reply": "no answer"}),
        ({"kind": "maths"}, [{**item, "answer": r"\frac{1" if item["id"] == 4 else 7} for item in sums()], "own_answer", {"item": "4"}),
    ],
)  # fmt: skip
def test_a_task_that_cannot_tell_models_apart_is_refused(
    plant: FilledPlant, keys: dict[str, Any], items: list[dict[str, Any]], code: str, data: dict[str, Any]
) -> None:
    with refused(f"proving.{code}", TaskError, **data):
        prove_written_task(plant, items, **keys)


def copies(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**item, "id": f"copy of {item['id']}", "question": f" {item['question'].upper()} "} for item in items]


def test_an_example_with_the_text_of_a_tested_item_is_refused(plant: FilledPlant) -> None:
    """A copy under another id or in another case is refused too, by every command that reads the task."""
    for shown in (
        sums(),
        copies(sums()),
        [{"id": "new", "question": "What is 77 + 1?", "answer": 78}, *copies(sums())[5:]],
    ):
        write_task(plant.workspace, "shown", shown, kind="maths")
        path = write_task(plant.workspace, "asked", sums(), kind="maths", examples="shown.jsonl", shots=3)
        with refused("file_rules.shown_item", TaskError):
            load_task(path, POLICY)
        write_task(plant.workspace, "asked", sums(), kind="maths", examples="shown.jsonl", shots=0)
        assert load_task(path, POLICY).items
    choices = [
        {**item, "choices": item["choices"][::-1], "answer": 3 - item["answer"], "id": f"c{n}"}
        for n, item in enumerate(choice_items())
    ]
    write_task(plant.workspace, "shown", choices)
    with refused("file_rules.shown_item", TaskError, example="c0", item="q0"):
        load_task(write_task(plant.workspace, "asked", choice_items(), examples="shown.jsonl", shots=1), POLICY)


def test_an_lm_eval_record_that_is_also_an_example_is_refused(plant: FilledPlant) -> None:
    items = choice_items()
    write_task(plant.workspace, "train", [{**item, "id": f"t{item['id']}"} for item in items[3:]])
    split = {
        "dataset_kwargs": {"data_files": {"test": "asked.jsonl", "train": "train.jsonl"}},
        "fewshot_split": "train",
    }
    path = write_lm_eval_task(plant.workspace, "asked", items, num_fewshot=2, **split)
    with refused(
        "file_rules.same_record", TaskError, record="record 1 of train.jsonl", other="record 4 of asked.jsonl"
    ):
        load_task(path, POLICY)
    assert load_task(write_lm_eval_task(plant.workspace, "asked", items, **split), POLICY).records


@pytest.mark.parametrize(
    ("choices", "answers", "code", "data"),
    [
        (["one", "two", "three"], [0, "B", 1], "mixed_answers",
         {"record": 2, "answer": "B", "way": "a letter", "earlier": "a place from 0"}),
        (["one", "two", "three"], ["one", "C", "two"], "mixed_answers",
         {"record": 2, "answer": "C", "way": "a letter", "earlier": "the text of a choice"}),
        (["B", "A", "C"], ["A", "B", "C"], "ambiguous_answer",
         {"record": 1, "answer": "A", "choices": ["'B' as a letter", "'A' as the text of a choice"]}),
        (["1", "2", "0"], [1, 0, 2], "ambiguous_answer",
         {"record": 1, "answer": 1, "choices": ["'2' as a place from 0", "'1' as the text of a choice"]}),
    ],
)  # fmt: skip
def test_all_answers_of_a_file_are_read_in_the_same_way(
    plant: FilledPlant, choices: list[str], answers: list[Any], code: str, data: dict[str, Any]
) -> None:
    asked = [{"id": n, "question": f"{n}?", "choices": choices, "answer": answers[n % 3]} for n in range(9)]
    with refused(f"file_rules.{code}", TaskError, **data):
        prove_written_task(plant, asked)


def test_answers_with_only_one_possible_reading_are_accepted(plant: FilledPlant) -> None:
    """Letters that are also the text of choices, and numbers that are not places."""
    for choices, answers, right in (
        (["A", "B", "C"], ["A", "C", "B"], [0, 2, 1]),
        (["B", "A", "x"], ["B", "A", "x"], [0, 1, 2]),
        (["10", "20", "30"], [0, 2, 1], [0, 2, 1]),
        (["10", "20", "30"], ["10", "30", "20"], [0, 2, 1]),
    ):
        asked = [{"id": n, "question": f"{n}?", "choices": choices, "answer": answers[n % 3]} for n in range(9)]
        items = load_task(write_task(plant.workspace, "asked", asked), POLICY).items
        assert [item.right_choice_index for item in items] == right * 3


def test_a_task_is_proven_once_before_it_is_first_measured(plant: FilledPlant, export: Path) -> None:
    candidate = plant.add_candidate(export)
    count = lambda: len(
        plant.ledger.select_rows(sa.select(events).where(events.c.kind == EVENT, events.c.subject == "task:once"))
    )
    task = load_task(write_task(plant.workspace, "once", choice_items()), POLICY)
    measure_task(plant, candidate, task, POLICY)
    assert count() == 1 and is_proven(plant.ledger, task)
    measure_task(plant, plant.add_candidate(export), task, POLICY)
    assert count() == 1
    other = load_task(write_task(plant.workspace, "once", choice_items()[:9]), POLICY)
    assert not is_proven(plant.ledger, other)
    same = load_task(
        write_task(plant.workspace, "once", [{**item, "answer": 5} for item in sums()], kind="maths", max_tokens=8),
        POLICY,
    )
    with refused("measuring.not_sound", TaskError, task="once") as found:
        measure_task(plant, candidate, same, POLICY)
    assert says(found.value.message, ("proving.same_answer", {"items": 10, "answer": "5"}))
