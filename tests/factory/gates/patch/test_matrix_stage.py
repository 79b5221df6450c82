"""The matrix stage on patches, with the first of its tiny runs and one tool. Both sides really train."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from factory.core import devices
from factory.core.progress import SILENT, ProgressTask
from factory.core.workspace import Workspace
from factory.gates.patch.execution_recorder import ExecutedCode, make_code_object_name
from factory.gates.patch.matrix import compare
from factory.gates.patch.matrix.cases import CASES, TOOLS, MatrixCase
from factory.gates.patch.matrix.compare import RoundingEffect
from factory.gates.patch.matrix.runs import MatrixPlan, MatrixRuns, MatrixSide
from factory.gates.patch.matrix.start_checkpoints import make_data_plans
from factory.gates.patch.matrix.unexecuted_code import UnexecutedPart
from factory.gates.patch.policy import MatrixPolicy, PatchPolicy
from factory.gates.patch.stages import matrix
from factory.gates.staged_gate import StagedGate
from factory.gates.time_limits import TimeLimits
from factory.gates.training_start import TrainingStart
from factory.git import repository
from factory.git.scope import AgentsPolicy, FileChange
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import Subject
from factory.runs.arm_runner import list_runs
from tests.support.factory.code_loop import make
from tests.support.factory.matrix import Prepared
from tests.support.gates.reasons import Expected, expect, tells
from tests.support.messages import codes
from tests.support.paths import ROOT

SCHEDULE = "trainer/optim/schedule.py"
RATE = "    warm = min(1.0, (step + 1) / schedule.warmup_steps) if schedule.warmup_steps else 1.0\n"
FIRST_STEPS = replace(CASES[0], changes=dict(CASES[0].changes) | {"stability.noise_scale_every": 0})
"""Without the noise scale: on some of the plan's random data it is absent with one rate and present with another, a difference without a size."""
NEVER = "\n\ndef never(x: int) -> int:\n    return x + 1\n"
Text = Callable[[str], str]


def rate(share: str) -> Text:
    return lambda text: text.replace(RATE, f"{RATE}    warm *= {share}\n", 1)


PATCHES: dict[str, tuple[str, Text, str, str, Expected]] = {
    "words": (SCHEDULE, lambda text: text + "\n# words\n", "", "passed", expect("patch.runs_alike", runs=2, same=2)),
    "another rate": (SCHEDULE, rate("1.1"), "", "failed", expect("patch.run_apart", run="first steps")),
    "another rate, called rounding": (SCHEDULE, rate("1.1"), "It changes rounding.", "failed", expect("patch.run_apart", run="first steps")),
    "rounding": (SCHEDULE, rate("(1 + 1e-7)"), "It changes ROUNDING.", "passed", expect("patch.runs_alike", runs=2, same=1)),
    "rounding, unsaid": (SCHEDULE, rate("(1 + 1e-7)"), "Surroundings.", "failed", expect("patch.rounds", differ=1, runs=2)),
    "unexecuted": (SCHEDULE, lambda text: text + NEVER, "", "missing", expect("patch.not_executed")),
    "an error": (SCHEDULE, lambda text: text.replace(RATE, "    raise OverflowError\n"), "", "failed", expect("patch.run_ended", run="first steps")),
    "a setting": ("policies/kernels.yaml", lambda text: text + "# words\n", "", "not needed", expect("patch.no_code")),
}  # fmt: skip


class Bars:
    """Progress that counts."""

    def __init__(self) -> None:
        self.bars: dict[str, list[float]] = {}  # what each moved by, after what it is to move by

    @contextmanager
    def task(self, title: str, total: float | None = None) -> Iterator[ProgressTask]:
        moved = self.bars.setdefault(title, [total or 0])
        yield SimpleNamespace(advance=lambda amount=1, note="": moved.append(amount))

    def line(self, text: str) -> None:
        pass


