"""Generated answers: drawn alike in any batch, held to exact answers and to tests in the sandbox, counted as pass@k."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factory.tasks.exact_answer import answer_of, number_of, same_answer
from factory.tasks.generation import generate_and_check, pass_at_k
from factory.tasks.items import CodeItem, TaskError
from factory.tasks.model import Drawing, TaskModel
from factory.tasks.policy import TaskLimits, TasksPolicy
from factory.tasks.task_file import load_task
from factory.tasks.verifiers import check_programs, check_solutions
from tests.support.factory.exports import Plant
from tests.support.factory.task_files import programs, sums, write_task

LIMITS = TaskLimits(code_cpu_seconds=1, code_seconds=30.0, code_printed_kib=64)


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_that_hold_a_right_one(samples: int) -> None:
    for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        answers = [number < right for number in range(samples)]
        chosen = list(itertools.combinations(answers, k))
        assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-12)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 3 + 4 = 7.\n#### 7", "7"),
        ("#### 1,234\nQuestion: 5", "1,234"),
        (r"thus \boxed{\frac{3}{4}} and 9 more", r"\frac{3}{4}"),
        (r"\boxed{1 and \boxed{2", "2"),
        ("it costs $1,200.50.", "$1,200.50"),
        ("minus -3", "-3"),
        ("none at all", None),
        ("####", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_answer_of_a_text(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    ("said", "right", "same"),
    [
        ("1,200", "1200.0", True), ("$3", "3", True), (r"\frac{1}{2}", "0.5", True), ("50%", "1/2", True), ("7.", "7", True),
        ("0.33", "1/3", False), ("1,20", "120", False), ("12", "21", False), ("x + 1", "x+1", True), ("x", "1", False), ("1/0", "1/0", True),
        ("9" * 5000, "1", False), ("-0", "0", True), ("−2", "-2", True),
    ],
)  # fmt: skip
def test_answers_are_compared_as_numbers_where_they_are(said: str, right: str, same: bool) -> None:
    assert same_answer(said, right) is same


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60), st.fractions(max_denominator=999))
def test_any_text_has_an_answer_or_none(text: str, value: Fraction) -> None:
    found = answer_of(text)
    assert found is None or isinstance(same_answer(found, "1"), bool)
    assert number_of(str(value)) == value


def test_programs_that_misbehave_are_wrong_and_say_why() -> None:
    """Each in the sandbox: what hangs, floods, fails, leaves early or breaks out of its tests has not passed."""
    cases = {
        "def f(): return 1\n": (True, "", ""),
        "def f(): return 2\n": (False, "", "AssertionError"),
        "def f(:\n": (False, "", "SyntaxError"),
        "while True: pass\n": (False, "cpu", ""),
        "print('x' * 1_000_000)\ndef f(): return 1\n": (False, "log", ""),
        "import sys; sys.exit(0)\n": (False, "", "it ended before its tests did"),
        "import os; os._exit(0)\n": (False, "", "it ended before its tests did"),
        "x = bytearray(1 << 31)\n": (False, "", "MemoryError"),
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')\n": (False, "", "URLError"),
        "print('\\ud800')\ndef f(): return 1\n": (False, "", "UnicodeEncodeError"),
        "f = '\ud800'": (False, "", "UnicodeDecodeError"),
    }
    found = check_programs([(program, "assert f() == 1") for program in cases], LIMITS)
    for one, (program, (right, stopped, why)) in zip(found, cases.items(), strict=True):
        assert (one.right, one.stopped) == (right, stopped), (program, one)
        assert why in one.why, (program, one)


def test_a_program_that_sleeps_is_stopped() -> None:
    [found] = check_programs([("import time; time.sleep(600)", "")], LIMITS.model_copy(update={"code_seconds": 3.0}))
    assert (found.right, found.stopped) == (False, "wall")


def test_an_item_whose_solution_fails_its_own_tests_is_named() -> None:
    items = [
        CodeItem(id=number, prompt="x = 1\n", tests=f"assert x == {number}", solution="y = 1") for number in (1, 2)
    ]
    with pytest.raises(TaskError, match="item '2': its own solution does not pass its tests: .*AssertionError"):
        check_solutions(items, LIMITS)


def test_no_program_passes_where_none_can(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TaskError, match="lets no program pass"):
        check_programs([("", "")], LIMITS.model_copy(update={"code_memory_mib": 1}))


def test_a_drawn_text_depends_on_its_seed_and_not_on_its_batch(plant: Plant, export: Path) -> None:
    model = TaskModel.load(export, plant.tokenizer, 4096, "cpu")
    how = Drawing(24, temperature=1.0)
    prompts = ["def f(x):\n", "import os\n", "class A:\n    def", "x"]
    together = model.generate(prompts, how, [1, 2, 3, 4], lambda n: None)
    alone = [model.generate([prompt], how, [seed], lambda n: None)[0] for prompt, seed in zip(prompts, (1, 2, 3, 4))]
    assert together == alone
    other = model.generate(prompts, how, [5, 6, 7, 8], lambda n: None)
    assert all(one.text != two.text for one, two in zip(together, other))
    [stopped] = model.generate(prompts[:1], Drawing(24, (together[0].text[2:4],), 1.0), [1], lambda n: None)
    assert (stopped.text, stopped.ended) == (together[0].text.split(together[0].text[2:4])[0], True)


def test_tokens_are_drawn_as_often_as_the_model_says(plant: Plant, export: Path) -> None:
    import torch

    model = TaskModel.load(export, plant.tokenizer, 4096, "cpu")
    prompt = "import "
    drawn = model.generate([prompt] * 400, Drawing(1, temperature=1.0), list(range(400)), lambda n: None)
    probability_V = model.model.logits(torch.tensor([plant.tokenizer.text_prompt(prompt).tolist()]))[0, -1].softmax(-1)
    token = int(probability_V.argmax())
    expected = float(probability_V[token])
    share = sum(one.text == plant.tokenizer.decode([token]) for one in drawn) / len(drawn)
    assert abs(share - expected) < 4 * (expected * (1 - expected) / 400) ** 0.5
    assert 0.02 < expected < 0.98


def test_a_task_of_each_kind_counts_its_answers(plant: Plant, export: Path) -> None:
    model = TaskModel.load(export, plant.tokenizer, 4096, "cpu")
    maths = write_task(
        plant.workspace, "sums", sums(), kind="maths", max_tokens=8, samples=3, temperature=1.0, pass_at=[1, 3]
    )
    rows, said = generate_and_check(load_task(maths, TasksPolicy()), model, LIMITS, lambda n: None)
    assert [row.task for row in rows] == ["sums/pass@1", "sums/pass@3"] * 10
    assert said["answers"] == 30 and 0 < said["never_ended"] <= 30
    assert sum(row.value for row in rows[::2]) == pytest.approx(said["right"] / 3)
    # solutions given as prompts: every program passes, whatever the model goes on with up to the stop
    right = [{**item, "prompt": item["prompt"] + item["solution"] + "\nif 1:\n    pass\n#"} for item in programs()]
    code = write_task(plant.workspace, "code", right, kind="code", max_tokens=8, stop=["\n"])
    rows, said = generate_and_check(load_task(code, TasksPolicy()), model, LIMITS, lambda n: None)
    assert [row.value for row in rows] == [1.0] * 8 and said["right"] == 8 and not said["stopped"]
