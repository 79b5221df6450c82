"""Time limits of a candidate follow the baseline: one longer second attempt, then the patch is held. Noisy measurements are repeated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from factory.core import devices
from factory.core.progress import SILENT
from factory.gates.holds import find_only_missing_stage, was_held_by_time_limit_only
from factory.gates.patch.judge import STAGES, judge_patch
from factory.gates.patch.policy import PatchPolicy, TrainingPolicy
from factory.gates.patch.stages import training as patch_training
from factory.gates.patch.stages.training import TrainingSide, compare_training
from factory.gates.patch.timed_session import PatchSession, TimedRun
from factory.gates.stage_interface import make_failed_evidence, make_missing_evidence, make_not_needed_evidence
from factory.gates.time_limits import (
    TimeLimits,
    make_out_of_time_evidence,
    make_stopped_message,
    run_attempts_with_limits,
)
from factory.gates.training_start import TrainingStart
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import Subject
from factory.runs.arm import Arm
from factory.runs.arm_runner import ArmRunner, list_runs
from factory.sandbox.cpu_clock import UsedCpuSeconds
from factory.sandbox.sandbox import SandboxLimits
from kernels.contract.message import Message
from tests.support.gates.reasons import Expected, expect, has, tells
from trainer.contract.checkpoint.format import Checkpoint


@pytest.mark.parametrize(
    ("baseline", "limits"),
    [
        (2.0, (300.0, 900.0)),  # the floor, and the second attempt
        (100.0, (500.0, 1500.0)),  # a machine fifty times slower
        (600.0, (3000.0, 3600.0)),
        (800.0, (4000.0,)),  # no second attempt that would be shorter than the first
    ],
)
def test_a_candidates_limits_follow_the_baseline(baseline: float, limits: tuple[float, ...]) -> None:
    patience = TimeLimits(times=5, least_seconds=300, again=3, again_seconds=3600)
    assert patience.compute_attempt_limits(baseline) == limits
    assert patience.model_copy(update={"again": 1.0}).compute_attempt_limits(baseline) == limits[:1]
    said = make_stopped_message("checks", limits, baseline, "oracle.patience")
    assert said.data == {"what": "checks", "limits": list(limits), "baseline": baseline, "key": "oracle.patience"}
    assert all(f"{limit:.0f}" in said for limit in limits) and "raise oracle.patience" in said


def test_only_an_attempt_that_ran_out_of_time_is_repeated() -> None:
    tried: list[tuple[int, float]] = []

    def needs(seconds: float) -> Callable[[int, float], bool]:
        def attempt(number: int, limit: float) -> bool:
            tried.append((number, limit))
            return seconds > limit

        return attempt

    assert [run_attempts_with_limits((1.0, 3.0), needs(seconds), bool) for seconds in (0.5, 2.0, 9.0)] == [
        False,
        False,
        True,
    ]
    assert tried == [(0, 1.0), (0, 1.0), (1, 3.0), (0, 1.0), (1, 3.0)]


def say(text: str) -> Message:
    return Message("gates.test", "{text}", text=text)


GOOD, LATE, LOST = {"state": "passed"}, make_out_of_time_evidence(say("late"), x=1), make_missing_evidence(say("lost"))


@pytest.mark.parametrize(
    ("stages", "alone", "late"),
    [
        ([GOOD, LATE], LATE, True),
        ([make_not_needed_evidence(say("a")), LATE], LATE, True),
        ([GOOD, LOST], LOST, False),
        ([LOST, LATE], {}, False),  # another stage has a say
        ([make_failed_evidence(say("a")), LATE], {}, False),
        ([GOOD, make_failed_evidence(say("a")) | {"out_of_time": True}], {}, False),
        ([GOOD, LOST | {"out_of_time": "True"}], LOST | {"out_of_time": "True"}, False),
        ([GOOD], {}, False),
    ],
)
def test_a_patch_is_judged_again_only_where_time_alone_held_it(stages: list[Any], alone: Any, late: bool) -> None:
    evidence = {"stages": {str(number): stage for number, stage in enumerate(stages)}}
    assert find_only_missing_stage(evidence) == alone and was_held_by_time_limit_only(evidence) == late
    assert find_only_missing_stage({}) == find_only_missing_stage(
        {"stages": None}
    ) == {} and not was_held_by_time_limit_only({})
    assert LATE == {"state": "missing", "reasons": ["late"], "out_of_time": True, "x": 1}
    assert TimeLimits().compute_attempt_limits(1e6) == (5e6,) and TimeLimits().compute_attempt_limits(0.0) == (
        300.0,
        900.0,
    )


def test_cpu_seconds_never_run_out_before_wall_seconds() -> None:
    assert (
        SandboxLimits(wall_seconds=1000).cpu_seconds_per_process >= 1000
        and SandboxLimits(wall_seconds=1000, cpu_seconds=7).cpu_seconds_per_process == 7
    )


# -- the training stage, on a clock that the test tells -------------------------------------------------------------------
POLICY = TrainingPolicy(steps=50, pairs=4, budget_seconds=1e6)
OVERHEAD, STEP = 1.0, 0.1


class Sessions:
    """Stands for the sandbox: sessions whose seconds the test tells, and whose weights say how many steps were made."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.limits: dict[str, list[float]] = {"baseline": [], "candidate": []}
        self.caches: list[list[str]] = []  # what the candidate found in its cache, a session each
        self.busy: dict[tuple[str, int], list[float]] = {}  # side and number of the session: factors of its runs
        self.out_of_time: set[tuple[str, int]] = set()
        self.order: list[str] = []
        self.left_when_begun: list[int] = []  # runs of earlier sessions that are still there, a session each
        # By side and number of the session: factors of its runs' weights; of its moments; seconds; what went wrong; one without CPU clocks.
        self.weights: dict[tuple[str, int], list[float]] = {}
        self.moments: dict[tuple[str, int], float] = {}
        self.seconds: dict[tuple[str, int], float] = {}
        self.broken: dict[tuple[str, int], str] = {}
        self.unclocked: set[tuple[str, int]] = set()
        self.given: list[tuple[str, list[Arm], list[int], dict[int, int]]] = []
        self.now = 0.0  # the stage's clock

    def session(
        self, folder: Path, code: Path, arms: list[Arm], origin: Any, wall_seconds: float, whole: Any, early: dict[int, int]
    ) -> PatchSession:  # fmt: skip
        side = code.name
        number = len(self.limits[side])
        self.limits[side].append(wall_seconds)
        self.order.append(side)
        self.left_when_begun.append(len(list(code.parent.glob("of-*/*/segments/*"))))
        if side == "candidate":
            (folder / "cache").mkdir(exist_ok=True)
            self.caches.append(sorted(path.name for path in (folder / "cache").iterdir()))
            (folder / "cache" / f"kept-{number}").touch()
        self.given.append((side, arms, list(whole), dict(early)))
        took = self.seconds.get((side, number), 30.0)
        self.now += took
        if (side, number) in self.out_of_time:
            return PatchSession(failed="stopped", out_of_time=True, seconds=wall_seconds)
        if (side, number) in self.broken:
            return PatchSession(failed=self.broken[side, number])
        factors = self.busy.get((side, number), [])
        runs, folders = [], [folder / "warm-up"]
        for place, arm in enumerate(arms[1:], 1):
            steps = arm.last_step - arm.first_step
            busy = factors[place - 2] if 0 <= place - 2 < len(factors) else 1.0
            span = STEP * (steps - 1) * busy
            of = folder / "segments" / f"{place:05d}"
            of.mkdir(parents=True)
            folders.append(of)
            (of / "metrics.jsonl").write_text("".join(json.dumps({"step": 0, "time": at}) + "\n" for at in (0.0, span)))
            moments = {"exp_avg.w": torch.ones(2) * steps * self.moments.get((side, number), 1.0)}
            rest = Checkpoint({}, moments, {"step": arm.last_step, "recipe": {}})
            off = dict(enumerate(self.weights.get((side, number), ()), 2)).get(place, 1.0)
            weights, before = ({"w": torch.ones(2) * n} for n in (steps * off, early.get(place, 0) - arm.first_step))
            seconds = OVERHEAD + span
            cpu = None if (side, number) in self.unclocked else UsedCpuSeconds(2 * seconds, seconds)
            runs.append(TimedRun(seconds, weights, rest, before, cpu))
        return PatchSession(runs, folders, seconds=took)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, ledger: Ledger) -> Sessions:
    made = Sessions(ledger)
    monkeypatch.setattr(patch_training, "train_timed_session", made.session)
    read = lambda path, part: {"w": torch.zeros(2)} if (path.name, part) == ("checkpoint", "model") else {}
    monkeypatch.setattr(patch_training.checkpoint_files, "read_tensors", read)
    return made


