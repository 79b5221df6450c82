"""The preflight: a small model trained in several ways that must come to the same weights.

A certificate compares new code with old code; the preflight compares new code with itself, so that it finds what was always wrong,
and what never shows in the loss: a denominator that depends on the accumulation, ranks that draw the same numbers, a rank that clips
by itself, copies of weights that drift apart, a kernel whose backward pass is wrong, state that a resume forgets.

    straight      0 ───────► LEAD ─────────────────────────► LEAD + steps
    resumed                  └─ another process ───────────►  the same to the bit on a CPU
    accumulation             └─ 4 micro-batches for 1 ─────►
    kernels                  └─ every op's reference ──────►  rounding, and no more than that
    compile                  └─ compiled blocks ───────────►
    2 ranks                  └─ weights, matrices, batch split ►
    rounded                  └─ weights moved by rounding ►  what rounding may do: the bound
    first weights 0 ► 1         1 and 2 ranks, at a rate that moves nothing: the same to the bit

Bounds are measured and not assumed: some runs go on from weights each of which is changed by one rounding, and no other run may be more
than ``times_rounding`` times as far from the straight one. Of gradients, moments and losses each is held to its own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from factory.training.certificate import Judgement, PreflightPolicy

LEAD = 10  # steps before the runs part, so that moments are warm
PERTURBED = ("rounded 1", "rounded 2")  # runs that measure what rounding does
LEAST = 1e-6  # share of a value that is never held against a run
# Of a weight. Weights are kept in fp32, where the smallest change is a unit in the last place; to compute in bf16 they are rounded.
# In fp8 the same perturbation shows how far roundings to eight bits spread it.
ROUNDING = {"fp32": 2.0**-23, "bf16": 2.0**-9, "fp8": 2.0**-9}
MICRO_BATCHES = 4
SEQUENCES = 8  # rows of a batch: two for each micro-batch, four for each rank
NARROWEST = 2  # key/value heads: the fewest that two tensor ranks can share


@dataclass(frozen=True)
class Way:
    """One way to train that must come to what the straight run came to. ``words``: what is compared."""

    name: str
    part: str  # of the policy
    words: str
    recipe: Mapping[str, Any] = field(default_factory=dict)  # keys with dots
    reference_kernels: bool = False
    ranks: int = 1


WAYS = (
    Way("resumed", "resume", "a resumed run and a straight one"),
    Way(
        "accumulated",
        "accumulation",
        f"accumulation of {MICRO_BATCHES} micro-batches and of 1",
        {"batch.micro_sequences": SEQUENCES // MICRO_BATCHES},
    ),
    Way("reference", "kernels", "reference kernels and the chosen ones", reference_kernels=True),
    Way("compiled", "compile", "compiled blocks and plain ones", {"compile": True}),
    Way("split", "ranks", "2 ranks that split the weights and 1 rank", ranks=2),
    Way("tensor", "ranks", "2 ranks that split each matrix and 1 rank", {"parallel.tensor": 2}, ranks=2),
    Way("replicas", "ranks", "2 ranks with a copy of the weights each and 1 rank", {"parallel.replicas": 2}, ranks=2),
)


@dataclass(frozen=True)
class FromStraight:
    """How far a run is from the straight one: shares of the straight one's values.

    ``series``: by name of metrics.jsonl, a value a step. ``tensors``: by name; of a weight how its ways since the runs parted differ,
    as a share of the straight one's; of ``exp_avg.<weight>`` and other moments the share of their norm.
    """

    series: Mapping[str, Sequence[float]]
    tensors: Mapping[str, float]


@dataclass(frozen=True)
class PreflightEvidence:
    """What the runs of one commit measured. A way that is in none of the mappings was not asked for."""

    commit: str
    lead: int
    steps: int
    exact_resume: bool  # a CPU repeats itself to the bit
    failed: Mapping[str, str] = field(default_factory=dict)  # by run: why it did not come to its end
    left_out: Mapping[str, str] = field(default_factory=dict)  # by way: why it cannot be run here
    rounding: Sequence[FromStraight] = ()
    apart: Mapping[str, FromStraight] = field(default_factory=dict)  # by way
    born_apart: Mapping[str, Sequence[str]] = field(
        default_factory=dict
    )  # by way with ranks: first weights that differ
    replicas_apart: Mapping[str, Sequence[str] | None] = field(default_factory=dict)  # None: the trainer did not say
    seconds: float = 0.0


@dataclass(frozen=True)
class Beyond:
    """The first number of a run that is further off than rounding explains."""

    what: str
    step: int
    difference: float
    rounding: float


# -- the judge ---------------------------------------------------------------------------------------------------------
def judge_preflight(policy: PreflightPolicy, evidence: PreflightEvidence) -> Judgement:
    """May the commit train? Pure. Missing evidence is ``hold``; each reason names the comparison and the step.

    >>> near = FromStraight({"loss": [1e-7, 2e-7]}, {"w": 1e-6})
    >>> far = FromStraight({"loss": [1e-7, 3e-2]}, {"w": 0.4})
    >>> found = PreflightEvidence("c0ffee", 10, 2, True, rounding=[near, near], apart={"accumulated": far})
    >>> judgement = judge_preflight(PreflightPolicy(parts=["accumulation"]), found)
    >>> judgement.outcome, judgement.reasons
    ('reject', ['Preflight: accumulation of 4 micro-batches and of 1 differ: loss at step 11 by 0.03 of its size, rounding by 2e-07.'])
    """
    wrong, missing = [], []
    for name, line in evidence.failed.items():
        wrong.append(f"Preflight: the run {name!r} failed: {line}.")
    asked = [way for way in WAYS if way.part in policy.parts and way.name not in evidence.left_out]
    if len(evidence.rounding) < len(PERTURBED) and not wrong:
        missing.append("Preflight: it was not measured what rounding does.")
    for way in asked if not wrong and not missing else ():
        born, copies = evidence.born_apart.get(way.name, ()), evidence.replicas_apart.get(way.name, ())
        if way.name not in evidence.apart:
            missing.append(f"Preflight: {way.words} were not compared.")
            continue
        if born:
            wrong.append(f"Preflight: {way.words} differ: the first weights, before step 0: {_names(born)}.")
        if copies is None:
            missing.append(f"Preflight: {way.words}: the code does not say whether its ranks' copies are equal.")
        elif copies:
            last = evidence.lead + evidence.steps - 1
            wrong.append(
                f"Preflight: {way.words}: ranks hold other bits of the same weights after step {last}: {_names(copies)}."
            )
        exact = way.part == "resume" and evidence.exact_resume
        if beyond := first_beyond(evidence, evidence.apart[way.name], 0.0 if exact else policy.times_rounding):
            than = "and must be the same to the bit" if exact else f"rounding by {beyond.rounding:.2g}"
            wrong.append(
                f"Preflight: {way.words} differ: {beyond.what} at step {beyond.step} by {beyond.difference:.2g} of its size, {than}."
            )
    if wrong:
        return Judgement("reject", wrong, [])
    if missing:
        return Judgement("hold", missing, [])
    facts = [f"Preflight: {len(asked)} ways to train came to the same weights over {evidence.steps} steps."]
    words = {way.name: way.words for way in WAYS}
    facts += [f"Preflight: not compared: {words[name]}: {why}." for name, why in evidence.left_out.items()]
    return Judgement("promote", facts, [])


def first_beyond(evidence: PreflightEvidence, found: FromStraight, times: float) -> Beyond | None:
    """The first number of ``found`` that is more than ``times`` the rounding away; losses before tensors, which are of the last step."""
    first: Beyond | None = None
    for name, shares in found.series.items():
        noise = 0.0  # the largest so far: it grows from step to step, and is small at one by chance
        for at, share in enumerate(shares):
            noise = max([noise, *(other.series.get(name, [])[at] for other in evidence.rounding)])
            if not share <= _bound(times, noise):
                if first is None or evidence.lead + at < first.step:
                    first = Beyond(name, evidence.lead + at, share, noise)
                break
    if first is not None:
        return first
    last = evidence.lead + evidence.steps - 1
    worst: tuple[float, Beyond] | None = None
    usual = {kind: _usual(kind, evidence.rounding) for kind in {kind_of(name) for name in found.tensors}}
    for name, share in sorted(found.tensors.items()):
        noise = max(usual[kind_of(name)], *(other.tensors.get(name, 0.0) for other in evidence.rounding))
        if not share <= _bound(times, noise):
            over = share / max(noise, LEAST)
            if worst is None or not over <= worst[0]:
                worst = over, Beyond(name, last, share, noise)
    return worst[1] if worst else None


def kind_of(tensor: str) -> str:
    """``exp_avg`` of ``exp_avg.embedding``; ``weight`` of weights, whose names are the model's own."""
    kind = tensor.partition(".")[0]
    return kind if kind in ("exp_avg", "exp_avg_sq", "momentum", "step") else "weight"


