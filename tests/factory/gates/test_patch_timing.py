"""How the patch gate computes seconds of a step from seconds of runs, which gains do not count, and when CPU time decides."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from factory.core.workspace import find_checkout_root
from factory.gates.patch.judge import compute_step_gain, judge_patch
from factory.gates.patch.policy import PatchPolicy, TrainingPolicy
from factory.gates.patch.step_timing import (
    MeasurementTimes,
    compute_long_run_gain,
    compute_quick_start_gain,
    estimate_cpu_overhead,
    make_step_seconds_evidence,
)
from tests.support.gates.patch_evidence import evidence
from tests.support.gates.reasons import expect, has, tells

SHIPPED = PatchPolicy.load(find_checkout_root() / "policies" / "gates" / "patch.yaml")
POLICY = TrainingPolicy(steps=100, pairs=2)  # four runs of each side
STEP = 0.01  # seconds of a baseline's


def run(overhead: float, steps: int, step: float = STEP) -> float:
    """Seconds of a run: the overhead holds the first step."""
    return overhead + (steps - 1) * step


def runs(overhead: float, ours: float, step: float = STEP, brief: float | None = None) -> MeasurementTimes:
    """A baseline and a candidate with these overheads; ``brief``: the candidate's overhead in its runs of two steps."""
    return MeasurementTimes(
        baseline=[run(overhead, 100)] * 4,
        candidate=[run(ours, 100, step)] * 4,
        briefs=[run(ours if brief is None else brief, 2, step)] * 2,
        twice=[run(overhead, 200)],
        overhead=overhead,
    )


@pytest.mark.parametrize(
    ("measured", "ratio"),
    [
        (runs(0.5, 0.5), 1.0),
        (runs(0.5, 0.5, STEP / 2), 2.0),  # quicker steps are a gain
        (runs(0.5, 0.1), 1.0),  # a quicker start is none
        (runs(0.5, 0.1, STEP / 2), 2.0),  # nor beside quicker steps
        (runs(0.5, 0.9), 1.0 / (1 + 0.4 / 0.99)),  # a slower one counts against it
        (runs(0.5, 0.5, STEP * 1.1), 1 / 1.1),
        (runs(0.5, 0.1, brief=0.5), 1.0 / (1 - 0.4 / 0.99)),  # hidden where it would show: the long runs tell
        (runs(0.5, 0.5, brief=0.1), 1.0 / (1 + 0.4 / 0.99)),  # slower where it does not show helps nobody
    ],
)
def test_only_quicker_steps_are_a_gain(measured: MeasurementTimes, ratio: float) -> None:
    found = make_step_seconds_evidence(POLICY, measured)
    shown = compute_step_gain(POLICY, {"round_pairs": [2, 2]}, found, 1)
    assert shown is not None and shown.ratio == pytest.approx(ratio, rel=0.02) and shown.noise == pytest.approx(1)
    assert found["slow_control"] == pytest.approx(199 / 99) and "doubt" not in found


@pytest.mark.parametrize("steps", [200, 800, 3200])
def test_a_candidate_that_hides_its_start_up_time_is_not_promoted(steps: int) -> None:
    """The candidate waits only in the runs that show its overhead. Short runs credit a gain, long runs never enough."""
    overhead = 0.5
    found = make_step_seconds_evidence(POLICY, runs(overhead, 0.05, brief=overhead))
    shown = compute_step_gain(POLICY, {"round_pairs": [2, 2]}, found, 1)
    long = compute_long_run_gain([(run(overhead, steps), run(0.05, steps))] * 2, steps, overhead)
    assert shown is not None and shown.ratio > 1.5 and long["ratio"] <= long["hideable"] * 1.0001
    assert long["hideable"] == pytest.approx(compute_quick_start_gain(overhead, (steps - 1) * STEP, steps - 1))
    told = evidence([1.0] * 4, [1 / shown.ratio] * 4, new_code=True, long=long | {"drift": 0.0, "control_drift": 0.2})
    policy = PatchPolicy(training=POLICY)
    assert judge_patch(policy, told).outcome in ("hold", "reject")


@pytest.mark.parametrize(
    ("measured", "code", "data"),
    [
        (MeasurementTimes([2, 2], [2, 2], [1, 1], [2.5], 1), "patch.clock_untrusted", {"slow": 1.5}),
        (MeasurementTimes([2, 2], [2, 2], [1, 1], [2.0, 3.0], 1), "patch.clock_untrusted", {"slow": 1.5}),
        (MeasurementTimes([1, 2], [2, 2], [1, 1], [5], 1), "patch.too_short", {"steps": 100, "overhead": 1}),
        (MeasurementTimes([2, 2], [1, 2], [1, 1], [5], 1), "patch.too_short", {"overhead": 1}),
    ],
)
def test_a_doubtful_timing_is_reported(measured: MeasurementTimes, code: str, data: dict[str, Any]) -> None:
    said = make_step_seconds_evidence(POLICY, measured)["doubt"]
    assert said.code == code and all(has(said, name, value) for name, value in data.items())


SHORT = TrainingPolicy(steps=11, pairs=2)


