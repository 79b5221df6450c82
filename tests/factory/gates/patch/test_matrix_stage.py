"""The matrix stage on patches, with the first of its tiny runs and one tool: both sides really train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from factory.core.progress import SILENT, Task
from factory.gates.patch.executed import Executed
from factory.gates.patch.matrix import compare
from factory.gates.patch.matrix.cases import CASES, TOOLS, MatrixCase
from factory.gates.patch.matrix.changed import Unexecuted
from factory.gates.patch.matrix.compare import Rounding
from factory.gates.patch.matrix.runs import MatrixRuns
from factory.gates.patch.policy import MatrixPolicy, PatchPolicy
from factory.gates.patch.stages import matrix
from factory.gates.staged_gate import StagedGate
from factory.git import repository
from factory.git.scope import AgentsPolicy, Change
from factory.ledger.plant import Plant
from factory.ledger.rows import Subject
from factory.runs.running import every_run
from tests.support.factory.code_loop import make
from tests.support.factory.matrix import Prepared

SCHEDULE = "trainer/optim/schedule.py"
RATE = "    warm = min(1.0, (step + 1) / schedule.warmup_steps) if schedule.warmup_steps else 1.0\n"
NEVER = "\n\ndef never(x: int) -> int:\n    return x + 1\n"
Text = Callable[[str], str]


def rate(share: str) -> Text:
    return lambda text: text.replace(RATE, f"{RATE}    warm *= {share}\n", 1)


PATCHES: dict[str, tuple[str, Text, str, str, str]] = {
    "words": (SCHEDULE, lambda text: text + "\n# words\n", "", "passed", "2 tiny runs are alike, 2 to the bit"),
    "another rate": (SCHEDULE, rate("1.1"), "", "failed", "run 'first steps': "),
    "another rate, called rounding": (SCHEDULE, rate("1.1"), "It changes rounding.", "failed", "run 'first steps': "),
    "rounding": (SCHEDULE, rate("(1 + 1e-7)"), "It changes ROUNDING.", "passed", "2 tiny runs are alike, 1 to the bit"),
    "rounding, unsaid": (SCHEDULE, rate("(1 + 1e-7)"), "Surroundings.", "failed", "1 of 2 tiny runs end with other bits"),
    "unexecuted": (SCHEDULE, lambda text: text + NEVER, "", "missing", "no run of the gate executed"),
    "an error": (SCHEDULE, lambda text: text.replace(RATE, "    raise OverflowError\n"), "", "failed", "run 'first steps' ended"),
    "a setting": ("policies/kernels.yaml", lambda text: text + "# words\n", "", "not needed", "no code"),
}  # fmt: skip


class Bars:
    """Progress that counts."""

    def __init__(self) -> None:
        self.bars: dict[str, list[float]] = {}  # what each moved by, after what it is to move by

    @contextmanager
    def task(self, title: str, total: float | None = None) -> Iterator[Task]:
        moved = self.bars.setdefault(title, [total or 0])
        yield SimpleNamespace(advance=lambda amount=1, note="": moved.append(amount))

    def line(self, text: str) -> None:
        pass


@pytest.mark.sample("words", "another rate", "rounding", "unexecuted", "a setting")
@pytest.mark.parametrize(("path", "change", "message", "state", "words"), PATCHES.values(), ids=PATCHES)
def test_what_a_patch_leaves_is_held_against_the_baselines(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, path: str, change: Text, message: str, state: str, words: str
) -> None:
    made = make()
    bars = Bars()
    plant, number = Plant(made.workspace, made.ledger, bars), 700 + len(every_run(made.ledger))
    monkeypatch.setattr(
        matrix, "make_plan", lambda *_: (prepared.plan, MatrixRuns())
    )  # one for all: it takes the longest
    monkeypatch.setattr(matrix, "CASES", CASES[:1])
    monkeypatch.setattr(matrix, "TOOLS", [tool for tool in TOOLS if tool.arguments == ("TRUNK", "5")])
    monkeypatch.setattr(compare, "MOST_TWINS", compare.TWINS)
    applied = repository.apply_proposal(
        made.target, made.base, [(path, change((made.target / path).read_text()))], branch=f"factory/test/{number}-x",
        policy=AgentsPolicy.load(made.workspace.policy("agents.yaml")), message=f"A title\n\n{message}", worktrees=made.workspace.worktrees,
    )  # fmt: skip
    try:
        policy = PatchPolicy.load(made.workspace.policy("gates/patch.yaml"))
        gate = StagedGate("patch", policy, (matrix,), lambda *_: None, lambda *_: None)  # type: ignore[arg-type, return-value]
        found = gate.gather(plant, Subject("proposal", number), applied, 1)["stages"]["matrix"]
    finally:
        repository.remove_worktree(made.target, applied.worktree)
        repository.remove_branch(made.target, applied.branch)
    assert found["state"] == state and words in found["reasons"][0], found
    if state != "not needed" and "ended" not in words:
        assert bars.bars["tiny runs of both sides"] == [3, 1, 1, 1]
    rows = [run["arm"] for run in every_run(made.ledger) if run["subject"] == f"proposal:{number}"]
    sides = {(applied.base, "baseline, 1 tiny runs"), (applied.commit, "candidate, 1 tiny runs")}
    assert {(arm["code"], arm["name"]) for arm in rows} == (sides if path == SCHEDULE else set())


FAR = compare.Difference("a", "loss", 9.0, 0.1)


@pytest.mark.parametrize(
    ("draws", "state", "asked"),
    [
        ([Rounding()], "passed", ["abc"]),
        ([Rounding(undecided=["b"]), Rounding()], "passed", ["abc", "b"]),
        ([Rounding(undecided=["b", "c"]), Rounding(undecided=["c"]), Rounding()], "passed", ["abc", "bc", "c"]),
        ([Rounding(undecided=["b"])] * 3, "failed", ["abc", "b", "b"]),
        ([Rounding([FAR])], "failed", ["abc"]),
        ([Rounding([FAR], ["b"])], "failed", ["abc"]),
        ([Rounding(undecided=["b"]), Rounding([FAR])], "failed", ["abc", "b"]),
        ([Rounding(problem="no room")], "missing", ["abc"]),
    ],
)
def test_what_rounding_decides_is_run_on_other_data_three_times_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draws: list[Rounding], state: str, asked: list[str]
) -> None:
    """The runs are told by the test: which data decide nothing cannot be chosen."""
    cases, drawn, told = [MatrixCase(name) for name in "abc"], [], iter(draws)

    def draw(case: object, work: Path, cases: list[MatrixCase], tools: Any) -> Any:
        drawn.append("".join(case.name for case in cases))
        return None, SimpleNamespace(folder=work), MatrixRuns(seconds=2.0), MatrixRuns(seconds=3.0)

    monkeypatch.setattr(matrix, "CASES", cases)
    monkeypatch.setattr(matrix, "TOOLS", ())
    monkeypatch.setattr(matrix, "_draw", draw)
    monkeypatch.setattr(matrix, "replace", lambda side, **_: side)
    monkeypatch.setattr(
        matrix, "compare_runs", lambda _, a, b, cases, tools: [compare.Compared(False, FAR) for _ in cases]
    )
    monkeypatch.setattr(matrix, "measure_rounding", lambda *_: next(told))
    case: Any = SimpleNamespace(paths=["kernels/a.py"], changes=[], work=tmp_path, progress=SILENT, handed_on={})
    found = matrix.run(case).evidence
    assert found["state"] == state and drawn == asked and next(told, None) is None, found
    if state != "missing":
        seconds = len(asked)
        assert (found["draws"], found["baseline_seconds"], found["candidate_seconds"]) == (
            seconds,
            2.0 * seconds,
            3.0 * seconds,
        )
    if state == "passed":
        assert (found["runs"], found["same_bits"]) == (3, 0)


def left_out(*paths: str) -> list[Unexecuted]:
    return [Unexecuted(path, line, "x") for line, path in enumerate(paths, 1)]


@pytest.mark.parametrize(
    ("paths", "waits"),
    [
        (["kernels/a/triton.py"], "cuda"),
        (["kernels/a/triton.py", "kernels/b/triton.py"], "cuda"),
        (["kernels/a/triton.py", "trainer/run.py"], None),
        (["trainer/run.py"], None),
    ],
)
def test_what_only_another_device_executes_waits_for_it(paths: list[str], waits: str | None) -> None:
    found = matrix._unexecuted(left_out(*paths))
    assert found.get("waits_for") == waits and len(found["unexecuted"]) == len(paths)
    reasons = matrix._reasons(left_out(*paths))
    assert ("waits" in reasons[0]) == bool(waits) and reasons[1:] == found["unexecuted"]


def test_a_long_list_is_cut_and_says_so() -> None:
    lists = [matrix._reasons(left_out(*["trainer/run.py"] * count)) for count in (8, 9, 11)]
    assert [len(reasons) for reasons in lists] == [9, 10, 10]
    assert [reasons[-1] for reasons in lists[1:]] == ["and 1 more lines", "and 3 more lines"]


def test_only_python_that_is_there_must_be_executed() -> None:
    base = {"trainer/a.py": b"# \xff\nx = 1\n"}
    changes = [
        Change("trainer/a.py", b"# \xfe\nx = 1\ny = 2\n"), Change("trainer/b.py", b"z = 3\n"), Change("trainer/c.py", None),
        Change("policies/kernels.yaml", b"cpu: {}\n"),
    ]  # fmt: skip
    case: Any = SimpleNamespace(changes=changes, base_bytes=base.get)
    assert [str(part) for part in matrix.never_executed(case, Executed())] == ["trainer/a.py:3: 2", "trainer/b.py:1: 3"]


def test_a_baseline_that_fails_says_nothing_about_the_patch() -> None:
    policy = MatrixPolicy(wall_seconds=77.0)
    failed, stopped = (
        matrix._approved_failed(policy, MatrixRuns(failed="no", out_of_time=ran_out)).evidence
        for ran_out in (False, True)
    )
    assert failed["state"] == stopped["state"] == "missing" and "failed: no" in failed["reasons"][0]
    assert "out_of_time" not in failed and stopped["out_of_time"] and "77 s" in stopped["reasons"][0]
