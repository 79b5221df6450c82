"""HumanEval, MBPP and BigCodeBench: programming tasks with tests."""

from __future__ import annotations

import ast
import sys
from typing import Any

from factory.tasks.published.record_form import LEFT_OUT, SHOWN, TESTED, Benchmark, RecordForm

# BigCodeBench's tests are a TestCase that no code runs. This code runs it and reports the first failure in one line.
RUN_TEST_CASES = """
def _run_test_cases():
    import unittest

    found = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(TestCases).run(found)
    assert found.testsRun, "TestCases has no test"
    for test, why in [*found.errors, *found.failures]:
        raise AssertionError(f"{test}: {why.strip().splitlines()[-1]}")


_run_test_cases()
"""


class HumanEval(RecordForm):
    """``HumanEval.jsonl`` of OpenAI's repository, and the Parquet file of ``openai/openai_humaneval`` (Chen et al. 2021)."""

    task_id: str
    prompt: str
    canonical_solution: str
    test: str
    entry_point: str

    def make_item(self, number: int, about: str) -> dict[str, Any]:
        return {
            "id": self.task_id,
            "prompt": self.prompt,
            "solution": self.canonical_solution,
            "tests": f"{self.test}\ncheck({self.entry_point})\n",
        }


class _Mbpp(RecordForm):
    """A task of MBPP (Austin et al. 2021). Tasks 11–510 are tested, tasks 2, 3 and 4 are examples."""

    task_id: int
    code: str
    test_list: list[str]

    def classify_record_use(self) -> str:
        if self.task_id in (2, 3, 4):
            return SHOWN
        return TESTED if 11 <= self.task_id <= 510 else LEFT_OUT

    def asked(self, said: str, before_tests: list[str]) -> dict[str, Any]:
        """The item. ``said``: the description of the task. ``before_tests``: code that runs before ``test_list``."""
        if not self.test_list:
            raise ValueError("test_list is empty")
        seen = "\n".join(self.test_list[:3])
        asked = f"You are an expert Python programmer, and here is your task: {said} Your code should pass these tests:"
        return {
            "id": self.task_id,
            "prompt": f"{asked}\n\n{seen}\n[BEGIN]\n",
            "begins": "",
            "solution": self.code,
            "tests": "\n".join([*filter(None, before_tests), *self.test_list]),
        }

    def make_example(self, number: int, about: str) -> dict[str, Any]:
        return self.make_item(number, about) | {"solution": f"{self.code}\n[DONE]"}


class Mbpp(_Mbpp):
    """``mbpp.jsonl`` of Google's repository, and the Parquet files of the configuration ``full``."""

    text: str
    test_setup_code: str

    def make_item(self, number: int, about: str) -> dict[str, Any]:
        return self.asked(self.text, [self.test_setup_code])


class SanitizedMbpp(_Mbpp):
    """``sanitized-mbpp.json``, and the Parquet files of the configuration ``sanitized``."""

    prompt: str
    test_imports: list[str]

    def make_item(self, number: int, about: str) -> dict[str, Any]:
        return self.asked(self.prompt, self.test_imports)


class BigCodeBench(RecordForm):
    """The JSON lines and Parquet files of BigCodeBench (Zhuo et al. 2024), in its form Complete: the model continues the docstring."""

    task_id: str
    complete_prompt: str
    canonical_solution: str
    test: str
    entry_point: str
    libs: str | list[str]

    def make_item(self, number: int, about: str) -> dict[str, Any]:
        return {
            "id": self.task_id,
            "prompt": self.complete_prompt,
            "solution": self.canonical_solution,
            "tests": f"{self.test}\n{RUN_TEST_CASES}",
            "libraries": sorted({lib.partition(".")[0] for lib in self._named()} - sys.stdlib_module_names),
        }

    def _named(self) -> list[str]:
        """The names of the libraries. The files have the list as text. Raises: ValueError."""
        try:
            found = ast.literal_eval(self.libs) if isinstance(self.libs, str) else self.libs
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            found = None
        if not isinstance(found, list) or not all(isinstance(lib, str) and lib for lib in found):
            raise ValueError(f"libs is not a list of names: {str(self.libs)[:80]!r}")
        return found


PROGRAMS = (
    Benchmark(
        "humaneval", "code", (HumanEval,), {"max_tokens": 1024}
    ),  # lm-eval: humaneval/humaneval.yaml; our default stops are its own
    Benchmark("mbpp", "code", (Mbpp, SanitizedMbpp), {"stop": ["[DONE]"]}, shown=3),  # lm-eval: mbpp/mbpp.yaml
    Benchmark(
        "bigcodebench",  # its own evaluation: bigcodebench/provider/utility.py
        "code",
        (BigCodeBench,),
        {
            "max_tokens": 1280,
            "stop": [
                "\nif __name__",
                "\ndef main(",
                "\nprint(",
                "\ndef ",
                "\nclass ",
                "\nimport ",
                "\nfrom ",
                "\nassert ",
            ],
        },
    ),
)
