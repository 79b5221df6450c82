"""Decides whether a window of steps shows an anomaly: compares one quantity of each step with its usual values before the window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType
from typing import Any

MAD_TO_DEVIATION = 1.4826  # of a normal distribution: Rousseeuw and Croux 1993
LEAST_DEVIATION = 0.02  # share of the median, as the trainer's detector has it
GONE, THERE = (
    0.35,
    0.65,
)  # of what the live run showed: below the first share an anomaly is gone, above the second it is there
UNNOTICED = 6.0  # robust deviations: below what a detector calls a spike
# Kinds of anomalies that a diagnosis can be about, those that tell most first: as ``trainer/monitor`` names them.
KINDS = (
    "non_finite", "loss_spike", "loss_drop", "divergence", "domain_spike", "domain_drop", "grad_norm_jump", "skipped_outlier",
    "activation_jump", "attention_logits", "update_jump", "plateau",
)  # fmt: skip
OF_GRADIENT = ("grad_norm_jump", "skipped_outlier")
OF_LAYER = {
    "activation_jump": "activation_max",
    "attention_logits": "attention_logit_max",
    "update_jump": "update_ratio",
}
LOW = ("loss_drop", "domain_drop")  # kinds whose loss is too low to be true
PARTS = (
    "loss",
    *OF_LAYER.values(),
)  # metrics of domains and layers, as metrics.jsonl names them: loss/code, activation_max/blocks.1


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one step; a value that is not finite is ``math.inf``. ``parts``: metrics of domains and of the measured layer, by key."""

    step: int
    loss: float
    grad_norm: float
    parts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def look_up_quantity(self, quantity: str) -> float | None:
        """``loss``, ``grad_norm``, or a key of ``parts``; None where the step has none.

        >>> StepMetrics(3, 2.0, 0.5, {"loss/code": 1.5}).look_up_quantity("loss/code")
        1.5
        """
        if quantity == "loss":
            return self.loss
        return self.grad_norm if quantity == "grad_norm" else self.parts.get(quantity)

    def to_row(self) -> list[Any]:
        """The metrics as a JSON list, from which ``StepMetrics(*row)`` makes them again."""
        return [self.step, self.loss, self.grad_norm, dict(self.parts)]


@dataclass(frozen=True)
class UsualValue:
    """Median and robust deviation of a quantity over the steps before an anomaly."""

    center: float
    deviation: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> UsualValue:
        """The usual value of the finite values. Without any, the center is 0 and the deviation infinite, so that nothing is unusual.

        >>> UsualValue.from_values([2.0, 2.1, 1.9, 2.0, 50.0]).center
        2.0
        """
        finite = [value for value in values if math.isfinite(value)]
        if not finite:
            return cls(0.0, math.inf)
        center = median(finite)
        spread = MAD_TO_DEVIATION * median(abs(value - center) for value in finite)
        return cls(center, max(spread, LEAST_DEVIATION * abs(center), 1e-12))


def choose_quantity_of_anomaly(kind: str, where: str) -> str:
    """The quantity that an anomaly is about; ``where`` as the trainer names it.

    >>> (choose_quantity_of_anomaly("domain_spike", "domain/code"), choose_quantity_of_anomaly("activation_jump", "layer/blocks.1"),
    ...  choose_quantity_of_anomaly("loss_spike", ""))
    ('loss/code', 'activation_max/blocks.1', 'loss')
    """
    part = where.partition("/")[2]
    if kind in OF_LAYER and part:
        return f"{OF_LAYER[kind]}/{part}"
    if kind.startswith("domain_") and part:
        return f"loss/{part}"
    return "grad_norm" if kind in OF_GRADIENT else "loss"