@pytest.mark.sample("words", "another rate", "rounding", "unexecuted", "a setting")
@pytest.mark.parametrize(("path", "change", "message", "state", "expected"), PATCHES.values(), ids=PATCHES)
def test_the_runs_of_a_patch_are_compared_with_the_baselines(
    prepared: Prepared,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    change: Text,
    message: str,
    state: str,
    expected: Expected,
) -> None:
    made = make()
    bars = Bars()
    plant, number = Plant(made.workspace, made.ledger, bars), 700 + len(list_runs(made.ledger))
    monkeypatch.setattr(
        matrix, "make_matrix_plan", lambda *_: (prepared.plan, MatrixRuns())
    )  # one for all: it takes the longest
    monkeypatch.setattr(matrix, "CASES", [FIRST_STEPS])
    monkeypatch.setattr(matrix, "_find_sized_runs", lambda case: None)
    monkeypatch.setattr(compare, "CASES", [FIRST_STEPS])
    monkeypatch.setattr(matrix, "TOOLS", [tool for tool in TOOLS if tool.arguments == ("TRUNK", "5")])
    monkeypatch.setattr(compare, "MOST_TWINS", compare.TWINS_PER_CASE)
    applied = repository.apply_proposal(
        made.target, made.base, [(path, change((made.target / path).read_text()))], branch=f"factory/test/{number}-x",
        policy=AgentsPolicy.load(made.workspace.policy_path("agents.yaml")), message=f"A title\n\n{message}", worktrees=made.workspace.worktrees,
    )  # fmt: skip
    try:
        policy = PatchPolicy.load(made.workspace.policy_path("gates/patch.yaml"))
        gate = StagedGate("patch", policy, (matrix,), lambda *_: None, lambda *_: None)  # type: ignore[arg-type, return-value]
        found = gate.gather_evidence(plant, Subject("proposal", number), applied, 1)["stages"]["matrix"]
    finally:
        repository.remove_worktree(made.target, applied.worktree)
        repository.remove_branch(made.target, applied.branch)
    assert found["state"] == state and tells(found["reasons"][:1], expected), found
    if state != "not needed" and expected[0] != "patch.run_ended":
        assert bars.bars["tiny runs of both sides"] == [3, 1, 1, 1]
    rows = [run["arm"] for run in list_runs(made.ledger) if run["subject"] == f"proposal:{number}"]
    sides = {(applied.base, "baseline, 1 tiny runs"), (applied.commit, "candidate, 1 tiny runs")}
    assert {(arm["code"], arm["name"]) for arm in rows} == (sides if path == SCHEDULE else set())


FAR = compare.CaseDifference("a", "loss", 9.0, 0.1)


@pytest.mark.parametrize(
    ("draws", "state", "asked"),
    [
        ([RoundingEffect()], "passed", ["abc"]),
        ([RoundingEffect(undecided=["b"]), RoundingEffect()], "passed", ["abc", "b"]),
        (
            [RoundingEffect(undecided=["b", "c"]), RoundingEffect(undecided=["c"]), RoundingEffect()],
            "passed",
            ["abc", "bc", "c"],
        ),
        ([RoundingEffect(undecided=["b"])] * 3, "failed", ["abc", "b", "b"]),
        ([RoundingEffect([FAR])], "failed", ["abc"]),
        ([RoundingEffect([FAR], ["b"])], "failed", ["abc"]),
        ([RoundingEffect(undecided=["b"]), RoundingEffect([FAR])], "failed", ["abc", "b"]),
        ([RoundingEffect(problem="no room")], "missing", ["abc"]),
    ],
)
def test_undecided_runs_are_repeated_on_new_data_at_most_three_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draws: list[RoundingEffect], state: str, asked: list[str]
) -> None:
    """The test supplies the results of the runs, because no data can be chosen on which rounding decides nothing."""
    cases, drawn, told, places = [MatrixCase(name) for name in "abc"], [], iter(draws), []

    def draw(case: object, work: Path, cases: list[MatrixCase], tools: Any, sized: Any) -> Any:
        assert sized is None
        drawn.append("".join(case.name for case in cases))
        places.append((work, list(tools)))
        return "plan", SimpleNamespace(folder=work), MatrixRuns(seconds=2.0), MatrixRuns(seconds=3.0)

    monkeypatch.setattr(matrix, "CASES", cases)
    monkeypatch.setattr(matrix, "TOOLS", ("tool",))
    monkeypatch.setattr(matrix, "_find_sized_runs", lambda case: None)
    monkeypatch.setattr(matrix, "_draw", draw)
    monkeypatch.setattr(matrix, "replace", lambda side, folder: f"twins in {folder}")
    monkeypatch.setattr(
        matrix, "compare_runs", lambda _, a, b, cases, tools: [compare.CaseComparison(False, FAR) for _ in cases]
    )

    def measure(plan: Any, side: Any, baseline: MatrixRuns, compared: Any) -> RoundingEffect:
        assert (plan, side, baseline.seconds) == ("plan", f"twins in {places[-1][0] / 'disturbed'}", 2.0) and len(
            compared
        ) == len(drawn[-1])
        return next(told)

    monkeypatch.setattr(matrix, "measure_rounding_effect", measure)
    case: Any = SimpleNamespace(
        changed_paths=["kernels/a.py", "kernels/a.yaml"], changes=[], work=tmp_path, progress=SILENT, handed_on={}
    )
    found = matrix.run(case).evidence
    assert found["state"] == state and drawn == asked and next(told, None) is None, found
    assert places == [(tmp_path / "matrix" / str(n), ["tool"] if n == 1 else []) for n in range(1, len(asked) + 1)]
    last = draws[-1]
    listed = [expect("patch.run_apart", run=one.case) for one in last.beyond]
    listed += [expect("patch.rounding_decides", run=name, draws=3) for name in last.undecided]
    if state == "failed":
        assert len(found["differences"]) == len(listed) and found["reasons"] == found["differences"]
        assert all(tells([one], said) for one, said in zip(found["reasons"], listed))
        undecided = sum(len(draw.undecided) for draw in draws)
        assert (found["runs"], found["same_bits"]) == (sum(map(len, asked)) - undecided, 0)
    assert (last.problem in found["reasons"][0]) or not last.problem
    if state != "missing":
        seconds = len(asked)
        assert (found["draws"], found["baseline_seconds"], found["candidate_seconds"]) == (
            seconds,
            2.0 * seconds,
            3.0 * seconds,
        )
    if state == "passed":
        assert (found["runs"], found["same_bits"]) == (3, 0)


