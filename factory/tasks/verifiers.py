"""Checks generated answers in the sandbox: maths by the final answer, code by its tests.

A program that exceeds a limit is wrong, and the limit is counted. A formula that takes too long to compare is wrong too. If the sandbox does not
work, or a right program fails in it, no answer can be checked: TaskError or IsolationError.
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

from factory.core.untrusted_trainer_files import open_regular_file
from factory.sandbox import sandbox
from factory.sandbox.sandbox import SandboxLimits
from factory.tasks.exact_answer import extract_answer, is_same_answer
from factory.tasks.items import CodeItem, MathsItem, TaskError
from factory.tasks.model import Advance
from factory.tasks.policy import TaskLimits
from kernels.contract.message import Message

INSIDE = Path(__file__).with_name("inside")
STARTING_SECONDS = 60.0  # for the imports of the program that compares formulas, on a busy machine
PACKAGES = sorted(
    {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
)  # folders that a program may import from
Pair = tuple[str, str]  # two formulas in TeX: (the right one, the model's)


@dataclass(frozen=True)
class AnswerCheckResult:
    """The result of checking one answer."""

    right: bool
    stopped: str = ""  # the limit of the sandbox that stopped the program
    why: str = ""  # the last line of a failed program's output


def check_maths_answers(answers: Sequence[tuple[MathsItem, str]], limits: TaskLimits) -> list[AnswerCheckResult]:
    """Check for each text that it ends with its item's answer. The same function extracts both answers.

    Raises: IsolationError if formulas must be compared and there is no sandbox; TaskError if math-verify does not work.
    """
    pairs = [(extract_answer(text), extract_answer(str(item.answer)) or str(item.answer)) for item, text in answers]
    asked: dict[Pair, None] = {}

    def ask(gold: str, said: str) -> bool:
        asked[gold, said] = None
        return True  # so that ``is_same_answer`` continues, and asks for every pair that may matter

    for said, gold in pairs:
        _ = said is not None and is_same_answer(said, gold, ask)
    known = _compare(list(asked), limits)
    found = []
    for said, gold in pairs:
        slow: list[bool] = []

        def told(one: str, other: str, slow: list[bool] = slow) -> bool:
            slow += [True] * (known[one, other] == "cpu")
            return known[one, other] == "yes"

        right = said is not None and is_same_answer(said, gold, told)
        found.append(AnswerCheckResult(right, "cpu" if slow and not right else ""))
    return found


def check_programs(
    programs: Sequence[tuple[str, str]], limits: TaskLimits, advance: Advance = lambda n: None
) -> list[AnswerCheckResult]:
    """Run each program with its tests. Raises: IsolationError; TaskError if even an empty program fails."""
    works = _check("", "assert True", limits)
    if not works.right:
        raise TaskError(
            "verifiers.nothing_passes",
            "Even an empty program fails in this machine's sandbox: {reason}",
            reason=works.why or works.stopped,
        )

    def one(pair: tuple[str, str]) -> AnswerCheckResult:
        found = _check(*pair, limits)
        advance(1)
        return found

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(one, programs))


def check_solutions(items: Sequence[CodeItem], limits: TaskLimits, advance: Advance = lambda n: None) -> None:
    """Raises: TaskError naming the first item whose own solution fails its tests."""
    mine = [item for item in items if item.solution is not None]
    programs = [(item.make_program_of_reply(item.solution or ""), item.tests) for item in mine]
    for item, found in zip(mine, check_programs(programs, limits, advance), strict=True):
        if not found.right:
            how = (
                Message("verifiers.over_limit", "The program exceeded its {limit} limit", limit=found.stopped)
                if found.stopped
                else found.why
            )
            raise TaskError(
                "verifiers.solution_fails",
                "item {item!r}: its own solution does not pass its tests: {reason}",
                item=item.key,
                reason=how,
            )


def _compare(pairs: list[Pair], running: TaskLimits) -> dict[Pair, str]:
    """Are the formulas of each pair equal? "yes", "no" or "cpu" (too slow), by math-verify."""
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
        ended = sandbox.run_in_sandbox(
            [sys.executable, "-I", str(program), str(folder), str(seconds)],
            output=folder,
            readonly=[program],
            environment={"OMP_NUM_THREADS": "1"},
            limits=SandboxLimits(
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
            raise TaskError(
                "verifiers.math_verify",
                "math-verify failed, so formulas cannot be compared: {reason}",
                reason=ended.describe_ending(),
            )
        try:
            with open_regular_file(folder / "equal.json") as file:
                found = json.loads(file.read(64 * len(pairs) + 64))
        except (OSError, ValueError, RecursionError) as error:
            raise TaskError(
                "verifiers.unreadable", "The output of math-verify cannot be read: {reason}", reason=str(error)[:200]
            ) from error
    if not isinstance(found, list) or len(found) != len(pairs) or not all(one in ("yes", "no", "cpu") for one in found):
        raise TaskError("verifiers.odd_output", "The output of math-verify has no answer for some of the formulas")
    return found


def _check(program: str, tests: str, running: TaskLimits) -> AnswerCheckResult:
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="factory-answer-") as name:
        folder, runner = Path(name), INSIDE / "code.py"
        # "surrogatepass": a model can write half of a surrogate pair; Python in the sandbox then refuses the file
        for file, text in (("program.py", program), ("tests.py", tests), ("word", word)):
            (folder / file).write_bytes(text.encode("utf-8", "surrogatepass"))
        ended = sandbox.run_in_sandbox(
            [sys.executable, "-I", "-S", str(runner), str(folder), *PACKAGES],
            output=folder,
            readonly=[runner],
            environment={"OMP_NUM_THREADS": "1"},
            limits=SandboxLimits(
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
        return AnswerCheckResult(True)
    if ended.stopped:
        return AnswerCheckResult(False, ended.stopped)
    if ended.returncode in (128 + 24, 128 + 9):  # SIGXCPU, and SIGKILL a second later
        return AnswerCheckResult(False, "cpu")
    early = Message("verifiers.ended_early", "The program ended before its tests ran")
    return AnswerCheckResult(False, why=early if ended.ok else ended.describe_ending())