def compared(
    plant: Sessions, policy: TrainingPolicy, folder: Path, workspace: Any, new_code: bool = True, progress: Any = SILENT
) -> Any:
    start = TrainingStart(folder / "checkpoint", 6, {}, {"token_shards": []}, {"attention": "native"})
    sides = [TrainingSide(folder / name, name[0] * 40, {}, folder / f"of-{name}") for name in ("baseline", "candidate")]
    for side in sides:
        (side.code / "policies").mkdir(parents=True, exist_ok=True)
        (side.code / "policies" / "kernels.yaml").write_text("cpu: {attention: auto}\n")
    runs = ArmRunner(Plant(workspace, plant.ledger, progress), folder, "patch gate", Subject("proposal", 1))
    return compare_training(runs, policy, start, sides[0], sides[1], new_code, 1)


def measured(plant: Sessions, policy: TrainingPolicy, folder: Path, workspace: Any, new_code: bool = True) -> Any:
    found, _ = compared(plant, policy, folder, workspace, new_code)
    stages: dict[str, Any] = {name: {"state": "passed", "reasons": [name]} for name in STAGES}
    stages["evals"]["gains"] = {"code": [0.0, 0.0]}
    return found, judge_patch(PatchPolicy(training=policy), {"stages": stages | {"training": found}, "tries": 1})