def left_out(*paths: str) -> list[UnexecutedPart]:
    return [UnexecutedPart(path, line, "x") for line, path in enumerate(paths, 1)]


@pytest.mark.parametrize(
    ("paths", "waits"),
    [
        (["kernels/a/triton.py"], "cuda"),
        (["kernels/a/triton.py", "kernels/b/triton.py"], "cuda"),
        (["kernels/a/triton.py", "trainer/run.py"], None),
        (["trainer/run.py"], None),
    ],
)
def test_a_patch_waits_if_all_unexecuted_code_is_for_another_device(paths: list[str], waits: str | None) -> None:
    found = matrix._unexecuted(left_out(*paths))
    assert found.get("waits_for") == waits and len(found["unexecuted"]) == len(paths)
    reasons = matrix._reasons(left_out(*paths))
    assert reasons[0].code == ("patch.waits_for_device" if waits else "patch.not_executed")
    assert reasons[0].data.get("device") == waits and reasons[1:] == found["unexecuted"]


def test_a_long_list_of_unexecuted_parts_is_cut_and_says_so() -> None:
    lists = [matrix._reasons(left_out(*["trainer/run.py"] * count)) for count in (8, 9, 11)]
    assert [len(reasons) for reasons in lists] == [9, 10, 10]
    last = [reasons[-1] for reasons in lists[1:]]
    assert codes(last) == ["patch.more_lines"] * 2 and [one.data["more"] for one in last] == [1, 3]


def test_the_new_and_the_removed_lines_of_python_files_must_be_executed() -> None:
    base = {"trainer/a.py": b"# \xff\nx = 1\n", "trainer/c.py": b"w = 4\n"}
    changes = [
        FileChange("trainer/a.py", b"# \xfe\nx = 1\ny = 2\n"), FileChange("trainer/b.py", b"z = 3\n"), FileChange("trainer/c.py", None),
        FileChange("trainer/d.py", b"# \xfe\n"),
        FileChange("policies/kernels.yaml", b"cpu: {}\n"),
    ]  # fmt: skip
    case: Any = SimpleNamespace(changes=changes, read_base_file=base.get, handed_on={})
    parts = matrix.find_unexecuted_changes(case, ExecutedCode(), ExecutedCode())
    assert [(part.path, part.line, part.source, part.removed) for part in parts] == [
        ("trainer/a.py", 3, "2", False),
        ("trainer/b.py", 1, "3", False),
        ("trainer/c.py", 1, "4", True),
    ]


