"""What keeps a run whole: clipping, skipping of updates that would break it, and detectors of anomalies.

Statistics are robust (median and median absolute deviation over a window), so that one spike does not hide the next.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from trainer.recipe import StabilityRecipe

MAD_TO_DEVIATION = 1.4826  # of a normal distribution: Rousseeuw and Croux 1993
MEDIAN_ERROR = 1.2533  # standard error of a median, in deviations / sqrt(n): sqrt(pi / 2)
LEAST_DEVIATION = 0.02  # share of the median: a window that hardly moves must not call every ripple a spike


@dataclass(frozen=True)
class Anomaly:
    """Something a person or the loss doctor should look at."""

    step: int
    kind: str  # non_finite · skipped_outlier · loss_spike · grad_norm_jump · divergence · plateau · throughput_drop
    value: float
    usual: float  # what it is compared with: the window's median, or the best one so far
    deviations: float  # how many robust deviations above it; of a throughput drop, the share of the usual that is left
    skipped: bool  # was the update skipped?


class Window:
    """The last values of one quantity."""

    def __init__(self, size: int) -> None:
        self.values: deque[float] = deque(maxlen=size)

    @property
    def ready(self) -> bool:
        return len(self.values) * 2 >= (self.values.maxlen or 0)

    @property
    def full(self) -> bool:
        return len(self.values) == self.values.maxlen

    def center_and_deviation(self) -> tuple[float, float]:
        center = median(self.values)
        spread = median(abs(value - center) for value in self.values)
        return center, max(MAD_TO_DEVIATION * spread, LEAST_DEVIATION * abs(center), 1e-12)

    def restore(self, values: list[float]) -> None:
        self.values.clear()
        self.values.extend(values)


class Detector:
    """Watches loss and gradient norm, step by step and over windows. Its state is in the checkpoint."""

    def __init__(self, recipe: StabilityRecipe) -> None:
        self.recipe = recipe
        self.loss = Window(recipe.window)
        self.grad_norm = Window(recipe.window)
        self.best = math.inf  # lowest median of a full window of losses
        self.windows_since_best = 0.0
        self.told: list[str] = []  # lasting states that were reported and still hold

    def grad_norm_limit(self) -> float:
        """The gradient norm above which the next update is skipped; infinite until the window is half full."""
        if not self.grad_norm.ready:
            return math.inf
        center, deviation = self.grad_norm.center_and_deviation()
        return center + self.recipe.skip_deviations * deviation

    def observe(self, step: int, loss: float, grad_norm: float, skipped: bool) -> list[Anomaly]:
        """Anomalies of this step, judged by those before it. Finite values join the window, so that it can follow."""
        found = list(self._sudden(step, loss, grad_norm, skipped))
        found += self._lasting(step)
        return found

    def _sudden(self, step: int, loss: float, grad_norm: float, skipped: bool) -> Iterator[Anomaly]:
        watched = (("loss_spike", self.loss, loss), ("grad_norm_jump", self.grad_norm, grad_norm))
        for kind, window, value in watched:
            if not math.isfinite(value):
                usual = window.center_and_deviation()[0] if window.values else math.nan
                yield Anomaly(step, "non_finite", value, usual, math.inf, skipped)
                continue
            if window.ready:
                center, deviation = window.center_and_deviation()
                above = (value - center) / deviation
                if kind == "grad_norm_jump" and skipped and math.isfinite(loss):
                    yield Anomaly(step, "skipped_outlier", value, center, above, True)
                elif above > self.recipe.spike_deviations:
                    yield Anomaly(step, kind, value, center, above, skipped)
            window.values.append(value)

    def _lasting(self, step: int) -> Iterator[Anomaly]:
        """Divergence and plateau of the loss's median over a whole window; each is told once until it ends."""
        if not self.loss.full:
            return
        center, deviation = self.loss.center_and_deviation()
        if center < self.best - MEDIAN_ERROR * deviation / math.sqrt(self.recipe.window):
            self.best, self.windows_since_best = center, 0.0
        else:
            self.windows_since_best += 1 / self.recipe.window
        states = {
            "divergence": center > self.recipe.divergence * self.best,
            "plateau": self.windows_since_best >= self.recipe.plateau_windows,
        }
        for kind, holds in states.items():
            if holds and kind not in self.told:
                yield Anomaly(step, kind, center, self.best, (center - self.best) / deviation, False)
        self.told = [kind for kind, holds in states.items() if holds]

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss": list(self.loss.values),
            "grad_norm": list(self.grad_norm.values),
            "best": self.best if math.isfinite(self.best) else None,
            "windows_since_best": self.windows_since_best,
            "told": self.told,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss.restore(state["loss"])
        self.grad_norm.restore(state["grad_norm"])
        self.best = math.inf if state["best"] is None else state["best"]
        self.windows_since_best, self.told = state["windows_since_best"], list(state["told"])


class ThroughputDetector:
    """Watches tokens/s. It is of this process and machine, so that no checkpoint holds it."""

    RECENT = 8  # steps whose median is compared with the usual

    def __init__(self, recipe: StabilityRecipe) -> None:
        self.least_share = recipe.throughput_drop
        self.usual = Window(recipe.window)
        self.recent = Window(self.RECENT)
        self.low = False

    def observe(self, step: int, tokens_per_s: float) -> list[Anomaly]:
        """A drop is told once, until the rate has come back."""
        self.recent.values.append(tokens_per_s)
        if not (self.usual.ready and self.recent.full):
            self.usual.values.append(tokens_per_s)
            return []
        recent, usual = median(self.recent.values), median(self.usual.values)
        was_low, self.low = self.low, recent < self.least_share * usual
        if not self.low:
            self.usual.values.append(tokens_per_s)  # a lasting drop does not become the usual
        drop = Anomaly(step, "throughput_drop", recent, usual, recent / usual, False)
        return [drop] if self.low and not was_low else []


def clip_and_skip(loss: Tensor, grad_norm: Tensor, clip: float, limit: float) -> tuple[Tensor, Tensor]:
    """(what to divide the gradients by, 1.0 where the update must be skipped), fp32 scalars, left on the device."""
    sound = torch.isfinite(loss) & torch.isfinite(grad_norm) & (grad_norm <= limit)
    skip = torch.where(sound, 0.0, 1.0)
    divide_by = torch.where(sound, (grad_norm / clip).clamp(min=1.0), 1.0)
    return divide_by, skip
