"""Is a generated answer right? Maths by the exact answer, code by its tests, in the sandbox.

A program that hangs, prints or takes too much is wrong, and why is counted. A sandbox that cannot be made, or that lets no right program pass,
is no answer at all: TaskError.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from factory.sandbox import sandbox
from factory.sandbox.sandbox import Limits
from factory.tasks.exact_answer import answer_of, same_answer
from factory.tasks.items import CodeItem, MathsItem, TaskError
from factory.tasks.policy import TaskLimits

INSIDE = Path(__file__).with_name("inside") / "code.py"


@dataclass(frozen=True)
class AnswerCheck:
    """Of one answer."""

    right: bool
    stopped: str = ""  # by which limit of the sandbox
    why: str = ""  # the last line of a program that failed


def check_maths(item: MathsItem, text: str) -> AnswerCheck:
    """Does the text end with the item's answer?"""
    gold = str(item.answer)
    right = (answer_of(gold) if "####" in gold else gold) or gold
    said = answer_of(text)
    return AnswerCheck(said is not None and same_answer(said, right))


def check_programs(programs: Sequence[tuple[str, str]], running: TaskLimits) -> list[AnswerCheck]:
    """Of each (program, tests). Raises: IsolationError; TaskError when not even an empty program passes."""
    works = _check("", "assert True", running)
    if not works.right:
        raise TaskError(f"the sandbox lets no program pass its tests here: {works.why or works.stopped}")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda pair: _check(pair[0], pair[1], running), programs))


def check_solutions(items: Sequence[CodeItem], running: TaskLimits) -> None:
    """Raises: TaskError naming the first item whose own solution fails its tests."""
    mine = [item for item in items if item.solution is not None]
    for item, found in zip(
        mine, check_programs([(item.program(item.solution or ""), item.tests) for item in mine], running), strict=True
    ):
        if not found.right:
            how = f"stopped: over its {found.stopped} limit" if found.stopped else found.why
            raise TaskError(f"item {item.key!r}: its own solution does not pass its tests: {how}")


def _check(program: str, tests: str, running: TaskLimits) -> AnswerCheck:
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="factory-answer-") as name:
        folder = Path(name)
        # "surrogatepass": a model can write half a pair, which Python then refuses inside
        for file, text in (("program.py", program), ("tests.py", tests), ("word", word)):
            (folder / file).write_bytes(text.encode("utf-8", "surrogatepass"))
        ended = sandbox.run(
            [sys.executable, "-I", "-S", str(INSIDE), str(folder)],
            output=folder,
            readonly=[INSIDE],
            environment={"OMP_NUM_THREADS": "1"},
            limits=Limits(
                wall_seconds=running.code_seconds,
                cpu_seconds=running.code_cpu_seconds,
                memory=running.code_memory_mib << 20,
                file=16 << 20,
                output=32 << 20,
                output_files=200,
                processes=32,
                log=running.code_printed_kib << 10,
                tmp=32 << 20,
            ),
        )
    said = ended.stdout.rstrip("\n").rsplit("\n", 1)[-1]
    if ended.ok and said == word:
        return AnswerCheck(True)
    if ended.stopped:
        return AnswerCheck(False, ended.stopped)
    if ended.returncode in (128 + 24, 128 + 9):  # SIGXCPU, and SIGKILL a second later
        return AnswerCheck(False, "cpu")
    return AnswerCheck(False, why="it ended before its tests did" if ended.ok else ended.why())