NO_GAIN = expect("patch.no_gain")
QUIET: list[float] = []
BUSY = [1.0, 1.6]
FASTER = {("candidate", number): [0.7, 0.7, 0.7] for number in range(9)}


@pytest.mark.parametrize(
    ("busy", "policy", "sessions", "outcome", "expected"),
    [
        ({}, {}, 2, "reject", NO_GAIN),
        (
            {("baseline", 0): BUSY},
            {},
            4,
            "reject",
            NO_GAIN,
        ),  # the first measurement was disturbed, the second was not
        ({("baseline", n): BUSY for n in range(9)}, {}, 6, "hold", expect("patch.too_noisy", noises=[1.6, 1.6, 1.6])),
        ({("baseline", n): BUSY for n in range(9)}, {"tries": 1}, 2, "hold", expect("patch.held_by_noise", pairs=4)),
        (
            {("baseline", n): BUSY for n in range(9)},
            {"budget_seconds": 1e-9},
            2,
            "hold",
            expect("patch.held_by_noise", measurements=1, tries=3),
        ),
        ({("candidate", n): BUSY for n in range(9)}, {}, 2, "reject", NO_GAIN),  # the candidate's noise is no reason
        ({("baseline", 0): [1.0, 1.2]}, {}, 2, "reject", NO_GAIN),  # within what is allowed
        ({("baseline", 0): BUSY, ("baseline", 2): [1.0, 1.2]}, {}, 6, "reject", NO_GAIN),  # not, after a noisy one
        (
            {("baseline", n): [0.05, 1.0] for n in range(9)},
            {"steps": 4},
            6,
            "hold",
            expect("patch.held_by_noise", measurements=3, tries=3),
        ),
    ],
)
def test_a_disturbed_baseline_is_measured_again(
    plant: Sessions,
    tmp_path: Path,
    workspace: Any,
    busy: Any,
    policy: Any,
    sessions: int,
    outcome: str,
    expected: Expected,
) -> None:
    plant.busy = busy
    found, verdict = measured(plant, POLICY.model_copy(update=policy), tmp_path, workspace, new_code=False)
    assert {name: len(limits) for name, limits in plant.limits.items()} == dict.fromkeys(plant.limits, sessions), found
    assert verdict.outcome == outcome and tells(verdict.reasons[:1], expected), verdict
    assert len(found.get("discarded", ())) == sessions // 2 - 1
    assert (found["reasons"][0].code == "patch.still_noisy") == (found["state"] == "missing"), found["reasons"]
    assert plant.left_when_begun == [0] * len(plant.order) and not list(tmp_path.rglob("segments/*")), (
        "runs stay no longer than they are read"
    )


