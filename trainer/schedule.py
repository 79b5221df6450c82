"""The learning rate: warm-up, then a stable trunk without an end, and anneal branches that decay off it.

Warm-up–stable–decay with 1 − sqrt: Hägele et al. 2024, arXiv 2405.18392 §3. A pure function of the step, so that a
checkpoint holds nothing of it and a resumed run cannot differ.
"""

from __future__ import annotations

import math
from typing import Literal

from trainer.recipe import ScheduleRecipe

TAILS = {
    "1-sqrt": lambda share: 1 - math.sqrt(share),
    "linear": lambda share: 1 - share,
    "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
}


def lr_share(schedule: ScheduleRecipe, kind: Literal["trunk", "anneal"], step: int, first: int, last: int) -> float:
    """The rate of ``step`` as a share of the peak, for a segment of steps [first, last)."""
    warm = min(1.0, (step + 1) / schedule.warmup_steps) if schedule.warmup_steps else 1.0
    if kind == "trunk":
        return warm
    floor = schedule.final_lr_share
    done = (step - first + 1) / (last - first + 1)
    return warm * (floor + (1 - floor) * TAILS[schedule.shape](done))
