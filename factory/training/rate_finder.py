"""Finds a learning rate for the first trunk segment by a short run whose rate rises exponentially (a range test, arXiv 1506.01186 §3.3).

The run starts where the next trunk segment would start, on the data of its plan, and leaves nothing but its numbers. A second run reads the same
batches with a rate of almost zero: the difference of both losses is what training changed, without the differences between batches. The rate at
which the smoothed difference is lowest is near the rate at which training fails. A tenth of it is the peak (fastai, arXiv 2002.04688 §4).

Before an imported model is trained for the first time, the factory makes such a test by itself (``find_rate_if_due``), unless a person chose a rate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.core.yaml_edit import set_yaml_value
from factory.core.errors import FactoryError, InputError
from factory.core.faults import has_room_for
from factory.core.path_removal import remove_path
from factory.git.repository import get_live_commit
from factory.ledger.imported_model import RATE_FOUND, RATE_NOT_SEARCHED, find_import
from factory.ledger.plant import Plant
from factory.ledger.rows import IMPORT, SegmentRow, Subject
from factory.ledger.writing import record_event_once
from factory.runs.arm import Arm
from factory.runs.arm_runner import ArmRunner
from factory.runs.live_code import LiveCode
from factory.runs.trace import read_step_lines
from factory.runs.untrusted_files import UntrustedFileError
from factory.training.continuing_recipe import RATE_COMMENT
from factory.training.planning import find_trunk_parent, forecast_trunk, load_recipe, make_next_trunk_spec
from kernels.contract.files import write_atomically
from kernels.contract.message import Message

if TYPE_CHECKING:
    from trainer.contract.recipe import Recipe

SPAN = 100.0  # the ramp ends at this many times the recipe's rate
STILL = 1e-12  # the rate of the second run, as a share of the recipe's: no weight changes
SAFETY = 10.0  # the lowest loss's rate, divided by the rate to use (arXiv 2002.04688 §4)
SMOOTHING = 0.7  # of the difference, exponential with correction of its start, as in Adam
STEPS = 64  # of each of the two runs, at most
CHECKPOINT_BYTES = 12  # of a weight and its moments in fp32
SHARE = 0.08  # of the work of the first trunk segment that the factory spends on a test by itself
LEAST_STEPS = 16  # of each run; fewer say too little


class RateNotFoundError(FactoryError):
    """The range test ended without a rate. Nothing was changed."""


@dataclass(frozen=True)
class FoundRate:
    """The rate that a range test found for the recipe's whole batch. ``lowest``: the rate of the lowest smoothed loss, for the same batch."""

    rate: float
    lowest: float
    before: float  # the recipe's rate
    steps: int
    gain: float  # the lowest smoothed difference of both losses, in nats a token: below zero if training helped
    seconds: float


def make_ramp(steps: int) -> list[dict[str, Any]]:
    """The milestones that make the rate rise exponentially from 1/steps of the peak to the peak, together with a warm-up of as many steps.

    The warm-up gives (step + 1) / steps. The milestones are the share that is left to steps^-(1 - step / (steps - 1)), which is never above one.

    >>> ramp = make_ramp(5)
    >>> [round((one["from_step"] + 1) / 5 * one["share"], 4) for one in ramp]
    [0.2991, 0.4472, 0.6687, 1.0]
    """
    share = lambda step: steps ** (step / (steps - 1)) / (step + 1)
    return [{"from_step": step, "share": min(1.0, share(step))} for step in range(1, steps)]