@pytest.mark.parametrize(
    ("busy", "sessions", "outcome", "expected"),
    [
        (FASTER, 4, "promote", expect("patch.wall_gain", ratio=1 / 0.7)),
        ({("baseline", 0): BUSY} | FASTER, 6, "promote", expect("patch.wall_gain", ratio=1 / 0.7)),
        ({("baseline", 2): BUSY} | FASTER, 6, "promote", expect("patch.wall_gain", ratio=1 / 0.7)),
        # Another program made the candidate look quick, once:
        ({key: FASTER[key] for key in list(FASTER)[:2]}, 4, "hold", expect("patch.gain_not_repeated")),
        ({("baseline", n): BUSY for n in range(2, 9)} | FASTER, 8, "hold", expect("patch.second_unsure", pairs=4)),
    ],
)
@pytest.mark.parametrize("new_code", [False, True])
def test_a_gain_is_measured_again_with_the_candidate_first(
    plant: Sessions,
    tmp_path: Path,
    workspace: Any,
    new_code: bool,
    busy: Any,
    sessions: int,
    outcome: str,
    expected: Expected,
) -> None:
    plant.busy = {key: [*factors, *[0.7] * (key[0] == "candidate")] for key, factors in busy.items()}
    found, verdict = measured(plant, POLICY, tmp_path, workspace, new_code)
    assert {name: len(limits) for name, limits in plant.limits.items()} == dict.fromkeys(plant.limits, sessions), found
    assert verdict.outcome == outcome and tells(verdict.reasons[:1], expected), verdict
    assert ("long" in found) == new_code and "long" not in found["again"]
    again = found["again"]["state"]
    assert (
        found["state"] == again
        and found["again"]["device"] == devices.get_device_kind()
        and found["new_code"] == new_code
    )
    said = found["reasons"][0]
    assert said.code == ("patch.trained_twice" if again == "passed" else "patch.second_time")
    assert again != "passed" or has(said, "step", 6)
    last = plant.order[-4:]
    assert last == ["candidate", "baseline", "candidate", "baseline"]


@pytest.mark.parametrize("number", [0, 1])
def test_a_candidate_that_was_stopped_is_tried_once_more(
    plant: Sessions, tmp_path: Path, workspace: Any, number: int
) -> None:
    plant.out_of_time = {("candidate", number)}
    found, verdict = measured(plant, POLICY, tmp_path, workspace)
    assert found["state"] == "passed" and verdict.outcome == "reject", verdict  # no gain, as without it
    expected = [300.0, 300.0]
    expected.insert(number + 1, 900.0)
    assert plant.limits["candidate"] == expected
    assert plant.caches[number + 1] == [], "it has seen this data: nothing that it kept is there"
    rows = [
        (run["arm"]["name"], run["state"]) for run in list_runs(plant.ledger)
    ]  # of each session, what it was tried with
    assert len(rows) == 4 and {state for _, state in rows} == {"done"}, rows
    assert {name.partition(",")[0] for name, _ in rows} == {"baseline", "candidate"}


@pytest.mark.parametrize(
    ("side", "sessions", "limits", "expected"),
    [
        ("candidate", (0, 1), [300.0, 900.0], expect("gates.stopped", limits=[300.0, 900.0], baseline=30.0, key="training.patience")),
        ("candidate", (2, 3), [300.0] * 3 + [900.0], expect("gates.stopped", baseline=30.0)),  # when repeated
        ("candidate", (3, 4), [300.0] * 4 + [900.0], expect("gates.stopped", baseline=30.0)),
        ("baseline", (0,), [], expect("gates.baseline_stopped", key="training.wall_seconds", seconds=3600.0)),
    ],
)  # fmt: skip
def test_a_session_that_never_ends_holds_the_patch(
    plant: Sessions, tmp_path: Path, workspace: Any, side: str, sessions: Any, limits: list[float], expected: Expected
) -> None:
    plant.busy, plant.out_of_time = FASTER, {(side, number) for number in sessions}
    found, verdict = measured(plant, POLICY, tmp_path, workspace, new_code=False)
    assert found["state"] == "missing" and verdict.outcome == "hold" and plant.limits["candidate"] == limits
    assert found.get("out_of_time") or "again" in found
    assert tells(verdict.reasons[:1], expected), verdict


