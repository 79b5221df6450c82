"""Scores of tasks, and what they say of a candidate against a champion: paired, item by item, with errors clustered by source document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from factory.evals.statistics import Gain, compare, holm
from factory.evals.tasks import EvalItem


@dataclass(frozen=True)
class TaskEvidence:
    """What is known of a candidate's tasks. A metric is '<task>/<metric>'."""

    gains: Mapping[str, Gain] = field(default_factory=dict)  # by metric, over the champion; positive is better
    margins: Mapping[str, float] = field(default_factory=dict)  # by metric: what may be lost
    values: Mapping[str, float] = field(default_factory=dict)  # by metric, the candidate's
    problems: tuple[str, ...] = ()  # sentences: what could not be measured or compared
    evaluations: Mapping[str, Any] = field(default_factory=dict)  # by task: [the candidate's, the champion's]
    alpha: float = 0.05

    def __bool__(self) -> bool:
        return bool(self.evaluations or self.problems)

    def with_other(self, other: TaskEvidence) -> TaskEvidence:
        """Of other tasks too."""
        return replace(
            self,
            gains={**self.gains, **other.gains},
            margins={**self.margins, **other.margins},
            values={**self.values, **other.values},
            problems=(*self.problems, *other.problems),
            evaluations={**self.evaluations, **other.evaluations},
        )


def scores(items: Sequence[EvalItem]) -> dict[str, Gain]:
    """Each metric's value, as the gain over nothing: its error is the value's."""
    return gains(items, [replace(item, value=0.0) for item in items]) or {}


def gains(
    candidate: Sequence[EvalItem], champion: Sequence[EvalItem], costs: Sequence[str] = ()
) -> dict[str, Gain] | None:
    """{metric: gain} of two evaluations of one task; None when their items differ. ``costs`` names metrics of which less is better.

    >>> one = [EvalItem("t/acc", f"{i}", "t", f"source{i}", float(i < 6), 1.0) for i in range(8)]
    >>> other = [EvalItem("t/acc", f"{i}", "t", f"source{i}", float(i < 4), 1.0) for i in range(8)]
    >>> gain = gains(one, other)["t/acc"]
    >>> round(gain.gain, 6), round(gain.error, 6), gain.clusters
    (0.25, 0.174964, 8)
    """
    # ``compare`` takes costs in nats: a domain is a measure there.
    found = compare([_as_nats(item, costs) for item in candidate], [_as_nats(item, costs) for item in champion], {})
    return found[1] if found else None


def _as_nats(item: EvalItem, costs: Sequence[str]) -> EvalItem:
    sign = 1 if item.task in costs else -1
    value = sign * item.value * math.log(2)
    return replace(item, task="bpb", item=f"{item.task}\0{item.item}", domain=item.task, value=value)


def reasons(evidence: TaskEvidence, clusters_min: int) -> tuple[list[str], list[str], list[str]]:
    """(what speaks against a candidate, what is missing, what was shown), in sentences. Pure.

    A metric is a guard: its gain must be shown to be above −margin, all metrics together at ``alpha`` (Holm).
    """
    against: list[str] = []
    missing = list(evidence.problems)
    facts: list[str] = []
    names = sorted(evidence.gains)

    def above(name: str, shared: int) -> bool:
        bound = evidence.gains[name].bound(evidence.alpha / shared)
        return bound is not None and bound > -evidence.margins[name]

    shown = holm(names, above)
    for name in names:
        gain, margin = evidence.gains[name], evidence.margins[name]
        upper = gain.bound(evidence.alpha / len(names), above=True)
        if upper is None or gain.gain is None or gain.clusters is None or gain.clusters < clusters_min:
            missing.append(
                f"Task {name}: could not be compared: {gain.clusters or 0} source documents, at least {clusters_min} are needed."
            )
            continue
        low, high = gain.bound(0.025), gain.bound(0.025, above=True)
        words = (
            f"Task {name}: {_signed(gain.gain)} against the champion (95 % between {_signed(low)} and {_signed(high)})"
        )
        if upper < -margin:
            against.append(f"{words}; a loss of at most {margin:.3f} is allowed.")
        elif not shown[name]:
            missing.append(
                f"{words}; a loss of at most {margin:.3f} is allowed, and the bound does not exclude a larger one."
            )
        else:
            facts.append(f"{words}.")
    return against, missing, facts


def _signed(value: float | None) -> str:
    return "?" if value is None else f"{value:+.3f}".replace("-", "−")
