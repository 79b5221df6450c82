"""Generated answers do not depend on their batch, are checked by exact answers or by tests in the sandbox, and are counted as pass@k."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from factory.tasks.answer_generation import estimate_pass_at_k, generate_and_check
from factory.tasks.items import TaskError
from factory.tasks.model import GenerationParameters, TaskModel
from factory.tasks.policy import TaskLimits, TasksPolicy
from factory.tasks.task_file import load_task
from factory.tasks.verifiers import check_programs
from tests.support.factory.exports import FilledPlant
from tests.support.factory.task_files import programs, sums, write_task
from tests.support.messages import refused

LIMITS = TaskLimits(code_cpu_seconds=1, code_seconds=30.0, code_printed_kib=64)


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_of_k_answers_with_a_right_one(samples: int) -> None:
    for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        answers = [number < right for number in range(samples)]
        chosen = list(itertools.combinations(answers, k))
        assert estimate_pass_at_k(samples, right, k) == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-12)


def test_programs_that_misbehave_count_as_wrong_with_a_reason() -> None:
    """Each in the sandbox: what hangs, floods, fails, leaves early or breaks out of its tests has not passed."""
    cases = {
        "def f(): return 1\n": (True, "", ""),
        "def f(): return 2\n": (False, "", "AssertionError"),
        "def f(:\n": (False, "", "SyntaxError"),
        "while True: pass\n": (False, "cpu", ""),
        "print('x' * 1_000_000)\ndef f(): return 1\n": (False, "log", ""),
        "import sys; sys.exit(0)\n": (False, "", "ended before its tests"),
        "import os; os._exit(0)\n": (False, "", "ended before its tests"),
        "x = bytearray(1 << 31)\n": (False, "", "MemoryError"),
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')\n": (False, "", "URLError"),
        "print('\\ud800')\ndef f(): return 1\n": (False, "", "UnicodeEncodeError"),
        "f = '\ud800'": (False, "", "'utf-8' codec can't decode"),
        "import sys\ndef f(): sys.exit(0)\n": (False, "", "ended before its tests"),
        "def f(): exit()\n": (False, "", "ended before its tests"),
    }
    found = check_programs([(program, "assert f() == 1") for program in cases], LIMITS)
    for one, (program, (right, stopped, why)) in zip(found, cases.items(), strict=True):
        assert (one.right, one.stopped) == (right, stopped), (program, one)
        assert why in one.why, (program, one)


UNITTEST = """
import unittest
class Tests(unittest.TestCase):
    def test(self):
        self.assertEqual(f(), 1)
if __name__ == "__main__":
    unittest.main()
