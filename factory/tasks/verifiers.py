"""Is a generated answer right? Maths by its answer, code by its tests, in the sandbox.

A program that hangs, prints or takes too much is wrong, and why is counted. So is a formula that takes too long to compare: what a model wrote is
parsed by a library in the sandbox alone. A sandbox that cannot be made, or that lets no right program pass, is no answer at all: TaskError.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from factory.core.left_files import open_file
from factory.sandbox import sandbox
from factory.sandbox.sandbox import Limits
from factory.tasks.exact_answer import answer_of, same_answer
from factory.tasks.items import CodeItem, MathsItem, TaskError
from factory.tasks.model import Advance
from factory.tasks.policy import TaskLimits

INSIDE = Path(__file__).with_name("inside")
STARTING_SECONDS = 60.0  # of a sandbox that compares formulas: its imports, on a busy machine
PACKAGES = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})  # which a program may import
Pair = tuple[str, str]  # of formulas in TeX: (gold, said)


@dataclass(frozen=True)
class AnswerCheck:
    """Of one answer."""

    right: bool
    stopped: str = ""  # by which limit of the sandbox
    why: str = ""  # the last line of a program that failed


def check_maths(answers: Sequence[tuple[MathsItem, str]], running: TaskLimits) -> list[AnswerCheck]:
    """Does each text end with its item's answer? Gold and text go through one extractor.

    Raises: IsolationError where formulas are to be compared and there is no sandbox; TaskError when the library does not work.
    """
    pairs = [(answer_of(text), answer_of(str(item.answer)) or str(item.answer)) for item, text in answers]
    asked: dict[Pair, None] = {}

    def ask(gold: str, said: str) -> bool:
        asked[gold, said] = None
        return True  # so that every pair is asked of which the answer may hang

    for said, gold in pairs:
        _ = said is not None and same_answer(said, gold, ask)
    known = _compare(list(asked), running)
    found = []
    for said, gold in pairs:
        slow: list[bool] = []

        def told(one: str, other: str, slow: list[bool] = slow) -> bool:
            slow += [True] * (known[one, other] == "cpu")
            return known[one, other] == "yes"

        right = said is not None and same_answer(said, gold, told)
        found.append(AnswerCheck(right, "cpu" if slow and not right else ""))
    return found


def check_programs(
    programs: Sequence[tuple[str, str]], running: TaskLimits, advance: Advance = lambda n: None
) -> list[AnswerCheck]:
    """Of each (program, tests). Raises: IsolationError; TaskError when not even an empty program passes."""
    works = _check("", "assert True", running)
    if not works.right:
        raise TaskError(f"the sandbox lets no program pass its tests here: {works.why or works.stopped}")

    def one(pair: tuple[str, str]) -> AnswerCheck:
        found = _check(*pair, running)
        advance(1)
        return found

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(one, programs))


def check_solutions(items: Sequence[CodeItem], running: TaskLimits, advance: Advance = lambda n: None) -> None:
    """Raises: TaskError naming the first item whose own solution fails its tests."""
    mine = [item for item in items if item.solution is not None]
    programs = [(item.program(item.solution or ""), item.tests) for item in mine]
    for item, found in zip(mine, check_programs(programs, running, advance), strict=True):
        if not found.right:
            how = f"stopped: over its {found.stopped} limit" if found.stopped else found.why
            raise TaskError(f"item {item.key!r}: its own solution does not pass its tests: {how}")


def _compare(pairs: list[Pair], running: TaskLimits) -> dict[Pair, str]:
    """ "yes", "no" or "cpu" of each pair, by math-verify."""
    if not pairs:
        return {}
    workers = min(len(os.sched_getaffinity(0)), len(pairs))
    parts = [pairs[at::workers] for at in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda part: zip(part, _compare_part(part, running), strict=True), parts)
        return {pair: said for part in found for pair, said in part}


def _compare_part(pairs: list[Pair], running: TaskLimits) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="factory-formulas-") as name:
        folder, seconds = Path(name), running.formula_cpu_seconds
        (folder / "pairs.json").write_text(json.dumps(pairs))
        program = INSIDE / "maths.py"
        ended = sandbox.run(
            [sys.executable, "-I", str(program), str(folder), str(seconds)],
            output=folder,
            readonly=[program],
            environment={"OMP_NUM_THREADS": "1"},
            limits=Limits(
                wall_seconds=STARTING_SECONDS + 4 * seconds * len(pairs),
                memory=running.formula_memory_mib << 20,
                file=16 << 20,
                output=32 << 20,
                output_files=200,
                processes=8,
                log=1 << 20,
                tmp=32 << 20,
            ),
        )
        if not ended.ok:
            raise TaskError(f"formulas cannot be compared with math-verify: it {ended.why()}")
        try:
            with open_file(folder / "equal.json") as file:
                found = json.loads(file.read(64 * len(pairs) + 64))
        except (OSError, ValueError, RecursionError) as error:
            raise TaskError(f"what math-verify left cannot be read: {str(error)[:200]}") from error
    if not isinstance(found, list) or len(found) != len(pairs) or not all(one in ("yes", "no", "cpu") for one in found):
        raise TaskError("what math-verify left is no answer to each pair of formulas")
    return found


def _check(program: str, tests: str, running: TaskLimits) -> AnswerCheck:
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="factory-answer-") as name:
        folder, runner = Path(name), INSIDE / "code.py"
        # "surrogatepass": a model can write half a pair, which Python then refuses inside
        for file, text in (("program.py", program), ("tests.py", tests), ("word", word)):
            (folder / file).write_bytes(text.encode("utf-8", "surrogatepass"))
        ended = sandbox.run(
            [sys.executable, "-I", "-S", str(runner), str(folder), *PACKAGES],
            output=folder,
            readonly=[runner],
            environment={"OMP_NUM_THREADS": "1"},
            limits=Limits(
                wall_seconds=running.code_seconds,
                cpu_seconds=running.code_cpu_seconds,
                memory=running.code_memory_mib << 20,
                file=16 << 20,
                output=32 << 20,
                output_files=200,
                processes=48 + 2 * (os.cpu_count() or 1),  # a pool of the default size
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
