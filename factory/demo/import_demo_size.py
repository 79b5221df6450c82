"""Chooses the steps of continuing that fit into the minutes of ``factory demo --from``. Pure functions of measured seconds.

A separate file, because a test calls it with measured seconds of other machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from factory.core.errors import InputError

DEFAULT_MINUTES, LEAST_MINUTES, MOST_MINUTES = 15.0, 1.0, 600.0
# Two models on three domains, in fp32. A token of a forward pass in fp32 takes about as long as one of a step in bf16.
MEASURED_TOKENS = 40_000
STARTS = 14  # starts of a program that imports torch: trainers, evaluator, engines
TRUNK_SHARE = 0.75
LEAST_TRUNK, LEAST_ANNEAL, MOST_STEPS = 12, 6, 400


@dataclass(frozen=True)
class ContinuingSize:
    """Steps of the trunk and of the anneal. ``seconds``: expected for the whole demo."""

    trunk: int
    anneal: int
    warmup: int
    seconds: float


def plan_continuing(minutes: float, spent: float, start: float, step: float, step_tokens: int) -> ContinuingSize:
    """Return the steps that use the remaining minutes, but at least ``LEAST_TRUNK`` and ``LEAST_ANNEAL``, and ``MOST_STEPS`` at most.

    ``spent``, ``start``, ``step``: seconds since the demo began, of a program's start, and of a step of ``step_tokens`` tokens.

    >>> plan_continuing(15, spent=150, start=5, step=2.0, step_tokens=2048)
    ContinuingSize(trunk=240, anneal=80, warmup=20, seconds=899.0625)
    """
    fixed = STARTS * start + MEASURED_TOKENS * step / step_tokens
    steps = min(MOST_STEPS, math.floor((60 * minutes - spent - fixed) / step))
    trunk = max(LEAST_TRUNK, round(TRUNK_SHARE * steps))
    anneal = max(LEAST_ANNEAL, steps - trunk)
    return ContinuingSize(trunk, anneal, max(2, min(20, trunk // 5)), spent + fixed + (trunk + anneal) * step)


def check_continuing_minutes(minutes: float) -> float:
    """Return ``minutes``. Raises: InputError for minutes out of range."""
    if not (math.isfinite(minutes) and LEAST_MINUTES <= minutes <= MOST_MINUTES):
        raise InputError(
            "import_demo_size.minutes", "With --from, --minutes must be from {least:g} to {most:g}, not {minutes:g}. The default is {default:g}.",
            minutes=minutes, least=LEAST_MINUTES, most=MOST_MINUTES, default=DEFAULT_MINUTES,
        )  # fmt: skip
    return minutes