"""

# (program, tests, whether plain Python ends with code 0 after its tests)
AS_PYTHON = {
    "annotations": ("def f(x: int): return x", "assert f.__annotations__['x'] is int", True),
    "a module's annotations": ("x: int = 1", "assert __annotations__ == {'x': int} and __name__ == '__main__'", True),
    "pickle": ("import pickle\nclass A: x = 1", "assert pickle.loads(pickle.dumps(A())).x == 1", True),
    "a pool": (
        "import multiprocessing\ndef g(x): return x * x\ndef f(xs):\n  with multiprocessing.Pool(2) as p: return p.map(g, xs)",
        "assert f([1, 2]) == [1, 4]", True,
    ),
    "processes that are spawned": (
        "import multiprocessing as m\ndef g(x): return x * x\ndef f(xs):\n  with m.get_context('spawn').Pool(1) as p: return p.map(g, xs)",
        "assert f([1, 2]) == [1, 4]", True,
    ),
    "unittest": ("def f(): return 1", UNITTEST, True),
    "unittest that fails": ("def f(): return 2", UNITTEST, False),
    "unittest, and the program exits": ("import sys\ndef f(): sys.exit(0)", UNITTEST, False),
    "unittest in the program": ("def f(): return 1" + UNITTEST, "assert f() == 2", False),
    "tests that exit with 1": ("", "import sys\nsys.exit(1)", False),
    "future annotations": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n  x: int",
        "import typing\nassert P.__annotations__ == {'x': 'int'} and typing.get_type_hints(P) == {'x': int}", True,
    ),
    "doctest": (
        "def f():\n  '''\n  >>> f()\n  1\n  '''\n  return 1",
        "import doctest\nassert doctest.testmod().failed == 0 and doctest.testmod().attempted == 1", True,
    ),
    "source": ("import inspect\ndef f(): return 1", "assert 'return 1' in inspect.getsource(f)", True),
    "arguments": ("import sys", "assert len(sys.argv) == 1 and sys.argv[0].endswith('program.py')", True),
    "main": ("x = 0\nif __name__ == '__main__':\n  x = 1", "assert x == 1", True),
    "what is left to the end": ("import atexit\natexit.register(print, 'bye')\ndef f(): return 1", "assert f() == 1", True),
    "packages": ("import numpy\ndef f(): return int(numpy.arange(4).sum())", "assert f() == 6", True),
    "carriage returns": ("def f():\r\n    return 1\r\n", "assert f() == 1", True),
    "the word": ("import os\ndef f(): return os.path.exists('word')", "assert not f()", True),
}  # fmt: skip


def test_programs_run_in_the_sandbox_as_python_runs_a_file() -> None:
    found = check_programs(
        [(program, tests) for program, tests, _ in AS_PYTHON.values()],
        LIMITS.model_copy(update={"code_cpu_seconds": 5}),
    )
    assert {name: one.right for name, one in zip(AS_PYTHON, found, strict=True)} == {
        name: right for name, (_, _, right) in AS_PYTHON.items()
    }


def test_a_program_that_sleeps_is_stopped() -> None:
    [found] = check_programs([("import time; time.sleep(600)", "")], LIMITS.model_copy(update={"code_seconds": 1.0}))
    assert (found.right, found.stopped) == (False, "wall")


def test_a_sandbox_in_which_no_program_can_pass_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("verifiers.nothing_passes", TaskError):
        check_programs([("", "")], LIMITS.model_copy(update={"code_memory_mib": 1}))


def test_a_sampled_text_depends_on_its_seed_and_not_on_its_batch(plant: FilledPlant, export: Path) -> None:
    model = TaskModel.load(export, plant.tokenizer, 4096, "cpu")
    how = GenerationParameters(24, temperature=1.0)
    prompts = ["def f(x):\n", "import os\n", "class A:\n    def", "x"]
    together = model.generate(prompts, how, [1, 2, 3, 4], lambda n: None)
    alone = [model.generate([prompt], how, [seed], lambda n: None)[0] for prompt, seed in zip(prompts, (1, 2, 3, 4))]
    assert together == alone
    other = model.generate(prompts, how, [5, 6, 7, 8], lambda n: None)
    assert all(one.text != two.text for one, two in zip(together, other))
    [stopped] = model.generate(
        prompts[:1], GenerationParameters(24, (together[0].text[2:4],), 1.0), [1], lambda n: None
    )
    assert (stopped.text, stopped.ended) == (together[0].text.split(together[0].text[2:4])[0], True)


def test_sampled_token_frequencies_follow_the_model_s_probabilities(plant: FilledPlant, export: Path) -> None:
    import torch

    model = TaskModel.load(export, plant.tokenizer, 4096, "cpu")
    prompt = "import "
    drawn = model.generate([prompt] * 400, GenerationParameters(1, temperature=1.0), list(range(400)), lambda n: None)
    probability_V = model.model.logits(torch.tensor([plant.tokenizer.encode_text_prompt(prompt).tolist()]))[
        0, -1
    ].softmax(-1)
    token = int(probability_V.argmax())
    expected = float(probability_V[token])
    share = sum(one.text == plant.tokenizer.decode([token]) for one in drawn) / len(drawn)
    assert abs(share - expected) < 4 * (expected * (1 - expected) / 400) ** 0.5
    assert 0.02 < expected < 0.98


def test_a_task_of_each_kind_counts_its_right_answers(plant: FilledPlant, export: Path) -> None:
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
