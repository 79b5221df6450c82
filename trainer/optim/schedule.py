"""The learning rate: that of the trunk (``wsd``, ``cosine`` or ``multi-step``), and that of anneals, which branch off the trunk and decay.

The rate is a pure function of the recipe and the step. Therefore a checkpoint stores no state of the schedule, and a resumed run has the same
rates. Every function returns the rate as a share of the peak, ``optimizer.lr``.
"""

from __future__ import annotations

import math
from typing import Literal

from trainer.contract.recipe import BatchRecipe, Recipe, ScheduleRecipe

TAILS = {
    "1-sqrt": lambda done: 1 - math.sqrt(done),
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}


def compute_lr_share(
    recipe: Recipe, kind: Literal["trunk", "anneal"], step: int, first: int, last: int, rewarm: bool = False
) -> float:
    """The share for ``step`` of a segment with the steps [first, last). It includes the factor ``compute_batch_size_lr_share``."""
    schedule = recipe.schedule
    if kind == "anneal":
        share = compute_anneal_lr_share(schedule, step, first, last)
    elif rewarm:
        share = compute_rewarmed_lr_share(schedule, step, first)
    else:
        share = compute_trunk_lr_share(schedule, step)
    return share * compute_batch_size_lr_share(recipe.batch, step)


def compute_trunk_lr_share(schedule: ScheduleRecipe, step: int) -> float:
    """The share on the trunk: a linear warm-up, then ``TRUNKS[schedule.kind]``. A trunk has no last step."""
    warm = min(1.0, (step + 1) / schedule.warmup_steps) if schedule.warmup_steps else 1.0
    return warm * TRUNKS[schedule.kind](schedule, step)


def compute_cosine_factor(schedule: ScheduleRecipe, step: int) -> float:
    """Half a cosine from one at the end of the warm-up to ``final_lr_share`` at ``cosine_steps``, and ``final_lr_share`` from then on.

    This is SGDR (arXiv 1608.03983 eq. 5) without restarts.
    """
    assert schedule.cosine_steps is not None
    done = (step - schedule.warmup_steps) / (schedule.cosine_steps - schedule.warmup_steps)
    floor = schedule.final_lr_share
    return floor + (1 - floor) * TAILS["cosine"](min(1.0, max(0.0, done)))


def find_milestone_lr_share(schedule: ScheduleRecipe, step: int) -> float:
    """The share of the last milestone that was reached; one before the first milestone (DeepSeek LLM, arXiv 2401.02954 §2.3)."""
    reached = [milestone.share for milestone in schedule.milestones if milestone.from_step <= step]
    return reached[-1] if reached else 1.0


TRUNKS = {
    "wsd": lambda schedule, step: 1.0,  # the peak (Hägele et al. 2024, arXiv 2405.18392 §3)
    "cosine": compute_cosine_factor,
    "multi-step": find_milestone_lr_share,
}


def compute_anneal_lr_share(schedule: ScheduleRecipe, step: int, first: int, last: int) -> float:
    """The share in an anneal: from the trunk's share at the first step ``first`` down towards ``final_lr_share``, along ``schedule.shape``.

    For 1 − sqrt see arXiv 2405.18392 §3. ``final_lr_share`` would be reached only at ``last``, so the last step still learns. If the trunk's share is
    already below ``final_lr_share``, it stays as it is.
    """
    start = compute_trunk_lr_share(schedule, first)
    floor = min(start, schedule.final_lr_share)
    done = (step - first + 1) / (last - first + 1)
    return floor + (start - floor) * TAILS[schedule.shape](done)


def compute_rewarmed_lr_share(schedule: ScheduleRecipe, step: int, first: int) -> float:
    """The share on a trunk that continues from annealed weights: it rises linearly from the anneal's last rate to the trunk's rate.

    WSD-S (Wen et al. 2024, arXiv 2410.05192) continues at the trunk's rate at once (``rewarmup_steps`` 0). A few steps of warm-up avoid updates
    that are too large, because the anneal left the optimiser's second moments small.
    """
    share = compute_trunk_lr_share(schedule, step)
    if step - first + 1 >= schedule.rewarmup_steps:
        return share
    start = min(share, schedule.final_lr_share)
    return start + (share - start) * (step - first + 1) / schedule.rewarmup_steps


def compute_batch_size_lr_share(batch: BatchRecipe, step: int) -> float:
    """The square root of (batch size at ``step`` / full batch size): Adam's scaling rule (Malladi et al., arXiv 2205.10287)."""
    return math.sqrt(batch.count_sequences_at(step) / batch.sequences)