def test_each_side_keeps_its_own_compile_cache_between_sessions(
    plant: Sessions, tmp_path: Path, workspace: Any
) -> None:
    compiled = devices.get_compiled_code_folder(workspace.root, "") / "inductor"
    compiled.mkdir(parents=True)
    plant.out_of_time = {("candidate", 1)}
    measured(plant, POLICY, tmp_path, workspace)
    assert plant.caches == [["inductor"], ["inductor", "kept-0"], ["inductor"]] and list(compiled.iterdir()) == []


# -- what the stage's evidence says ---------------------------------------------------------------------------------------
class Bars:
    """Progress that counts."""

    def __init__(self) -> None:
        self.moved: list[float] = []

    @contextmanager
    def task(self, title: str, total: float | None = None) -> Iterator[Any]:
        self.moved.append(total or 0)
        yield SimpleNamespace(advance=lambda amount=1, note="": self.moved.append(amount))

    def line(self, text: str) -> None:
        pass


def test_the_evidence_of_a_quiet_measurement_is_complete(plant: Sessions, tmp_path: Path, workspace: Any) -> None:
    plant.seconds = {("baseline", 0): 50.0}
    plant.weights = {("candidate", 1): [1.0, 1.004]}  # of the four pairs the last is apart
    bars, seen = Bars(), POLICY.model_copy(update={"pairs": 5})
    found, pair = compared(plant, seen, tmp_path, workspace, new_code=False, progress=bars)
    both = lambda seconds: {"baseline": [seconds] * 5, "candidate": [seconds] * 5}
    step, whole = pytest.approx(STEP), pytest.approx(OVERHEAD + 4.9)
    cpu = {clock: told.pop("total_seconds") for clock, told in found["cpu"].items()}
    assert cpu == {clock: both(pytest.approx(times * 5.9)) for clock, times in (("tree", 2), ("thread", 1))}
    for clock, times in (("tree", 2), ("thread", 1)):
        told = found["cpu"][clock]
        assert told["overhead_seconds"] == pytest.approx(times) and told["slow_control"] == pytest.approx(9.9 / 4.9)
        assert told["baseline_seconds"] == told["candidate_seconds"] == [pytest.approx(times * STEP)] * 5
    del found["cpu"]
    assert found == {
        "state": "passed", "reasons": found["reasons"], "steps": 50, "new_code": False,
        "device": devices.get_device_kind(), "session_seconds": 50.0, "total_seconds": both(whole), "overhead_seconds": pytest.approx(OVERHEAD),
        "slow_control": pytest.approx(9.9 / 4.9), "baseline_seconds": [step] * 5, "candidate_seconds": [step] * 5,
        "drift": pytest.approx(0.004, rel=1e-3), "control_drift": pytest.approx(1 / 50), "left_out": 1,
    }  # fmt: skip
    assert tells(found["reasons"], expect("patch.trained", runs=5, steps=50, step=6)) and len(found["reasons"]) == 1
    assert [float(run.weights["w"][0]) for run in pair] == [pytest.approx(50.2), 50.0], (
        "the pair that is furthest apart"
    )
    assert bars.moved == [10, 2, 2, 3, 3] and plant.limits["candidate"] == [300.0, 300.0]


def test_partly_missing_cpu_time_is_left_out(plant: Sessions, tmp_path: Path, workspace: Any) -> None:
    plant.unclocked = {("candidate", 1)}
    found, _ = compared(plant, POLICY, tmp_path, workspace)
    assert found["state"] == "passed" and "cpu" not in found


@pytest.mark.parametrize(
    ("weights", "sessions", "state", "outcome"),
    [
        ({("candidate", 0): [1.0, 1.02]}, 2, "failed", "reject"),  # a pair of sessions is enough to see it
        ({("candidate", 0): [1.0, 1.009]}, 4, "passed", "reject"),  # no gain
        ({("candidate", 1): [1.02]}, 4, "passed", "reject"),
        ({("baseline", 0): [0.98, 1.0]}, 2, "failed", "reject"),
    ],
)
def test_weights_that_differ_end_the_measurement(
    plant: Sessions, tmp_path: Path, workspace: Any, weights: Any, sessions: int, state: str, outcome: str
) -> None:
    plant.weights = weights
    plant.busy = {("baseline", number): BUSY for number in range(9)}
    found, verdict = measured(plant, POLICY.model_copy(update={"tries": 1}), tmp_path, workspace)
    assert (len(plant.order), found["state"]) == (sessions, state), found
    differ = max(abs(1 - share) for of in weights.values() for share in of) > 0.01
    assert found["drift"] == pytest.approx(max(abs(1 - w) for of in weights.values() for w in of), rel=0.03)
    assert (
        verdict.outcome == (outcome if differ else "hold")
        and tells(verdict.reasons[:1], expect("patch.training_differs", steps=50)) == differ
    )
    assert sessions == 4 or (found["left_out"] == 1 and len(found["total_seconds"]["baseline"]) == 2)