def find_lowest_loss_rate(rates: Sequence[float], losses: Sequence[float]) -> tuple[float, float]:
    """(the rate at which the smoothed loss is lowest, that loss). A loss that is not finite ends the test.

    ``losses``: minus those of unchanged weights on the same batches, so the first is 0.

    Raises: RateNotFoundError without a finite loss, or if none is below 0.

    >>> find_lowest_loss_rate([1e-5, 1e-4, 1e-3, 1e-2, 1e-1], [0.0, -0.1, -0.9, -0.8, 5.0])[0]
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
        raise RateNotFoundError(
            "rate_finder.no_loss", "The loss was not finite at the first step, so no rate can be found."
        )
    if best >= 0:
        raise RateNotFoundError(
            "rate_finder.no_gain", "No rate of the test lowered the loss below that of unchanged weights, so none is better than the recipe's."
        )  # fmt: skip
    return found, best


def find_rate(plant: Plant, steps: int = STEPS, changes: Sequence[str] = ()) -> FoundRate:
    """Run the range test with batches of one micro-batch, so that it is short. Returns the rate for the recipe's batch.

    After a kill or a pause, the next call keeps a run that had ended. ``changes``: as for ``plan_trunk``.
    Raises: InputError without data; RateNotFoundError, naming the last line of the log, if a run failed; PausedError, SegmentError.
    """
    began = time.monotonic()
    recipe = load_recipe(plant.workspace)
    spec = make_next_trunk_spec(plant, steps, changes)
    rows = recipe.batch.micro_sequences or recipe.batch.sequences
    ratio = math.sqrt(recipe.batch.sequences / rows)  # AdamW's rate follows the root of the batch, arXiv 2205.10287
    commit, first = get_live_commit(plant.workspace.repository), spec["first_step"]
    if first:
        parent = find_trunk_parent(plant.ledger, recipe)
        assert parent is not None
        trained = next(row for row in SegmentRow.read_lineage(plant.ledger, parent.id) if row.kind != IMPORT)
        raise InputError(
            "rate_finder.trained", "The trunk has been trained already, and the range test begins with the weights from before its first segment. "
            "'factory rewind {segment}' undoes the training; then the rate can be searched.", segment=trained.id,
        )  # fmt: skip
    # compiling takes longer than so few steps
    keys: dict[str, Any] = {
        "schedule.kind": "multi-step", "schedule.milestones": make_ramp(steps), "schedule.warmup_steps": steps,
        "schedule.trunk_steps": {"first": steps, "later": steps}, "batch.sequences": rows, "batch.warmup": [], "compile": False,
        "checkpoint_every": steps, "keep_checkpoints": 1, "stability.skip_deviations": 1e9,
    }  # fmt: skip
    rate = recipe.optimizer.lr / ratio
    still, ramp = (
        Arm(name, spec, commit, recipe=keys | {"optimizer.lr": rate * times})
        for name, times in (("unchanged weights", STILL), ("range test", SPAN))
    )
    home = plant.workspace.root / "rate-finder"
    needed = 2 * CHECKPOINT_BYTES * recipe.model.parameters
    if not home.exists() and not has_room_for(plant.workspace.root, needed):
        raise RateNotFoundError(
            "rate_finder.disk", "The range test writes {needed:.1f} GB for its time, and the disk has less free space", needed=needed / 1e9
        )  # fmt: skip
    runs = ArmRunner(plant, home, "rate finder", Subject("step", 0))
    for left in home.glob("*"):  # of a test with other steps, data or code
        if left.is_dir() and left.name not in (still.key, ramp.key):
            remove_path(left)
    done = runs.train_with_live_code(
        LiveCode.check_out_commit(plant, commit),
        [still, ramp],
        Message("rate_finder.searches", "search the learning rate"),
    )
    if done.code:
        remove_path(home)
        raise RateNotFoundError("rate_finder.failed", "The range test failed: {problem}", problem=done.line)
    try:
        before, after = (
            {
                line["step"]: line
                for line in read_step_lines(runs.find_arm_folder(arm), "metrics.jsonl")
                if {"loss", "lr"} <= line.keys()
            }
            for arm in (still, ramp)
        )
    except UntrustedFileError as error:
        raise RateNotFoundError(
            "rate_finder.unreadable", "The numbers of the range test cannot be read: {problem}", problem=error
        ) from error
    shared = sorted(before.keys() & after.keys())
    lowest, gain = find_lowest_loss_rate(
        [after[step]["lr"] * ratio for step in shared], [after[step]["loss"] - before[step]["loss"] for step in shared]
    )
    remove_path(home)
    return FoundRate(
        float(f"{lowest / SAFETY:.2g}"), lowest, recipe.optimizer.lr, steps, gain, time.monotonic() - began
    )


def find_rate_if_due(plant: Plant, steps: int | None = None, changes: Sequence[str] = (), allowed: bool = True) -> None:
    """Search the rate before an imported model is trained for the first time, if its recipe still has the rate that the import wrote.

    The test takes at most ``SHARE`` of the segment's work. A line of ``plant.progress`` says what was found, or why nothing was searched, and the
    ledger keeps both. ``steps``, ``changes``: as for ``plan_trunk``. ``allowed``: a person's choice for this segment.
    """
    workspace = plant.workspace
    if not _has_imported_rate(plant):
        return
    trunk = forecast_trunk(plant, steps, changes)
    if not trunk.steps:
        return  # the planning says what is missing
    recipe = load_recipe(workspace)
    count = choose_step_count(recipe, trunk.steps)
    reason: Message | None = None
    if not (allowed and workspace.config.find_rate):
        reason = Message("rate_finder.not_wanted", "a person chose not to")
    elif count < LEAST_STEPS:
        reason = Message(
            "rate_finder.too_short",
            "{share:.0%} of the {steps:,|step|steps} of the first segment are too short for a range test of {least} steps",
            share=SHARE, steps=trunk.steps, least=LEAST_STEPS,
        )  # fmt: skip
    else:
        try:
            found = find_rate(plant, count, changes)
        except RateNotFoundError as error:
            reason = Message.from_json(error.message)
        else:
            plant.progress.line(f"  {describe_found_rate(found, write_rate(plant, found))}")
            return
    record_event_once(plant.ledger, RATE_NOT_SEARCHED, "trunk", {"reason": reason.to_json()})
    plant.progress.line(describe_unsearched_rate(recipe.optimizer.lr, reason))


def _has_imported_rate(plant: Plant) -> bool:
    """Whether the next segment is the first after an import, and nobody has changed the rate that the import wrote."""
    row = find_import(plant.ledger) if plant.workspace.config.import_from else None
    if row is None or row.state != "done" or not plant.workspace.recipe_path().exists():
        return False
    recipe = load_recipe(plant.workspace)
    parent = find_trunk_parent(plant.ledger, recipe)
    return (
        parent is not None
        and parent.id == row.id
        and recipe.optimizer.lr == row.recipe_json["optimizer"]["lr"]
        and str(RATE_COMMENT) in plant.workspace.recipe_path().read_text("utf-8").splitlines()
    )


def choose_step_count(recipe: Recipe, steps: int) -> int:
    """The steps of each run of a range test before a trunk segment of so many steps: together ``SHARE`` of its micro-batches, at most ``STEPS``.

    >>> from types import SimpleNamespace as Some
    >>> [choose_step_count(Some(batch=Some(sequences=8, micro_sequences=2)), steps) for steps in (10, 100, 200, 2000)]
    [1, 16, 32, 64]
    """
    micros = recipe.batch.sequences // (recipe.batch.micro_sequences or recipe.batch.sequences)
    return min(STEPS, int(SHARE * steps * micros / 2))


def write_rate(plant: Plant, found: FoundRate) -> Path:
    """Record the rate in the ledger and write it into the workspace's own copy of the recipe, with a comment that names the source.

    Returns the file.
    """
    record_event_once(plant.ledger, RATE_FOUND, "trunk", asdict(found))
    own = plant.workspace.own_recipe_path()
    text = set_yaml_value(plant.workspace.recipe_path().read_text(encoding="utf-8"), ("optimizer", "lr"), found.rate)
    comment = Message(
        "rate_finder.comment",
        "# optimizer.lr was found by a range test in {steps} steps (arXiv 1506.01186 §3.3, 2002.04688 §4). To repeat it: 'factory tune --rate'.",
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


def describe_unsearched_rate(rate: float, reason: Message) -> Message:
    """A line for a person."""
    return Message(
        "rate_finder.not_searched",
        "  The learning rate stays {rate:.1e} and was not searched: {reason}. It can be searched until a segment is trained: 'factory tune --rate'.",
        rate=rate, reason=reason,
    )  # fmt: skip
