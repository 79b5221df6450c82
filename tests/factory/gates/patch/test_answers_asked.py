"""The two processes of the op checks: their requests, visible files and time limits. Patches that change the tests of ops."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from factory.core import devices
from factory.gates.patch import op_answers
from factory.gates.patch.execution_recorder import RECORDER_FILE, WATCH_FILE, ExecutedCode
from factory.gates.patch.op_answers import DRIVER, OpAnswers, check_tests_unchanged, compare_answer, run_op_jobs
from factory.gates.patch.policy import OraclePolicy
from factory.gates.time_limits import TimeLimits
from factory.runs.untrusted_files import UntrustedFileError
from factory.sandbox import sandbox
from kernels.contract.message import Message
from tests.support.gates.reasons import Expected, expect, tells
from tests.support.messages import codes

POLICY = OraclePolicy(
    wall_seconds=70.0, patience=TimeLimits(times=2.0, least_seconds=10.0, again=3.0, again_seconds=100.0)
)
NOTED = {"lines": {"kernels/a.py": [3]}, "instructions": {}, "traced": {}, "launched": {}, "conditions": {}}
Acts = Callable[[Path], object]


def ended(code: int = 0, stopped: str | None = None) -> sandbox.SandboxResult:
    return sandbox.SandboxResult(code, "", "x" * 3000 + "\nlast words", 20.0, stopped, 0, 0)


class Processes:
    """Stands for the sandbox, whose processes take seconds to import torch: each acts on its output folder, and ends as it is told."""

    def __init__(self, *runs: tuple[Acts, sandbox.SandboxResult]) -> None:
        self.runs, self.asked = list(runs), list[dict[str, Any]]()

    def run(self, command: list[str], **how: Any) -> sandbox.SandboxResult:
        self.asked.append(how | {"command": command})
        act, result = self.runs[len(self.asked) - 1]
        act(how["output"])
        return result


def nothing(folder: Path) -> None:
    pass


def notes(folder: Path) -> None:
    (folder / "executed.json").write_text(json.dumps(NOTED))


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Processes]:
    def made(*runs: tuple[Acts, sandbox.SandboxResult]) -> Processes:
        told = Processes(*runs)
        monkeypatch.setattr(sandbox, "run_in_sandbox", told.run)
        return told

    return made


JOB = {"op": "swiglu", "implementation": "fast", "case": "small", "dtype": "fp32", "values": "normal"}


def test_the_candidate_answers_without_seeing_the_truth(processes: Callable[..., Processes], tmp_path: Path) -> None:
    told = processes((nothing, ended()), (notes, ended()))
    base, patch, work = tmp_path / "base", tmp_path / "patch", tmp_path / "deep" / "work"
    with run_op_jobs([JOB], POLICY, base, patch, work, {"kernels/a.py": [3]}) as answers:
        os.fstat(answers.folder)
    with pytest.raises(OSError):
        os.fstat(answers.folder)
    request, question, given = work / "request.json", work / "question.json", work / "given"
    asked = {"device": devices.get_device_kind(), "jobs": [JOB]}
    assert json.loads(request.read_text()) == asked
    assert json.loads(question.read_text()) == asked | {
        "recorder": str(RECORDER_FILE),
        "watched": {"kernels/a.py": [3]},
    }
    start, common = [sys.executable, str(DRIVER)], {"environment": {"OMP_NUM_THREADS": "1"}}
    make, answer = told.asked
    assert make.pop("limits").wall_seconds == 70.0 and answer.pop("limits").wall_seconds == 40.0
    assert make == common | {
        "command": [*start, "make", str(request), str(given)],
        "readonly": [base, request, DRIVER, RECORDER_FILE, WATCH_FILE], "output": given, "cwd": base,
    }  # fmt: skip
    out = work / "answers-0"
    assert answer == common | {
        "command": [*start, "answer", str(question), str(given / "inputs"), str(out)],
        "readonly": [patch, question, given / "inputs", DRIVER, RECORDER_FILE, WATCH_FILE], "output": out, "cwd": patch,
    }  # fmt: skip
    assert (answers.seconds, answers.baseline_seconds) == (40.0, 20.0) and answers.truth == given / "truth"
    assert (answers.missing, answers.died, answers.log, answers.out_of_time) == (None, None, "", False)
    assert answers.executed.lines == {"kernels/a.py": {3}} and answers.watched == {"kernels/a.py": [3]}


@pytest.mark.parametrize(
    ("runs", "missing", "died", "late"),
    [
        ([ended(3)], expect("patch.no_inputs", problem="the command ended with code 3: last words"), None, False),
        ([ended(9, "wall")], expect("gates.baseline_stopped", seconds=70.0, key="oracle.wall_seconds"), None, True),
        ([ended(), ended(5)], None, "code 5: last words", False),
        ([ended(), ended(9, "memory")], None, "memory limit", False),
        ([ended(), ended(9, "wall"), ended(5)], None, "code 5", False),
        (
            [ended(), ended(9, "wall"), ended(9, "wall")], None,
            expect("gates.stopped", what="checks", limits=[40.0, 100.0], baseline=20.0, key="oracle.patience"), True,
        ),
        ([ended(), ended(9, "wall"), ended()], None, None, False),
    ],
)  # fmt: skip
def test_an_early_end_of_a_process_is_reported(
    processes: Callable[..., Processes], tmp_path: Path, runs: Any, missing: Any, died: Any, late: bool
) -> None:
    told = processes(*((notes if number == 1 else nothing, run) for number, run in enumerate(runs)))
    (tmp_path / "work").mkdir()  # as it may be
    with run_op_jobs([JOB], POLICY, tmp_path, tmp_path, tmp_path / "work") as answers:
        pass
    for said, expected in ((answers.missing, missing), (answers.died, died)):
        assert bool(said) == bool(expected), said
        if said:  # what the sandbox says is its own text
            assert expected in said if isinstance(expected, str) else tells([said], expected)
    assert answers.out_of_time == late and len(told.asked) == len(runs)
    assert answers.log == (("x" * 3000 + "\nlast words")[-2000:] if died else "")
    assert (answers.seconds, answers.baseline_seconds) == (20.0 * min(len(runs), 2), 20.0)
    assert bool(answers.executed.lines) == (len(runs) == 2), "what a stopped attempt left is not read"
    if len(runs) == 3:
        assert [how["output"].name for how in told.asked[1:]] == ["answers-0", "answers-1"]
        assert [how["limits"].wall_seconds for how in told.asked[1:]] == [40.0, 100.0]
        assert len(told.asked[1]["readonly"]) == len(told.asked[2]["readonly"])


@pytest.mark.parametrize("left", ["{", "[]", "{}", '{"lines": 3}', "[" * 100_000, "null"])
def test_an_unreadable_record_of_executed_code_counts_as_empty(tmp_path: Path, left: str) -> None:
    (tmp_path / "executed.json").write_text(left)
    folder = os.open(tmp_path, os.O_RDONLY)
    assert op_answers.read_executed_code(folder) == ExecutedCode()
    os.close(folder)


def test_reasons_name_the_job() -> None:
    wrong = Message("patch.test", "wrong")
    said = {"op": "swiglu", "implementation": "fast", "about": "small, fp32, normal values", "problem": wrong}
    assert op_answers._of_job(JOB, wrong).data == said
    assert op_answers._of_job(JOB | {"about": "call 3"}, wrong).data == said | {"about": "call 3"}


# -- one answer --------------------------------------------------------------------------------------------------------
ONE = {"output 0": torch.ones(2)}
UNCHANGED = {"inputs changed": torch.zeros(0, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        (ONE | UNCHANGED, []),
        (ONE, ["patch.op_changes_inputs"]),  # it does not say that it does not
        (ONE | UNCHANGED | {"launches": torch.tensor([2, 0])}, ["patch.op_no_launch"]),
        (ONE | UNCHANGED | {"launches": torch.tensor([2, 1])}, []),
        (ONE | UNCHANGED | {"launches": torch.tensor(-1)}, ["patch.op_no_launch"]),
        (ONE | UNCHANGED | {"launches": torch.tensor(1.0)}, ["patch.op_no_launch"]),
        (ONE | UNCHANGED | {"later output 0": torch.ones(2)}, []),
        (ONE | UNCHANGED | {"later output 0": torch.zeros(2)}, ["patch.op_late"]),
        (UNCHANGED | {"later output 0": torch.zeros(2)}, ["patch.op_shape"]),
        (UNCHANGED | {"output 0": torch.ones(2).double(), "later output 0": torch.ones(2)}, ["patch.op_shape"]),
        ({"raised": torch.tensor([list(b"Odd: \xff\n"), list(b"x" * 7)], dtype=torch.uint8)}, ["patch.op_raised"]),
        ({"output 0": torch.zeros(2), "launches": torch.tensor(0)}, ["patch.op_changes_inputs", "patch.op_no_launch", "patch.op_off"]),
    ],
)  # fmt: skip
def test_problems_of_an_answer_are_named(tmp_path: Path, left: dict[str, torch.Tensor], expected: list[str]) -> None:
    save_file({"output 0": torch.ones(2, dtype=torch.float64)}, tmp_path / "exact-7.safetensors")
    save_file(ONE, tmp_path / "eager-7.safetensors")
    save_file(left, tmp_path / "answer-7.safetensors")
    with opened(tmp_path) as folder:
        wrong, share = compare_answer(tmp_path, folder, 7)
    assert codes(wrong) == expected, wrong
    assert all(one.data.get("result", "output 0") == "output 0" for one in wrong)
    assert (share == float("inf")) == ("raised" in left)


@contextlib.contextmanager
def opened(folder: Path) -> Any:
    held = os.open(folder, os.O_RDONLY)
    try:
        yield held
    finally:
        os.close(held)


def test_long_exceptions_are_cut() -> None:
    said = op_answers._text(torch.tensor([list(b"a" * 300)] * 9, dtype=torch.int32))
    assert said.startswith("a" * 300) and len(said) <= 400
    assert len(op_answers._text(torch.tensor(list(b"\x01 " * 1000 + b"end")))) <= 400


MIB = 1 << 20


@pytest.mark.parametrize("truth", [0, 2 * MIB])
def test_an_answer_much_larger_than_twice_the_truth_is_refused(tmp_path: Path, truth: int) -> None:
    save_file({"output 0": torch.ones(2 + truth // 8, dtype=torch.float64)}, tmp_path / "exact-0.safetensors")
    save_file({"output 0": torch.ones(2 + truth // 8)}, tmp_path / "eager-0.safetensors")
    with opened(tmp_path) as folder:
        for size, fits in ((0.9, True), (1.1, False)):
            padding = torch.zeros(int(truth * 1.5 + size * MIB), dtype=torch.uint8)
            right = {"output 0": torch.ones(2 + truth // 8), "padding": padding}
            save_file(UNCHANGED | right, tmp_path / "answer-0.safetensors")
            with contextlib.nullcontext() if fits else pytest.raises(UntrustedFileError):
                assert compare_answer(tmp_path, folder, 0)[0] == []


# -- does the patch change an op's tests? ------------------------------------------------------------------------------
JOBS = [JOB | {"op": op} for op in ("adamw", "rms_norm", "swiglu")]
INPUT, EXACT = {"input 0": torch.ones(2)}, {"output 0": torch.ones(2, dtype=torch.float64)}
WORDS = {"inputs": [{"tensor": "input 0"}], "cost": {}}


def made(folder: Path, number: int, **other: Any) -> None:
    """Test ``number`` of an op as the driver makes it; ``other``: of its parts."""
    parts: dict[str, Any] = {"words": WORDS, "given": INPUT, "exact": EXACT, "eager": ONE} | other
    for part in ("inputs", "truth"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "inputs" / f"given-{number}.json").write_text(json.dumps(parts["words"]))
    for part, name in (("inputs", "given"), ("truth", "exact"), ("truth", "eager")):
        save_file(parts[name], folder / part / f"{name}-{number}.safetensors")


@pytest.fixture
def truth(tmp_path: Path) -> OpAnswers:
    for number in range(len(JOBS)):
        made(tmp_path / "given", number)
    return OpAnswers(
        JOBS, tmp_path / "given" / "truth", -1, 40.0, 20.0, watched={"kernels/a.py": [3]}, executed=ExecutedCode()
    )


OFF = {"output 0": torch.full((2,), 1.1)}
CHANGES: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"words": WORDS | {"cost": {"forward_flops": 1}}}, "patch.test_model"),
    ({"given": {"input 0": torch.zeros(2)}}, "patch.test_inputs"),
    ({"given": INPUT | {"input 1": torch.zeros(2)}}, "patch.test_inputs"),
    ({"exact": {"output 0": torch.zeros(2, dtype=torch.float64)}}, "patch.test_reference"),
    ({"exact": EXACT | {"output 1": torch.zeros(2, dtype=torch.float64)}}, "patch.test_reference"),
    ({"eager": OFF}, "patch.test_accuracy"),
]


@pytest.mark.parametrize(("other", "code"), CHANGES)
def test_only_people_may_change_an_ops_tests(
    processes: Callable[..., Processes], tmp_path: Path, truth: OpAnswers, other: dict[str, Any], code: str
) -> None:
    def makes(folder: Path) -> None:
        for number in range(len(JOBS)):
            made(folder, number, **(other if number == 1 else {}))
        notes(folder / "truth")

    told = processes((makes, ended()))
    found = check_tests_unchanged(truth, POLICY.patience, tmp_path / "patch", tmp_path)
    (how,) = told.asked
    request = json.loads((tmp_path / "request-again.json").read_text())
    assert request == {
        "device": devices.get_device_kind(),
        "jobs": JOBS,
        "recorder": str(RECORDER_FILE),
        "watched": {"kernels/a.py": [3]},
    }
    assert how["command"][2:] == ["make", str(tmp_path / "request-again.json"), str(tmp_path / "again-0")]
    assert how["readonly"][:2] == [tmp_path / "patch", tmp_path / "request-again.json"]
    assert how["output"] == tmp_path / "again-0" and how["cwd"] == tmp_path / "patch"
    assert truth.executed.lines == {"kernels/a.py": {3}}
    if code:
        assert (found["state"], found["failures"]) == ("failed", 1)
        assert tells(found["reasons"], expect("patch.test_changed", op="rms_norm", problem=code)), found
    else:
        assert found == {}


@pytest.mark.parametrize(
    ("runs", "state", "failures", "expected"),
    [
        ([ended(4)], "failed", 1, expect("patch.no_tests", problem="the command ended with code 4: last words")),
        ([ended()], "failed", 1, expect("patch.no_tests", problem="runs.missing", file="given-0.json")),
        (
            [ended(9, "wall")] * 2,
            "missing",
            None,
            expect("gates.stopped", limits=[40.0, 100.0], baseline=20.0, key="oracle.patience"),
        ),
    ],
)
def test_op_tests_that_the_candidate_cannot_make_fail_or_hold_the_patch(
    processes: Callable[..., Processes],
    tmp_path: Path,
    truth: OpAnswers,
    runs: Any,
    state: str,
    failures: Any,
    expected: Expected,
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    told = processes(*((nothing, run) for run in runs))
    found = check_tests_unchanged(truth, POLICY.patience, tmp_path, tmp_path)
    assert (found["state"], found.get("failures")) == (state, failures) and tells(found["reasons"], expected), found
    assert found.get("out_of_time", False) == (state == "missing") and len(found["reasons"]) == 1
    assert [how["limits"].wall_seconds for how in told.asked] == [40.0, 100.0][: len(runs)]
    assert len(os.listdir("/proc/self/fd")) == before, "every folder is closed"


def test_at_most_five_wrong_tests_are_listed(
    processes: Callable[..., Processes], tmp_path: Path, truth: OpAnswers
) -> None:
    jobs = [JOB | {"op": f"op {number}"} for number in range(7)]
    for number in range(7):
        made(tmp_path / "given", number)
    (tmp_path / "given" / "inputs" / "given-6.json").unlink()  # no op of the baseline's

    def makes(folder: Path) -> None:
        for number in range(7):
            made(folder, number, given={"input 0": torch.zeros(2)})

    processes((makes, ended()))
    found = check_tests_unchanged(replace(truth, jobs=jobs), POLICY.patience, tmp_path, tmp_path)
    assert found["failures"] == 6 and [reason[:4] for reason in found["reasons"]] == [f"op {n}" for n in range(5)]


def test_op_tests_much_larger_than_the_baselines_are_refused(tmp_path: Path, truth: OpAnswers) -> None:
    """Each file may be a little larger than the baseline's, whose size nobody chose."""
    for size, fits in ((0.9, True), (1.1, False)):
        padding = {"padding": torch.zeros(int(size * MIB), dtype=torch.uint8)}
        for large in (
            {"words": WORDS | {"x": " " * int(size * MIB)}},
            {"given": INPUT | padding},
            {"exact": EXACT | padding},
            {"eager": ONE | padding},
        ):
            made(tmp_path / "again", 0, **large)
            again, refused = tmp_path / "again", contextlib.nullcontext() if fits else pytest.raises(UntrustedFileError)
            with opened(again / "inputs") as inputs, opened(again / "truth") as exact, refused:
                wrong = op_answers._test_differs(tmp_path / "given", inputs, exact, 1, 0)
                assert bool(wrong) == ("eager" not in large), wrong
            shutil.rmtree(tmp_path / "again")