def test_old_code_of_an_op_answers_the_op_checks_before_a_removed_line_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An implementation that the patch chooses was perhaps not chosen before, so the tiny runs did not execute its old lines."""
    path, text = "kernels/a.py", "x = 1\n"
    code = compile(text, path, "exec")
    ran = {(make_code_object_name(code), i.offset) for i in dis.get_instructions(code)}
    asked: list[Any] = []

    def record(answers: Any, old: Any, *rest: Any) -> ExecutedCode:
        asked.append(old)
        return ExecutedCode(instructions={path: ran} if answers.executes else {})

    monkeypatch.setattr(matrix, "record_old_code", record)
    for oracle, left, times in (
        (None, 1, 0),
        (SimpleNamespace(jobs=[], executes=False), 1, 1),
        (SimpleNamespace(jobs=[], executes=True), 0, 1),
    ):
        asked.clear()
        case: Any = SimpleNamespace(
            changes=[FileChange(path, b"")], read_base_file=lambda _: text.encode(), handed_on={"oracle": oracle}, policy=PatchPolicy(),
            baseline=tmp_path, work=tmp_path,
        )  # fmt: skip
        found = matrix.find_unexecuted_changes(case, ExecutedCode(), ExecutedCode())
        assert len(found) == left and asked == [{path: [1]}] * times


def test_a_hold_for_conditions_alone_says_so() -> None:
    parts = [
        UnexecutedPart("trainer/a.py", 3, "x > 1", "true"),
        UnexecutedPart("trainer/a.py", 4, "max(1, x)", "0", removed=True),
    ]
    assert codes(matrix._reasons(parts)) == ["patch.one_sided", "patch.condition_one_sided", "patch.removed_part"]
    assert matrix._reasons(parts)[2].data["part"].data["number"] == 1
    assert codes(matrix._reasons([*parts, *left_out("trainer/a.py")]))[0] == "patch.not_executed"


def test_a_baseline_that_fails_says_nothing_about_the_patch() -> None:
    policy = MatrixPolicy(wall_seconds=77.0)
    failed, stopped = (
        matrix._approved_failed(policy, MatrixRuns(failed="no", out_of_time=ran_out)).evidence
        for ran_out in (False, True)
    )
    assert failed["state"] == stopped["state"] == "missing" and tells(
        failed["reasons"], expect("patch.baseline_runs_failed", problem="no")
    )
    assert (
        "out_of_time" not in failed
        and stopped["out_of_time"]
        and tells(stopped["reasons"], expect("gates.baseline_stopped", seconds=77.0))
    )


# -- one draw of data, without a process -----------------------------------------------------------------------------------
class Sides:
    """Stands for the processes: what each side's runs left is told by the name of their folder."""

    def __init__(self, ends: dict[str, MatrixRuns]) -> None:
        self.ends, self.asked = ends, list[Any]()

    def plan(self, side: MatrixSide, folder: Path, recipe_name: str, sized: Any) -> Any:
        assert sized is None
        self.asked.append((side, folder, recipe_name))
        names = dict.fromkeys((case.name for case in CASES), "00001")
        plan = MatrixPlan(
            make_data_plans(folder), {}, names, {case.name: case.steps for case in CASES}, "c", 1, recipe_name, folder
        )
        return plan, self.ends.get("0", MatrixRuns())

    def run(self, plan: MatrixPlan, side: MatrixSide, cases: Any, tools: Any) -> MatrixRuns:
        self.asked.append((side, cases, tools))
        return self.ends.get(side.folder.name) or MatrixRuns(seconds=100.0)


