"""What keeps a run whole: clipping, skipping of updates that would break it, and a detector of anomalies.

Statistics are robust (median and median absolute deviation over a window), so that one spike does not hide the next.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from trainer.recipe import StabilityRecipe

MAD_TO_DEVIATION = 1.4826  # of a normal distribution: Rousseeuw and Croux 1993
LEAST_DEVIATION = 0.02  # share of the median: a window that hardly moves must not call every ripple a spike


@dataclass(frozen=True)
class Anomaly:
    """Something a person or the loss doctor should look at."""

    step: int
    kind: str  # non_finite · skipped_outlier · loss_spike · grad_norm_jump
    value: float
    usual: float  # the window's median
    deviations: float  # how many robust deviations above it
    skipped: bool  # was the update skipped?


class Window:
    """The last values of one quantity."""

    def __init__(self, size: int) -> None:
        self.values: deque[float] = deque(maxlen=size)

    @property
    def ready(self) -> bool:
        return len(self.values) * 2 >= (self.values.maxlen or 0)

    def center_and_deviation(self) -> tuple[float, float]:
        center = median(self.values)
        spread = median(abs(value - center) for value in self.values)
        return center, max(MAD_TO_DEVIATION * spread, LEAST_DEVIATION * abs(center), 1e-12)


class Detector:
    """Watches loss and gradient norm. Its state is in the checkpoint."""

    def __init__(self, recipe: StabilityRecipe) -> None:
        self.recipe = recipe
        self.loss = Window(recipe.window)
        self.grad_norm = Window(recipe.window)

    def grad_norm_limit(self) -> float:
        """The gradient norm above which the next update is skipped; infinite until the window is half full."""
        if not self.grad_norm.ready:
            return math.inf
        center, deviation = self.grad_norm.center_and_deviation()
        return center + self.recipe.skip_deviations * deviation

    def observe(self, step: int, loss: float, grad_norm: float, skipped: bool) -> list[Anomaly]:
        """Anomalies of this step, judged by those before it. Finite values join the window, so that it can follow."""
        found: list[Anomaly] = []
        watched = (("loss_spike", self.loss, loss), ("grad_norm_jump", self.grad_norm, grad_norm))
        for kind, window, value in watched:
            if not math.isfinite(value):
                usual = window.center_and_deviation()[0] if window.values else math.nan
                found.append(Anomaly(step, "non_finite", value, usual, math.inf, skipped))
                continue
            if window.ready:
                center, deviation = window.center_and_deviation()
                above = (value - center) / deviation
                if kind == "grad_norm_jump" and skipped and math.isfinite(loss):
                    found.append(Anomaly(step, "skipped_outlier", value, center, above, True))
                elif above > self.recipe.spike_deviations:
                    found.append(Anomaly(step, kind, value, center, above, skipped))
            window.values.append(value)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"loss": list(self.loss.values), "grad_norm": list(self.grad_norm.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for window, values in ((self.loss, state["loss"]), (self.grad_norm, state["grad_norm"])):
            window.values.clear()
            window.values.extend(values)


def clip_and_skip(loss: Tensor, grad_norm: Tensor, clip: float, limit: float) -> tuple[Tensor, Tensor]:
    """(what to divide the gradients by, 1.0 where the update must be skipped), fp32 scalars, left on the device."""
    sound = torch.isfinite(loss) & torch.isfinite(grad_norm) & (grad_norm <= limit)
    skip = torch.where(sound, 0.0, 1.0)
    divide_by = torch.where(sound, (grad_norm / clip).clamp(min=1.0), 1.0)
    return divide_by, skip
