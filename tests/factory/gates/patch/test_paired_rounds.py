"""Rounds of paired runs: their order, limits, caches, evidence and end, with sessions whose seconds and weights the test tells."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from factory.core import devices
from factory.core.progress import SILENT
from factory.gates.patch import paired_rounds
from factory.gates.patch.judge import STAGES, judge_patch
from factory.gates.patch.paired_rounds import Suspicions, TrainingSide
from factory.gates.patch.policy import PatchPolicy, TrainingPolicy
from factory.gates.patch.stages import training
from factory.gates.patch.timed_session import SessionEndedError, TimedRun
from factory.gates.training_start import TrainingStart
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import Subject
from factory.runs.arm import Arm
from factory.runs.arm_runner import ArmRunner, list_runs
from factory.sandbox.cpu_clock import UsedCpuSeconds
from factory.sandbox.usage import ProcessTree
from kernels.contract.message import Message
from tests.support.gates.reasons import Expected, expect, tells
from trainer.contract.checkpoint.format import Checkpoint

POLICY = TrainingPolicy(steps=50, pairs=2, budget_seconds=1e6)
OVERHEAD, STEP = 1.0, 0.1
NO_GAIN = expect("patch.no_gain")


class Sessions:
    """Stands for the sandbox. Keys of the tables are a side and the number of its session, from 0; values are lists by run without the warm-up."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.factors: dict[tuple[str, int], list[float]] = {}  # of the seconds of a run's steps
        self.weights: dict[tuple[str, int], list[float]] = {}  # factors of its weights
        self.moments: dict[tuple[str, int], float] = {}
        self.ends: dict[tuple[str, int], SessionEndedError] = {}  # instead of its first run after the warm-up
        self.unclocked: set[tuple[str, int]] = set()
        self.restless: set[tuple[str, int]] = set()  # sessions that run while they should stand still
        self.opened: list[tuple[str, list[Arm], Collection[int], Mapping[int, int]]] = []
        self.turns: list[tuple[str, int]] = []  # side and steps, in order
        self.limits: dict[str, list[float]] = {"baseline": [], "candidate": []}
        self.caches: list[list[str]] = []  # what the candidate found in its cache, a session each
        self.running: set[str] = set()  # sides whose processes run
        self.most_open = 0
        self.now = 1000.0

    def open(
        self, folder: Path, code: Path, arms: list[Arm], origin: Any, wall: float, whole: Any, early: Any
    ) -> Session:
        side = code.name
        number = sum(one == side for one, *_ in self.opened)
        self.opened.append((side, arms, whole, early))
        if side == "candidate":
            (folder / "cache").mkdir(exist_ok=True)
            self.caches.append(sorted(path.name for path in (folder / "cache").iterdir()))
            (folder / "cache" / f"kept-{number}").touch()
        return Session(self, (side, number), folder, arms, whole, early)


