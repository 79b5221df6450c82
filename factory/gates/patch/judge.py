"""``judge_patch(policy, evidence) -> Verdict``: the decision on a patch as a pure function.

Evidence is what the stages found: ``{"stages": {name: {"state": …, "reasons": […], …}}, "tries": n}``. A stage's state
is 'passed', 'failed', 'missing' (it could not be measured) or 'not needed'. The first failed stage rejects; a missing one holds. A gain
promotes only if its lower bound is above the policy's, its size is above the noise floor, and it was measured twice, in separate
processes: another program seldom disturbs both measurements in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from factory.gates.patch.policy import EvalsPolicy, PatchPolicy, TrainingPolicy
from factory.gates.release.judge import HOLD, PROMOTE, REJECT, Verdict

STAGES = ("scope", "static", "oracle", "exploits", "isolated", "matrix", "training", "evals")
CPU_CLOCKS = {"tree": "all processes", "thread": "the busiest thread"}  # keys of the evidence, in words
OPTIONAL = {"oracle", "exploits", "isolated", "matrix"}  # may be 'not needed': a patch without ops, or without code


@dataclass(frozen=True)
class StepGain:
    """Ratio of step times, baseline over candidate, with one-sided bounds, and the largest ratio of two baseline runs."""

    ratio: float
    lower: float
    upper: float
    noise: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def judge_patch(policy: PatchPolicy, evidence: Mapping[str, Any]) -> Verdict:
    stages: Mapping[str, Any] = evidence.get("stages") or {}
    for name in STAGES:
        stage = stages.get(name) or {}
        state = stage.get("state")
        said = [str(reason) for reason in stage.get("reasons") or []]
        if state == "failed":
            return Verdict(REJECT, tuple(said or [f"the {name} stage failed"]))
        if state != "passed" and not (state == "not needed" and name in OPTIONAL):
            return Verdict(HOLD, tuple(said or [f"there is no evidence from the {name} stage"]))
    tries = evidence.get("tries")
    if not isinstance(tries, int) or tries < 1:
        return Verdict(HOLD, ("the evidence does not say how often this target was tried",))
    verdict = judge_training(policy.training, stages["training"], tries)
    return _judge_evals(policy.evals, stages["evals"], verdict) if verdict.outcome == PROMOTE else verdict


def judge_training(policy: TrainingPolicy, found: Mapping[str, Any], tries: int) -> Verdict:
    """On the training stage; ``found["again"]``: the evidence of the measurement that repeats it."""
    seen = judge_measurement(policy, found, tries)
    if seen.outcome != PROMOTE:
        return seen
    repeated = found.get("again")
    if not isinstance(repeated, Mapping):
        return Verdict(HOLD, ("a gain was measured once and the measurement was not repeated", *seen.reasons))
    again = judge_measurement(policy, repeated, tries, repeats=True)
    if again.outcome == PROMOTE:  # nothing selected the second for its result, so it is the one reported
        return Verdict(PROMOTE, (*again.reasons, f"first measurement: {seen.reasons[0]}", *seen.reasons[1:]))
    if training_differs(policy, repeated):
        return again
    said = (*seen.reasons, f"second measurement: {again.reasons[0]}", *again.reasons[1:])
    if again.outcome == REJECT:
        return Verdict(HOLD, ("the first measurement showed a gain, the second did not", *said))
    what_to_do = f"close other programs and have it judged again, or raise training.pairs (now {policy.pairs}) in policies/gates/patch.yaml"
    return Verdict(HOLD, (f"the first measurement showed a gain, the second is unsure: {what_to_do}", *said))


def judge_measurement(
    policy: TrainingPolicy, found: Mapping[str, Any], tries: int, *, repeats: bool = False
) -> Verdict:
    """On one measurement. One that ``repeats`` another has no long runs: the first one's count."""
    drift, control = (_number(found.get(key)) for key in ("drift", "control_drift"))
    if drift is None or control is None:
        return Verdict(HOLD, ("the weights after the same steps were not compared",))
    if training_differs(policy, found):
        return Verdict(REJECT, (training_difference(policy, found),))
    result = wall_gain(policy, found, tries)
    if result is None:
        return Verdict(HOLD, ("the whole step was not timed, or not often enough",))
    times = (
        f"{result.ratio:.3f}× whole-step gain by the wall clock (at least {result.lower:.3f}, noise floor {result.noise:.3f}; "
        f"weights {drift:.3f} away)"
    )
    needed = max(policy.min_gain, result.noise)
    if result.noise > policy.noise_allowed(_measurements(found)):
        return _judge_noisy(policy, found, result, times, tries)
    if result.lower > policy.min_gain and result.ratio > needed:
        enough = repeats or found.get("new_code") is False
        return Verdict(PROMOTE, (times,)) if enough else _judge_long(policy, found.get("long"), result, times)
    if result.ratio > needed or result.lower > policy.min_gain:
        return Verdict(
            HOLD,
            (
                f"a gain is likely but not shown: its lower bound must be above {policy.min_gain:g}, and the gain above the noise "
                f"floor; raise training.pairs (now {policy.pairs}) in policies/gates/patch.yaml, or close other programs and "
                "have it judged again",
                times,
            ),
        )
    return Verdict(REJECT, (f"no gain beyond the noise floor: more than {needed:.3f}× is needed", times))


