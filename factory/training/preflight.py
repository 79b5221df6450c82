"""Judges the preflight: the commit trains a small model in several ways, and all must end with the same weights.

A certificate compares new code with old code. The preflight compares new code with itself, so it also finds old mistakes, and mistakes
that the loss does not show: a denominator that depends on the accumulation, ranks that draw the same numbers, a rank that clips
by itself, copies of weights that drift apart, a kernel with a wrong backward pass, state that a resume forgets.

    straight      0 ───────► LEAD ─────────────────────────► LEAD + steps
    resumed                  └─ another process ───────────►  the same bits on a CPU
    accumulation             └─ 4 micro-batches for 1 ─────►
    kernels                  └─ every op's reference ──────►  differ by rounding only
    compile                  └─ compiled blocks ───────────►
    2 ranks                  └─ weights, matrices, batch split ►
    rounded                  └─ weights moved by rounding ►  the effect of rounding: the bound
    first weights 0 ► 1         1 and 2 ranks, at a rate that moves nothing: the same bits

The bounds are measured. Four runs start from weights each of which is changed by one rounding. ``preflight_noise`` estimates from them the
standard deviation that rounding gives each number: weights, moments, losses and gradient norms, by step. Every other run may differ from the
straight run by at most ``times_rounding`` standard deviations. ``python -m benchmarks.judge.preflight`` counts how many honest codes are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from factory.training.certificate import CodeJudgement, PreflightPolicy
from factory.training.preflight_noise import (
    GRAD_NORM,
    LEAST,
    WINDOW,
    DistanceFromStraightRun,
    RoundingNoise,
    compute_early_excess,
    estimate_order_effect,
    estimate_rounding_noise,
)
from kernels.contract.message import Message
from models.shrinking import shrink_spec
from trainer.contract.lora import fit_to_smaller_model
from trainer.contract.recipe import Recipe

LEAD_STEPS = 10  # steps before the runs separate, so that moments are warm
PERTURBED_RUNS = ("rounded 1", "rounded 2", "rounded 3", "rounded 4")  # runs that measure the effect of rounding
# The relative change of each weight, by precision. In fp32 the smallest change is a unit in the last place. To compute in bf16, weights
# are rounded. In fp8 the same change as in bf16 shows how far rounding to eight bits spreads it.
ROUNDING = {"fp32": 2.0**-23, "bf16": 2.0**-9, "fp8": 2.0**-9}
MICRO_BATCHES = 4
SEQUENCES = 8  # rows of a batch: two for each micro-batch, four for each rank
LEAST_KV_HEADS = 2  # key/value heads: the fewest that two tensor ranks can share
MOST_WEIGHTS_NAMED = 3  # weights in a message


@dataclass(frozen=True)
class TrainingVariant:
    """One way to train that must end with the weights of the straight run. ``words``: names both sides of the comparison."""

    name: str
    part: str  # of the policy's ``parts``
    words: Message
    recipe: Mapping[str, Any] = field(default_factory=dict)  # keys with dots
    reference_kernels: bool = False
    ranks: int = 1


WAYS = (
    TrainingVariant("resumed", "resume", Message("training.preflight.resumed", "a resumed run and an uninterrupted run")),
    TrainingVariant(
        "accumulated", "accumulation",
        Message("training.preflight.accumulated", "steps of {micro_batches} micro-batches and steps of 1 micro-batch", micro_batches=MICRO_BATCHES),
        {"batch.micro_sequences": SEQUENCES // MICRO_BATCHES},
    ),
    TrainingVariant(
        "reference", "kernels", Message("training.preflight.reference", "reference kernels and the chosen kernels"), reference_kernels=True
    ),
    TrainingVariant("compiled", "compile", Message("training.preflight.compiled", "compiled blocks and uncompiled blocks"), {"compile": True}),
    TrainingVariant("split", "ranks", Message("training.preflight.split", "1 rank and 2 ranks that split the weights"), ranks=2),
    TrainingVariant(
        "tensor", "ranks", Message("training.preflight.tensor", "1 rank and 2 ranks that split each matrix"), {"parallel.tensor": 2}, ranks=2
    ),
    TrainingVariant(
        "replicas", "ranks", Message("training.preflight.replicas", "1 rank and 2 ranks that each hold all weights"),
        {"parallel.replicas": 2}, ranks=2,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class PreflightEvidence:
    """The measurements of one commit's runs. A way that is in none of the mappings was not asked for."""

    commit: str
    lead: int
    steps: int
    exact_resume: bool  # true on a CPU, which gives the same bits again
    failed: Mapping[str, str] = field(default_factory=dict)  # by run: why it did not finish
    left_out: Mapping[str, str] = field(default_factory=dict)  # by way: why it cannot be run here
    rounding: Sequence[DistanceFromStraightRun] = ()
    sum_error: float = 0.0  # relative error of an fp32 norm of a tensor of this model, the largest
    longest_sum: int = 0  # number of squares in the longest of these norms
    apart: Mapping[str, DistanceFromStraightRun] = field(default_factory=dict)  # by way
    born_apart: Mapping[str, Sequence[str]] = field(
        default_factory=dict
    )  # by way with ranks: names of initial weights that differ
    replicas_apart: Mapping[str, Sequence[str] | None] = field(
        default_factory=dict
    )  # by way with ranks: the names of weights whose copies differ; None: the trainer did not write them
    seconds: float = 0.0


