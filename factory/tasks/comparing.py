"""Scores of tasks, and what they say of a candidate against a champion: paired, item by item, with errors clustered by document group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from factory.evals.power import MOST_FAILED, ScoredGuard, variance_of
from factory.evals.statistics import Gain, compare, holm
from factory.evals.tasks import EvalItem


@dataclass(frozen=True)
class TaskEvidence:
    """What is known of a candidate's tasks. A metric is '<task>/<metric>'."""

    gains: Mapping[str, Gain] = field(default_factory=dict)  # by metric, over the champion; positive is better
    margins: Mapping[str, float] = field(default_factory=dict)  # by metric: what may be lost
    values: Mapping[str, float] = field(default_factory=dict)  # by metric, the candidate's
    problems: tuple[str, ...] = ()  # sentences: what could not be measured or compared
    remedies: Mapping[str, str] = field(default_factory=dict)  # by problem: what a person can do
    evaluations: Mapping[str, Any] = field(default_factory=dict)  # by task: [the candidate's, the champion's]
    alpha: float = 0.05
    items: Mapping[str, int] = field(default_factory=dict)  # by metric
    variances: Mapping[str, float] = field(default_factory=dict)  # by metric, of an item's value, of the champion's

    @classmethod
    def problem(cls, words: str, remedy: str) -> TaskEvidence:
        """Of a task that could not be measured or compared."""
        return cls(problems=(words,), remedies={words: remedy})

    def __bool__(self) -> bool:
        return bool(self.evaluations or self.problems)

    def with_other(self, other: TaskEvidence) -> TaskEvidence:
        """Of other tasks too."""
        mine, its = vars(self), vars(other)
        both: dict[str, Any] = {name: {**mine[name], **its[name]} for name in mine if isinstance(mine[name], dict)}
        return replace(self, **both, problems=(*self.problems, *other.problems))


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


def sizes(champion: Sequence[EvalItem]) -> tuple[dict[str, int], dict[str, float]]:
    """({metric: items}, {metric: variance of an item's value}) of the champion, of each metric whose items count alike and are from 0 to 1."""
    values: dict[str, list[float]] = {}
    other = set[str]()
    for item in champion:
        values.setdefault(item.task, []).append(item.value)
        if item.weight != 1 or not 0 <= item.value <= 1:
            other.add(item.task)
    known = {name: ones for name, ones in values.items() if name not in other}
    return {name: len(ones) for name, ones in known.items()}, {name: variance_of(ones) for name, ones in known.items()}


@dataclass(frozen=True)
class TaskReasons:
    """Sentences: what speaks against a candidate, what could not be measured or compared, what was not shown, and what was."""

    against: tuple[str, ...] = ()
    not_measured: tuple[str, ...] = ()
    not_shown: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()


def set_aside(evidence: TaskEvidence, clusters_min: int) -> dict[str, ScoredGuard]:
    """Metrics that cannot tell harm: an equally good model would fail them more than once in five, or they are of too few groups. One of which too
    little is known stands. It follows from the items and the champion alone: a candidate that changes many answers sets none aside.

    >>> of = lambda items: TaskEvidence({"t/acc": Gain(0.05, 0.08, items, items)}, {"t/acc": 0.1}, items={"t/acc": items}, variances={"t/acc": 0.25})
    >>> [sorted(set_aside(of(items), 8)) for items in (40, 400)]
    [['t/acc'], []]
    """
    found = {}
    for name, gain in evidence.gains.items():
        items, variance = evidence.items.get(name), evidence.variances.get(name)
        known = (items, variance, gain.clusters, gain.effective)
        if any(value is None or not math.isfinite(value) or value < 0 for value in known):
            continue
        assert items and variance is not None and gain.clusters is not None and gain.effective is not None
        scored = ScoredGuard(items, gain.effective, variance, evidence.margins[name], evidence.alpha)
        if gain.clusters < clusters_min or not scored.stands:
            found[name] = scored
    return found


def reasons(evidence: TaskEvidence, clusters_min: int) -> TaskReasons:
    """What the tasks say of a candidate. Pure.

    A metric is a guard: its gain must be shown to be above −margin, all that stand together at ``alpha`` (Holm). One that is set aside informs, and
    speaks against a candidate where a loss is shown.
    """
    against: list[str] = []
    missing: list[str] = []
    open_: list[str] = []
    facts: list[str] = []
    names = sorted(evidence.gains)
    apart = set_aside(evidence, clusters_min)

    def above(name: str, shared: int) -> bool:
        bound = evidence.gains[name].bound(evidence.alpha / shared)
        return bound is not None and bound > -evidence.margins[name]

    shown = holm([name for name in names if name not in apart], above)
    for name in names:
        gain, margin = evidence.gains[name], evidence.margins[name]
        upper = gain.bound(evidence.alpha / len(names), above=True)
        few = gain.clusters is None or gain.clusters < clusters_min
        if name in apart and few:
            facts.append(
                f"Task {name}: {_signed(gain.gain)} against the champion. {_small(apart[name], gain, clusters_min)}"
            )
            continue
        if upper is None or gain.gain is None or few:
            missing.append(
                f"Task {name}: could not be compared: {gain.clusters or 0} document groups, at least {clusters_min} are needed."
                if few
                else f"Task {name}: could not be compared: a number is missing or not finite."
            )
            continue
        low, high = gain.bound(0.025), gain.bound(0.025, above=True)
        words = (
            f"Task {name}: {_signed(gain.gain)} against the champion (95 % between {_signed(low)} and {_signed(high)})"
        )
        if upper < -margin:
            against.append(f"{words}; a loss of at most {margin:.3f} is allowed.")
        elif name in apart and apart[name].tells and gain.gain < -margin:
            open_.append(f"{words}; a loss of more than {margin:.3f} was measured, and at most that is allowed.")
        elif name in apart:
            facts.append(f"{words}. {_small(apart[name], gain, clusters_min)}")
        elif not shown[name]:
            open_.append(
                f"{words}; a loss of at most {margin:.3f} is allowed, and the bound does not exclude a larger one."
            )
        else:
            facts.append(f"{words}.")
    return TaskReasons(tuple(against), (*evidence.problems, *missing), tuple(open_), tuple(facts))


def _small(known: ScoredGuard, gain: Gain, clusters_min: int) -> str:
    """Why a task does not guard, and the size that it needs."""
    clusters = gain.clusters or 0
    if clusters < clusters_min:
        return f"It informs alone: {clusters} document groups, and {clusters_min} are needed."
    needed = known.needed()
    size = f"about {needed} are needed" if needed else "no number is enough for its margin"
    return (
        f"It is set aside as a guard: of 100 models that are as good, {known.items} items hold {100 * (1 - known.passed):.0f}, at most "
        f"{100 * MOST_FAILED:.0f} are allowed, and {size} (margin in tasks.yaml). {known.still}"
    )


def _signed(value: float | None) -> str:
    return "?" if value is None else f"{value:+.3f}".replace("-", "−")
