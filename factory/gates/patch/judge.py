"""``judge_patch(policy, evidence) -> Verdict``: the decision on a patch as a pure function.

The evidence is ``{"stages": {name: {"state": …, "reasons": […], …}}, "tries": n}``. The state of a stage is 'passed', 'failed', 'missing' (it
could not be measured) or 'not needed'. The first stage that does not pass decides: 'failed' rejects the patch, 'missing' holds it.

The gain in the time of a step has an interval that holds at every moment of the measurement (``factory.gates.patch.confidence``), so the stage may
look at it after each pair of runs. A patch is promoted if the whole interval is above ``min_gain``, rejected if the whole interval is below it, and
held if ``min_gain`` is inside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from factory.gates.patch.confidence import compute_interval_of_rounds
from factory.gates.patch.policy import EvalsPolicy, PatchPolicy, TrainingPolicy
from factory.gates.release.judge import HOLD, PROMOTE, REJECT, Verdict
from factory.gates.stage_interface import (
    make_no_evidence_message,
    make_stage_failed_message,
    make_unknown_tries_message,
    read_reasons,
)
from kernels.contract.message import Message

STAGES = ("scope", "static", "oracle", "exploits", "isolated", "matrix", "training", "evals")
CPU_CLOCKS = {
    "tree": Message("patch.all_processes", "all processes"),
    "thread": Message("patch.busiest_thread", "the busiest thread"),
}  # key of the evidence → its name for a person
OPTIONAL_STAGES = {
    "oracle",
    "exploits",
    "isolated",
    "matrix",
}  # may be 'not needed', for a patch without ops or without code


@dataclass(frozen=True)
class StepGain:
    """The gain in the time of a step. ``ratio``: the baseline's time over the candidate's, with its interval from ``lower`` to ``upper``.

    ``noise``: the factor by which the ratio of one pair of runs is usually off (one standard deviation).
    """

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
        said = read_reasons(stage)
        if state == "failed":
            return Verdict(REJECT, tuple(said or [make_stage_failed_message(name)]))
        if state != "passed" and not (state == "not needed" and name in OPTIONAL_STAGES):
            return Verdict(HOLD, tuple(said or [make_no_evidence_message(name)]))
    tries = evidence.get("tries")
    if not isinstance(tries, int) or tries < 1:
        return Verdict(HOLD, (make_unknown_tries_message(),))
    verdict = judge_training(policy.training, stages["training"], tries)
    return _judge_evals(policy.evals, stages["evals"], verdict) if verdict.outcome == PROMOTE else verdict


def judge_training(policy: TrainingPolicy, found: Mapping[str, Any], tries: int) -> Verdict:
    """Return the verdict on the evidence of the training stage, so far or at its end. HOLD: more pairs may make it clear."""
    drift, control = (_number(found.get(key)) for key in ("drift", "control_drift"))
    if drift is None or control is None:
        not_compared = Message(
            "patch.weights_not_compared",
            "The weights of candidate and baseline after the same steps were not compared.",
        )
        return Verdict(HOLD, (not_compared,))
    if are_training_results_different(policy, found):
        return Verdict(REJECT, (make_training_difference_message(policy, found),))
    if found.get("bits_expected") and found.get("same_bits") is False:
        return Verdict(HOLD, (_make_bits_message(drift),))
    cpu_may_decide = _count_ways(found) == 2
    shared = tries * _count_ways(found)
    wall = compute_step_gain(policy, found, found, shared)
    if wall is None:
        not_timed = Message("patch.not_timed", "The whole training step was timed too rarely or not at all.")
        return Verdict(HOLD, (not_timed,))
    by_wall = Message(
        "patch.wall_gain",
        "By the wall clock, the candidate's step is {ratio:.3f}× as fast as the baseline's (between {lower:.3f}× and {upper:.3f}×, "
        "{pairs:,|pair|pairs} of runs). Their weights differ by {drift:.2g} of the distance of training.",
        pairs=len(found["baseline_seconds"]), drift=drift, **wall.to_json(),
    )  # fmt: skip
    if wall.lower > policy.min_gain:
        if found.get("new_code") is False:
            return Verdict(PROMOTE, (by_wall,))
        return _judge_long(policy, found.get("long"), wall, by_wall)
    if wall.upper < policy.min_gain:
        no_gain = Message(
            "patch.no_gain",
            "There is no gain of {needed:g}×, the least that counts: the candidate's step is at most {upper:.3f}× as fast as the baseline's.",
            needed=policy.min_gain, upper=wall.upper,
        )  # fmt: skip
        return Verdict(REJECT, (no_gain, by_wall))
    by_cpu = compute_cpu_gains(policy, found, shared)
    told = tuple(
        Message(
            "patch.cpu_gain",
            "By the CPU time of {clock}, the candidate's step is {ratio:.3f}× as fast as the baseline's (between {lower:.3f}× and {upper:.3f}×).",
            clock=CPU_CLOCKS[clock], **gain.to_json(),
        )
        for clock, gain in by_cpu.items()
    )  # fmt: skip
    shown = [gain.lower for gain in by_cpu.values()]
    if cpu_may_decide and len(shown) == len(CPU_CLOCKS) and policy.min_gain < min(shown) <= wall.upper:
        decided = Message(
            "patch.decided_by_cpu",
            "The wall clock neither shows this gain nor excludes it, because the machine is busy. Both CPU clocks show it.",
        )
        return Verdict(PROMOTE, (*told, by_wall, decided))
    unclear = Message(
        "patch.unclear",
        "It is not clear whether the gain is {needed:g}×, the least that counts: it lies between {lower:.3f}× and {upper:.3f}×, after "
        "{pairs:,|pair|pairs} of runs in {rounds:,|round|rounds}.",
        needed=policy.min_gain, lower=wall.lower, upper=wall.upper, pairs=len(found["baseline_seconds"]), rounds=len(found["round_pairs"]),
    )  # fmt: skip
    return Verdict(HOLD, (unclear, by_wall, *told))


def _make_bits_message(drift: float) -> Message:
    return Message(
        "patch.bits_only_here",
        "The tiny training runs gave the same bits, but the runs of the recipe did not: the weights are apart by {drift:.2g} of the distance that "
        "they moved. Code that computes the same gives the same bits at every size. If the patch may change rounding, say so in the hypothesis.",
        drift=drift,
    )


def are_training_results_different(policy: TrainingPolicy, found: Mapping[str, Any]) -> bool:
    """True if the weights of candidate and baseline, after the same steps on the same data, are too far apart."""
    drift, control = (_number(found.get(key)) for key in ("drift", "control_drift"))
    return drift is not None and control is not None and drift > policy.max_drift * control


def find_measured_gain(policy: TrainingPolicy, found: Mapping[str, Any], tries: int) -> StepGain | None:
    """Return the gain that reports show: the one that decided, which is the wall clock's, or else the smaller of the CPU clocks'."""
    shared = tries * _count_ways(found)
    wall = compute_step_gain(policy, found, found, shared)
    if wall is not None and wall.lower <= policy.min_gain < wall.upper:
        verdict = judge_training(policy, found, tries)
        if verdict.outcome == PROMOTE:
            return min(compute_cpu_gains(policy, found, shared).values(), key=lambda one: one.ratio)
    return wall


def _count_ways(found: Mapping[str, Any]) -> int:
    """Return the number of ways to show a gain, which share the error: 2 where CPU time may decide."""
    return 2 if found.get("device") == "cpu" and found.get("new_code") is False else 1


def compute_cpu_gains(policy: TrainingPolicy, found: Mapping[str, Any], tries: int) -> dict[str, StepGain]:
    """Return the gain by each CPU clock that could be read.

    New code could hide work from the CPU clocks, so they decide only about approved code, on a CPU, and only if both show the gain. More threads
    cannot lower the CPU time of all processes. Fewer threads cannot lower the CPU time of the busiest thread.
    """
    cpu = found.get("cpu")
    clocks = {clock: cpu.get(clock) for clock in CPU_CLOCKS} if isinstance(cpu, Mapping) else {}
    gains = {
        clock: compute_step_gain(policy, found, seconds, tries)
        for clock, seconds in clocks.items()
        if isinstance(seconds, Mapping)
    }
    return {clock: gain for clock, gain in gains.items() if gain is not None}


def make_training_difference_message(policy: TrainingPolicy, found: Mapping[str, Any]) -> Message:
    """Return the reason to reject a patch for which ``are_training_results_different`` is true."""
    steps, drift, control = found.get("steps", policy.steps), found["drift"], found["control_drift"]
    return Message(
        "patch.training_differs",
        "The training results differ too much. After {steps} steps, the distance between the candidate's and the baseline's weights is {drift:.3f} "
        "times the distance that the weights moved. At most {allowed:.3f} times is allowed. This limit is {share:g} times the effect of leaving out "
        "{skipped} of {steps} steps.",
        steps=steps, drift=drift, allowed=policy.max_drift * control, share=policy.max_drift,
        skipped=policy.count_steps_to_leave_out_for_min_gain(steps),
    )  # fmt: skip


def _judge_long(policy: TrainingPolicy, found: object, result: StepGain, times: Message) -> Verdict:
    """Return the verdict on new code that gains in short runs. It must gain in long runs too, by more than a quicker start could cause."""
    long = found if isinstance(found, Mapping) else {}
    numbers = [_number(long.get(key)) for key in ("ratio", "hideable", "drift", "control_drift")]
    if any(number is None for number in numbers):
        not_long = Message(
            "patch.long_not_timed",
            "The long runs of the new code were not timed, so a quicker start may be the only cause of the gain.",
        )
        return Verdict(HOLD, (not_long, times))
    ratio, hideable, drift, control = (number for number in numbers if number is not None)
    steps = long.get("steps")
    if drift > policy.max_drift * control:
        away = Message(
            "patch.long_differs",
            "The training results differ too much. After {steps} steps, the distance between the candidate's and the baseline's weights is "
            "{drift:.3f} times the distance that the weights moved. At most {allowed:.3f} times is allowed.",
            steps=steps, drift=drift, allowed=policy.max_drift * control,
        )  # fmt: skip
        return Verdict(REJECT, (away, times))
    doubt = result.noise ** (
        2 / math.sqrt(_number(long.get("runs")) or 1)
    )  # two standard deviations of the mean of the long pairs
    if ratio * doubt <= policy.min_gain:
        no_gain = Message(
            "patch.no_long_gain",
            "Over {steps} steps the candidate is {ratio:.3f}× as fast as the baseline, so there is no gain over many "
            "steps.",
            steps=steps,
            ratio=ratio,
        )
        return Verdict(REJECT, (no_gain, times))
    needed = hideable * max(policy.min_gain, doubt)
    if ratio <= needed:
        unsure = Message(
            "patch.quicker_start",
            "Over {steps} steps the gain is {ratio:.3f}×, but a quicker start without quicker steps could cause a gain of {needed:.3f}×. To time "
            "longer runs, raise training.long in policies/gates/patch.yaml.",
            steps=steps, ratio=ratio, needed=needed,
        )  # fmt: skip
        return Verdict(HOLD, (unsure, times))
    long_gain = Message(
        "patch.long_gain",
        "Over {steps} steps the gain is {ratio:.3f}×. A quicker start without quicker steps could cause a gain of at most {needed:.3f}×.",
        steps=steps, ratio=ratio, needed=needed,
    )  # fmt: skip
    return Verdict(PROMOTE, (times, long_gain))


def _judge_evals(policy: EvalsPolicy, found: Mapping[str, Any], verdict: Verdict) -> Verdict:
    """Return ``verdict`` if no domain is worse, else a hold or a reject. Each source document counts once. The domains share the confidence."""
    gains = found.get("gains")
    if not isinstance(gains, Mapping) or not gains:
        return Verdict(HOLD, (Message("patch.not_scored", "The weights were not scored on held-out documents."),))
    unshown: list[Message] = []
    worst = (-math.inf, Message("patch.no_domain", "no domain was scored"))
    for domain, values in gains.items():
        numbers = [_number(value) for value in values] if isinstance(values, list) else []
        known = [number for number in numbers if number is not None]
        if len(known) < 2 or len(known) < len(numbers):
            few = Message(
                "patch.few_documents",
                "{domain} has too few held-out documents to score weights. Ingest more documents: 'factory ingest PATH'.",
                domain=domain,
            )
            return Verdict(HOLD, (few,))
        mean = sum(known) / len(known)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in known) / (len(known) - 1))
        reach = (
            compute_t_quantile(1 - (1 - policy.confidence) / len(gains), len(known) - 1)
            * deviation
            / math.sqrt(len(known))
        )
        change = Message(
            "patch.domain_change",
            "in {domain}, bits per byte change by {change:+.4f} (upper bound {most:+.4f}, measured on {documents} documents)",
            domain=domain, change=-mean, most=reach - mean, documents=len(known),
        )  # fmt: skip
        worst = max(worst, (reach - mean, change))
        if mean < -policy.margin:
            worse = Message(
                "patch.weights_worse",
                "The candidate's weights are worse: {change}. A change of at most {margin:+g} is allowed.",
                change=change, margin=policy.margin,
            )  # fmt: skip
            return Verdict(REJECT, (worse,))
        if mean - reach <= -policy.margin:
            unshown.append(
                Message(
                    "patch.weights_unsure",
                    "The candidate's weights may be worse: {change}. A change of at most {margin:+g} is allowed.",
                    change=change, margin=policy.margin,
                )
            )  # fmt: skip
    if unshown:
        return Verdict(HOLD, (*unshown, *verdict.reasons))
    shown = Message(
        "patch.worst_domain", "The worst change of a domain on held-out documents: {change}.", change=worst[1]
    )
    return Verdict(verdict.outcome, (*verdict.reasons, shown))


def compute_step_gain(
    policy: TrainingPolicy, found: Mapping[str, Any], seconds: Mapping[str, Any], tries: int
) -> StepGain | None:
    """Return the gain by one clock. None: the times are not usable.

    ``seconds``: ``baseline_seconds`` and ``candidate_seconds``, the seconds of a step in each run, pair by pair. ``found["round_pairs"]``: the number
    of pairs in each round. The values are the logarithms of the pairs' ratios (``compute_interval_of_rounds``). The error 1 − confidence is divided
    among ``tries``. Times are not usable if one is missing, not finite or not above zero, or before ``policy.rounds`` rounds were made.
    """
    a, b = _logs(seconds.get("baseline_seconds")), _logs(seconds.get("candidate_seconds"))
    sizes = found.get("round_pairs")
    if (
        a is None
        or b is None
        or not isinstance(sizes, Sequence)
        or not all(isinstance(n, int) and n > 0 for n in sizes)
    ):
        return None
    if len(sizes) < policy.rounds or not len(a) == len(b) == sum(sizes):
        return None
    ratios = iter([x - y for x, y in zip(a, b, strict=True)])
    rounds = [[next(ratios) for _ in range(size)] for size in sizes]
    interval = compute_interval_of_rounds(rounds, (1 - policy.confidence) / tries)
    bounds = [min(max(x, -700.0), 700.0) for x in (interval.mean, interval.low, interval.high, interval.deviation)]
    return StepGain(*map(math.exp, bounds))


def compute_t_quantile(share: float, degrees_of_freedom: int) -> float:
    """Return the value below which ``share`` of Student's t distribution with ``degrees_of_freedom`` degrees of freedom lies.

    >>> round(compute_t_quantile(0.975, 1), 3), round(compute_t_quantile(0.975, 30), 3)
    (12.706, 2.042)
    """
    from scipy.stats import t  # the import takes half a second, so only a verdict imports it

    return float(t.ppf(share, degrees_of_freedom))


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