def drawn(
    monkeypatch: pytest.MonkeyPatch, plant: Plant, folder: Path, start: TrainingStart | None, **ends: MatrixRuns
) -> Any:
    sides = Sides({name.strip("_"): runs for name, runs in ends.items()})
    monkeypatch.setattr(matrix, "make_matrix_plan", sides.plan)
    monkeypatch.setattr(matrix, "run_cases", sides.run)
    for side, choice in (("base", "auto"), ("patch", "native")):
        (folder / side / "policies").mkdir(parents=True)
        (folder / side / "policies" / "kernels.yaml").write_text(f"cpu: {{swiglu: {choice}}}\n")
    policy = MatrixPolicy(
        wall_seconds=70.0, patience=TimeLimits(times=2.0, least_seconds=10.0, again=3.0, again_seconds=1000.0)
    )
    after = ExitStack()
    case: Any = SimpleNamespace(
        baseline=folder / "base", candidate=folder / "patch", applied=SimpleNamespace(base="b" * 40, commit="c" * 40), plant=plant,
        subject=Subject("proposal", 7), workspace=plant.workspace, changed_paths=["trainer/a.py", "a.yaml"], start=start, progress=Bars(),
        policy=PatchPolicy(matrix=policy), after_stages=after,
    )  # fmt: skip
    monkeypatch.setattr(matrix, "find_watched_lines", lambda case, old=False: {"trainer/a.py": [1 if old else 2]})
    return matrix._draw(case, folder / "work", CASES[:2], TOOLS[:1]), sides.asked, case