@pytest.mark.parametrize(
    ("measured", "doubtful"),
    [
        (
            MeasurementTimes([2.0, 2.0], [2.0, 2.0], [1.1, 1.1], twice=[2.5], overhead=1.0),
            True,
        ),  # 1.5 times: the clock is slow
        (MeasurementTimes([2.0, 2.0], [2.0, 2.0], [1.1, 1.1], twice=[2.51], overhead=1.0), False),
        (MeasurementTimes([1.0, 2.0], [2.0, 2.0], [1.1, 1.1], twice=[3.0], overhead=1.0), True),
        (MeasurementTimes([2.0, 2.0], [1.0, 2.0], [1.1, 1.1], twice=[3.0], overhead=1.0), True),
        (MeasurementTimes([2.0, 2.0], [1.01, 2.0], [1.1, 1.1], twice=[3.0], overhead=1.0), False),
    ],
)
def test_no_step_seconds_are_computed_from_doubtful_runs(measured: MeasurementTimes, doubtful: bool) -> None:
    found = make_step_seconds_evidence(SHORT, measured)
    assert ("doubt" in found) == doubtful == ("baseline_seconds" not in found)
    assert found["total_seconds"] == {"baseline": list(measured.baseline), "candidate": list(measured.candidate)}


def test_step_seconds_exclude_the_overhead() -> None:
    found = make_step_seconds_evidence(
        SHORT, MeasurementTimes([3.0, 2.0], [1.5, 2.5], [1.0, 1.25], twice=[4.0], overhead=1.0)
    )
    assert found["baseline_seconds"] == [pytest.approx(0.2), pytest.approx(0.1)] and found["slow_control"] == 2.0
    # of the candidate the longer of: all but the overhead; all but a brief run, for as many steps as that has not
    assert found["candidate_seconds"] == [pytest.approx(0.05), pytest.approx(max(0.15, 1.25 / 9))]
    found = make_step_seconds_evidence(
        SHORT, MeasurementTimes([2.0, 2.5], [1.5, 2.5], [0.5, 0.75], twice=[4.0], overhead=1.0)
    )
    assert found["candidate_seconds"] == [pytest.approx(0.75 / 9), pytest.approx(1.75 / 9)]


def test_approved_code_needs_no_brief_runs_and_the_first_round_no_control() -> None:
    found = make_step_seconds_evidence(SHORT, MeasurementTimes([3.0, 2.0], [1.5, 2.5], [], [], 1.0))
    assert found["candidate_seconds"] == [pytest.approx(0.05), pytest.approx(0.15)]
    assert "slow_control" not in found and "doubt" not in found


@pytest.mark.parametrize("overhead", [0.0, 0.4, 0.9])
def test_a_wrong_overhead_creates_no_gain(overhead: float) -> None:
    """The overhead is an estimate. Between equal sides it does not matter, and a true gain keeps its sign."""
    same = make_step_seconds_evidence(SHORT, MeasurementTimes([2.0, 3.0], [2.0, 3.0], [], [], overhead))
    assert same["baseline_seconds"] == same["candidate_seconds"]
    quick = make_step_seconds_evidence(SHORT, MeasurementTimes([2.0, 3.0], [1.9, 2.8], [], [], overhead))
    assert all(a > b for a, b in zip(quick["baseline_seconds"], quick["candidate_seconds"], strict=True))


def test_long_runs_limit_the_gain_that_a_quick_start_can_hide() -> None:
    assert compute_long_run_gain([(11.0, 6.0)], 11, 1.0) == {
        "steps": 11,
        "runs": 1,
        "ratio": pytest.approx(2.0),
        "hideable": 1.0,
    }  # the start is one step
    assert (
        compute_quick_start_gain(3.0, 10.0, 10) == pytest.approx(10 / 8)
        and compute_quick_start_gain(0.5, 10.0, 10) == 1.0
    )
    assert compute_long_run_gain([(11.0, 1.0)], 11, 1.0)["ratio"] == pytest.approx(10_000)
    two = compute_long_run_gain([(11.0, 6.0), (21.0, 41.0)], 11, 1.0)  # a geometric mean: 2 and 1/2 are none
    assert two["ratio"] == pytest.approx(1.0) and two["runs"] == 2
    assert estimate_cpu_overhead(SHORT, [3.0, 4.0, 9.0], [5.1]) == pytest.approx(4.0 - 1.1 * 10 / 11)


def test_cpu_overhead_is_found_from_a_run_of_twice_the_steps() -> None:
    assert estimate_cpu_overhead(POLICY, [run(0.5, 100)] * 3, [run(0.5, 200)]) == pytest.approx(0.5)
    assert estimate_cpu_overhead(POLICY, [1.0, 1.0], [9.0]) == estimate_cpu_overhead(POLICY, [1.0], []) == 0.0


