"""Seconds of a step, computed from the seconds of a measurement's runs. Pure arithmetic, the same for every clock.

A run's overhead is its time without the steps after the first. Both sides count with the *baseline's* overhead, so a slower start counts against
a candidate. A quicker start earns nothing: the candidate's steps are also estimated as the time of its runs minus its own runs of two steps, and the
longer estimate counts. Code could still make its start quicker and slow these two steps down. But a start costs the same seconds however many
steps follow. So new code that seems to gain must also run longer, and must gain more there than a start of no time would.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from factory.gates.patch.policy import TrainingPolicy
from kernels.contract.message import Message

BRIEF_RUN_STEPS = 2  # of the runs that show a candidate's own overhead
MIN_CONTROL_RATIO = (
    1.5  # a run of twice the steps must take longer by more than this factor, or the clock is not trusted
)


@dataclass(frozen=True)
class RunSeconds:
    """Seconds of the runs of one measurement, by one clock, read from outside."""

    baseline: Sequence[float]  # of ``steps`` each
    candidate: Sequence[float]
    briefs: Sequence[float]  # the candidate's, of BRIEF_STEPS
    twice: float  # the baseline's, of twice the steps: a control that must look slow
    overhead: float  # of a baseline run


def step_seconds_evidence(policy: TrainingPolicy, runs: RunSeconds) -> dict[str, Any]:
    """Evidence with the seconds of a step, one number per run; or with ``doubt``, the reason that they cannot be computed."""
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


def cpu_overhead(policy: TrainingPolicy, baseline: Sequence[float], twice: float) -> float:
    """CPU seconds of a baseline run before its second step, computed from a run and from one of twice the steps."""
    usual = statistics.median(baseline)
    return max(0.0, usual - (twice - usual) * (policy.steps - 1) / policy.steps)


def find_unreliable_timing(policy: TrainingPolicy, found: Mapping[str, Any], measurement: int) -> Message | None:
    """The reason that the baseline's own runs differ too much to compare with. None: they do not. ``measurement``: its number, from 1.

    The candidate's runs do not count: a measurement that is repeated because of them would choose among outcomes.
    """
    totals, overhead = found["total_seconds"]["baseline"], found["overhead_seconds"]
    if min(totals) <= overhead:
        return _too_short(policy, overhead)
    if found["slow_control"] <= MIN_CONTROL_RATIO:
        return _untrusted(found["slow_control"])
    noise = baseline_noise(found)
    if noise <= policy.noise_allowed(measurement):
        return None
    return Message(
        "patch.noisy", "the times of two runs of the same code differ by a factor of {noise:.2f}", noise=noise
    )


def baseline_noise(found: Mapping[str, Any]) -> float:
    """Largest ratio between the steps of two baseline runs."""
    seconds = [total - found["overhead_seconds"] for total in found["total_seconds"]["baseline"]]
    return max(seconds) / min(seconds)


def long_run_gain(baseline: float, candidate: float, steps: int, overhead: float) -> dict[str, Any]:
    """The gain in one long run of each side, and the gain that a quicker start alone could cause there."""
    return {
        "steps": steps,
        "ratio": (baseline - overhead) / max(candidate - overhead, 1e-3),
        "hideable": gain_of_quick_start(overhead, baseline - overhead, steps - 1),
    }


def gain_of_quick_start(overhead: float, steps_alone: float, steps: int) -> float:
    """The gain of the baseline over itself if its start took no longer than one step."""
    avoidable = max(0.0, overhead - steps_alone / steps)
    return steps_alone / max(steps_alone - avoidable, steps_alone / 1e6)


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