@dataclass(frozen=True)
class DifferenceBeyondRounding:
    """The first number of a run that differs by more than rounding explains."""

    what: str
    step: int
    difference: float
    rounding: float  # the noise
    allowed: float


# -- the judge ---------------------------------------------------------------------------------------------------------
def judge_preflight(policy: PreflightPolicy, evidence: PreflightEvidence) -> CodeJudgement:
    """Decide whether the commit may train. Pure. Missing evidence is ``hold``; each reason names the comparison and the step.

    >>> near = DistanceFromStraightRun({"loss": [1e-7, 2e-7]}, {"w": 1e-6})
    >>> far = DistanceFromStraightRun({"loss": [1e-7, 3e-2]}, {"w": 0.4})
    >>> found = PreflightEvidence("c0ffee", 10, 2, True, rounding=[near] * 4, apart={"accumulated": far})
    >>> judgement = judge_preflight(PreflightPolicy(parts=["accumulation"]), found)
    >>> print(judgement.outcome, str(judgement.reasons[0]).partition(". ")[2])
    reject At step 11, the relative difference of loss is 0.03. Rounding causes 2e-07, and at most 2e-06 is allowed.
    """
    wrong, missing = list[Message](), list[Message]()
    for name, line in evidence.failed.items():
        wrong.append(
            Message("training.preflight.run_failed", "Preflight: the run {run!r} failed: {line}.", run=name, line=line)
        )
    asked = [way for way in WAYS if way.part in policy.parts and way.name not in evidence.left_out]
    noise = estimate_rounding_noise(evidence.rounding)
    if (len(evidence.rounding) < len(PERTURBED_RUNS) or not noise.is_measured) and not wrong:
        missing.append(Message("training.preflight.no_rounding", "Preflight: the effect of rounding was not measured."))
    for way in asked if not wrong and not missing else ():
        born, copies = evidence.born_apart.get(way.name, ()), evidence.replicas_apart.get(way.name, ())
        if way.name not in evidence.apart:
            missing.append(
                Message("training.preflight.not_compared", "Preflight: {both} were not compared.", both=way.words)
            )
            continue
        if born:
            wrong.append(
                Message(
                    "training.preflight.initial_weights_differ",
                    "Preflight: {both} differ. {count:,|initial weight differs|initial weights differ} "
                    "before step 0, for example {weights}.",
                    both=way.words,
                    count=len(born),
                    weights=list(born[:MOST_WEIGHTS_NAMED]),
                )  # fmt: skip
            )
        if copies is None:
            missing.append(
                Message(
                    "training.preflight.copies_unknown",
                    "Preflight: in the comparison of {both}, the code does not report whether all ranks have equal copies of the weights.",
                    both=way.words,
                )  # fmt: skip
            )
        elif copies:
            wrong.append(
                Message(
                    "training.preflight.copies_differ",
                    "Preflight: in the comparison of {both}, {count:,|weight has|weights have} different bits on different ranks "
                    "after step {step}, for example {weights}.",
                    both=way.words,
                    step=evidence.lead + evidence.steps - 1,
                    count=len(copies),
                    weights=list(copies[:MOST_WEIGHTS_NAMED]),
                )  # fmt: skip
            )
        exact = way.part == "resume" and evidence.exact_resume
        times = 0.0 if exact else policy.times_rounding
        if beyond := find_first_difference_beyond_rounding(evidence, way, noise, times):
            wrong.append(_beyond_exact(way, beyond) if exact else _beyond_rounding(way, beyond))
    if wrong:
        return CodeJudgement("reject", wrong, [])
    if missing:
        return CodeJudgement("hold", missing, [])
    facts = [
        Message(
            "training.preflight.passed",
            "Preflight: {ways:,|way|ways} to train gave the same weights over {steps:,|step|steps}.",
            ways=len(asked),
            steps=evidence.steps,
        )  # fmt: skip
    ]
    both = {way.name: way.words for way in WAYS}
    facts += [
        Message(
            "training.preflight.left_out",
            "Preflight: {both} were not compared, because {why}.",
            both=both[name],
            why=why,
        )
        for name, why in evidence.left_out.items()
    ]
    return CodeJudgement("promote", facts, [])