@dataclass(frozen=True)
class Symptom:
    """The deviation of the live run in its window: the quantity, the direction, and the distance from the usual value."""

    kind: str  # of the anomaly
    quantity: str
    low: bool  # too low, not too high
    usual: UsualValue
    excess: float  # the largest, in the unit of the quantity; infinite where it was not finite

    @classmethod
    def from_live_run(
        cls, kind: str, before: Sequence[StepMetrics], window: Sequence[StepMetrics], where: str = ""
    ) -> Symptom:
        """The symptom in a ``window`` of the live run, compared with the steps ``before``. ``where``: the anomaly's domain or layer.

        >>> calm = [StepMetrics(step, 2.0, 0.5) for step in range(8)]
        >>> Symptom.from_live_run("loss_spike", calm, [StepMetrics(8, 5.0, 0.6), StepMetrics(9, 2.1, 0.5)]).excess
        3.0
        """
        quantity = choose_quantity_of_anomaly(kind, where)
        usual = UsualValue.from_values(list_quantity_values(before, quantity))
        symptom = cls(kind, quantity, kind in LOW, usual, 0.0)
        return cls(kind, quantity, symptom.low, usual, symptom.find_largest_excess(window, usual))

    def find_largest_excess(self, window: Sequence[StepMetrics], usual: UsualValue) -> float:
        """The largest distance from ``usual`` in the symptom's direction; infinite where a value is not finite."""
        values = list_quantity_values(window, self.quantity)
        if self.kind == "non_finite" or not all(map(math.isfinite, values)):
            odd = any(not math.isfinite(x) for point in window for x in (point.loss, point.grad_norm))
            return math.inf if odd else 0.0
        sign = -1.0 if self.low else 1.0
        return max((sign * (value - usual.center) for value in values), default=0.0)

    def is_present_in(self, window: Sequence[StepMetrics]) -> bool | None:
        """True if the anomaly is there, False if it is gone, None if it is neither.

        >>> calm = [StepMetrics(step, 2.0, 0.5) for step in range(8)]
        >>> spike = Symptom.from_live_run("loss_spike", calm, [StepMetrics(8, 5.0, 0.6)])
        >>> [spike.is_present_in([StepMetrics(8, loss, 0.5)]) for loss in (4.9, 3.5, 2.3, math.inf)]
        [True, None, False, True]
        """
        excess = self.find_largest_excess(window, self.usual)
        if math.isinf(excess) or math.isinf(self.excess):
            return math.isinf(excess)
        if self.excess <= 0:
            return None  # nothing was measured that could come again
        share = excess / self.excess
        return True if share >= THERE else False if share <= GONE else None

    def is_unnoticeable_in(self, window: Sequence[StepMetrics]) -> bool:
        """True if no detector would notice the window. Stricter than ``is_present_in`` if the live run's excess was large."""
        excess = self.find_largest_excess(window, self.usual)
        return self.is_present_in(window) is False and excess <= UNNOTICED * self.usual.deviation

    def find_largest_difference(
        self, full_replay: Sequence[StepMetrics], reduced_replay: Sequence[StepMetrics]
    ) -> float:
        """The largest excess of one replay over another at the same step, in the symptom's direction: the effect of what the reduced one leaves out.

        >>> spike = Symptom("loss_spike", "loss", False, UsualValue(2.0, 0.1), 3.0)
        >>> spike.find_largest_difference([StepMetrics(8, 6.0, 1.0), StepMetrics(9, 2.2, 1.0)], [StepMetrics(8, 3.5, 1.0), StepMetrics(9, 2.1, 1.0)])
        2.5
        """
        if self.kind == "non_finite":
            odd, left = (
                math.isinf(self.find_largest_excess(window, self.usual)) for window in (full_replay, reduced_replay)
            )
            return math.inf if odd and not left else 0.0
        other = {point.step: point.look_up_quantity(self.quantity) for point in reduced_replay}
        sign = -1.0 if self.low else 1.0
        both = [(point.look_up_quantity(self.quantity), other.get(point.step)) for point in full_replay]
        pairs = [(a, b) for a, b in both if a is not None and b is not None]
        return max(
            (sign * (a - b) if math.isfinite(a) else math.inf for a, b in pairs if math.isfinite(b)), default=0.0
        )


def list_quantity_values(points: Sequence[StepMetrics], quantity: str) -> list[float]:
    """The values of a quantity, at the steps that have it, in the order of ``points``."""
    return [value for point in points if (value := point.look_up_quantity(quantity)) is not None]


def read_step_metrics(lines: Sequence[Mapping[str, Any]]) -> list[StepMetrics]:
    """The metrics of each step from the lines of metrics.jsonl, sorted. The later line of a step counts. A line without a loss is left out.

    >>> read_step_metrics([{"step": 4, "loss": 2.0, "grad_norm": None, "loss/code": 1.5, "time": 9.0}])
    [StepMetrics(step=4, loss=2.0, grad_norm=inf, parts={'loss/code': 1.5})]
    """
    number = lambda value: float(value) if isinstance(value, int | float) and math.isfinite(value) else math.inf
    found = {}
    for line in lines:
        if "loss" not in line:
            continue
        parts = {key: number(value) for key, value in line.items() if "/" in key and key.partition("/")[0] in PARTS}
        found[line["step"]] = StepMetrics(line["step"], number(line.get("loss")), number(line.get("grad_norm")), parts)
    return [found[step] for step in sorted(found)]


def find_anomaly_onset(
    lines: Sequence[StepMetrics], step: int, most_steps_back: int = 16, deviations: float = 4.0
) -> int:
    """The step at which an anomaly began that was noticed at ``step``. Norms may climb before the loss does (BLOOM's did for five steps).

    The search goes back over at most ``most_steps_back`` steps, as long as loss or gradient norm is ``deviations`` above its earlier usual value.

    >>> calm = [StepMetrics(s, 2.0, 0.5) for s in range(40)]
    >>> find_anomaly_onset([*calm, StepMetrics(40, 2.0, 3.0), StepMetrics(41, 2.0, 9.0), StepMetrics(42, 7.0, 30.0)], 42)
    40
    """
    earlier = [point for point in lines if step - 3 * most_steps_back <= point.step < step - most_steps_back]
    usual = {key: UsualValue.from_values(list_quantity_values(earlier, key)) for key in ("loss", "grad_norm")}
    before = {point.step: point for point in lines}
    while step - 1 in before and most_steps_back and earlier:
        point = before[step - 1]
        high = lambda key, u, p=point: (p.look_up_quantity(key) or 0.0) > u.center + deviations * u.deviation
        if not any(high(key, u) for key, u in usual.items()):
            break
        step, most_steps_back = step - 1, most_steps_back - 1
    return step
