"""Computes the seconds of a step from the seconds of a measurement's runs. Pure arithmetic, the same for every clock.

A run's overhead is its time without the steps after the first step. The *baseline's* overhead is subtracted from the runs of both sides, so a slower
start counts against a candidate. An error of this overhead creates no gain where there is none: it is the same for both sides. A quicker start gains
nothing: the steps of new code are also estimated as the time of its runs minus the time of its own runs of two steps, and the longer estimate
counts. Code could still make its start quicker and slow down the runs of two steps. But the time of a start does not depend on the number of steps
after it. So new code that seems to gain must make long runs too. There it must gain more than a start that takes no time would gain.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
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
    candidate: Sequence[float]  # on the same data, in the same order
    briefs: Sequence[float]  # the candidate's runs of BRIEF_RUN_STEPS steps; none for approved code
    twice: Sequence[
        float
    ]  # the baseline's runs of twice the steps: a control that must look slow; none before the second round
    overhead: float  # of a baseline run


def make_step_seconds_evidence(policy: TrainingPolicy, runs: MeasurementTimes) -> dict[str, Any]:
    """Return evidence with the seconds of a step in each run; or with ``doubt``, the reason that they cannot be computed."""
    usual = statistics.median(runs.baseline)
    found: dict[str, Any] = {
        "total_seconds": {"baseline": list(runs.baseline), "candidate": list(runs.candidate)},
        "overhead_seconds": runs.overhead,
    }
    if min(*runs.baseline, *runs.candidate) <= runs.overhead:
        return found | {"doubt": _too_short(policy, runs.overhead)}
    if runs.twice:
        slow = found["slow_control"] = (statistics.fmean(runs.twice) - runs.overhead) / (usual - runs.overhead)
        if slow <= MIN_CONTROL_RATIO:
            return found | {"doubt": _untrusted(slow)}
    counted = policy.steps - 1  # the first step belongs to the overhead
    steps_alone = counted / (policy.steps - BRIEF_RUN_STEPS)
    longest = max(runs.briefs, default=math.inf)
    return found | {
        "baseline_seconds": [(total - runs.overhead) / counted for total in runs.baseline],
        "candidate_seconds": [
            max(total - runs.overhead, (total - longest) * steps_alone) / counted for total in runs.candidate
        ],
    }


def estimate_cpu_overhead(policy: TrainingPolicy, baseline: Sequence[float], twice: Sequence[float]) -> float:
    """Return the CPU seconds of a baseline run before its second step, estimated from runs of ``policy.steps`` and runs of twice the steps.

    Without runs of twice the steps it is 0, so that a gain looks smaller than it is.
    """
    if not twice:
        return 0.0
    usual = statistics.median(baseline)
    return max(0.0, usual - (statistics.fmean(twice) - usual) * (policy.steps - 1) / policy.steps)


def compute_long_run_gain(pairs: Sequence[tuple[float, float]], steps: int, overhead: float) -> dict[str, Any]:
    """Return the gain in long runs (``ratio``), and the gain that a quicker start alone could cause there (``hideable``).

    ``pairs``: seconds of baseline and candidate, at least one pair. The ratio is the geometric mean of the pairs' ratios.
    """
    ratios = [(baseline - overhead) / max(candidate - overhead, 1e-3) for baseline, candidate in pairs]
    baseline = statistics.fmean(of for of, _ in pairs)
    return {
        "steps": steps,
        "runs": len(pairs),
        "ratio": statistics.geometric_mean(max(ratio, 1e-9) for ratio in ratios),
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
        "training.steps in policies/gates/patch.yaml",
        steps=policy.steps, overhead=overhead,
    )  # fmt: skip


def _untrusted(slow: float) -> Message:
    return Message(
        "patch.clock_untrusted",
        "the clock cannot be trusted: twice as many steps took only {slow:.2f}× the time, and more than {expected}× is expected",
        slow=slow, expected=MIN_CONTROL_RATIO,
    )  # fmt: skip
