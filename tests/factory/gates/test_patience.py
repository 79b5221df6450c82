"""Time limits of a candidate: by what the baseline took, once more with longer, then hold; and noise that is measured anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from factory.core import devices
from factory.gates.patch.judge import STAGES, judge_patch
from factory.gates.patch.policy import PatchPolicy, TrainingPolicy
from factory.gates.patch.session import PatchSession, TimedRun
from factory.gates.patch.stages import training as patch_training
from factory.gates.patch.stages.training import Side, compare_training
from factory.gates.patience import Patience, patiently, stopped
from factory.gates.training_start import Start
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import Subject
from factory.runs.arm import Arm
from factory.runs.running import Runs, every_run
from factory.sandbox.clock import CpuSeconds
from factory.sandbox.sandbox import Limits
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
    patience = Patience(times=5, least_seconds=300, again=3, again_seconds=3600)
    assert patience.limits(baseline) == limits
    assert patience.model_copy(update={"again": 1.0}).limits(baseline) == limits[:1]
    words = stopped("the candidate's checks", limits, baseline, "oracle.patience")
    assert all(f"{limit:.0f} s" in words for limit in limits) and "raise oracle.patience" in words


def test_only_a_stopped_attempt_is_repeated() -> None:
    tried: list[tuple[int, float]] = []

    def needs(seconds: float) -> Callable[[int, float], bool]:
        def attempt(number: int, limit: float) -> bool:
            tried.append((number, limit))
            return seconds > limit

        return attempt

    assert [patiently((1.0, 3.0), needs(seconds), bool) for seconds in (0.5, 2.0, 9.0)] == [False, False, True]
    assert tried == [(0, 1.0), (0, 1.0), (1, 3.0), (0, 1.0), (1, 3.0)]


def test_cpu_seconds_never_run_out_before_wall_seconds() -> None:
    assert Limits(wall_seconds=1000).cpu >= 1000 and Limits(wall_seconds=1000, cpu_seconds=7).cpu == 7


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
        if (side, number) in self.out_of_time:
            return PatchSession(failed="stopped", out_of_time=True, seconds=wall_seconds)
        factors = self.busy.get((side, number), [])
        runs, folders = [], [folder / "warm-up"]
        for place, arm in enumerate(arms[1:], 1):
            steps = arm.last - arm.first
            busy = factors[place - 2] if 0 <= place - 2 < len(factors) else 1.0
            span = STEP * (steps - 1) * busy
            of = folder / "segments" / f"{place:05d}"
            of.mkdir(parents=True)
            folders.append(of)
            (of / "metrics.jsonl").write_text("".join(json.dumps({"step": 0, "time": at}) + "\n" for at in (0.0, span)))
            moments = {"exp_avg.w": torch.ones(2) * steps}
            rest = Checkpoint({}, moments, {"step": arm.last, "recipe": {}})
            weights, before = ({"w": torch.ones(2) * n} for n in (steps, early.get(place, 0) - arm.first))
            seconds = OVERHEAD + span
            runs.append(TimedRun(seconds, weights, rest, before, CpuSeconds(2 * seconds, seconds)))
        return PatchSession(runs, folders, seconds=30.0)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, ledger: Ledger) -> Sessions:
    made = Sessions(ledger)
    monkeypatch.setattr(patch_training, "timed_session", made.session)
    monkeypatch.setattr(patch_training.checkpoint_files, "read_tensors", lambda *_: {"w": torch.zeros(2)})
    return made


def measured(plant: Sessions, policy: TrainingPolicy, folder: Path, workspace: Any, new_code: bool = True) -> Any:
    start = Start(folder / "checkpoint", 6, {}, {"token_shards": []})
    sides = [Side(folder / name, name[0] * 40, {}, folder / f"of-{name}") for name in ("baseline", "candidate")]
    for side in sides:
        (side.code / "policies").mkdir(parents=True, exist_ok=True)
        (side.code / "policies" / "kernels.yaml").write_text("cpu: {attention: auto}\n")
    runs = Runs(Plant(workspace, plant.ledger), folder, "patch gate", Subject("proposal", 1))
    found, _ = compare_training(runs, policy, start, *sides, new_code, 1)
    stages: dict[str, Any] = {name: {"state": "passed", "reasons": [name]} for name in STAGES}
    stages["evals"]["gains"] = {"code": [0.0, 0.0]}
    return found, judge_patch(PatchPolicy(training=policy), {"stages": stages | {"training": found}, "tries": 1})


QUIET: list[float] = []
BUSY = [1.0, 1.6]
FASTER = {("candidate", number): [0.7, 0.7, 0.7] for number in range(9)}


@pytest.mark.parametrize(
    ("busy", "policy", "sessions", "outcome", "words"),
    [
        ({}, {}, 2, "reject", "no gain"),
        (
            {("baseline", 0): BUSY},
            {},
            4,
            "reject",
            "no gain",
        ),  # the first measurement was disturbed, the second was not
        ({("baseline", n): BUSY for n in range(9)}, {}, 6, "hold", "differ 1.60×, 1.60×, 1.60×"),
        ({("baseline", n): BUSY for n in range(9)}, {"tries": 1}, 2, "hold", "raise training.steps (now 50)"),
        ({("baseline", n): BUSY for n in range(9)}, {"budget_seconds": 1e-9}, 2, "hold", "measured 1 of at most 3"),
        ({("candidate", n): BUSY for n in range(9)}, {}, 2, "reject", "no gain"),  # the candidate's noise is no reason
        ({("baseline", 0): [1.0, 1.2]}, {}, 2, "reject", "no gain"),  # within what is allowed
        ({("baseline", 0): BUSY, ("baseline", 2): [1.0, 1.2]}, {}, 6, "reject", "no gain"),  # not, after a noisy one
        ({("baseline", n): [0.05, 1.0] for n in range(9)}, {"steps": 4}, 6, "hold", "measured 3 of at most 3 times"),
    ],
)
def test_a_disturbed_baseline_is_measured_again(
    plant: Sessions, tmp_path: Path, workspace: Any, busy: Any, policy: Any, sessions: int, outcome: str, words: str
) -> None:
    plant.busy = busy
    found, verdict = measured(plant, POLICY.model_copy(update=policy), tmp_path, workspace, new_code=False)
    assert {name: len(limits) for name, limits in plant.limits.items()} == dict.fromkeys(plant.limits, sessions), found
    assert verdict.outcome == outcome and words in verdict.reasons[0], verdict
    assert len(found.get("discarded", ())) == sessions // 2 - 1
    assert plant.left_when_begun == [0] * len(plant.order) and not list(tmp_path.rglob("segments/*")), (
        "runs stay no longer than they are read"
    )


@pytest.mark.parametrize(
    ("busy", "sessions", "outcome", "words"),
    [
        (FASTER, 4, "promote", "1.429× whole-step gain by the wall clock"),
        ({("baseline", 0): BUSY} | FASTER, 6, "promote", "1.429× whole-step gain by the wall clock"),
        ({("baseline", 2): BUSY} | FASTER, 6, "promote", "1.429× whole-step gain by the wall clock"),
        # Another program made the candidate look quick, once:
        ({key: FASTER[key] for key in list(FASTER)[:2]}, 4, "hold", "the second did not"),
        ({("baseline", n): BUSY for n in range(2, 9)} | FASTER, 8, "hold", "the second is unsure"),
    ],
)
@pytest.mark.parametrize("new_code", [False, True])
def test_a_gain_is_measured_again_the_candidate_first(
    plant: Sessions, tmp_path: Path, workspace: Any, new_code: bool, busy: Any, sessions: int, outcome: str, words: str
) -> None:
    plant.busy = {key: [*factors, *[0.7] * (key[0] == "candidate")] for key, factors in busy.items()}
    found, verdict = measured(plant, POLICY, tmp_path, workspace, new_code)
    assert {name: len(limits) for name, limits in plant.limits.items()} == dict.fromkeys(plant.limits, sessions), found
    assert verdict.outcome == outcome and words in verdict.reasons[0], verdict
    assert ("long" in found) == new_code and "long" not in found["again"]
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
        (run["arm"]["name"], run["state"]) for run in every_run(plant.ledger)
    ]  # of each session, what it was tried with
    assert len(rows) == 4 and {state for _, state in rows} == {"done"}, rows
    assert {name.partition(",")[0] for name, _ in rows} == {"baseline", "candidate"}


@pytest.mark.parametrize(
    ("side", "sessions", "limits", "words"),
    [
        ("candidate", (0, 1), [300.0, 900.0], ["(300 s, then 900 s; the baseline took 30 s", "training.patience in policies/gates/"]),
        ("candidate", (2, 3), [300.0] * 3 + [900.0], ["the baseline took 30 s"]),  # when repeated
        ("candidate", (3, 4), [300.0] * 4 + [900.0], ["the baseline took 30 s"]),
        ("baseline", (0,), [], ["training.wall_seconds", "3600 s with approved code"]),
    ],
)  # fmt: skip
def test_a_session_that_never_ends_holds_the_patch(
    plant: Sessions, tmp_path: Path, workspace: Any, side: str, sessions: Any, limits: list[float], words: list[str]
) -> None:
    plant.busy, plant.out_of_time = FASTER, {(side, number) for number in sessions}
    found, verdict = measured(plant, POLICY, tmp_path, workspace, new_code=False)
    assert found["state"] == "missing" and verdict.outcome == "hold" and plant.limits["candidate"] == limits
    assert found.get("out_of_time") or "again" in found
    assert all(part in verdict.reasons[0] for part in words), verdict


def test_a_compile_cache_moves_along_with_its_own_side(plant: Sessions, tmp_path: Path, workspace: Any) -> None:
    compiled = devices.compiled(workspace.root, "") / "inductor"
    compiled.mkdir(parents=True)
    plant.out_of_time = {("candidate", 1)}
    measured(plant, POLICY, tmp_path, workspace)
    assert plant.caches == [["inductor"], ["inductor", "kept-0"], ["inductor"]] and list(compiled.iterdir()) == []
