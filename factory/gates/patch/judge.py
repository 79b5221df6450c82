"""``judge_patch(policy, evidence) -> Verdict``: the decision on a patch as a pure function.

The evidence is ``{"stages": {name: {"state": …, "reasons": […], …}}, "tries": n}``. The state of a stage is 'passed', 'failed', 'missing' (it
could not be measured) or 'not needed'. The first stage that does not pass decides: 'failed' rejects the patch, 'missing' holds it. A gain promotes
the patch only if its lower bound is above ``min_gain``, its size is above the noise floor, and a second measurement in new processes confirms both.
Another program seldom disturbs two measurements in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

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
CPU_CLOCKS = {"tree": "all processes", "thread": "the busiest thread"}  # key of the evidence → its name for a person
OPTIONAL_STAGES = {
    "oracle",
    "exploits",
    "isolated",
    "matrix",
}  # may be 'not needed', for a patch without ops or without code


@dataclass(frozen=True)
class StepGain:
    """The gain in the time of a step. ``ratio``: the baseline's time over the candidate's, with one-sided bounds ``lower`` and ``upper``.

    ``noise``: the largest ratio between the times of two baseline runs.
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
    """Return the verdict on the training stage. ``found["again"]`` is the evidence of the second measurement."""
    seen = judge_measurement(policy, found, tries)
    if seen.outcome != PROMOTE:
        return seen
    repeated = found.get("again")
    if not isinstance(repeated, Mapping):
        once = Message("patch.measured_once", "A measurement showed a gain, but the measurement was not repeated.")
        return Verdict(HOLD, (once, *seen.reasons))
    again = judge_measurement(policy, repeated, tries, repeats=True)
    if again.outcome == PROMOTE:  # nothing selected the second measurement by its result, so it is reported
        return Verdict(PROMOTE, (*again.reasons, _measurement(1, seen), *seen.reasons[1:]))
    if are_training_results_different(policy, repeated):
        return again
    said = (*seen.reasons, _measurement(2, again), *again.reasons[1:])
    if again.outcome == REJECT:
        not_again = Message(
            "patch.gain_not_repeated", "The first measurement showed a gain, but the second measurement showed none."
        )
        return Verdict(HOLD, (not_again, *said))
    unsure = Message(
        "patch.second_unsure",
        "The first measurement showed a gain, but the second measurement was too uncertain to confirm the gain. Close other programs and judge "
        "the patch again, or raise training.pairs (now {pairs}) in policies/gates/patch.yaml.",
        pairs=policy.pairs,
    )
    return Verdict(HOLD, (unsure, *said))


def _measurement(number: int, verdict: Verdict) -> Message:
    return Message("patch.measurement", "Measurement {number}: {reason}", number=number, reason=verdict.reasons[0])


def judge_measurement(
    policy: TrainingPolicy, found: Mapping[str, Any], tries: int, *, repeats: bool = False
) -> Verdict:
    """Return the verdict on one measurement. A second measurement (``repeats``) has no long runs, because the first measurement had them."""
    drift, control = (_number(found.get(key)) for key in ("drift", "control_drift"))
    if drift is None or control is None:
        return Verdict(
            HOLD,
            (
                Message(
                    "patch.weights_not_compared",
                    "The weights of candidate and baseline after the same steps were not compared.",
                ),
            ),
        )
    if are_training_results_different(policy, found):
        return Verdict(REJECT, (make_training_difference_message(policy, found),))
    result = compute_wall_clock_gain(policy, found, tries)
    if result is None:
        return Verdict(
            HOLD, (Message("patch.not_timed", "The whole training step was timed too rarely or not at all."),)
        )
    times = Message(
        "patch.wall_gain",
        "By the wall clock, the candidate's step is {ratio:.3f}× as fast as the baseline's (lower bound {lower:.3f}×, noise floor "
        "{noise:.3f}×). The distance between the candidate's and the baseline's weights is {drift:.3f} times the distance that the weights moved in "
        "training.",
        ratio=result.ratio, lower=result.lower, noise=result.noise, drift=drift,
    )  # fmt: skip
    needed = max(policy.min_gain, result.noise)
    if result.noise > policy.compute_allowed_noise(_measurements(found)):
        return _judge_noisy(policy, found, result, times, tries)
    if result.lower > policy.min_gain and result.ratio > needed:
        enough = repeats or found.get("new_code") is False
        return Verdict(PROMOTE, (times,)) if enough else _judge_long(policy, found.get("long"), result, times)
    if result.ratio > needed or result.lower > policy.min_gain:
        likely = Message(
            "patch.gain_likely",
            "A gain is likely but not shown. The gain's lower bound must be above {least:g}, and the gain must be above the noise floor. Raise "
            "training.pairs (now {pairs}) in policies/gates/patch.yaml, or close other programs and judge the patch again.",
            least=policy.min_gain, pairs=policy.pairs,
        )  # fmt: skip
        return Verdict(HOLD, (likely, times))
    no_gain = Message(
        "patch.no_gain",
        "There is no gain beyond the noise floor: the candidate's step must be more than {needed:.3f}× as fast as the baseline's.",
        needed=needed,
    )
    return Verdict(REJECT, (no_gain, times))


