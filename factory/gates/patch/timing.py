"""Seconds of a step, from the seconds of a measurement's runs: pure arithmetic, the same for every clock.

A run's overhead (everything but the steps after the first) is the *baseline's* on both sides, so that a slower start counts against a
candidate. A quicker start earns nothing: a candidate's steps are estimated a second time, as what its runs take beyond its own runs
of two steps, and the longer estimate counts. Code that makes its start quicker and slows those two steps down could still pass one off as
the other. But a start costs the same seconds however many steps follow: so new code that seems to gain is run for longer too, and must show
a larger gain there than leaving out all of the baseline's start would.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from factory.gates.patch.policy import TrainingPolicy

BRIEF_STEPS = 2  # of the runs that a candidate's own overhead is seen in
SLOW_CONTROL = 1.5  # a run of twice the steps must take more than this many times as long, or nothing is measured here
QUIETER = "close other programs and have it judged again"


@dataclass(frozen=True)
class RunSeconds:
    """What the runs of one measurement took, by one clock, read from outside."""

    baseline: Sequence[float]  # of ``steps`` each
    candidate: Sequence[float]
    briefs: Sequence[float]  # the candidate's, of BRIEF_STEPS
    twice: float  # the baseline's, of twice the steps: the control that is known to be slow
    overhead: float  # of a baseline run


def timing(policy: TrainingPolicy, runs: RunSeconds) -> dict[str, Any]:
    """Evidence of the seconds of a step, one number a run; or ``doubt``, why they cannot be computed."""
    usual = statistics.median(runs.baseline)
    found: dict[str, Any] = {
        "total_seconds": {"baseline": list(runs.baseline), "candidate": list(runs.candidate)},
        "overhead_seconds": runs.overhead,
    }
    if min(runs.baseline) <= runs.overhead:
        return found | {"doubt": _too_short(policy, runs.overhead)}
    slow = found["slow_control"] = (runs.twice - runs.overhead) / (usual - runs.overhead)
    if slow <= SLOW_CONTROL:
        return found | {"doubt": _untrusted(slow)}
    if min(runs.candidate) <= runs.overhead:
        return found | {"doubt": _too_short(policy, runs.overhead)}
    counted = policy.steps - 1  # the first step belongs to the overhead
    steps_alone = counted / (policy.steps - BRIEF_STEPS)
    longest = max(runs.briefs)
    return found | {
        "baseline_seconds": [(total - runs.overhead) / counted for total in runs.baseline],
        "candidate_seconds": [
            max(total - runs.overhead, (total - longest) * steps_alone) / counted for total in runs.candidate
        ],
    }


def cpu_overhead(policy: TrainingPolicy, baseline: Sequence[float], twice: float) -> float:
    """CPU seconds of a baseline run before its second step: a run's, less the steps that ``twice`` has more than it."""
    usual = statistics.median(baseline)
    return max(0.0, usual - (twice - usual) * (policy.steps - 1) / policy.steps)


def too_noisy(policy: TrainingPolicy, found: Mapping[str, Any], measurement: int) -> str:
    """Why the baseline's own runs differ too much to compare with; '': they do not. ``measurement``: its number, from 1.

    The candidate's runs are not considered: to repeat a measurement because of them would be to choose among outcomes.
    """
    totals, overhead = found["total_seconds"]["baseline"], found["overhead_seconds"]
    if min(totals) <= overhead:
        return _too_short(policy, overhead)
    if found["slow_control"] <= SLOW_CONTROL:
        return _untrusted(found["slow_control"])
    noise = noise_of(found)
    return f"two runs of the same code differ {noise:.2f}×" if noise > policy.noise_allowed(measurement) else ""


def noise_of(found: Mapping[str, Any]) -> float:
    """Largest ratio between the steps of two baseline runs."""
    seconds = [total - found["overhead_seconds"] for total in found["total_seconds"]["baseline"]]
    return max(seconds) / min(seconds)


def long_timing(baseline: float, candidate: float, steps: int, overhead: float) -> dict[str, Any]:
    """The gain over one long run of each side, and the gain that a quicker start alone could cause there."""
    return {
        "steps": steps,
        "ratio": (baseline - overhead) / max(candidate - overhead, 1e-3),
        "hideable": hideable(overhead, baseline - overhead, steps - 1),
    }


def hideable(overhead: float, steps_alone: float, steps: int) -> float:
    """The gain that the baseline itself would show if its start took no more time than one step."""
    avoidable = max(0.0, overhead - steps_alone / steps)
    return steps_alone / max(steps_alone - avoidable, steps_alone / 1e6)


def _too_short(policy: TrainingPolicy, overhead: float) -> str:
    return (
        f"{policy.steps} steps take less time than a run's overhead of {overhead:.2f} s varies: raise training.steps in "
        f"policies/gates/patch.yaml, or {QUIETER}"
    )


def _untrusted(slow: float) -> str:
    return f"the clock cannot be trusted: twice the steps took {slow:.2f}× the time, more than {SLOW_CONTROL}× is expected; {QUIETER}"
