"""The learning rate: a trunk (``wsd``, ``cosine`` or ``multi-step``), and anneal branches that decay off it.

The rate is a pure function of the recipe and the step. A checkpoint stores no state of the schedule, and a resumed run
has the same rates. Shares are of the peak, ``optimizer.lr``.
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


def lr_share(
    recipe: Recipe, kind: Literal["trunk", "anneal"], step: int, first: int, last: int, rewarm: bool = False
) -> float:
    """The rate of ``step`` as a share of the peak, for a segment of steps [first, last), with ``batch_share`` applied."""
    schedule = recipe.schedule
    if kind == "anneal":
        share = anneal_share(schedule, step, first, last)
    elif rewarm:
        share = rewarmed_share(schedule, step, first)
    else:
        share = trunk_share(schedule, step)
    return share * batch_share(recipe.batch, step)


def trunk_share(schedule: ScheduleRecipe, step: int) -> float:
    """The share on a trunk, which has no end: a linear warm-up, then ``TRUNKS[schedule.kind]``."""
    warm = min(1.0, (step + 1) / schedule.warmup_steps) if schedule.warmup_steps else 1.0
    return warm * TRUNKS[schedule.kind](schedule, step)


def cosine_share(schedule: ScheduleRecipe, step: int) -> float:
    """Half a cosine from the end of the warm-up to ``final_lr_share`` at ``cosine_steps``, the same rate from then on.

    SGDR, arXiv 1608.03983 eq. 5, without restarts.
    """
    assert schedule.cosine_steps is not None
    done = (step - schedule.warmup_steps) / (schedule.cosine_steps - schedule.warmup_steps)
    floor = schedule.final_lr_share
    return floor + (1 - floor) * TAILS["cosine"](min(1.0, max(0.0, done)))


def milestone_share(schedule: ScheduleRecipe, step: int) -> float:
    """The share of the newest milestone (DeepSeek LLM, arXiv 2401.02954 §2.3)."""
    reached = [milestone.share for milestone in schedule.milestones if milestone.from_step <= step]
    return reached[-1] if reached else 1.0


TRUNKS = {
    "wsd": lambda schedule, step: 1.0,  # the peak (Hägele et al. 2024, arXiv 2405.18392 §3)
    "cosine": cosine_share,
    "multi-step": milestone_share,
}


def anneal_share(schedule: ScheduleRecipe, step: int, first: int, last: int) -> float:
    """From the trunk's rate at the branch point ``first`` towards ``final_lr_share``, along the recipe's tail.

    1 − sqrt: arXiv 2405.18392 §3. The last step still learns, because the floor would be reached only at ``last``. A trunk that is already
    below the floor is not raised to it.
    """
    start = trunk_share(schedule, first)
    floor = min(start, schedule.final_lr_share)
    done = (step - first + 1) / (last - first + 1)
    return floor + (start - floor) * TAILS[schedule.shape](done)


def rewarmed_share(schedule: ScheduleRecipe, step: int, first: int) -> float:
    """The share on a trunk that continues from annealed weights: a line from the anneal's last rate back to the trunk's.

    WSD-S (Wen et al. 2024, arXiv 2410.05192) continues at the trunk's rate at once (``rewarmup_steps`` 0). A few steps of warm-up protect
    the optimiser's second moments, which the anneal left small.
    """
    share = trunk_share(schedule, step)
    if step - first + 1 >= schedule.rewarmup_steps:
        return share
    start = min(share, schedule.final_lr_share)
    return start + (share - start) * (step - first + 1) / schedule.rewarmup_steps


def batch_share(batch: BatchRecipe, step: int) -> float:
    """The square root of the batch's share of the full one: Adam's scaling rule (Malladi et al., arXiv 2205.10287)."""
    return math.sqrt(batch.sequences_at(step) / batch.sequences)