def are_training_results_different(policy: TrainingPolicy, found: Mapping[str, Any]) -> bool:
    """True if the weights of candidate and baseline, after the same steps on the same data, are too far apart."""
    drift, control = (_number(found.get(key)) for key in ("drift", "control_drift"))
    return drift is not None and control is not None and drift > policy.max_drift * control


def find_smaller_measured_gain(policy: TrainingPolicy, found: Mapping[str, Any], tries: int) -> StepGain | None:
    """Return the smaller gain of the two measurements, because code may detect which measurement it is in. None: no gain was measured."""
    repeated = found.get("again")
    measured = [
        compute_wall_clock_gain(policy, found, tries),
        compute_wall_clock_gain(policy, repeated, tries) if isinstance(repeated, Mapping) else None,
    ]
    return min((one for one in measured if one is not None), key=lambda one: one.ratio, default=None)


def compute_wall_clock_gain(policy: TrainingPolicy, found: Mapping[str, Any], tries: int) -> StepGain | None:
    """Return the gain by the wall clock. The confidence is divided among the tries and the discarded measurements."""
    shared = tries * _measurements(found)
    return compute_step_gain(policy, found.get("baseline_seconds"), found.get("candidate_seconds"), shared)


def _measurements(found: Mapping[str, Any]) -> int:
    discarded = found.get("discarded")
    return 1 + (len(discarded) if isinstance(discarded, list) else 0)


def _judge_noisy(
    policy: TrainingPolicy, found: Mapping[str, Any], wall: StepGain, times: Message, tries: int
) -> Verdict:
    """Return the verdict if the wall clock is too noisy. CPU time may then show the gain, if only approved code ran, on a CPU.

    New code could hide work from the CPU clocks. Two CPU clocks must both show the gain. More threads cannot lower the CPU time of all processes.
    Fewer threads cannot lower the CPU time of the busiest thread. The wall clock must not contradict them.
    """
    measurements = _measurements(found)
    allowed = policy.compute_allowed_noise(measurements)
    before = [_number(other.get("noise")) for other in found.get("discarded") or () if isinstance(other, Mapping)]
    noisy = Message(
        "patch.too_noisy",
        "The machine is too noisy to judge by the wall clock: the times of two runs of the same code differ by a factor of {noises:.2f}. At most "
        "{allowed:.2f} is allowed.",
        noises=[noise for noise in (*before, wall.noise) if noise is not None], allowed=allowed,
    )  # fmt: skip
    by_cpu = {clock: _cpu_gain(policy, found, clock, tries * measurements) for clock in CPU_CLOCKS}
    shown = {clock: gained for clock, gained in by_cpu.items() if gained is not None}
    by_cpu_time = [
        Message(
            "patch.cpu_gain",
            "By the CPU time of {clock}, the candidate's step is {ratio:.3f}× as fast as the baseline's (lower bound {lower:.3f}×, noise floor "
            "{noise:.3f}×).",
            clock=CPU_CLOCKS[clock], **gained.to_json(),
        )
        for clock, gained in shown.items()
    ]  # fmt: skip
    may = found.get("device") == "cpu" and found.get("new_code") is False and len(shown) == len(CPU_CLOCKS)
    gains = all(
        gained.noise <= allowed and gained.lower > policy.min_gain and gained.ratio > max(policy.min_gain, gained.noise)
        for gained in shown.values()
    )
    if may and gains and wall.ratio > policy.min_gain:
        least = min(shown.values(), key=lambda gained: gained.ratio)
        decided = Message(
            "patch.decided_by_cpu",
            "By CPU time, the candidate's step is {ratio:.3f}× as fast as the baseline's (lower bound {lower:.3f}×, noise floor {noise:.3f}×). "
            "{noisy}",
            **least.to_json(), noisy=noisy,
        )  # fmt: skip
        return Verdict(PROMOTE, (decided, *by_cpu_time, times))
    held = Message(
        "patch.held_by_noise",
        "{noisy} The factory made {measurements} of at most {tries} measurements. Close other programs and judge the patch again, or raise "
        "training.steps (now {steps}) or training.pairs (now {pairs}) in policies/gates/patch.yaml.",
        noisy=noisy, measurements=measurements, tries=policy.tries, steps=policy.steps, pairs=policy.pairs,
    )  # fmt: skip
    return Verdict(HOLD, (held, times, *by_cpu_time))