@pytest.mark.parametrize("started", [False, True])
def test_the_candidate_runs_with_its_own_code_and_kernel_choice(
    tmp_path: Path, workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    start = TrainingStart(tmp_path, 6, {"name": "mine"}, {}, {"swiglu": "fused"}, "d" * 40) if started else None
    monkeypatch.setattr(Workspace, "recipe_path", lambda self: ROOT / "policies" / "recipes" / "tiny.yaml")
    found, asked, case = drawn(monkeypatch, Plant(workspace, ledger), tmp_path, start)
    begun, baseline, candidate = asked
    plan, approved, *runs = found
    work, compiled = (
        tmp_path / "work",
        devices.get_compiled_code_folder(workspace.root, "d" * 40) / "inductor" / "factory-kernels",
    )
    assert begun[1:] == (work / "plan", "mine" if started else "tiny") and plan.recipe_name == begun[2]
    assert [one.seconds for one in runs] == [100.0, 100.0] and baseline[1:] == candidate[1:] == (CASES[:2], TOOLS[:1])
    for side, folder, old in ((begun[0], "0", {}), (baseline[0], "1", {"trainer/a.py": [1]}), (approved, "", {})):
        assert (side.code, side.folder, side.wall_seconds, side.watched) == (case.baseline, work / folder, 70.0, old)
    assert approved.after is case.after_stages and approved.compiled == (compiled if started else None)
    side = candidate[0]
    assert (side.code, side.folder, side.wall_seconds, side.watched) == (
        case.candidate,
        work / "2",
        200.0,
        {"trainer/a.py": [2]},
    )
    assert side.compiled == approved.compiled and approved.disturbed == side.disturbed == 0
    texts = [
        yaml.safe_load(of.kernels[name].read_text()) for of in (approved, side) for name in ("reference", "chosen")
    ]
    chosen = "fused" if started else "auto"
    assert texts == [{}, {"cpu": {"swiglu": chosen}}, {}, {"cpu": {"swiglu": "native"}}]
    assert case.progress.bars == {"tiny runs of both sides": [3, 1, 1, 1]}
    rows = {(run["arm"]["name"], run["arm"]["code"], run["purpose"], run["state"]) for run in list_runs(ledger)}
    assert rows == {
        (f"{who}, 2 tiny runs", code * 40, "patch gate", "done")
        for who, code in (("baseline", "b"), ("candidate", "c"))
    }


LATE, BROKEN = MatrixRuns(failed="late", out_of_time=True, seconds=9.0), MatrixRuns(failed="no", seconds=9.0)


@pytest.mark.parametrize(
    ("ends", "state", "expected", "sides"),
    [
        ({"_0": BROKEN}, "missing", expect("patch.baseline_runs_failed", problem="no"), 1),
        ({"_0": LATE}, "missing", expect("gates.baseline_stopped", seconds=70.0, key="matrix.wall_seconds"), 1),
        ({"_1": BROKEN}, "missing", expect("patch.baseline_runs_failed", problem="no"), 2),
        ({"_1": LATE}, "missing", expect("gates.baseline_stopped", seconds=70.0), 2),
        ({"_2": BROKEN}, "failed", expect("patch.runs_failed", problem="no"), 3),
        ({"_2": LATE, "_3": BROKEN}, "failed", expect("patch.runs_failed", problem="no"), 4),
        (
            {"_2": LATE, "_3": LATE}, "missing",
            expect("gates.stopped", what="tiny runs", limits=[200.0, 600.0], baseline=100.0, key="matrix.patience"), 4,
        ),
        ({"_2": LATE}, "", None, 4),
    ],
)  # fmt: skip
def test_failed_runs_are_attributed_to_their_side(
    tmp_path: Path,
    workspace: Workspace,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    ends: Any,
    state: str,
    expected: Any,
    sides: int,
) -> None:
    start = TrainingStart(tmp_path, 6, {"name": "mine"}, {})
    found, asked, _ = drawn(monkeypatch, Plant(workspace, ledger), tmp_path, start, **ends)
    assert len(asked) == sides and [side.folder.name for side, *_ in asked] == ["0", "1", "2", "3"][:sides]
    if not state:
        assert found[3].failed == "" and [side.wall_seconds for side, *_ in asked[2:]] == [200.0, 600.0]
        return
    told = found.evidence
    late = state == "missing" and LATE in ends.values()
    assert (told["state"], told.get("out_of_time", False)) == (state, late), told
    assert tells(told["reasons"][:1], expected), told
    failed = [run for run in list_runs(ledger) if run["state"] == "failed"]
    assert len(failed) == (1 if sides > 1 else 0)


@pytest.mark.parametrize(
    ("paths", "message", "may"),
    [
        (["kernels/a.py"], "", True),
        (["trainer/a.py"], "It changes Rounding.", True),
        (["trainer/a.py"], "Surroundings", False),
        (["trainer/kernels/a.py"], "rounded", False),
    ],
)
def test_only_patches_of_ops_and_declared_patches_may_change_rounding(
    monkeypatch: pytest.MonkeyPatch, paths: list[str], message: str, may: bool
) -> None:
    monkeypatch.setattr(
        repository, "read_commit_message", lambda at, commit: message if (at, commit) == ("code", "c") else "rounding"
    )
    case: Any = SimpleNamespace(
        changed_paths=paths, workspace=SimpleNamespace(repository="code"), applied=SimpleNamespace(commit="c")
    )
    assert matrix.may_round_differently(case) == may


def test_code_executed_by_the_op_checks_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the reasons name at most eight differences."""
    path, text = "trainer/a.py", "x = 1\ny = 2\n"
    code = compile(text, path, "exec")
    at = lambda line: {
        (make_code_object_name(code), i.offset)
        for i in dis.get_instructions(code)
        if i.positions and i.positions.lineno == line
    }
    same, far = (
        compare.CaseComparison(True, None),
        [compare.CaseComparison(False, compare.CaseDifference(str(n), "a", 9.0, 0.1)) for n in range(9)],
    )
    compared = [same]
    monkeypatch.setattr(
        matrix,
        "_draw",
        lambda *_: (None, None, MatrixRuns(), MatrixRuns(executed=ExecutedCode(instructions={path: at(1)}))),
    )
    monkeypatch.setattr(matrix, "compare_runs", lambda *_: compared)
    monkeypatch.setattr(matrix, "may_round_differently", lambda case: False)
    monkeypatch.setattr(matrix, "_find_sized_runs", lambda case: None)
    case: Any = SimpleNamespace(
        changed_paths=[path],
        changes=[FileChange(path, text.encode())],
        read_base_file=lambda _: None,
        work=tmp_path,
        progress=SILENT,
        handed_on={},
    )
    for answers, state in (
        (None, "missing"),
        (SimpleNamespace(jobs=[], executed=ExecutedCode()), "missing"),
        (SimpleNamespace(jobs=[], executed=ExecutedCode(instructions={path: at(2)})), "passed"),
    ):
        case.handed_on = {"oracle": answers}
        found = matrix.run(case).evidence
        assert found["state"] == state and (found["runs"], found["same_bits"], found["draws"]) == (1, 1, 1), found
        assert state == "passed" or found["unexecuted"] == [f"{path}:2: 2"]
    compared += far
    found = matrix.run(case).evidence
    assert found["state"] == "failed" and (len(found["reasons"]), len(found["differences"])) == (8, 9)
    compared[:] = [same, compare.CaseComparison(False, None), compare.CaseComparison(False, None)]
    found = matrix.run(case).evidence
    assert found["state"] == "failed" and tells(found["reasons"], expect("patch.rounds", differ=2, runs=3))
