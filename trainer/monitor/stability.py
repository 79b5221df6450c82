"""Stability: gradient clipping, skipping of updates that would break the run, and detectors of anomalies."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from trainer.contract.recipe import StabilityRecipe
from trainer.monitor.hook import Anomaly, StepHook, UpdateOutcome
from trainer.monitor.window import RecentValues, find_rise_onset

MOST_BLOCKS = 64  # at this number of blocks, pairs of blocks are merged
MAY_FALL, FALLS = (
    1.0,
    3.0,
)  # standard errors: a loss that falls by less than the first begins a plateau, by more than the second ends it
RECENT_SHARE = 4  # a plateau is judged by the last fourth of the run
RECENT_LOW = 8  # a loss that is too low is judged by the mean of the last eighth of a window
TRACE_WINDOWS = 2  # windows in which an anomaly's onset is searched


class LossHistory:
    """The losses since the first step, as fewer than ``MOST_BLOCKS`` blocks of equal length. A block's value is the mean of its windows' medians.

    A plateau is judged over the last quarter of the run, but over at least ``least`` blocks. The longer a run, the less its loss falls in a
    given number of steps (arXiv 2001.08361 §5), and noise would hide the fall.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self.blocks: list[float] = []
        self.windows = 1  # in a block
        self.partial: list[float] = []  # medians of the windows of the block that is not full yet
        self.seen = 0  # steps of the window that is not full yet

    def observe(self, window: RecentValues) -> bool:
        """Call it once for each value that joined a window. Returns True if a new block is full."""
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

    def count_judged_windows(self) -> int:
        """The number of windows that ``compare_halves`` covers."""
        return self._recent() * self.windows

    def _recent(self) -> int:
        return max(self.least, len(self.blocks) // RECENT_SHARE)

    def compare_halves(self) -> tuple[float, float, float] | None:
        """(mean of the earlier half of the recent blocks, mean of their later half, standard error of the difference); None if there are too few.

        The error is estimated from the differences of neighbouring blocks, because a slow fall hardly changes these.
        """
        count = self._recent()
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


def measure_deviations_below(window: RecentValues, value: float) -> float:
    """Robust deviations by which ``value`` lies below the window. If larger, twice those by which the mean of the last eighth of a window (``value``
    included) lies below it. A loss that is too low stays low while its documents last, and a mean of several steps varies less.

    >>> usual = RecentValues(16)
    >>> usual.restore([2.0, 2.1, 1.9, 2.0, 2.05, 1.95, 2.1, 1.9, 2.0, 2.0, 2.1, 1.9, 2.05, 1.95, 2.0])
    >>> round(measure_deviations_below(usual, 1.5), 1)
    6.7
    >>> usual.values.append(1.5)
    >>> round(measure_deviations_below(usual, 1.5), 1)
    13.5
    """
    center, deviation = window.compute_center_and_deviation()
    count = max(1, (window.values.maxlen or 0) // RECENT_LOW)
    recent = [*list(window.values)[len(window.values) - count + 1 :], value]
    mean = 2 * (center - fmean(recent)) / deviation if count > 1 else 0.0
    return max((center - value) / deviation, mean)


class DomainLossHistory:
    """The last losses of one domain. Each is the mean over a number of tokens, which is kept too."""

    def __init__(self, size: int) -> None:
        self.loss, self.tokens = RecentValues(size), RecentValues(size)

    def measure_deviations_above_usual(self, loss: float, tokens: float) -> tuple[float, float]:
        """(usual loss, robust deviations of ``loss`` above it). A mean of fewer tokens than usual may deviate √(usual / tokens) times as far."""
        center, deviation = self.loss.compute_center_and_deviation()
        few = max(1.0, median(self.tokens.values) / tokens) ** 0.5
        return center, (loss - center) / (few * deviation)


class StabilityDetector(StepHook):
    """Reports anomalies of the loss, the gradient norm and the loss of each domain, for single steps and over windows."""

    key = "detector"

    def __init__(self, recipe: StabilityRecipe) -> None:
        self.recipe = recipe
        self.loss = RecentValues(recipe.window)
        self.grad_norm = RecentValues(recipe.window)
        self.domains: dict[str, DomainLossHistory] = {}
        # [step, loss, gradient norm] of the last steps at which loss and norm were finite
        self.trace: deque[tuple[int, float, float]] = deque(maxlen=TRACE_WINDOWS * recipe.window)
        self.best = math.inf  # lowest median of a full window of losses
        self.course = LossHistory(recipe.plateau_windows)
        self.reported: list[str] = []  # lasting states that were reported and still hold
        self._tokens: Mapping[str, float] = {}  # of the present step, by domain
        self._held = (
            math.inf
        )  # the limit at the last step that ``read_every`` divides; not used if ``read_every`` is one

    def compute_grad_norm_limit(self) -> float:
        """The gradient norm above which the next update is skipped. It is infinite until the window is half full.

        With ``read_every`` above one, the limit changes only after every ``read_every`` steps. Readings in between (for a checkpoint or a stop) do
        not change it. Therefore a resumed run continues with the same bits.
        """
        return self._held if self.recipe.read_every > 1 else self._limit()

    def _limit(self) -> float:
        if not self.grad_norm.is_half_full:
            return math.inf
        center, deviation = self.grad_norm.compute_center_and_deviation()
        return center + self.recipe.skip_deviations * deviation

    def record(self, numbers: dict[str, list[float]], outcome: UpdateOutcome) -> dict[str, Any]:
        self._tokens = outcome.supervised_by_domain
        return {}

    def after_step(self, record: dict[str, Any]) -> list[Anomaly]:
        anomalies = []
        if "loss" in record:  # otherwise a step without targets: it is not judged, and does not join the windows
            found = {name: (record[f"loss/{name}"], tokens) for name, tokens in self._tokens.items() if tokens}
            anomalies = self.observe(record["step"], record["loss"], record["grad_norm"], record["skipped"], found)
        if self.recipe.read_every > 1 and (record["step"] + 1) % self.recipe.read_every == 0:
            self._held = self._limit()
        return anomalies

    def observe(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        skipped: bool,
        domains: Mapping[str, tuple[float, float]] | None = None,
    ) -> list[Anomaly]:
        """Anomalies of this step, judged by the earlier steps. Finite values, even unusual ones, then join the windows: a new level becomes usual.

        ``domains``: (mean loss, number of tokens) of each domain in the step.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.trace.append((step, loss, grad_norm))
        found = list(self._sudden(step, loss, grad_norm, skipped))
        found += self._of_domains(step, domains or {}, skipped)
        found += self._lasting(step, loss)
        return [replace(a, onset=self._onset(a)) if a.onset is None else a for a in found]

    def _sudden(self, step: int, loss: float, grad_norm: float, skipped: bool) -> Iterator[Anomaly]:
        watched = (("loss_spike", self.loss, loss), ("grad_norm_jump", self.grad_norm, grad_norm))
        for kind, window, value in watched:
            if not math.isfinite(value):
                usual = window.compute_center_and_deviation()[0] if window.values else math.nan
                yield Anomaly(step, "non_finite", value, usual, math.inf, skipped)
                continue
            if window.is_half_full:
                center, deviation = window.compute_center_and_deviation()
                above = (value - center) / deviation
                if kind == "grad_norm_jump" and skipped and math.isfinite(loss):
                    yield Anomaly(step, "skipped_outlier", value, center, above, True)
                elif above > self.recipe.spike_deviations:
                    yield Anomaly(step, kind, value, center, above, skipped)
                elif kind == "loss_spike" and measure_deviations_below(window, value) > self.recipe.spike_deviations:
                    yield Anomaly(step, "loss_drop", value, center, above, skipped)
            window.values.append(value)

    def _of_domains(self, step: int, domains: Mapping[str, tuple[float, float]], skipped: bool) -> Iterator[Anomaly]:
        """Anomalies of the domains whose loss is far from its usual value."""
        for name, (loss, tokens) in domains.items():
            if not math.isfinite(loss):
                continue  # the whole loss is not finite either
            held = self.domains.setdefault(name, DomainLossHistory(self.recipe.window))
            if held.loss.is_half_full:
                usual, above = held.measure_deviations_above_usual(loss, tokens)
                if abs(above) > self.recipe.spike_deviations:
                    kind = "domain_spike" if above > 0 else "domain_drop"
                    yield Anomaly(step, kind, loss, usual, above, skipped, where=f"domain/{name}")
            held.loss.values.append(loss)
            held.tokens.values.append(tokens)

    def _onset(self, anomaly: Anomaly) -> int:
        """The step where the anomaly began: where the loss or the gradient norm (the earlier of both) left its usual value for good."""
        steps, losses, norms = zip(*self.trace) if self.trace else ((), (), ())
        found: Iterable[int | None] = (find_rise_onset(losses), find_rise_onset(norms))
        if anomaly.kind.endswith("_drop"):
            found = (find_rise_onset(losses, -1),)
        return min((steps[index] for index in found if index is not None), default=anomaly.step)

    def _lasting(self, step: int, loss: float) -> Iterator[Anomaly]:
        """Anomalies that last: divergence (the median of a full window is far above the best) and plateau. Each is reported once until it ends."""
        if not math.isfinite(loss):
            return
        grown = self.course.observe(self.loss)
        if not self.loss.is_full:
            return
        center, deviation = self.loss.compute_center_and_deviation()
        self.best = min(self.best, center)
        diverged = center > self.recipe.divergence * self.best
        if self._is_new("divergence", diverged):
            yield Anomaly(step, "divergence", center, self.best, (center - self.best) / deviation, False)
        if grown and (halves := self.course.compare_halves()) is not None:
            earlier, later, error = halves
            falls = (earlier - later) / max(error, 1e-12)
            flat = falls < (FALLS if "plateau" in self.reported else MAY_FALL)
            if self._is_new("plateau", flat and not diverged):
                began = max(0, step + 1 - self.course.count_judged_windows() * self.recipe.window)
                yield Anomaly(step, "plateau", later, earlier, -falls, False, onset=began)

    def _is_new(self, kind: str, holds: bool) -> bool:
        """True if the state holds and was not reported since it began."""
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
            "domains": {
                name: {"loss": list(held.loss.values), "tokens": list(held.tokens.values)}
                for name, held in self.domains.items()
            },
            "trace": [list(line) for line in self.trace],
        } | ({} if self.recipe.read_every == 1 else {"limit": self._held if math.isfinite(self._held) else None})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. Older checkpoints lack ``domains`` and ``trace``: they start empty. A missing ``limit`` is computed from the windows."""
        self.loss.restore(state["loss"])
        self.grad_norm.restore(state["grad_norm"])
        self.best = math.inf if state["best"] is None else state["best"]
        self.course.load_state_dict(state["course"])
        self.reported = list(state["told"])
        self.domains = {name: DomainLossHistory(self.recipe.window) for name in state.get("domains", {})}
        for name, held in self.domains.items():
            held.loss.restore(state["domains"][name]["loss"])
            held.tokens.restore(state["domains"][name]["tokens"])
        self.trace.clear()
        self.trace.extend((step, loss, norm) for step, loss, norm in state.get("trace", ()))
        limit = state.get("limit", self._limit())
        self._held = math.inf if limit is None else limit


class ThroughputDetector(StepHook):
    """Reports a drop of tokens/s. A restored state is used only on an equal machine: the same number of devices with the same name."""

    key = "throughput"
    RECENT = 8  # steps whose median is compared with the usual

    def __init__(self, recipe: StabilityRecipe, machine: str) -> None:
        """``machine``: the name of this machine, to which the usual rate belongs."""
        self.least_share = recipe.throughput_drop
        self.machine = machine
        self.usual = RecentValues(recipe.window)
        self.recent = RecentValues(self.RECENT)
        self.low = False

    def after_step(self, record: dict[str, Any]) -> list[Anomaly]:
        return self.observe(record["step"], record["tokens_per_s"])

    def observe(self, step: int, tokens_per_s: float) -> list[Anomaly]:
        """The anomalies of a step. A drop is reported once. It is reported again only after the rate has recovered."""
        self.recent.values.append(tokens_per_s)
        if not (self.usual.is_half_full and self.recent.is_full):
            self.usual.values.append(tokens_per_s)
            return []
        recent, usual = median(self.recent.values), median(self.usual.values)
        was_low, self.low = self.low, recent < self.least_share * usual
        if not self.low:
            self.usual.values.append(tokens_per_s)  # a lasting drop does not become the usual
        drop = Anomaly(step, "throughput_drop", recent, usual, recent / usual, False)
        return [drop] if self.low and not was_low else []

    def state_dict(self) -> dict[str, Any]:
        """The state without the recent steps. A resumed run collects new ones: its first steps are slow and are judged together with later ones."""
        return {"machine": self.machine, "usual": list(self.usual.values), "low": self.low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. The usual rate of another machine is dropped."""
        if state["machine"] == self.machine:
            self.usual.restore(state["usual"])
            self.low = state["low"]


def decide_clip_and_skip(
    loss: Tensor, grad_norm: Tensor, clip: float, limit: float, targets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(the divisor of the gradients, 1.0 if the update must be skipped else 0.0), both fp32 scalars on the device.

    ``targets``: number of tokens of the global batch that carry loss. If it is zero the update is skipped: the momentum and the weight decay would
    otherwise still move the weights.
    """
    sound = torch.isfinite(loss) & torch.isfinite(grad_norm) & (grad_norm <= limit)
    if targets is not None:
        sound &= targets > 0
    skip = torch.where(sound, 0.0, 1.0)
    divide_by = torch.where(sound, (grad_norm / clip).clamp(min=1.0), 1.0)
    return divide_by, skip