class Session:
    def __init__(
        self, of: Sessions, key: tuple[str, int], folder: Path, arms: list[Arm], whole: Any, early: Any
    ) -> None:
        self.of, self.key, self.folder, self.arms, self.whole, self.early = of, key, folder, arms, whole, early
        self.init, self.next, self.failed = 1, 0, ""

    def train_next(self, allowed: float) -> TimedRun:
        of, (side, _), arm, place = self.of, self.key, self.arms[self.next], self.next
        assert not of.running - {side}, "only one side runs at a time"
        of.running.add(side)
        self.next += 1
        steps = arm.last_step - arm.first_step
        of.limits[side].append(allowed)
        of.turns.append((side, steps))
        if place == 1 and self.key in of.ends:
            self.failed = of.ends[self.key].why
            raise of.ends[self.key]
        told = lambda table: dict(enumerate(table.get(self.key, ()), 1)).get(place, 1.0)
        span = STEP * (steps - 1) * told(of.factors)
        where = self.folder / "segments" / f"{place:05d}"
        where.mkdir(parents=True)
        (where / "metrics.jsonl").write_text("".join(json.dumps({"step": 0, "time": at}) + "\n" for at in (0.0, span)))
        moments = {"exp_avg.w": torch.ones(2) * steps * of.moments.get(self.key, 1.0)}
        rest = Checkpoint({}, moments, {"step": arm.last_step, "recipe": {}}) if place in self.whole else None
        weights, before = (
            {"w": torch.ones(2) * n} for n in (steps * told(of.weights), self.early.get(place, 0) - arm.first_step)
        )
        seconds = OVERHEAD + span
        of.now += seconds
        cpu = None if self.key in of.unclocked else UsedCpuSeconds(2 * seconds, seconds)
        return TimedRun(seconds, weights if place else {}, rest, before, cpu, where)

    def pause(self) -> None:
        self.of.running.discard(self.key[0])

    def check_still(self) -> None:
        if self.key in self.of.restless:
            raise SessionEndedError(Message("patch.not_still", "no"), not_still=True)

    def close(self) -> None:
        self.of.running.discard(self.key[0])


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, ledger: Ledger) -> Sessions:
    made = Sessions(ledger)
    monkeypatch.setattr(paired_rounds, "TimedSession", made.open)
    monkeypatch.setattr(paired_rounds, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(paired_rounds, "read_process_tree", lambda init, most: ProcessTree([init], 1, 1))
    monkeypatch.setattr(devices, "get_device_kind", lambda: "cpu")
    read = lambda path, part: {"w": torch.zeros(2)} if (path.name, part) == ("checkpoint", "model") else {}
    monkeypatch.setattr(training.checkpoint_files, "read_tensors", read)
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
    return training.compare_training(runs, policy, start, sides[0], sides[1], Suspicions(new_code), 1)


def judged(plant: Sessions, policy: TrainingPolicy, folder: Path, workspace: Any, new_code: bool = True) -> Any:
    found, _ = compared(plant, policy, folder, workspace, new_code)
    stages: dict[str, Any] = {name: {"state": "passed", "reasons": [name]} for name in STAGES}
    stages["evals"]["gains"] = {"code": [0.0, 0.0]}
    return found, judge_patch(PatchPolicy(training=policy), {"stages": stages | {"training": found}, "tries": 1})


def factors(
    baseline: list[float], candidate: list[float], sessions: int = 40, new_code: bool = False, control: float = 1.0
) -> dict[tuple[str, int], list[float]]:
    """The same factors of the timed runs of all sessions. In the first two rounds a control comes first."""
    found = {}
    for side, given in (("baseline", baseline), ("candidate", candidate)):
        for number in range(sessions):
            found[side, number] = [*([control] if number < 2 and (side == "baseline" or new_code) else []), *given]
    return found


FASTER = factors([1.0, 1.01], [0.7, 0.71])
UNSURE = factors([1.0, 1.0], [0.7, 1.3])


# -- how long it goes on ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "rounds", "state", "outcome", "expected"),
    [
        ({}, 2, "passed", "reject", NO_GAIN),
        (FASTER, 2, "passed", "promote", expect("patch.wall_gain", pairs=4)),
        (factors([1.0, 1.01], [0.975, 0.965]), 5, "passed", "promote", expect("patch.cpu_gain")),  # a small gain
        (factors([1.0, 1.3], [0.8, 0.9]), 3, "passed", "promote", expect("patch.wall_gain", pairs=5)),  # a pair more
    ],
)
def test_rounds_are_added_until_the_gain_is_clear(
    plant: Sessions,
    tmp_path: Path,
    workspace: Any,
    given: Any,
    rounds: int,
    state: str,
    outcome: str,
    expected: Expected,
) -> None:
    plant.factors = given
    found, verdict = judged(plant, POLICY, tmp_path, workspace, new_code=False)
    assert (found["state"], verdict.outcome) == (state, outcome), verdict
    assert tells(verdict.reasons[:1], expected), verdict
    assert len(found["round_pairs"]) == rounds and sum(found["round_pairs"]) == len(found["baseline_seconds"])
    assert len(plant.opened) == 2 * rounds and not plant.running
    assert not list(tmp_path.rglob("segments/*")), "runs stay no longer than they are read"


