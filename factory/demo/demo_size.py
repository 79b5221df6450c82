"""Chooses the model, the steps and the size of evaluations that fit into the demo's minutes. Pure functions of measured seconds.

Every machine makes two candidates and one judged proposal. A faster machine gets a larger model and more steps, not a shorter demo. A step
should take about ``STEP_SECONDS`` in a demo of six minutes, so that the patch gate, which repeats steps about 170 times, leaves time for training.
The model is the largest of ``LADDER`` with such steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from factory.core.errors import InputError
from kernels.contract.message import Message

LEAST_MINUTES, MOST_MINUTES = 2.0, 120.0
STEP_SECONDS = 0.15  # seconds of a step in a demo of SIX minutes
DEFAULT_MINUTES = 6.0
OVERHEAD = 2.0  # time of a step divided by that of its products, attention and loss head; measured on small models


@dataclass(frozen=True)
class DemoShape:
    """A size of the demo's model, and of its batch in rows of 256 positions."""

    d_model: int
    layers: int
    heads: int
    kv_heads: int
    d_ff: int
    sequences: int

    def apply_to_recipe(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the recipe ``raw`` with these sizes. Its learning rate was tuned at a width of 256 and scales with muP (``base_d_model``)."""
        sizes = {"d_model": self.d_model, "layers": self.layers, "heads": self.heads, "kv_heads": self.kv_heads}
        model = raw["model"] | sizes | {"d_ff": self.d_ff, "base_d_model": 256}
        # Two micro-batches measure the gradient noise for free. One would sometimes be split, and compiled again.
        batch = raw["batch"] | {"sequences": self.sequences, "micro_sequences": self.sequences // 2}
        return raw | {"model": model, "batch": batch}

    def __str__(self) -> str:
        return Message(
            "demo.shape", "{layers} layers of width {width}, {rows} rows of 256 tokens a step", layers=self.layers, width=self.d_model,
            rows=self.sequences,
        )  # fmt: skip


LADDER = (  # smallest first; a step of each shape takes 1.5 to 3 times as long as one of the shape before
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
class DemoTimings:
    """Measured seconds on this machine."""

    spent: float  # since the demo began
    ingest: float  # ingest of the first shards
    start: float  # start of a trainer whose code is compiled
    step: float  # a step of the chosen shape


@dataclass(frozen=True)
class DemoPlan:
    """The sizes for the rest of the demo. ``over``: seconds by which the demo will exceed its minutes; 0 when it fits."""

    first: int  # steps of the first trunk segment; ``later``: of later trunk segments; ``anneal``: of each anneal
    later: int
    anneal: int
    measure_seconds: float  # for the code loop's agent
    improve_seconds: float  # the day's budget: less than the first proposal takes, so that exactly one is made
    patch: dict[str, int]  # of policies/gates/patch.yaml: training
    evals: dict[str, int]  # of policies/evals.yaml
    seconds: dict[str, float]  # expected seconds of each part
    over: float


LEAST = {"first": 60, "later": 30, "anneal": 24}  # with fewer steps a candidate may not beat the trigram model
SHARES = {"first": 0.44, "later": 0.24, "anneal": 0.16}  # of all steps; the demo has two anneals
CONTROL_STEPS = 50  # steps of the gate's warm-ups and controls in two rounds
MORE_ROUNDS = (
    180  # seconds, in a demo of six minutes, in which rounds are added on a busy machine, until the verdict is clear
)


def check_minutes(minutes: float) -> float:
    """Return ``minutes``. Raises: InputError for minutes out of range."""
    if not (math.isfinite(minutes) and LEAST_MINUTES <= minutes <= MOST_MINUTES):
        raise InputError(
            "demo.minutes", "--minutes must be from {least:g} to {most:g}, not {minutes:g}. The default is {default:g}.", minutes=minutes,
            least=LEAST_MINUTES, most=MOST_MINUTES, default=DEFAULT_MINUTES,
        )  # fmt: skip
    return minutes


def guess_first_shape(minutes: float, predicted: dict[DemoShape, float]) -> DemoShape:
    """Return the largest shape whose predicted step is short enough. ``predicted``: seconds of a step's matrix products, attention and loss head."""
    short = STEP_SECONDS * minutes / DEFAULT_MINUTES
    fitting = [shape for shape in LADDER if shape in predicted and predicted[shape] * OVERHEAD <= short]
    return fitting[-1] if fitting else LADDER[0]


def guess_next_shape(minutes: float, shape: DemoShape, step: float) -> DemoShape:
    """Return the shape to try after ``shape`` took ``step`` seconds a step; ``shape`` itself when the time is near the goal."""
    ratio, place = step / (STEP_SECONDS * minutes / DEFAULT_MINUTES), LADDER.index(shape)
    if ratio > 1.3 and place > 0:
        return LADDER[place - (2 if ratio > 5 and place > 1 else 1)]
    if ratio < 0.35 and place + 1 < len(LADDER):
        return LADDER[place + 1]
    return shape


def plan_demo(minutes: float, timings: DemoTimings) -> DemoPlan:
    """Return the steps and sizes that use the remaining minutes."""
    scale = min(1.0, minutes / DEFAULT_MINUTES)
    evals = {
        "documents_per_domain": max(16, round(60 * scale)),
        "cloze_items_per_domain": max(10, round(40 * scale)),
        "chat_samples": max(4, round(12 * scale)),
    }
    # Two rounds of three pairs are enough for a gain as large as the demo's on a quiet machine.
    hurried = minutes < 2 * DEFAULT_MINUTES
    patch = {
        "steps": 10,
        "pairs": 3 if hurried else 4,
        "long": 8 if scale == 1 else 4,
        "budget_seconds": int(MORE_ROUNDS * scale),
    }
    # Enough to compile and time at least two implementations. Without them, no patch can be proposed.
    measure = round(max(40.0 * scale, 15.0 + 5 * timings.start), 1)
    judged = CONTROL_STEPS + 2 * 2 * patch["pairs"] * patch["steps"]
    # In starts of a program that imports torch, on two cores without a GPU. The work between the starts is small.
    fixed = {
        "ingest of later shards": 0.5 * timings.ingest,
        "starting segments": 8 * timings.start,
        "evaluations and gates": 2 * (2 * timings.start + 10.0 * scale),
        "profile": 4.5 * timings.start + 30 * timings.step,
        "timing implementations": measure,
        "judging the proposal": 13 * timings.start + judged * timings.step + 10.0,
    }
    left = 60 * minutes - timings.spent - sum(fixed.values())
    steps = left / timings.step
    found = {name: max(LEAST[name], int(share * steps)) for name, share in SHARES.items()}
    training = (found["first"] + found["later"] + 2 * found["anneal"]) * timings.step
    seconds = {"so far": timings.spent, "training": training, **fixed}
    over = max(0.0, sum(seconds.values()) - 60 * minutes)
    improve = round((fixed["profile"] + measure) / 2, 1)
    return DemoPlan(
        **found, measure_seconds=measure, improve_seconds=improve, patch=patch, evals=evals, seconds=seconds, over=over
    )