@pytest.mark.parametrize("number", [0, 1])
def test_optimizer_moments_that_differ_fail_the_patch(
    plant: Sessions, tmp_path: Path, workspace: Any, number: int
) -> None:
    """One pair's checkpoints of each half are compared whole."""
    plant.moments = {("candidate", number): 1.009}
    assert compared(plant, POLICY, tmp_path, workspace)[0]["state"] == "passed"
    plant.limits, plant.moments = {"baseline": [], "candidate": []}, {("candidate", number): 1.011}
    found, pair = compared(plant, POLICY, tmp_path, workspace)
    assert (
        found["state"] == "failed"
        and pair is None
        and tells(found["reasons"], expect("patch.optimiser_apart", kind="exp_avg"))
        and found["drift"] == 0
    )


def test_the_control_is_compared_with_the_run_on_the_same_data(plant: Sessions, tmp_path: Path, workspace: Any) -> None:
    """The second half's data move weights and moments by other steps."""
    large = {(side, 1): [2.0, 2.0] for side in ("baseline", "candidate")}
    plant.weights, plant.moments = large, {("baseline", 1): 3.0, ("candidate", 1): 3.0}
    found, _ = compared(plant, POLICY, tmp_path, workspace)
    assert found["state"] == "passed" and found["control_drift"] == pytest.approx(1 / 50) and found["drift"] == 0
    plant.limits, plant.moments = {"baseline": [], "candidate": []}, {("baseline", 1): 3.0, ("candidate", 1): 3.1}
    assert compared(plant, POLICY, tmp_path, workspace)[0]["state"] == "failed"


@pytest.mark.parametrize(("side", "state"), [("candidate", "failed"), ("baseline", "missing")])
def test_a_run_that_breaks_is_reported_with_its_side(
    plant: Sessions, tmp_path: Path, workspace: Any, side: str, state: str
) -> None:
    plant.broken = {(side, 1): "run 2: no"}
    found, pair = compared(plant, POLICY, tmp_path, workspace)
    assert found == {"state": state, "reasons": found["reasons"]} and pair is None
    assert tells(found["reasons"], expect("patch.training_failed", side=side, problem="run 2: no"))
    (row,) = [run for run in list_runs(plant.ledger) if run["state"] != "done"]
    assert row["arm"]["name"].startswith(f"{side}, ") and row["arm"]["code"] == side[0] * 40


def test_time_limits_follow_the_baselines_session_and_grow_with_the_long_run(
    plant: Sessions, tmp_path: Path, workspace: Any
) -> None:
    plant.busy = FASTER
    plant.seconds = {("baseline", number): 100.0 * (number + 1) for number in range(4)}
    found, pair = compared(plant, POLICY.model_copy(update={"wall_seconds": 100.0}), tmp_path, workspace)
    # by the steps of the larger half, of its control of twice the steps, and of a run of eight times the steps
    assert plant.limits["baseline"] == [100.0, 300.0, 100.0, 100.0] and "again" in found
    # first of the baseline's own two; when repeated, the first measurement's first, then its own
    assert plant.limits["candidate"] == [500.0, 1000.0, 500.0, 1500.0]
    assert found["long"] == {
        "steps": 400, "ratio": pytest.approx(1 / 0.7), "hideable": pytest.approx(39.9 / 39.0), "drift": 0.0,
        "control_drift": pytest.approx(8 / 400),
    }  # fmt: skip


