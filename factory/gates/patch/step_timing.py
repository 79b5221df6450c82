"""Computes the seconds of a step from the seconds of a measurement's runs. Pure arithmetic, the same for every clock.

A run's overhead is its time without the steps after the first step. The *baseline's* overhead is subtracted from the runs of both sides, so a slower
start counts against a candidate. A quicker start gains nothing: the candidate's steps are also estimated as the time of its runs minus the time of
its own runs of two steps, and the longer estimate counts. Code could still make its start quicker and slow down the runs of two steps. But the time
of a start does not depend on the number of steps after it. So new code that seems to gain must make a long run too. There it must gain more than a
start that takes no time would gain.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from factory.gates.patch.policy import TrainingPolicy
from kernels.contract.message import Message

BRIEF_RUN_STEPS = 2  # steps of the runs that show a candidate's own overhead
MIN_CONTROL_RATIO = 1.5  # if twice the steps take no more than this factor of the time, the clock is not trusted


@dataclass(frozen=True)
class MeasurementTimes:
    """The seconds of the runs of one measurement by one clock, which is read from outside."""

    baseline: Sequence[float]  # runs of ``steps`` steps
    candidate: Sequence[float]
    briefs: Sequence[float]  # the candidate's runs of BRIEF_RUN_STEPS steps
    twice: float  # the baseline's run of twice the steps: a control that must look slow
    overhead: float  # of a baseline run


def make_step_seconds_evidence(policy: TrainingPolicy, runs: MeasurementTimes) -> dict[str, Any]:
    """Return evidence with the seconds of a step in each run; or with ``doubt``, the reason that they cannot be computed."""
    usual = statistics.median(runs.baseline)
    found: dict[str, Any] = {
        "total_seconds": {"baseline": list(runs.baseline), "candidate": list(runs.candidate)},
        "overhead_seconds": runs.overhead,
    }
    if min(runs.baseline) <= runs.overhead:
        return found | {"doubt": _too_short(policy, runs.overhead)}
    slow = found["slow_control"] = (runs.twice - runs.overhead) / (usual - runs.overhead)
    if slow <= MIN_CONTROL_RATIO:
        return found | {"doubt": _untrusted(slow)}
    if min(runs.candidate) <= runs.overhead:
        return found | {"doubt": _too_short(policy, runs.overhead)}
    counted = policy.steps - 1  # the first step belongs to the overhead
    steps_alone = counted / (policy.steps - BRIEF_RUN_STEPS)
    longest = max(runs.briefs)
    return found | {
        "baseline_seconds": [(total - runs.overhead) / counted for total in runs.baseline],
        "candidate_seconds": [
            max(total - runs.overhead, (total - longest) * steps_alone) / counted for total in runs.candidate
        ],
    }


def estimate_cpu_overhead(policy: TrainingPolicy, baseline: Sequence[float], double_length_run: float) -> float:
    """Return the CPU seconds of a baseline run before its second step, estimated from runs of ``policy.steps`` and a run of twice the steps."""
    usual = statistics.median(baseline)
    return max(0.0, usual - (double_length_run - usual) * (policy.steps - 1) / policy.steps)


def find_timing_problem(policy: TrainingPolicy, found: Mapping[str, Any], measurement: int) -> Message | None:
    """Return the reason that the baseline's times cannot be used for a comparison. None: they can be used. ``measurement``: its number, from 1.

    The candidate's runs do not count. If they could cause a repetition, the candidate would choose among several outcomes.
    """
    totals, overhead = found["total_seconds"]["baseline"], found["overhead_seconds"]
    if min(totals) <= overhead:
        return _too_short(policy, overhead)
    if found["slow_control"] <= MIN_CONTROL_RATIO:
        return _untrusted(found["slow_control"])
    noise = compute_baseline_noise(found)
    if noise <= policy.compute_allowed_noise(measurement):
        return None
    return Message(
        "patch.noisy", "the times of two runs of the same code differ by a factor of {noise:.2f}", noise=noise
    )


def compute_baseline_noise(found: Mapping[str, Any]) -> float:
    """Return the largest ratio between the times that two baseline runs take for their steps."""
    seconds = [total - found["overhead_seconds"] for total in found["total_seconds"]["baseline"]]
    return max(seconds) / min(seconds)


def compute_long_run_gain(baseline: float, candidate: float, steps: int, overhead: float) -> dict[str, Any]:
    """Return the gain in a long run of each side (``ratio``), and the gain that a quicker start alone could cause there (``hideable``)."""
    return {
        "steps": steps,
        "ratio": (baseline - overhead) / max(candidate - overhead, 1e-3),
        "hideable": compute_quick_start_gain(overhead, baseline - overhead, steps - 1),
    }


def compute_quick_start_gain(overhead: float, seconds_of_steps: float, steps: int) -> float:
    """Return the gain of the baseline over itself if its start took no longer than one step. ``seconds_of_steps``: the seconds of ``steps`` steps."""
    avoidable = max(0.0, overhead - seconds_of_steps / steps)
    return seconds_of_steps / max(seconds_of_steps - avoidable, seconds_of_steps / 1e6)


def _too_short(policy: TrainingPolicy, overhead: float) -> Message:
    return Message(
        "patch.too_short",
        "a run of {steps} steps took no longer than the overhead of a run ({overhead:.2f} s), so the time of a step is not known. Raise "
        "training.steps in policies/gates/patch.yaml, or close other programs and judge the patch again",
        steps=policy.steps, overhead=overhead,
    )  # fmt: skip


def _untrusted(slow: float) -> Message:
    return Message(
        "patch.clock_untrusted",
        "the clock cannot be trusted: twice as many steps took only {slow:.2f}× the time, and more than {expected}× is expected. Close other "
        "programs and judge the patch again",
        slow=slow, expected=MIN_CONTROL_RATIO,
    )  # fmt: skip