def training_differs(policy: TrainingPolicy, found: Mapping[str, Any]) -> bool:
    """Whether the weights of the same steps on the same data ended too far apart."""
    drift, control = (_number(found.get(key)) for key in ("drift", "control_drift"))
    return drift is not None and control is not None and drift > policy.max_drift * control


def reported_gain(policy: TrainingPolicy, found: Mapping[str, Any], tries: int) -> StepGain | None:
    """The smaller one, where it was measured twice: code may find out which measurement it is in."""
    repeated = found.get("again")
    measured = [
        wall_gain(policy, found, tries),
        wall_gain(policy, repeated, tries) if isinstance(repeated, Mapping) else None,
    ]
    return min((one for one in measured if one is not None), key=lambda one: one.ratio, default=None)


def wall_gain(policy: TrainingPolicy, found: Mapping[str, Any], tries: int) -> StepGain | None:
    """By the wall clock. A measurement shares the confidence with those that were discarded before it."""
    shared = tries * _measurements(found)
    return gain(policy, found.get("baseline_seconds"), found.get("candidate_seconds"), shared)


def _measurements(found: Mapping[str, Any]) -> int:
    discarded = found.get("discarded")
    return 1 + (len(discarded) if isinstance(discarded, list) else 0)


def _judge_noisy(policy: TrainingPolicy, found: Mapping[str, Any], wall: StepGain, times: str, tries: int) -> Verdict:
    """The wall clock is too noisy. CPU time may show a gain, where only approved code ran, on a CPU.

    New code could hide work from the CPU clocks; approved code does not try. Both must show the gain: all processes together, which
    more threads do not make smaller, and the busiest thread, which fewer threads do not make smaller. The wall clock must not
    contradict them.
    """
    measurements = _measurements(found)
    allowed = policy.noise_allowed(measurements)
    before = [_number(other.get("noise")) for other in found.get("discarded") or () if isinstance(other, Mapping)]
    each = ", ".join(f"{noise:.2f}×" for noise in (*before, wall.noise) if noise is not None)
    noisy = f"the machine is too noisy to judge by the wall clock: two runs of the same code differ {each}, at most {allowed:.2f}× is allowed"
    by_cpu = {clock: _cpu_gain(policy, found, clock, tries * measurements) for clock in CPU_CLOCKS}
    shown = {clock: gained for clock, gained in by_cpu.items() if gained is not None}
    by_cpu_time = [
        f"by CPU time of {CPU_CLOCKS[clock]} {gained.ratio:.3f}× (at least {gained.lower:.3f}, noise {gained.noise:.3f})"
        for clock, gained in shown.items()
    ]
    may = found.get("device") == "cpu" and found.get("new_code") is False and len(shown) == len(CPU_CLOCKS)
    gains = all(
        gained.noise <= allowed and gained.lower > policy.min_gain and gained.ratio > max(policy.min_gain, gained.noise)
        for gained in shown.values()
    )
    if may and gains and wall.ratio > policy.min_gain:
        least = min(shown.values(), key=lambda gained: gained.ratio)
        decided = f"{least.ratio:.3f}× whole-step gain by CPU time (at least {least.lower:.3f}, noise floor {least.noise:.3f}; {noisy})"
        return Verdict(PROMOTE, (decided, *by_cpu_time, times))
    what_to_do = (
        f"close other programs and have it judged again, or raise training.steps (now {policy.steps}) or "
        f"training.pairs (now {policy.pairs}) in policies/gates/patch.yaml"
    )
    measured = f"measured {measurements} of at most {policy.tries} times"
    return Verdict(HOLD, (f"{noisy}, {measured}: {what_to_do}", times, *by_cpu_time))


def _cpu_gain(policy: TrainingPolicy, found: Mapping[str, Any], clock: str, tries: int) -> StepGain | None:
    cpu = found.get("cpu")
    seconds = cpu.get(clock) if isinstance(cpu, Mapping) else None
    if not isinstance(seconds, Mapping):
        return None
    return gain(policy, seconds.get("baseline_seconds"), seconds.get("candidate_seconds"), tries)


def training_difference(policy: TrainingPolicy, found: Mapping[str, Any]) -> str:
    steps, drift, control = found.get("steps", policy.steps), found["drift"], found["control_drift"]
    return (
        f"training results differ: after {steps} steps the candidate's weights are {drift:.3f} away from the baseline's "
        f"(relative to how far training moved them); at most {policy.max_drift * control:.3f} is allowed, {policy.max_drift:g} of "
        f"what skipping {policy.worth(steps)} of {steps} steps causes"
    )