@pytest.mark.parametrize(("first", "second", "told"), [(1.004, 1.002, 0), (1.002, 1.004, 1), (1.002, 1.002, 0)])
def test_the_pair_that_differs_more_of_two_measurements_is_scored(
    plant: Sessions, tmp_path: Path, workspace: Any, first: float, second: float, told: int
) -> None:
    plant.busy = FASTER
    plant.weights = {("candidate", 0): [first], ("candidate", 2): [second, second]}
    found, pair = compared(plant, POLICY, tmp_path, workspace)
    of = (first, second)[told]
    assert float(pair[0].weights["w"][0]) == pytest.approx(50 * of) and float(pair[1].weights["w"][0]) == 50
    runs = [run for side, arms, *_ in plant.given for run in arms if side == "candidate"]
    assert len({arm.seed for arm in runs}) == len(runs), "all on data of their own"
    assert found["drift"] == pytest.approx(first - 1, rel=1e-3)


def test_each_session_trains_the_planned_arms(plant: Sessions, tmp_path: Path, workspace: Any) -> None:
    plant.busy = FASTER
    compared(plant, POLICY, tmp_path, workspace)
    assert [(side, [arm.last_step - arm.first_step for arm in arms]) for side, arms, *_ in plant.given] == [
        ("baseline", [20, 49, 50, 50]), ("candidate", [20, 2, 50, 50]),
        ("baseline", [20, 100, 50, 50, 400]), ("candidate", [20, 2, 50, 50, 400]),
        ("candidate", [20, 2, 50, 50]), ("baseline", [20, 49, 50, 50]),
        ("candidate", [20, 2, 50, 50]), ("baseline", [20, 100, 50, 50]),
    ]  # fmt: skip
    for side, arms, whole, early in plant.given:
        assert len(whole) == (2 if arms[1].last_step == 6 + 49 else 1) and set(whole) <= {1, 2, 3}
        long = len(arms) == 5
        assert early == ({4: 6 + 392} if long else {})
        assert [arm.recipe for arm in arms] == [{}] * 4 + [{"checkpoint_every": 398, "keep_checkpoints": 2}] * long
        for arm in arms:
            assert (arm.code, arm.kernels) == (side[0] * 40, "cpu:\n  attention: native\n"), arm
            spec = arm.make_spec()
            assert (spec["first_step"], spec["kind"], spec["code_commit"]) == (6, "trunk", arm.code)
            assert spec["restart_data"] and spec["initial_checkpoint"] == str(tmp_path / "checkpoint")
    rows = [run["arm"] for run in list_runs(plant.ledger)]
    assert sorted(row["last"] for row in rows) == [56] * 5 + [106] + [406] * 2
    assert {row["name"].partition(", the")[0] for row in rows} == {
        "baseline, 4 runs", "candidate, 4 runs", "baseline, 5 runs", "candidate, 5 runs"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("budget", "seconds", "rounds"),
    [
        (240.0, [30.0] * 9, 2),  # each takes two minutes
        (239.0, [30.0] * 9, 1),
        (360.0, [30.0] * 9, 3),
        (359.0, [30.0] * 9, 2),
        (400.0, [90.0, 90.0, 10.0, 10.0, 10.0, 10.0], 1),  # the longest so far: 240 seconds
        (520.0, [90.0, 90.0, 10.0, 10.0, 10.0, 10.0], 2),
    ],
)
def test_a_new_measurement_begins_only_if_it_would_probably_end_in_time(
    plant: Sessions, tmp_path: Path, workspace: Any, monkeypatch: Any, budget: float, seconds: list[float], rounds: int
) -> None:
    monkeypatch.setattr(patch_training, "time", SimpleNamespace(monotonic=lambda: 1000.0 + plant.now))
    plant.busy = {("baseline", number): BUSY for number in range(9)}
    plant.seconds = {("baseline", number): each for number, each in enumerate(seconds)}
    found, _ = compared(plant, POLICY.model_copy(update={"budget_seconds": budget}), tmp_path, workspace)
    discarded = found.get("discarded", [])
    assert len(discarded) == rounds - 1
    for one in discarded:
        assert one["noise"] == pytest.approx(1.6) and has(one["doubt"], "noise", 1.6)
        assert one["overhead_seconds"] == pytest.approx(OVERHEAD) and len(one["total_seconds"]["candidate"]) == 4


def test_a_measurement_without_step_seconds_has_no_noise(plant: Sessions, tmp_path: Path, workspace: Any) -> None:
    plant.busy = {("baseline", number): [0.0, 0.0] for number in range(9)}
    found, pair = compared(plant, POLICY.model_copy(update={"tries": 2}), tmp_path, workspace)
    assert [one["noise"] for one in found["discarded"]] == [None] and found["state"] == "missing" and pair is not None