# -- CPU time, where the wall clock is too noisy ---------------------------------------------------------------------------
NOISY = {"baseline": [1.0, 1.6, 1.0, 1.1, 0.7, 1.4], "candidate": [0.9, 0.9, 0.8, 0.9, 1.1, 0.8]}
LESS = {"baseline_seconds": [1.0, 1.01, 1.0, 1.0, 0.99, 1.0], "candidate_seconds": [0.8, 0.81, 0.8, 0.8, 0.8, 0.79]}
SAME = LESS | {"candidate_seconds": [1.0, 1.0, 1.01, 1.0, 1.0, 0.99]}
MORE = LESS | {"candidate_seconds": [1.5, 1.5, 1.51, 1.5, 1.5, 1.5]}
BUSY = LESS | {"baseline_seconds": [1.0, 1.6, 0.7, 1.0, 1.4, 0.8]}
FAIR = {"device": "cpu", "new_code": False}


@pytest.mark.parametrize(
    ("tree", "thread", "others", "outcome"),
    [
        (LESS, LESS, {}, "promote"),
        (LESS, MORE, {}, "hold"),  # one thread does the work of two, without their waiting: less in all, and no quicker
        (LESS, SAME, {}, "hold"),  # threads that only waited are gone
        (MORE, LESS, {}, "hold"),  # more threads share the work
        (SAME, LESS, {}, "hold"),
        (SAME, SAME, {}, "hold"),  # never a reject: the wall clock decides that
        (BUSY, LESS, {}, "hold"),  # this clock is disturbed as well
        (LESS, BUSY, {}, "hold"),
        (LESS, LESS, {"new_code": True}, "hold"),  # who could hide what it computes
        (LESS, LESS, {"new_code": None}, "hold"),
        (LESS, LESS, {"device": "cuda"}, "hold"),  # which this clock does not see
        (LESS, LESS, {"device": None}, "hold"),
        (
            LESS,
            LESS,
            {"candidate_seconds": [2.4, 2.5, 2.4, 2.5, 2.4, 2.3]},
            "reject",
        ),  # the wall clock excludes the gain
        (LESS, LESS, {"candidate_seconds": [2.0, 2.1, 2.0, 2.1, 2.0, 1.9]}, "hold"),  # it excludes this gain
        (LESS, LESS, {"drift": 0.3}, "reject"),  # and what it learns comes first
        (LESS, None, {}, "hold"),
        (None, LESS, {}, "hold"),
        (LESS, LESS | {"baseline_seconds": [1.0, math.nan, 1.0, 1.0, 1.0, 1.0]}, {}, "hold"),
    ],
)
def test_cpu_time_decides_only_if_both_cpu_clocks_show_the_gain(
    tree: Any, thread: Any, others: dict[str, Any], outcome: str
) -> None:
    told = FAIR | {"cpu": {"tree": tree, "thread": thread}}
    verdict = judge_patch(SHIPPED, evidence(NOISY["baseline"], NOISY["candidate"], **(told | others)))
    assert verdict.outcome == outcome and len(verdict.reasons) <= 5, verdict
    if outcome == "promote":
        assert tells(verdict.reasons[:1], expect("patch.cpu_gain", clock="patch.all_processes", ratio=1.25))
        assert [reason.code for reason in verdict.reasons[1:4]] == [
            "patch.cpu_gain",
            "patch.wall_gain",
            "patch.decided_by_cpu",
        ]
    if outcome == "hold":
        assert tells(verdict.reasons[:1], expect("patch.unclear", pairs=6, rounds=2))


def test_a_clear_wall_clock_is_not_overruled_by_cpu_time() -> None:
    told = FAIR | {"cpu": {"tree": LESS, "thread": LESS}}
    quiet = [1.0, 1.01, 1.0, 1.0, 0.99, 1.0]
    verdict = judge_patch(SHIPPED, evidence(quiet, quiet, **told))
    assert verdict.outcome == "reject" and verdict.reasons[1].code == "patch.wall_gain"


def test_two_ways_to_show_a_gain_share_the_error() -> None:
    """By the wall clock alone the gain would be shown, but not with half of the error."""
    baseline, candidate = [1.0, 1.02, 0.98] * 2, [0.92, 0.96, 0.94] * 2
    alone = judge_patch(SHIPPED, evidence(baseline, candidate, new_code=False))
    shared = judge_patch(SHIPPED, evidence(baseline, candidate, **FAIR))
    assert (alone.outcome, shared.outcome) == ("promote", "hold")


def test_cpu_time_rarely_promotes_a_patch_without_a_gain() -> None:
    """Simulated, a patch without a gain on a wall clock that nobody could read: processes move CPU seconds by 1 or 2 %, runs by 1 %."""
    draw, times = random.Random(3), 600
    for apart in (0.01, 0.02):
        side = lambda apart=apart: [
            math.exp(process + draw.gauss(0, 0.01))
            for process in (draw.gauss(0, apart), draw.gauss(0, apart))
            for _ in "1234"
        ]
        promoted = 0
        for _ in range(times):
            clock = {"baseline_seconds": side(), "candidate_seconds": side()}
            wall = [[math.exp(draw.gauss(0, 0.3)) for _ in range(8)] for _ in range(2)]
            found = evidence(*wall, **FAIR, cpu={"tree": clock, "thread": clock})
            promoted += judge_patch(SHIPPED, found).outcome == "promote"
        assert promoted / times <= 0.01, (apart, promoted)