@pytest.mark.parametrize(("budget", "rounds"), [(1.0, 2), (200.0, 6), (400.0, 14)])
def test_a_gain_that_stays_unclear_is_judged_again_later(
    plant: Sessions, tmp_path: Path, workspace: Any, budget: float, rounds: int
) -> None:
    plant.factors = UNSURE
    policy = POLICY.model_copy(update={"budget_seconds": budget})
    found, verdict = judged(plant, policy, tmp_path, workspace, new_code=False)
    assert (found["state"], found["undecided"], verdict.outcome) == ("missing", True, "hold")
    assert len(found["round_pairs"]) == rounds, (plant.now, found["round_pairs"])
    assert plant.now - 1000 <= budget or rounds == 2
    assert verdict.reasons[0].code == "patch.unclear" and verdict.reasons[-1].code == "patch.judged_again"
    assert len(verdict.reasons) <= 5


def test_a_round_has_new_processes_that_take_turns(plant: Sessions, tmp_path: Path, workspace: Any) -> None:
    plant.factors = factors([1.0] * 3, [0.7] * 3, new_code=True)
    compared(plant, POLICY, tmp_path, workspace)
    b, c = "baseline", "candidate"
    assert [side for side, *_ in plant.opened] == [b, c, c, b]
    assert plant.turns == [
        (b, 5), (c, 5), (b, 49), (c, 2), (b, 50), (c, 50), (c, 50), (b, 50),
        (c, 5), (b, 5), (c, 2), (b, 100), (c, 50), (b, 50), (b, 50), (c, 50), (c, 400), (b, 400),
    ]  # fmt: skip
    for side, arms, _, early in plant.opened:
        assert [arm.recipe for arm in arms if arm.last_step != 406] == [{}] * (len(arms) - (arms[-1].last_step == 406))
        assert early == ({4: 398} if arms[-1].last_step == 406 else {})
        for arm in arms:
            assert (arm.code, arm.kernels) == (side[0] * 40, "cpu:\n  attention: native\n"), arm
            spec = arm.make_spec()
            assert (spec["first_step"], spec["kind"], spec["code_commit"]) == (6, "trunk", arm.code)
            assert spec["restart_data"] and spec["initial_checkpoint"] == str(tmp_path / "checkpoint")
    timed = {
        side: [arm.seed for of, arms, *_ in plant.opened if of == side for arm in arms if arm.last_step == 56]
        for side in (b, c)
    }
    assert timed[b] == timed[c] and len(set(timed[b])) == 4, "each pair on data of its own"
    rows = [run["arm"] for run in list_runs(plant.ledger)]
    assert {row["name"].partition(", the")[0] for row in rows} == {
        "baseline, 4 runs",
        "candidate, 4 runs",
        "baseline, 5 runs",
        "candidate, 5 runs",
    }
    assert {run["state"] for run in list_runs(plant.ledger)} == {"done"}


