"""What fits into the demo's minutes: the model, the steps, and how much is measured. Pure functions of measured seconds.

Every machine runs the same story: two candidates, one judged proposal. A faster machine gets a larger model and more steps, not
a shorter demo. A step should take about ``STEP_S`` in a demo of six minutes, so that the patch gate's runs, which repeat steps
about 300 times, leave time for training; the model is the largest of ``LADDER`` with such steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

LEAST_MINUTES, MOST_MINUTES = 2.0, 120.0
STEP_S = 0.15  # seconds of a step, where the demo has SIX minutes
SIX = 6.0
OVERHEAD = 2.0  # a step's seconds over those of its products, attention and loss head alone; measured on small models


@dataclass(frozen=True)
class DemoShape:
    """One size of the demo's model, and of its batch in rows of 256 positions."""

    d_model: int
    layers: int
    heads: int
    kv_heads: int
    d_ff: int
    sequences: int

    def recipe(self, raw: dict[str, Any]) -> dict[str, Any]:
        """A recipe with these sizes. The rate was found at a width of 256 and moves with muP (``base_d_model``)."""
        sizes = {"d_model": self.d_model, "layers": self.layers, "heads": self.heads, "kv_heads": self.kv_heads}
        model = raw["model"] | sizes | {"d_ff": self.d_ff, "base_d_model": 256}
        # With two micro-batches the gradient's noise costs nothing to measure; one would be split now and then, and compiled again.
        batch = raw["batch"] | {"sequences": self.sequences, "micro_sequences": self.sequences // 2}
        return raw | {"model": model, "batch": batch}

    def __str__(self) -> str:
        return f"{self.layers} layers of width {self.d_model}, {self.sequences} rows of 256 tokens a step"


LADDER = (  # smallest first; each step takes 1.5 to 3 times as long as the one before
    DemoShape(128, 2, 2, 1, 384, 8),
    DemoShape(128, 4, 2, 1, 384, 8),
    DemoShape(128, 4, 2, 1, 384, 16),
    DemoShape(192, 4, 3, 1, 576, 16),
    DemoShape(256, 4, 4, 2, 768, 16),
    DemoShape(384, 6, 6, 2, 1152, 16),
    DemoShape(512, 8, 8, 4, 1536, 32),
    DemoShape(768, 12, 12, 4, 2048, 64),
)


@dataclass(frozen=True)
class Seen:
    """Measured seconds of this machine."""

    spent: float  # since the demo began
    ingest: float  # of the first shards
    start: float  # of a trainer whose code is compiled already
    step: float  # of the chosen shape


@dataclass(frozen=True)
class Size:
    """The sizes of the rest of the demo. ``over``: seconds by which it will exceed its minutes; 0 where it fits."""

    first: int  # steps of the first trunk segment, of later ones, and of each anneal
    later: int
    anneal: int
    measure_seconds: float  # for the code loop's agent
    improve_seconds: float  # of the day's budget: less than the first proposal takes, so that there is time for one
    patch: dict[str, int]  # of policies/gates/patch.yaml: training
    evals: dict[str, int]  # of policies/evals.yaml
    seconds: dict[str, float]  # what each part is expected to take
    over: float


LEAST = {"first": 60, "later": 30, "anneal": 24}  # fewer steps, and a candidate may not beat the trigram
SHARES = {"first": 0.44, "later": 0.24, "anneal": 0.16}  # of all steps; there are two anneals
JUDGED_STEPS = 310  # of the gate's runs and their warm-ups, measured twice, with four pairs
TWO_PAIRS = 0.74  # share of those steps with two pairs


def checked(minutes: float) -> float:
    """Raises: ValueError for minutes out of range."""
    if not (math.isfinite(minutes) and LEAST_MINUTES <= minutes <= MOST_MINUTES):
        raise ValueError(
            f"--minutes {minutes:g}: the demo takes {LEAST_MINUTES:g} to {MOST_MINUTES:g} minutes; 6 is the default"
        )
    return minutes


def first_guess(minutes: float, predicted: dict[DemoShape, float]) -> DemoShape:
    """The largest shape whose predicted step is short enough. ``predicted``: seconds of its products, attention and loss head."""
    short = STEP_S * minutes / SIX
    fitting = [shape for shape in LADDER if shape in predicted and predicted[shape] * OVERHEAD <= short]
    return fitting[-1] if fitting else LADDER[0]


def next_guess(minutes: float, shape: DemoShape, step: float) -> DemoShape:
    """The shape to try after ``shape`` took ``step`` seconds a step; the same one where that is close enough."""
    ratio, place = step / (STEP_S * minutes / SIX), LADDER.index(shape)
    if ratio > 1.3 and place > 0:
        return LADDER[place - (2 if ratio > 5 and place > 1 else 1)]
    if ratio < 0.35 and place + 1 < len(LADDER):
        return LADDER[place + 1]
    return shape


def plan(minutes: float, seen: Seen) -> Size:
    """The sizes that use the minutes that are left."""
    scale = min(1.0, minutes / SIX)
    evals = {
        "documents_per_domain": max(16, round(60 * scale)),
        "cloze_items_per_domain": max(10, round(40 * scale)),
        "chat_samples": max(4, round(12 * scale)),
    }
    # A gain that would promote is measured twice: two pairs in each are enough for one as large as the demo's.
    # On a noisy machine a measurement is repeated once: a second time would take another minute of the six.
    hurried = minutes < 2 * SIX
    patch = {"steps": 10, "pairs": 2 if hurried else 4, "tries": 2 if hurried else 3, "long": 8 if scale == 1 else 4}
    # Enough for at least two implementations, which are compiled first: without any there is nothing to propose.
    measure = round(max(40.0 * scale, 15.0 + 5 * seen.start), 1)
    judged = JUDGED_STEPS * (1.0 if patch["pairs"] == 4 else TWO_PAIRS)
    # Counted in starts of a program that imports torch, on two cores without a GPU; the work between them is small.
    fixed = {
        "ingest of the shards that come later": 0.5 * seen.ingest,
        "starting segments": 8 * seen.start,
        "evaluations and gates": 2 * (2 * seen.start + 10.0 * scale),
        "profile": 4.5 * seen.start + 30 * seen.step,
        "timing implementations": measure,
        "judging the proposal": 13 * seen.start + judged * seen.step + 10.0,
    }
    left = 60 * minutes - seen.spent - sum(fixed.values())
    steps = left / seen.step
    found = {name: max(LEAST[name], int(share * steps)) for name, share in SHARES.items()}
    training = (found["first"] + found["later"] + 2 * found["anneal"]) * seen.step
    seconds = {"so far": seen.spent, "training": training, **fixed}
    over = max(0.0, sum(seconds.values()) - 60 * minutes)
    improve = round((fixed["profile"] + measure) / 2, 1)
    return Size(
        **found, measure_seconds=measure, improve_seconds=improve, patch=patch, evals=evals, seconds=seconds, over=over
    )
