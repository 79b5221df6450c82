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

The bounds are measured. Two runs start from weights each of which is changed by one rounding. Every other run may be at most
``times_rounding`` times as far from the straight run as these two. Weights, gradients, moments and losses each have their own bound.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from factory.training.certificate import CodeJudgement, PreflightPolicy
from kernels.contract.message import Message
from models.shrinking import shrink_spec
from trainer.contract.lora import fit_to_smaller_model
from trainer.contract.recipe import Recipe

LEAD_STEPS = 10  # steps before the runs separate, so that moments are warm
PERTURBED_RUNS = ("rounded 1", "rounded 2")  # runs that measure the effect of rounding
LEAST = 1e-6  # share of a value: a smaller difference is always accepted
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
class DistanceFromStraightRun:
    """How far a run is from the straight run, as shares of the straight run's values.

    ``series``: by key of metrics.jsonl, one value for each step. ``tensors``: by name. For a weight: the difference between the two changes
    since step LEAD, as a share of the straight run's change. For ``exp_avg.<weight>`` and other moments: a share of their norm.
    """

    series: Mapping[str, Sequence[float]]
    tensors: Mapping[str, float]


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
    rounding: float


# -- the judge ---------------------------------------------------------------------------------------------------------
def judge_preflight(policy: PreflightPolicy, evidence: PreflightEvidence) -> CodeJudgement:
    """Decide whether the commit may train. Pure. Missing evidence is ``hold``; each reason names the comparison and the step.

    >>> near = DistanceFromStraightRun({"loss": [1e-7, 2e-7]}, {"w": 1e-6})
    >>> far = DistanceFromStraightRun({"loss": [1e-7, 3e-2]}, {"w": 0.4})
    >>> found = PreflightEvidence("c0ffee", 10, 2, True, rounding=[near, near], apart={"accumulated": far})
    >>> judgement = judge_preflight(PreflightPolicy(parts=["accumulation"]), found)
    >>> print(judgement.outcome, str(judgement.reasons[0]).partition(". ")[2])
    reject At step 11, the relative difference of loss is 0.03, but rounding causes a relative difference of only 2e-07.
    """
    wrong, missing = list[Message](), list[Message]()
    for name, line in evidence.failed.items():
        wrong.append(
            Message("training.preflight.run_failed", "Preflight: the run {run!r} failed: {line}.", run=name, line=line)
        )
    asked = [way for way in WAYS if way.part in policy.parts and way.name not in evidence.left_out]
    if len(evidence.rounding) < len(PERTURBED_RUNS) and not wrong:
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
        if beyond := find_first_difference_beyond_rounding(
            evidence, evidence.apart[way.name], 0.0 if exact else policy.times_rounding
        ):
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
        "Preflight: {both} differ. At step {step}, the relative difference of {what} is {difference:.2g}, but "
        "rounding causes a relative difference of only {rounding:.2g}.",
        both=way.words, what=beyond.what, step=beyond.step, difference=beyond.difference,
        rounding=beyond.rounding,
    )  # fmt: skip


def find_first_difference_beyond_rounding(
    evidence: PreflightEvidence, distance: DistanceFromStraightRun, rounding_factor: float
) -> DifferenceBeyondRounding | None:
    """Return the first number of ``distance`` that is more than ``rounding_factor`` times the effect of rounding; None if there is none.

    Losses come before tensors, which are those of the last step.
    """
    first: DifferenceBeyondRounding | None = None
    for name, shares in distance.series.items():
        noise = 0.0  # the largest so far: it grows with the steps, and can be small at one step by chance
        for at, share in enumerate(shares):
            noise = max([noise, *(other.series.get(name, [])[at] for other in evidence.rounding)])
            if not share <= _bound(rounding_factor, noise):
                if first is None or evidence.lead + at < first.step:
                    first = DifferenceBeyondRounding(name, evidence.lead + at, share, noise)
                break
    if first is not None:
        return first
    last = evidence.lead + evidence.steps - 1
    worst: tuple[float, DifferenceBeyondRounding] | None = None
    usual = {kind: _usual(kind, evidence.rounding) for kind in {find_tensor_kind(name) for name in distance.tensors}}
    for name, share in sorted(distance.tensors.items()):
        noise = max(usual[find_tensor_kind(name)], *(other.tensors.get(name, 0.0) for other in evidence.rounding))
        if not share <= _bound(rounding_factor, noise):
            over = share / max(noise, LEAST)
            if worst is None or not over <= worst[0]:
                worst = over, DifferenceBeyondRounding(name, last, share, noise)
    return worst[1] if worst else None


def find_tensor_kind(tensor: str) -> str:
    """``exp_avg`` for ``exp_avg.embedding``; ``weight`` for a weight, whose name is that of the model."""
    kind = tensor.partition(".")[0]
    return kind if kind in ("exp_avg", "exp_avg_sq", "momentum", "step") else "weight"


def _usual(kind: str, rounding: Sequence[DistanceFromStraightRun]) -> float:
    """The median over the tensors of a kind, because the distance of one tensor can be small by chance."""
    shares = [share for other in rounding for name, share in other.tensors.items() if find_tensor_kind(name) == kind]
    return statistics.median(shares) if shares else 0.0


def _bound(times: float, noise: float) -> float:
    return max(times * noise, LEAST) if times else 0.0


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
