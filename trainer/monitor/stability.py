"""Stability: gradient clipping, skipping of updates that would break the run, and detectors of anomalies.

Statistics are robust (median and median absolute deviation over a window), so that one spike does not hide the next.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from trainer.contract.recipe import StabilityRecipe
from trainer.monitor.hook import Anomaly, Hook

MAD_TO_DEVIATION = 1.4826  # of a normal distribution: Rousseeuw and Croux 1993
MOST_BLOCKS = 64  # that a run's course is kept in
MAY_FALL, FALLS = 1.0, 3.0  # standard errors of a fall: below the first begins a plateau, above the second ends it
RECENT_SHARE = 4  # a fourth of the run so far is what a plateau is judged by
LEAST_DEVIATION = 0.02  # share of the median: a window that hardly moves must not call every ripple a spike


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


class LossHistory:
    """The loss since the first step, in at most ``MOST_BLOCKS`` blocks of equal length: the mean of window medians.

    A plateau is judged over the last quarter of a run, and never over less than ``least`` windows: what a loss still
    falls in a given number of steps shrinks as a run grows old (arXiv 2001.08361 §5), and drowns in its noise.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self.blocks: list[float] = []
        self.windows = 1  # in a block
        self.partial: list[float] = []  # medians of the windows of the block that is not full yet
        self.seen = 0  # steps of the window that is not full yet

    def observe(self, window: Window) -> bool:
        """To be called once for each value that joined a window. Is a new block full?"""
        self.seen += 1
        if self.seen < (window.values.maxlen or 0):
            return False
        self.seen = 0
        self.partial.append(median(window.values))
        if len(self.partial) < self.windows:
            return False
        self.blocks.append(fmean(self.partial))
        self.partial = []
        if len(self.blocks) == MOST_BLOCKS:
            self.blocks = [fmean(pair) for pair in zip(self.blocks[::2], self.blocks[1::2])]
            self.windows *= 2
        return True

    def halves(self) -> tuple[float, float, float] | None:
        """(mean of the earlier half of the recent blocks, of the later half, the standard error of their difference).

        The error is from neighbouring blocks' differences, which a slow fall hardly touches.
        """
        count = max(self.least, len(self.blocks) // RECENT_SHARE)
        if len(self.blocks) < count:
            return None
        recent = self.blocks[-count:]
        earlier, later = recent[: count // 2], recent[count // 2 :]
        square = fmean((a - b) ** 2 for a, b in zip(recent, recent[1:])) / 2
        return fmean(earlier), fmean(later), math.sqrt(square * (1 / len(earlier) + 1 / len(later)))

    def state_dict(self) -> dict[str, Any]:
        return {
            "blocks": list(self.blocks),
            "windows": self.windows,
            "partial": list(self.partial),
            "seen": self.seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.blocks, self.partial = list(state["blocks"]), list(state["partial"])
        self.windows, self.seen = state["windows"], state["seen"]


class Detector(Hook):
    """Watches loss and gradient norm, step by step and over windows."""

    key = "detector"

    def __init__(self, recipe: StabilityRecipe) -> None:
        self.recipe = recipe
        self.loss = Window(recipe.window)
        self.grad_norm = Window(recipe.window)
        self.best = math.inf  # lowest median of a full window of losses
        self.course = LossHistory(recipe.plateau_windows)
        self.reported: list[str] = []  # lasting states that were reported and still hold

    def grad_norm_limit(self) -> float:
        """The gradient norm above which the next update is skipped; infinite until the window is half full."""
        if not self.grad_norm.ready:
            return math.inf
        center, deviation = self.grad_norm.center_and_deviation()
        return center + self.recipe.skip_deviations * deviation

    def after_step(self, record: dict[str, Any]) -> list[Anomaly]:
        return self.observe(record["step"], record["loss"], record["grad_norm"], record["skipped"])

    def observe(self, step: int, loss: float, grad_norm: float, skipped: bool) -> list[Anomaly]:
        """Anomalies of this step, judged by those before it. Finite values join the window, so that it can follow."""
        found = list(self._sudden(step, loss, grad_norm, skipped))
        found += self._lasting(step, loss)
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

    def _lasting(self, step: int, loss: float) -> Iterator[Anomaly]:
        """Divergence of the loss's median over a whole window, and plateau; each is reported once until it ends."""
        if not math.isfinite(loss):
            return
        grown = self.course.observe(self.loss)
        if not self.loss.full:
            return
        center, deviation = self.loss.center_and_deviation()
        self.best = min(self.best, center)
        diverged = center > self.recipe.divergence * self.best
        if self._is_new("divergence", diverged):
            yield Anomaly(step, "divergence", center, self.best, (center - self.best) / deviation, False)
        if grown and (halves := self.course.halves()) is not None:
            earlier, later, error = halves
            falls = (earlier - later) / max(error, 1e-12)
            flat = falls < (FALLS if "plateau" in self.reported else MAY_FALL)
            if self._is_new("plateau", flat and not diverged):
                yield Anomaly(step, "plateau", later, earlier, -falls, False)

    def _is_new(self, kind: str, holds: bool) -> bool:
        """Does the state hold, and was it not reported since it began?"""
        new = holds and kind not in self.reported
        self.reported = [other for other in self.reported if other != kind] + [kind] * holds
        return new

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss": list(self.loss.values),
            "grad_norm": list(self.grad_norm.values),
            "best": self.best if math.isfinite(self.best) else None,
            "course": self.course.state_dict(),
            "told": self.reported,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss.restore(state["loss"])
        self.grad_norm.restore(state["grad_norm"])
        self.best = math.inf if state["best"] is None else state["best"]
        self.course.load_state_dict(state["course"])
        self.reported = list(state["told"])


class ThroughputDetector(Hook):
    """Watches tokens/s. Its state is valid on the machine that it was measured on: as many devices of the same name."""

    key = "throughput"
    RECENT = 8  # steps whose median is compared with the usual

    def __init__(self, recipe: StabilityRecipe, machine: str) -> None:
        """``machine``: what the usual rate is of, as its state names it."""
        self.least_share = recipe.throughput_drop
        self.machine = machine
        self.usual = Window(recipe.window)
        self.recent = Window(self.RECENT)
        self.low = False

    def after_step(self, record: dict[str, Any]) -> list[Anomaly]:
        return self.observe(record["step"], record["tokens_per_s"])

    def observe(self, step: int, tokens_per_s: float) -> list[Anomaly]:
        """A drop is reported once, until the rate has recovered."""
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

    def state_dict(self) -> dict[str, Any]:
        """Not the recent steps: the first ones after a restart are slow, and are judged together with those after them."""
        return {"machine": self.machine, "usual": list(self.usual.values), "low": self.low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What was usual elsewhere is forgotten."""
        if state["machine"] == self.machine:
            self.usual.restore(state["usual"])
            self.low = state["low"]


def clip_and_skip(loss: Tensor, grad_norm: Tensor, clip: float, limit: float) -> tuple[Tensor, Tensor]:
    """(what to divide the gradients by, 1.0 where the update must be skipped), fp32 scalars, left on the device."""
    sound = torch.isfinite(loss) & torch.isfinite(grad_norm) & (grad_norm <= limit)
    skip = torch.where(sound, 0.0, 1.0)
    divide_by = torch.where(sound, (grad_norm / clip).clamp(min=1.0), 1.0)
    return divide_by, skip