@pytest.mark.parametrize("why", ["a GPU", "little memory"])
def test_without_room_for_two_one_process_comes_after_the_other(
    plant: Sessions, tmp_path: Path, workspace: Any, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "a GPU":
        monkeypatch.setattr(devices, "get_device_kind", lambda: "cuda")
    else:
        monkeypatch.setattr(paired_rounds, "read_process_tree", lambda init, most: ProcessTree([init], 1, 1 << 60))
    found, verdict = judged(plant, POLICY, tmp_path, workspace, new_code=False)
    b, c = "baseline", "candidate"
    first, second = (
        [(b, 5), (b, 49), (b, 50), (b, 50), (c, 5), (c, 50), (c, 50)],
        [(c, 5), (c, 50), (c, 50), (b, 5), (b, 100), (b, 50), (b, 50)],
    )
    assert plant.turns == first + second and verdict.outcome == "reject"


# -- limits ------------------------------------------------------------------------------------------------------------------
LATE = SessionEndedError(Message("patch.test", "stopped"), out_of_time=True)


@pytest.mark.parametrize("number", [0, 1])
def test_a_candidate_that_was_stopped_is_tried_once_more(
    plant: Sessions, tmp_path: Path, workspace: Any, number: int
) -> None:
    plant.ends = {("candidate", number): LATE}
    found, verdict = judged(plant, POLICY, tmp_path, workspace)
    assert found["state"] == "passed" and verdict.outcome == "reject", verdict  # no gain, as without it
    assert len(plant.opened) == 6 and found["round_pairs"] == [2, 2] and len(found["baseline_seconds"]) == 4
    assert {300.0, 900.0} <= set(plant.limits["candidate"])
    assert plant.caches[number + 1] == [], "it has seen these data: nothing that it kept is there"


@pytest.mark.parametrize(
    ("ends", "state", "expected", "late"),
    [
        ({("candidate", 0): LATE, ("candidate", 1): LATE}, "missing", expect("gates.stopped", limits=[300.0, 900.0], key="training.patience"), True),
        ({("baseline", 0): LATE}, "missing", expect("gates.baseline_stopped", key="training.wall_seconds", seconds=3600.0), True),
        ({("candidate", 1): SessionEndedError(Message("patch.test", "run 2: no"))}, "failed", expect("patch.training_failed"), False),
        ({("baseline", 1): SessionEndedError(Message("patch.test", "run 2: no"))}, "missing", expect("patch.training_failed"), False),
        ({("candidate", 1): SessionEndedError(Message("patch.not_still", "no"), not_still=True)}, "missing", expect("patch.not_still"), False),
        ({("baseline", 1): SessionEndedError(Message("patch.not_still", "no"), not_still=True)}, "missing", expect("patch.not_still"), False),
    ],
)  # fmt: skip
def test_a_session_that_ends_early_ends_the_measurement(
    plant: Sessions, tmp_path: Path, workspace: Any, ends: Any, state: str, expected: Expected, late: bool
) -> None:
    plant.ends = ends
    found, pair = compared(plant, POLICY, tmp_path, workspace)
    assert found["state"] == state and pair is None and found.get("out_of_time", False) == late
    assert tells(found["reasons"], expected), found["reasons"]
    assert not plant.running
    broken = [run for run in list_runs(plant.ledger) if run["state"] == "failed"]
    assert {run["arm"]["name"].partition(",")[0] for run in broken} == {side for side, _ in ends}


@pytest.mark.parametrize("side", ["baseline", "candidate"])
def test_a_side_that_does_not_stand_still_ends_the_measurement(
    plant: Sessions, tmp_path: Path, workspace: Any, side: str
) -> None:
    """Checked after each run of the other side, so that the last pause counts too."""
    plant.restless = {(side, 1)}
    found, pair = compared(plant, POLICY, tmp_path, workspace)
    assert found["state"] == "missing" and found["undecided"] and pair is None
    assert tells(found["reasons"], expect("patch.not_still")) and not plant.running


def test_what_more_rounds_cannot_decide_ends_early(plant: Sessions, tmp_path: Path, workspace: Any) -> None:
    """Runs without steps worth timing, and a gain that a quicker start could cause: a person has to change the policy."""
    plant.factors = factors([0.0, 0.0], [0.0, 0.0], control=0.0)
    found, verdict = judged(plant, POLICY, tmp_path / "1", workspace)
    assert len(found["round_pairs"]) == 2 and not found.get("undecided") and verdict.outcome == "hold"
    plant.factors = factors([1.0] * 2, [0.7] * 2, new_code=True)
    for number in range(1, 12):
        for name in ("baseline", "candidate"):
            plant.factors[name, number] = [*plant.factors[name, number], 1.0 if name == "baseline" else 0.97]
    plant.opened.clear()
    found, verdict = judged(plant, POLICY, tmp_path / "2", workspace)
    assert found["long"]["runs"] == paired_rounds.MOST_LONG_PAIRS and not found.get("undecided")
    assert verdict.outcome == "hold" and verdict.reasons[0].code == "patch.quicker_start"


def test_limits_follow_the_baselines_longest_run_and_the_steps(plant: Sessions, tmp_path: Path, workspace: Any) -> None:
    plant.factors = factors([20.0] * 3, [14.0] * 3, new_code=True, control=20.0)  # a baseline run takes 99 s
    policy = POLICY.model_copy(update={"wall_seconds": 500.0})
    compared(plant, policy, tmp_path, workspace)
    by_turn: dict[str, list[tuple[int, float]]] = {"baseline": [], "candidate": []}
    places = {side: iter(limits) for side, limits in plant.limits.items()}
    for side, steps in plant.turns:
        by_turn[side].append((steps, next(places[side])))
    assert [limit for steps, limit in by_turn["baseline"] if steps <= 50] == [500.0] * 7
    assert [limit for steps, limit in by_turn["baseline"] if steps > 50] == [1000.0, 4000.0]
    ours = by_turn["candidate"]
    assert (
        ours[0] == (5, 300.0)
        and ours[2] == (50, pytest.approx(5 * 99))
        and ours[-1] == (400, pytest.approx(8 * 5 * 99.5))
    )


def test_each_side_keeps_its_own_compile_cache_between_sessions(
    plant: Sessions, tmp_path: Path, workspace: Any
) -> None:
    compiled = devices.get_compiled_code_folder(workspace.root, "") / "inductor"
    compiled.mkdir(parents=True)
    plant.ends = {("candidate", 1): LATE}
    judged(plant, POLICY, tmp_path, workspace)
    assert plant.caches == [["inductor"], ["inductor", "kept-0"], ["inductor"]] and list(compiled.iterdir()) == []


# -- what the evidence says --------------------------------------------------------------------------------------------------
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
    plant.weights = {("candidate", 1): [1.0, 1.004]}  # of the four pairs the last is apart
    bars = Bars()
    found, pair = compared(plant, POLICY, tmp_path, workspace, new_code=False, progress=bars)
    both = lambda seconds: {"baseline": [seconds] * 4, "candidate": [seconds] * 4}
    step, whole = pytest.approx(STEP), pytest.approx(OVERHEAD + 4.9)
    for clock, times in (("tree", 2), ("thread", 1)):
        told = found["cpu"][clock]
        assert told.pop("total_seconds") == both(pytest.approx(times * 5.9))
        assert told["overhead_seconds"] == pytest.approx(times) and told["slow_control"] == pytest.approx(9.9 / 4.9)
        assert told["baseline_seconds"] == told["candidate_seconds"] == [pytest.approx(times * STEP)] * 4
    del found["cpu"]
    assert found == {
        "state": "passed", "reasons": found["reasons"], "steps": 50, "new_code": False, "device": "cpu", "round_pairs": [2, 2],
        "total_seconds": both(whole), "overhead_seconds": pytest.approx(OVERHEAD), "slow_control": pytest.approx(9.9 / 4.9),
        "baseline_seconds": [step] * 4, "candidate_seconds": [step] * 4, "drift": pytest.approx(0.004, rel=1e-3),
        "control_drift": pytest.approx(1 / 50), "left_out": 1, "same_bits": False, "bits_expected": False,
    }  # fmt: skip
    assert (
        tells(found["reasons"], expect("patch.trained", runs=4, steps=50, step=6, rounds=2))
        and len(found["reasons"]) == 1
    )
    assert [float(run.weights["w"][0]) for run in pair] == [pytest.approx(50.2), 50.0], (
        "the pair that is furthest apart"
    )
    assert bars.moved == [4, 1, 1, 1, 1]


def test_equal_weights_are_equal_to_the_bit(plant: Sessions, tmp_path: Path, workspace: Any) -> None:
    assert compared(plant, POLICY, tmp_path, workspace)[0]["same_bits"] is True


def test_long_runs_count_beside_the_pairs(plant: Sessions, tmp_path: Path, workspace: Any) -> None:
    plant.factors = factors([1.0, 1.0], [0.7, 0.7]) | {
        ("candidate", 1): [1.0, 0.7, 0.7, 0.8],
        ("candidate", 0): [1.0, 0.7, 0.7],
    }
    plant.factors["baseline", 1] = [1.0, 1.0, 1.0, 1.0]
    found, _ = compared(plant, POLICY, tmp_path, workspace)
    assert found["long"] == {
        "steps": 400, "runs": 1, "ratio": pytest.approx(1 / 0.8), "hideable": pytest.approx(39.9 / 39.0), "drift": 0.0,
        "control_drift": pytest.approx(8 / 400),
    }  # fmt: skip


def test_partly_missing_cpu_time_is_left_out(plant: Sessions, tmp_path: Path, workspace: Any) -> None:
    plant.unclocked = {("candidate", 1)}
    found, _ = compared(plant, POLICY, tmp_path, workspace)
    assert found["state"] == "passed" and "cpu" not in found


@pytest.mark.parametrize(
    ("weights", "sessions", "state"),
    [
        ({("candidate", 0): [1.0, 1.0, 1.02]}, 2, "failed"),  # a round is enough to see it
        ({("candidate", 0): [1.0, 1.0, 1.009]}, 4, "passed"),
        ({("candidate", 1): [1.0, 1.02]}, 4, "failed"),
        ({("baseline", 0): [1.0, 0.98, 1.0]}, 2, "failed"),
    ],
)
def test_weights_that_differ_end_the_measurement(
    plant: Sessions, tmp_path: Path, workspace: Any, weights: Any, sessions: int, state: str
) -> None:
    plant.weights = weights
    found, verdict = judged(plant, POLICY, tmp_path, workspace)
    assert (len(plant.opened), found["state"]) == (sessions, state), found
    assert found["drift"] == pytest.approx(max(abs(1 - w) for of in weights.values() for w in of), rel=0.03)
    assert verdict.outcome == "reject"
    assert tells(verdict.reasons[:1], expect("patch.training_differs", steps=50)) == (state == "failed")


@pytest.mark.parametrize("number", [0, 1])
def test_optimizer_moments_that_differ_fail_the_patch(
    plant: Sessions, tmp_path: Path, workspace: Any, number: int
) -> None:
    """One pair's checkpoints of each of the first two rounds are compared whole."""
    plant.moments = {("candidate", number): 1.009}
    assert compared(plant, POLICY, tmp_path / "1", workspace)[0]["state"] == "passed"
    plant.opened.clear()
    plant.moments = {("candidate", number): 1.011}
    found, pair = compared(plant, POLICY, tmp_path / "2", workspace)
    assert found["state"] == "failed" and pair is None and found["drift"] == 0
    assert tells(found["reasons"], expect("patch.optimiser_apart", kind="exp_avg"))


def test_weights_are_kept_of_one_pair_only(plant: Sessions, tmp_path: Path, workspace: Any, monkeypatch: Any) -> None:
    """Otherwise a long measurement of a large model fills the memory."""
    seen: list[Any] = []
    init = paired_rounds.PairedRounds.__init__

    def noted(self: Any, *given: Any) -> None:
        init(self, *given)
        seen.append(self)

    monkeypatch.setattr(paired_rounds.PairedRounds, "__init__", noted)
    plant.factors = UNSURE
    compared(plant, POLICY.model_copy(update={"budget_seconds": 400.0}), tmp_path, workspace)
    (measured,) = seen
    runs = [
        *measured.totals["baseline"],
        *measured.totals["candidate"],
        *measured.briefs,
        *measured.twice,
        measured.left_out,
    ]
    assert len(runs) > 30 and not any(run.weights or run.early or run.rest for run in runs)