def _cpu_gain(policy: TrainingPolicy, found: Mapping[str, Any], clock: str, tries: int) -> StepGain | None:
    cpu = found.get("cpu")
    seconds = cpu.get(clock) if isinstance(cpu, Mapping) else None
    if not isinstance(seconds, Mapping):
        return None
    return compute_step_gain(policy, seconds.get("baseline_seconds"), seconds.get("candidate_seconds"), tries)


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
    if failed := long.get("failed"):
        return Verdict(HOLD, (Message.from_json(failed), times))
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
    if ratio * result.noise <= policy.min_gain:  # one run a side, which another program may have disturbed by ``noise``
        no_gain = Message(
            "patch.no_long_gain",
            "Over {steps} steps the candidate is {ratio:.3f}× as fast as the baseline, so there is no gain over many "
            "steps.",
            steps=steps,
            ratio=ratio,
        )
        return Verdict(REJECT, (no_gain, times))
    needed = hideable * max(policy.min_gain, result.noise)
    if ratio <= needed:
        doubt = Message(
            "patch.quicker_start",
            "Over {steps} steps the gain is {ratio:.3f}×, but a quicker start without quicker steps could cause a gain of {needed:.3f}×. To time "
            "longer runs, raise training.long in policies/gates/patch.yaml.",
            steps=steps, ratio=ratio, needed=needed,
        )  # fmt: skip
        return Verdict(HOLD, (doubt, times))
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


def compute_step_gain(policy: TrainingPolicy, baseline: object, candidate: object, tries: int) -> StepGain | None:
    """Return the gain, from the seconds of a step in each run of baseline and candidate. None: the times are not usable.

    The times count as log-normal with one pooled variance. The t bounds share the confidence among ``tries`` (Bonferroni). They ignore that runs of
    one process are more alike than runs of two processes: tests/factory/gates/test_patch_judge.py simulates how often a patch without a gain is
    promoted. Times are not usable if one is missing, not finite or not above zero, or if a side has fewer runs than ``policy.pairs``.
    """
    a, b = _logs(baseline), _logs(candidate)
    if a is None or b is None or min(len(a), len(b)) < policy.pairs:
        return None
    degrees = len(a) + len(b) - 2
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    variance = (sum((x - mean_a) ** 2 for x in a) + sum((x - mean_b) ** 2 for x in b)) / degrees
    reach = compute_t_quantile(1 - (1 - policy.confidence) / tries, degrees) * math.sqrt(
        variance * (1 / len(a) + 1 / len(b))
    )
    found = mean_a - mean_b
    bounds = [min(max(x, -700.0), 700.0) for x in (found, found - reach, found + reach, max(a) - min(a))]
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