def _beyond_exact(way: TrainingVariant, beyond: DifferenceBeyondRounding) -> Message:
    return Message(
        "training.preflight.bits_differ",
        "Preflight: {both} differ. At step {step}, the relative difference of {what} is {difference:.2g}, but all bits "
        "must be the same.", both=way.words, what=beyond.what, step=beyond.step, difference=beyond.difference,
    )  # fmt: skip


def _beyond_rounding(way: TrainingVariant, beyond: DifferenceBeyondRounding) -> Message:
    return Message(
        "training.preflight.beyond_rounding",
        "Preflight: {both} differ. At step {step}, the relative difference of {what} is {difference:.2g}. "
        "Rounding causes {rounding:.2g}, and at most {allowed:.2g} is allowed.",
        both=way.words, what=beyond.what, step=beyond.step, difference=beyond.difference, rounding=beyond.rounding,
        allowed=beyond.allowed,
    )  # fmt: skip


def find_first_difference_beyond_rounding(
    evidence: PreflightEvidence, way: TrainingVariant, noise: RoundingNoise, times: float
) -> DifferenceBeyondRounding | None:
    """Return the first number of a way that differs by more than ``times`` the noise; None if there is none. ``times`` 0: all bits must be equal.

    Losses and norms come before tensors, which are those of the last step. Of several tensors the one that is furthest beyond its noise is returned.
    """
    distance = evidence.apart[way.name]
    last = evidence.lead + evidence.steps - 1
    # Only ranks add up the squares of the gradients in another order.
    explained = estimate_order_effect(evidence.sum_error, evidence.longest_sum) if way.ranks > 1 else 0.0
    excess = compute_early_excess(noise, distance.series.get(GRAD_NORM, ()), explained)

    def compare(name: str, at: int, share: float, usual: float) -> DifferenceBeyondRounding | None:
        least = max(LEAST, explained) if name == GRAD_NORM else LEAST
        allowed = max(times * usual * (1.0 if at < WINDOW else max(1.0, excess)), least) if times else 0.0
        return None if share <= allowed else DifferenceBeyondRounding(name, evidence.lead + at, share, usual, allowed)

    series = [
        beyond
        for name, shares in distance.series.items()
        for at, share in enumerate(shares)
        if (beyond := compare(name, at, share, noise.series[name][at] if name in noise.series else 0.0))
    ]
    if series:
        return min(series, key=lambda beyond: beyond.step)
    tensors = [
        replace(beyond, step=last)
        for name, share in sorted(distance.tensors.items())
        if (beyond := compare(name, max(WINDOW, evidence.steps), share, noise.estimate_tensor_noise(name)))
    ]
    over = lambda beyond: math.inf if math.isnan(beyond.difference) else beyond.difference / max(beyond.rounding, LEAST)
    return max(tensors, key=over, default=None)


# -- the small model ---------------------------------------------------------------------------------------------------
def make_small_recipe(recipe: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """A recipe with the same switches whose steps take a fraction of a second. ``recipe``: complete, as JSON.

    Its model is the real one with few heads, layers and positions (``shrink_spec``). The vocabulary stays, because the data's tokens are its numbers.
    The rank of ``adapt`` falls to what its matrices allow. Clipping always acts. Nothing is compiled, skipped, or split in two for the noise scale,
    because each of ``WAYS`` changes one thing.
    """
    whole = Recipe.parse(recipe)
    model = shrink_spec(whole.model, layers=2, context=256, kv_heads=LEAST_KV_HEADS, experts=8)
    adapt, freeze = fit_to_smaller_model(model, whole.adapt, whole.freeze)
    schedule = {
        "warmup_steps": 2,
        "trunk_steps": {"first": LEAD_STEPS + steps, "later": LEAD_STEPS + steps},
        "anneal_steps": 1,
    }
    stability = recipe["stability"] | {"grad_clip": min(recipe["stability"]["grad_clip"], 0.1), "noise_scale_every": 0}
    return {
        **recipe,
        "compile": False,
        "checkpoint_every": LEAD_STEPS,
        "keep_checkpoints": LEAD_STEPS + steps,
        "model": model.model_dump(),
        "adapt": adapt and adapt.model_dump(),
        "freeze": freeze,
        "export_dtypes": {},
        "batch": {"sequences": SEQUENCES, "packing": recipe["batch"]["packing"]},
        "schedule": schedule,
        "stability": stability | {"skip_deviations": 1e9},
        "parallel": {"recompute": recipe["parallel"]["recompute"]},
    }
