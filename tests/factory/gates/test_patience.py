"""Time limits of a candidate follow the baseline: one longer second attempt, then the patch is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from factory.gates.holds import find_only_missing_stage, was_held_by_time_limit_only
from factory.gates.stage_interface import make_failed_evidence, make_missing_evidence, make_not_needed_evidence
from factory.gates.time_limits import (
    TimeLimits,
    make_out_of_time_evidence,
    make_stopped_message,
    run_attempts_with_limits,
)
from factory.sandbox.sandbox import SandboxLimits
from kernels.contract.message import Message


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
