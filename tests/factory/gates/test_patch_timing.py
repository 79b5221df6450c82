"""How the patch gate computes seconds of a step from seconds of runs, which gains do not count, and when CPU time decides."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factory.core.workspace import find_checkout_root
from factory.gates.patch.judge import compute_step_gain, judge_measurement, judge_patch
from factory.gates.patch.policy import PatchPolicy, TrainingPolicy
from factory.gates.patch.step_timing import (
    MeasurementTimes,
    compute_baseline_noise,
    compute_long_run_gain,
    compute_quick_start_gain,
    estimate_cpu_overhead,
    find_timing_problem,
    make_step_seconds_evidence,
)
from tests.support.gates.patch_evidence import evidence
from tests.support.gates.reasons import expect, has, tells

SHIPPED = PatchPolicy.load(find_checkout_root() / "policies" / "gates" / "patch.yaml")
POLICY = TrainingPolicy(steps=100, pairs=2)
STEP = 0.01  # seconds of a baseline's


def run(overhead: float, steps: int, step: float = STEP) -> float:
    """Seconds of a run: the overhead holds the first step."""
    return overhead + (steps - 1) * step


def runs(
    overhead: float, ours: float, step: float = STEP, brief: float | None = None, spread: float = 1.0
) -> MeasurementTimes:
    """A baseline and a candidate with these overheads; ``brief``: the candidate's overhead in its runs of two steps."""
    return MeasurementTimes(
        baseline=[run(overhead, 100), run(overhead, 100, STEP * spread)],
        candidate=[run(ours, 100, step)] * 2,
        briefs=[run(ours if brief is None else brief, 2, step)] * 2,
        twice=run(overhead, 200),
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
    shown = compute_step_gain(POLICY, found["baseline_seconds"], found["candidate_seconds"], 1)
    assert shown is not None and shown.ratio == pytest.approx(ratio, rel=0.02) and shown.noise == pytest.approx(1)
    assert (
        found["slow_control"] == pytest.approx(199 / 99)
        and "doubt" not in found
        and not find_timing_problem(POLICY, found, 1)
    )


@pytest.mark.parametrize("steps", [200, 800, 3200])
def test_a_candidate_that_hides_its_start_up_time_is_not_promoted(steps: int) -> None:
    """The candidate waits only in the runs that show its overhead. Short runs credit a gain, long runs never enough."""
    overhead = 0.5
    found = make_step_seconds_evidence(POLICY, runs(overhead, 0.05, brief=overhead))
    shown = compute_step_gain(POLICY, found["baseline_seconds"], found["candidate_seconds"], 1)
    long = compute_long_run_gain(run(overhead, steps), run(0.05, steps), steps, overhead)
    assert shown is not None and shown.ratio > 1.5 and long["ratio"] <= long["hideable"] * 1.0001
    assert long["hideable"] == pytest.approx(compute_quick_start_gain(overhead, (steps - 1) * STEP, steps - 1))
    told = evidence([1.0, 1.0], [1 / shown.ratio] * 2, new_code=True, long=long | {"drift": 0.0, "control_drift": 0.2})
    policy = PatchPolicy(training=POLICY)
    assert judge_patch(policy, told).outcome in ("hold", "reject")


@pytest.mark.parametrize(
    ("measured", "code", "data"),
    [
        (runs(0.5, 0.5, spread=1.3), "patch.noisy", {"noise": 1.3}),
        (runs(0.5, 0.5, spread=1.2), "", {}),
        (MeasurementTimes([2, 2], [2, 2], [1, 1], twice=2.5, overhead=1), "patch.clock_untrusted", {"slow": 1.5}),
        (
            MeasurementTimes([1, 2], [2, 2], [1, 1], twice=5, overhead=1),
            "patch.too_short",
            {"steps": 100, "overhead": 1},
        ),
    ],
)
def test_an_unreliable_baseline_timing_is_reported(measured: MeasurementTimes, code: str, data: dict[str, Any]) -> None:
    found = make_step_seconds_evidence(POLICY, measured)
    said = find_timing_problem(POLICY, found, 1)
    assert getattr(said, "code", "") == code and all(has(said, name, value) for name, value in data.items())
    assert not found.get("doubt") or found["doubt"] == said  # what it holds the patch back for is tried again


SHORT = TrainingPolicy(steps=11, pairs=2, max_noise=1.5)


@pytest.mark.parametrize(
    ("measured", "doubtful"),
    [
        (
            MeasurementTimes([2.0, 2.0], [2.0, 2.0], [1.1, 1.1], twice=2.5, overhead=1.0),
            True,
        ),  # 1.5 times: the clock is slow
        (MeasurementTimes([2.0, 2.0], [2.0, 2.0], [1.1, 1.1], twice=2.51, overhead=1.0), False),
        (MeasurementTimes([1.0, 2.0], [2.0, 2.0], [1.1, 1.1], twice=3.0, overhead=1.0), True),
        (MeasurementTimes([2.0, 2.0], [1.0, 2.0], [1.1, 1.1], twice=3.0, overhead=1.0), True),
        (MeasurementTimes([2.0, 2.0], [1.01, 2.0], [1.1, 1.1], twice=3.0, overhead=1.0), False),
    ],
)
def test_no_step_seconds_are_computed_from_doubtful_runs(measured: MeasurementTimes, doubtful: bool) -> None:
    found = make_step_seconds_evidence(SHORT, measured)
    assert ("doubt" in found) == doubtful == ("baseline_seconds" not in found)
    assert found["total_seconds"] == {"baseline": list(measured.baseline), "candidate": list(measured.candidate)}


def test_step_seconds_exclude_the_overhead() -> None:
    found = make_step_seconds_evidence(
        SHORT, MeasurementTimes([3.0, 2.0], [1.5, 2.5], [1.0, 1.25], twice=4.0, overhead=1.0)
    )
    assert found["baseline_seconds"] == [pytest.approx(0.2), pytest.approx(0.1)] and found["slow_control"] == 2.0
    # of the candidate the longer of: all but the overhead; all but a brief run, for as many steps as that has not
    assert found["candidate_seconds"] == [pytest.approx(0.05), pytest.approx(max(0.15, 1.25 / 9))]
    assert compute_baseline_noise(found) == 2.0 and find_timing_problem(SHORT, found, 1)
    found = make_step_seconds_evidence(
        SHORT, MeasurementTimes([2.0, 2.5], [1.5, 2.5], [0.5, 0.75], twice=4.0, overhead=1.0)
    )
    assert found["candidate_seconds"] == [pytest.approx(0.75 / 9), pytest.approx(1.75 / 9)]
    assert not find_timing_problem(SHORT, found, 1) and find_timing_problem(
        SHORT, found, 2
    )  # a later measurement needs less noise
    assert find_timing_problem(SHORT, found | {"slow_control": 1.5}, 1) and not find_timing_problem(
        SHORT, found | {"slow_control": 1.51}, 1
    )


def test_long_runs_limit_the_gain_that_a_quick_start_can_hide() -> None:
    assert compute_long_run_gain(11.0, 6.0, 11, 1.0) == {
        "steps": 11,
        "ratio": 2.0,
        "hideable": 1.0,
    }  # the start is one step
    assert (
        compute_quick_start_gain(3.0, 10.0, 10) == pytest.approx(10 / 8)
        and compute_quick_start_gain(0.5, 10.0, 10) == 1.0
    )
    assert compute_long_run_gain(11.0, 1.0, 11, 1.0)["ratio"] == pytest.approx(10_000)
    assert estimate_cpu_overhead(SHORT, [3.0, 4.0, 9.0], 5.1) == pytest.approx(4.0 - 1.1 * 10 / 11)


times = st.lists(st.floats(0.6, 9), min_size=2, max_size=2)


@given(times, times, times, times)
def test_seconds_of_the_candidate_never_cause_a_new_measurement(
    baseline: list[float], candidate: list[float], other: list[float], briefs: list[float]
) -> None:
    """Otherwise a patch could be measured until its result is lucky."""
    said = {
        find_timing_problem(
            POLICY,
            make_step_seconds_evidence(POLICY, MeasurementTimes(baseline, ours, briefs, twice=4.0, overhead=0.5)),
            1,
        )
        for ours in (candidate, other, [0.1, 0.1])
    }
    assert len(said) == 1


def test_cpu_overhead_is_found_from_a_run_of_twice_the_steps() -> None:
    assert estimate_cpu_overhead(POLICY, [run(0.5, 100)] * 3, run(0.5, 200)) == pytest.approx(0.5)
    assert estimate_cpu_overhead(POLICY, [1.0, 1.0], 9.0) == 0.0


# -- CPU time, where the wall clock is too noisy ---------------------------------------------------------------------------
NOISY = {"baseline": [1.0, 1.6, 1.0, 1.1], "candidate": [0.9, 0.9, 0.8, 0.9]}
LESS = {"baseline_seconds": [1.0, 1.01, 1.0, 1.0], "candidate_seconds": [0.8, 0.81, 0.8, 0.8]}
SAME = LESS | {"candidate_seconds": [1.0, 1.0, 1.01, 1.0]}
MORE = LESS | {"candidate_seconds": [1.5, 1.5, 1.51, 1.5]}
BUSY = LESS | {"baseline_seconds": [1.0, 1.4, 1.0, 1.0]}


@pytest.mark.parametrize(
    ("tree", "thread", "others", "outcome"),
    [
        (LESS, LESS, {}, "promote"),
        (LESS, MORE, {}, "hold"),  # one thread does the work of two, without their waiting: less in all, and no quicker
        (LESS, SAME, {}, "hold"),  # threads that only waited are gone
        (MORE, LESS, {}, "hold"),  # more threads share the work
        (SAME, LESS, {}, "hold"),
        (SAME, SAME, {}, "hold"),  # never a reject: the wall clock was not asked
        (BUSY, LESS, {}, "hold"),  # this clock is disturbed as well
        (LESS, BUSY, {}, "hold"),
        (LESS, LESS, {"new_code": True}, "hold"),  # who could hide what it computes
        (LESS, LESS, {"new_code": None}, "hold"),
        (LESS, LESS, {"device": "cuda"}, "hold"),  # which this clock does not see
        (LESS, LESS, {"device": None}, "hold"),
        (LESS, LESS, {"candidate_seconds": [1.2, 1.3, 1.1, 1.2]}, "hold"),  # the wall clock contradicts
        (LESS, LESS, {"drift": 0.3}, "reject"),  # and what it learns comes first
        (LESS, None, {}, "hold"),
        (None, LESS, {}, "hold"),
        (LESS, LESS | {"baseline_seconds": [1.0, math.nan, 1.0, 1.0]}, {}, "hold"),
    ],
)
def test_cpu_time_decides_only_if_both_cpu_clocks_show_the_gain(
    tree: Any, thread: Any, others: dict[str, Any], outcome: str
) -> None:
    told = {"device": "cpu", "new_code": False, "cpu": {"tree": tree, "thread": thread}}
    verdict = judge_patch(SHIPPED, evidence(NOISY["baseline"], NOISY["candidate"], **(told | others)))
    assert verdict.outcome == outcome, verdict
    if outcome == "promote":
        assert tells(verdict.reasons[:1], expect("patch.decided_by_cpu", ratio=1.249, noisy="patch.too_noisy"))
    if outcome == "hold":
        assert tells(verdict.reasons[:1], expect("patch.held_by_noise", noisy="patch.too_noisy", pairs=4))


def test_the_smaller_of_two_cpu_gains_decides_and_both_are_reported() -> None:
    more = LESS | {"candidate_seconds": [0.5, 0.5, 0.51, 0.5]}
    for tree, thread in ((LESS, more), (more, LESS)):
        told = {
            "device": "cpu",
            "new_code": False,
            "cpu": {"tree": tree, "thread": thread},
            "discarded": [{"noise": 1.7}, 3, {}],
        }
        verdict = judge_patch(SHIPPED, evidence(NOISY["baseline"], NOISY["candidate"], **told))
        assert verdict.outcome == "promote" and tells(
            verdict.reasons[:1], expect("patch.decided_by_cpu", ratio=1.249, noises=[1.7, 1.6])
        )
        each = {"all processes": tree, "the busiest thread": thread}
        for reason, (name, of) in zip(verdict.reasons[1:], each.items()):
            assert tells([reason], expect("patch.cpu_gain", clock=name, ratio=1.249 if of is LESS else 1.995)), reason
        assert verdict.reasons[3].code == "patch.wall_gain"


EVEN, ALIKE, LOWER = [1.0] * 4, [1.0, 1.01, 1.0, 1.0], [0.95, 0.975, 0.925, 0.95]


@pytest.mark.parametrize(
    ("baseline", "candidate", "discarded", "wall", "outcome"),
    [
        (ALIKE, LOWER, 0, 0.9, "promote"),
        (ALIKE, LOWER, 9, 0.9, "hold"),  # the confidence is shared with what was discarded
        (EVEN, [0.8] * 4, 0, 1 / 1.02, "hold"),  # the wall clock shows no more than counts
        (EVEN, [1 / 1.02] * 4, 0, 0.9, "hold"),
        ([1.0, 1.3, 1.0, 1.0], [0.5] * 4, 0, 0.9, "hold"),  # this clock is as noisy
    ],
)
def test_cpu_time_promotes_only_a_clear_gain_on_quiet_clocks(
    baseline: list[float], candidate: list[float], discarded: int, wall: float, outcome: str
) -> None:
    clock = {"baseline_seconds": baseline, "candidate_seconds": candidate}
    told = {
        "device": "cpu",
        "new_code": False,
        "cpu": {"tree": clock, "thread": clock},
        "discarded": [{"noise": 1.6}] * discarded,
    }
    verdict = judge_patch(SHIPPED, evidence([1.0, 1.6, 1.0, 1 / 1.6], [wall] * 4, **told))
    assert verdict.outcome == outcome, verdict
    assert outcome == "promote" or tells(
        verdict.reasons[:1], expect("patch.held_by_noise", measurements=discarded + 1, tries=3)
    )


def test_a_quiet_wall_clock_is_not_overruled_by_cpu_time() -> None:
    told = {"device": "cpu", "new_code": False, "cpu": {"tree": LESS, "thread": LESS}}
    verdict = judge_patch(SHIPPED, evidence([1.0, 1.01, 1.0, 1.0], [1.0, 1.01, 1.0, 1.0], **told))
    assert verdict.outcome == "reject" and verdict.reasons[1].code == "patch.wall_gain"


def test_cpu_time_rarely_promotes_a_patch_without_a_gain() -> None:
    """Simulated, a patch without a gain on a wall clock that nobody could read: processes move CPU seconds by 1 to 3 %, runs by 1 %."""
    draw, times = random.Random(3), 1500
    for apart in (0.01, 0.02, 0.03):
        side = lambda apart=apart: [
            math.exp(process + draw.gauss(0, 0.01))
            for process in (draw.gauss(0, apart), draw.gauss(0, apart))
            for _ in "12"
        ]
        promoted = 0
        for _ in range(times):
            clock = {"baseline_seconds": side(), "candidate_seconds": side()}
            wall = [
                math.exp(draw.gauss(0, 0.2)) for _ in range(3)
            ]  # noise of the baseline aside: it was noisy three times
            told = {"device": "cpu", "new_code": False, "cpu": {"tree": clock, "thread": clock}}
            told["discarded"] = [{"noise": 1.5}] * 2
            found = evidence([1.0, 1.6, 1.0, 1.2], [1.2, *wall], **told)
            promoted += judge_patch(SHIPPED, found).outcome == "promote"
        assert promoted / times < 0.05, (apart, promoted)  # what training.confidence says


# -- measuring anew --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("skewed", [False, True])
def test_new_measurements_do_not_raise_the_share_of_wrong_promotions(skewed: bool) -> None:
    """Simulated, a patch without a gain: a process moves its two runs by 1 %, other programs each run by ``each``. Trying again is no
    second chance: what a verdict after it needs makes up for what luck it adds."""
    policy, draw, times = SHIPPED.training, random.Random(11), 1500
    busy = lambda each: abs(draw.gauss(0, each)) if skewed else draw.gauss(0, each)
    side = lambda each, true: [
        math.exp(process + busy(each)) / true for process in (draw.gauss(0, 0.01), draw.gauss(0, 0.01)) for _ in "12"
    ]
    shares = {}
    for each in (0.02, 0.08, 0.12, 0.2, 0.35):
        counts = {"one": 0, "anew": 0}
        for _ in range(times):
            discarded: list[dict[str, Any]] = []
            for measurement in range(1, policy.tries + 1):
                baseline, candidate = side(each, 1.0), side(each, 1.0)
                found = evidence(baseline, candidate, new_code=False, discarded=list(discarded))
                once = judge_measurement(policy, found["stages"]["training"], 1)  # the repeat is left out here
                promoted = once.outcome == "promote"
                counts["one"] += promoted and measurement == 1
                noise = max(baseline) / min(baseline)
                if noise <= policy.compute_allowed_noise(measurement):
                    break
                discarded.append({"noise": noise})
            counts["anew"] += promoted
        shares[each] = {name: count / times for name, count in counts.items()}
    print(f"promoted without a gain: {shares}")
    assert max(share["anew"] for share in shares.values()) < 0.03
    assert all(share["anew"] - share["one"] < 0.01 for share in shares.values()), shares