def _usual(kind: str, rounding: Sequence[FromStraight]) -> float:
    """The median over the tensors of a kind: one tensor over two runs is now and then near by chance."""
    shares = [share for other in rounding for name, share in other.tensors.items() if kind_of(name) == kind]
    return statistics.median(shares) if shares else 0.0


def _bound(times: float, noise: float) -> float:
    return max(times * noise, LEAST) if times else 0.0


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# -- what is run -------------------------------------------------------------------------------------------------------
def small_recipe(recipe: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """A recipe as complete JSON → one of the same switches whose steps take a fraction of a second.

    Few heads, layers and rows; the vocabulary stays, as the data's tokens are numbers in it. Clipping always acts. Nothing is
    compiled, skipped, or split in two for the noise scale: ``WAYS`` change one thing each.
    """
    model = dict(recipe["model"])
    groups = model["heads"] // model["kv_heads"]
    kv_heads = min(model["kv_heads"], NARROWEST)
    if kv_heads < model["kv_heads"]:
        narrow = min(model["d_model"], kv_heads * groups * model["head_dim"])
        d_ff = max(16, math.ceil(model["d_ff"] * narrow / model["d_model"] / 16) * 16)
        model |= {"kv_heads": kv_heads, "heads": kv_heads * groups, "d_model": narrow, "d_ff": d_ff}
    experts = model["experts"]
    layers = max(2, model["nope_every"] or 0)
    if experts:
        count = min(experts["count"], max(8, experts["per_token"]))
        experts = experts | {"dense_layers": min(experts["dense_layers"], 1), "count": count}
    model |= {"layers": min(model["layers"], layers), "context": min(model["context"], 256), "experts": experts}
    schedule = {"warmup_steps": 2, "trunk_steps": {"first": LEAD + steps, "later": LEAD + steps}, "anneal_steps": 1}
    stability = recipe["stability"] | {"grad_clip": min(recipe["stability"]["grad_clip"], 0.1), "noise_scale_every": 0}
    return {
        **recipe,
        "compile": False,
        "checkpoint_every": LEAD,
        "keep_checkpoints": LEAD + steps,
        "model": model,
        "batch": {"sequences": SEQUENCES, "packing": recipe["batch"]["packing"]},
        "schedule": schedule,
        "stability": stability | {"skip_deviations": 1e9},
        "parallel": {"recompute": recipe["parallel"]["recompute"]},
    }