def _judge_long(policy: TrainingPolicy, found: object, result: StepGain, times: str) -> Verdict:
    """New code that gains over short runs must gain over long ones, by more than a quicker start could cause."""
    long = found if isinstance(found, Mapping) else {}
    if failed := long.get("failed"):
        return Verdict(HOLD, (str(failed), times))
    numbers = [_number(long.get(key)) for key in ("ratio", "hideable", "drift", "control_drift")]
    if any(number is None for number in numbers):
        return Verdict(HOLD, ("new code was not timed over runs long enough to rule out a quicker start", times))
    ratio, hideable, drift, control = (number for number in numbers if number is not None)
    steps = long.get("steps")
    if drift > policy.max_drift * control:
        away = f"after {steps} steps the candidate's weights are {drift:.3f} away, at most {policy.max_drift * control:.3f} is allowed"
        return Verdict(REJECT, (f"training results differ: {away}", times))
    if (
        ratio * result.noise <= policy.min_gain
    ):  # of one run a side, which another program may have disturbed by so much
        return Verdict(REJECT, (f"no gain over {steps} steps: {ratio:.3f}×", times))
    needed = hideable * max(policy.min_gain, result.noise)
    if ratio <= needed:
        doubt = (
            f"over {steps} steps the gain is {ratio:.3f}×, and a quicker start alone could cause {needed:.3f}×: raise training.long "
            "in policies/gates/patch.yaml"
        )
        return Verdict(HOLD, (doubt, times))
    return Verdict(
        PROMOTE, (times, f"{ratio:.3f}× over {steps} steps, where a quicker start could cause {needed:.3f}×")
    )


def _judge_evals(policy: EvalsPolicy, found: Mapping[str, Any], verdict: Verdict) -> Verdict:
    """``verdict``, if no domain is worse. Each source document counts once, and the domains share the confidence."""
    gains = found.get("gains")
    if not isinstance(gains, Mapping) or not gains:
        return Verdict(HOLD, ("the weights were not scored on held-out documents",))
    unshown, worst = [], (-math.inf, "")
    for domain, values in gains.items():
        numbers = [_number(value) for value in values] if isinstance(values, list) else []
        known = [number for number in numbers if number is not None]
        if len(known) < 2 or len(known) < len(numbers):
            return Verdict(HOLD, (f"{domain}: too few held-out documents to score weights on: ingest more documents",))
        mean = sum(known) / len(known)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in known) / (len(known) - 1))
        reach = t_quantile(1 - (1 - policy.confidence) / len(gains), len(known) - 1) * deviation / math.sqrt(len(known))
        said = f"{domain} {-mean:+.4f} bits per byte (at most {-(mean - reach):+.4f}, {len(known)} documents)"
        worst = max(worst, (reach - mean, said))
        if mean < -policy.margin:
            return Verdict(
                REJECT, (f"the candidate's weights are worse: {said}, at most {policy.margin:+g} is allowed",)
            )
        if mean - reach <= -policy.margin:
            unshown.append(f"the candidate's weights may be worse: {said}, at most {policy.margin:+g} is allowed")
    if unshown:
        return Verdict(HOLD, (*unshown, *verdict.reasons))
    return Verdict(verdict.outcome, (*verdict.reasons, f"held out, the worst domain: {worst[1]}"))


def gain(policy: TrainingPolicy, baseline: object, candidate: object, tries: int) -> StepGain | None:
    """From seconds of each side's runs. Log-normal, pooled variance, t bounds shared among ``tries`` (Bonferroni).

    Runs of one process are more alike than those of two, which these bounds ignore: how often a patch without a gain is
    promoted all the same is simulated in tests/factory/gates/test_patch_judge.py. None when a time is missing, not finite or not
    above zero, or a side has fewer runs than the policy's pairs.
    """
    a, b = _logs(baseline), _logs(candidate)
    if a is None or b is None or min(len(a), len(b)) < policy.pairs:
        return None
    degrees = len(a) + len(b) - 2
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    variance = (sum((x - mean_a) ** 2 for x in a) + sum((x - mean_b) ** 2 for x in b)) / degrees
    reach = t_quantile(1 - (1 - policy.confidence) / tries, degrees) * math.sqrt(variance * (1 / len(a) + 1 / len(b)))
    found = mean_a - mean_b
    bounds = [min(max(x, -700.0), 700.0) for x in (found, found - reach, found + reach, max(a) - min(a))]
    return StepGain(*map(math.exp, bounds))


def t_quantile(share: float, degrees: int) -> float:
    """The value below which ``share`` of Student's t distribution with ``degrees`` of freedom lies.

    >>> round(t_quantile(0.975, 1), 3), round(t_quantile(0.975, 30), 3)
    (12.706, 2.042)
    """
    from scipy.stats import t  # half a second, which only a verdict needs to wait for

    return float(t.ppf(share, degrees))


def _logs(seconds: object) -> list[float] | None:
    if not isinstance(seconds, Sequence) or isinstance(seconds, str):
        return None
    numbers = [_number(value) for value in seconds]
    if any(number is None or number <= 0 for number in numbers):
        return None
    return [math.log(number) for number in numbers if number is not None]


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
