"""Finds a learning rate for the first trunk segment by a short run whose rate rises exponentially (a range test, arXiv 1506.01186 §3.3).

The run starts where the next trunk segment would start, on the data of its plan, and leaves nothing but its numbers. The rate at which the smoothed
loss is lowest is near the rate at which training fails. A tenth of it is the peak (fastai, arXiv 2002.04688 §4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.core.yaml_edit import set_yaml_value
from factory.core.errors import FactoryError, InputError
from factory.core.path_removal import remove_path
from factory.git.repository import get_live_commit
from factory.ledger.plant import Plant
from factory.ledger.rows import Subject
from factory.runs.arm import Arm
from factory.runs.arm_runner import ArmRunner
from factory.runs.live_code import LiveCode
from factory.runs.trace import read_step_lines
from factory.training.continuing_recipe import RATE_COMMENT
from factory.training.planning import load_recipe, make_next_trunk_spec
from kernels.contract.files import write_atomically
from kernels.contract.message import Message

SPAN = 10.0  # the ramp ends at this many times the recipe's rate
SAFETY = 10.0  # the lowest loss's rate, divided by the rate to use (arXiv 2002.04688 §4)
SMOOTHING = 0.9  # of the loss, exponential with correction of its start, as in Adam
STEPS = 64


@dataclass(frozen=True)
class FoundRate:
    """The rate that a range test found for the recipe's whole batch. ``lowest``: the rate of the lowest smoothed loss, for the same batch."""

    rate: float
    lowest: float
    before: float  # the recipe's rate
    steps: int


def make_ramp(steps: int) -> list[dict[str, Any]]:
    """The milestones that make the rate rise exponentially from 1/steps of the peak to the peak, together with a warm-up of as many steps.

    The warm-up gives (step + 1) / steps. The milestones are the share that is left to steps^-(1 - step / (steps - 1)), which is never above one.

    >>> ramp = make_ramp(5)
    >>> [round((one["from_step"] + 1) / 5 * one["share"], 4) for one in ramp]
    [0.2991, 0.4472, 0.6687, 1.0]
    """
    share = lambda step: steps ** (step / (steps - 1)) / (step + 1)
    return [{"from_step": step, "share": min(1.0, share(step))} for step in range(1, steps)]


def find_lowest_loss_rate(rates: Sequence[float], losses: Sequence[float]) -> float:
    """The rate at which the smoothed loss is lowest. A loss that is not finite ends the test. Raises: InputError without a finite loss.

    >>> find_lowest_loss_rate([1e-5, 1e-4, 1e-3, 1e-2, 1e-1], [4.0, 3.9, 3.0, 3.1, 9.0])
    0.01
    """
    best, smooth, found = math.inf, 0.0, None
    for number, (rate, loss) in enumerate(zip(rates, losses, strict=True)):
        if not math.isfinite(loss):
            break
        smooth = SMOOTHING * smooth + (1 - SMOOTHING) * loss
        value = smooth / (1 - SMOOTHING ** (number + 1))
        if value < best:
            best, found = value, rate
    if found is None:
        raise InputError("rate_finder.no_loss", "The loss was not finite at the first step, so no rate can be found.")
    return found


def find_rate(plant: Plant, steps: int = STEPS) -> FoundRate:
    """Run the range test with batches of one micro-batch, so that it is short. Returns the rate for the recipe's batch.

    Raises: InputError without data; FactoryError, naming the log, if the run failed.
    """
    recipe = load_recipe(plant.workspace)
    spec = make_next_trunk_spec(plant, steps)
    rows = recipe.batch.micro_sequences or recipe.batch.sequences
    ratio = math.sqrt(recipe.batch.sequences / rows)  # AdamW's rate follows the root of the batch, arXiv 2205.10287
    commit, first = get_live_commit(plant.workspace.repository), spec["first_step"]
    if first:
        raise InputError("rate_finder.trained", "The trunk has been trained already, so its rate is not searched.")
    changes = {
        "optimizer.lr": recipe.optimizer.lr / ratio * SPAN, "schedule.kind": "multi-step", "schedule.milestones": make_ramp(steps),
        "schedule.warmup_steps": steps, "schedule.trunk_steps": {"first": steps, "later": steps}, "batch.sequences": rows, "batch.warmup": [],
        "checkpoint_every": steps, "keep_checkpoints": 1, "stability.skip_deviations": 1e9,
    }  # fmt: skip
    arm = Arm("range test", spec, commit, recipe=changes)
    home = plant.workspace.root / "rate-finder"
    runs = ArmRunner(plant, home, "rate finder", Subject("step", 0))
    try:
        done = runs.train_with_live_code(LiveCode.check_out_commit(plant, commit), [arm], "range test")
        if done.code:
            raise FactoryError("rate_finder.failed", "The range test failed: {problem}", problem=done.line)
        lines = read_step_lines(runs.find_arm_folder(arm), "metrics.jsonl")
    finally:
        remove_path(home)
    scored = [(line["lr"] * ratio, line["loss"]) for line in lines if "loss" in line]
    lowest = find_lowest_loss_rate([rate for rate, _ in scored], [loss for _, loss in scored])
    return FoundRate(float(f"{lowest / SAFETY:.2g}"), lowest, recipe.optimizer.lr, steps)


def write_rate(plant: Plant, found: FoundRate) -> Path:
    """Write the rate into the workspace's own copy of the recipe, with a comment that names the source; returns the file."""
    own = plant.workspace.own_recipe_path()
    text = set_yaml_value(plant.workspace.recipe_path().read_text(encoding="utf-8"), ("optimizer", "lr"), found.rate)
    comment = Message(
        "rate_finder.comment",
        "# optimizer.lr was found by 'factory tune --rate' in {steps} steps (arXiv 1506.01186 §3.3, 2002.04688 §4).",
        steps=found.steps,
    )
    older = (comment.partition(" in ")[0], str(RATE_COMMENT))
    kept = [line for line in text.splitlines(keepends=True) if not line.startswith(older)]
    own.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(own, f"{comment}\n{''.join(kept)}")
    return own


def describe_found_rate(found: FoundRate, file: Path) -> Message:
    """A line for a person."""
    return Message(
        "rate_finder.found",
        "The loss was lowest at a rate of {lowest:.1e}. The recipe's rate is now {rate:.1e} (before: {before:.1e}), in {file}",
        lowest=found.lowest, rate=found.rate, before=found.before, file=file,
    )  # fmt: skip
