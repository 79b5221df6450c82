"""Compares the task scores of a candidate and a champion: paired by item, with standard errors clustered by document group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from factory.evals.power import MOST_FAILED, ScoredGuard, compute_smoothed_variance
from factory.evals.statistics import Gain, compare_items, run_holm_step_down
from factory.evals.tasks import EvalItem
from kernels.contract.message import Message


@dataclass(frozen=True)
class TaskEvidence:
    """The measurements of a candidate's tasks. A metric is named '<task>/<metric>'."""

    gains: Mapping[str, Gain] = field(default_factory=dict)  # metric → gain over the champion; positive is better
    margins: Mapping[str, float] = field(default_factory=dict)  # metric → allowed loss
    values: Mapping[str, float] = field(default_factory=dict)  # metric → the candidate's score
    problems: tuple[str, ...] = ()  # sentences about tasks that could not be measured or compared
    remedies: Mapping[str, str] = field(default_factory=dict)  # problem → what a person can do
    evaluations: Mapping[str, Any] = field(
        default_factory=dict
    )  # task → [id of the candidate's evaluation, id of the champion's]
    alpha: float = 0.05
    items: Mapping[str, int] = field(default_factory=dict)  # metric → number of items
    variances: Mapping[str, float] = field(default_factory=dict)  # metric → variance of the champion's item values

    @classmethod
    def from_problem(cls, problem: str, remedy: str) -> TaskEvidence:
        """The evidence of a task that could not be measured or compared."""
        return cls(problems=(problem,), remedies={problem: remedy})

    def __bool__(self) -> bool:
        return bool(self.evaluations or self.problems)

    def merge(self, other: TaskEvidence) -> TaskEvidence:
        """This evidence and that of other tasks."""
        mine, its = vars(self), vars(other)
        both: dict[str, Any] = {name: {**mine[name], **its[name]} for name in mine if isinstance(mine[name], dict)}
        return replace(self, **both, problems=(*self.problems, *other.problems))


def compute_metric_scores(items: Sequence[EvalItem]) -> dict[str, Gain]:
    """Each metric's score with its standard error, as a gain over zero."""
    return compute_metric_gains(items, [replace(item, value=0.0) for item in items]) or {}


def compute_metric_gains(
    candidate: Sequence[EvalItem], champion: Sequence[EvalItem], costs: Sequence[str] = ()
) -> dict[str, Gain] | None:
    """{metric: gain} of two evaluations of a task. None if their items differ. ``costs``: metrics whose lower value is better.

    >>> one = [EvalItem("t/acc", f"{i}", "t", f"source{i}", float(i < 6), 1.0) for i in range(8)]
    >>> other = [EvalItem("t/acc", f"{i}", "t", f"source{i}", float(i < 4), 1.0) for i in range(8)]
    >>> gain = compute_metric_gains(one, other)["t/acc"]
    >>> round(gain.gain, 6), round(gain.error, 6), gain.clusters
    (0.25, 0.174964, 8)
    """
    # ``compare_items`` expects bits-per-byte items in nats, with the metric as domain.
    found = compare_items(
        [_as_nats(item, costs) for item in candidate], [_as_nats(item, costs) for item in champion], {}
    )
    return found[1] if found else None


def _as_nats(item: EvalItem, costs: Sequence[str]) -> EvalItem:
    sign = 1 if item.task in costs else -1
    value = sign * item.value * math.log(2)
    return replace(item, task="bpb", item=f"{item.task}\0{item.item}", domain=item.task, value=value)


def compute_item_counts_and_variances(champion: Sequence[EvalItem]) -> tuple[dict[str, int], dict[str, float]]:
    """({metric: number of items}, {metric: variance of an item's value}) of the champion.

    Only metrics whose items have weight 1 and values from 0 to 1 are included.
    """
    values: dict[str, list[float]] = {}
    other = set[str]()
    for item in champion:
        values.setdefault(item.task, []).append(item.value)
        if item.weight != 1 or not 0 <= item.value <= 1:
            other.add(item.task)
    known = {name: ones for name, ones in values.items() if name not in other}
    return {name: len(ones) for name, ones in known.items()}, {
        name: compute_smoothed_variance(ones) for name, ones in known.items()
    }


@dataclass(frozen=True)
class TaskReasons:
    """Sentences about a candidate's tasks, by their effect on the verdict."""

    against: tuple[str, ...] = ()  # losses that reject
    not_measured: tuple[str, ...] = ()  # tasks that could not be measured or compared
    not_shown: tuple[str, ...] = ()  # losses that hold
    facts: tuple[str, ...] = ()


def find_unreliable_metrics(evidence: TaskEvidence, clusters_min: int) -> dict[str, ScoredGuard]:
    """Metrics that cannot guard: more than one in five equally good models would fail them, or they have too few groups.

    A metric with missing numbers is not set aside. The result depends only on the items and the champion, not on the candidate's answers.

    >>> of = lambda items: TaskEvidence({"t/acc": Gain(0.05, 0.08, items, items)}, {"t/acc": 0.1}, items={"t/acc": items}, variances={"t/acc": 0.25})
    >>> [sorted(find_unreliable_metrics(of(items), 8)) for items in (40, 400)]
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
        if gain.clusters < clusters_min or not scored.is_reliable:
            found[name] = scored
    return found


def make_task_reasons(evidence: TaskEvidence, clusters_min: int) -> TaskReasons:
    """The sentences about a candidate's tasks. Pure.

    Each metric is a guard: its gain must be shown to be above −margin, all guards together at level ``alpha`` (Holm). A metric that is set aside
    does not hold a candidate because a loss is not excluded. It rejects if it shows a loss, and can hold if the measured loss is too large.
    """
    against: list[Message] = []
    missing: list[Message] = []
    open_: list[Message] = []
    facts: list[Message] = []
    names = sorted(evidence.gains)
    apart = find_unreliable_metrics(evidence, clusters_min)

    def above(name: str, shared: int) -> bool:
        bound = evidence.gains[name].compute_confidence_bound(evidence.alpha / shared)
        return bound is not None and bound > -evidence.margins[name]

    shown = run_holm_step_down([name for name in names if name not in apart], above)
    for name in names:
        gain, margin = evidence.gains[name], evidence.margins[name]
        upper = gain.compute_confidence_bound(evidence.alpha / len(names), upper=True)
        few = gain.clusters is None or gain.clusters < clusters_min
        if name in apart and few:
            facts.append(
                Message(
                    "comparing.few_groups_informs", "Task {task}: the score differs by {change} from the champion's. {reason}",
                    task=name, gain=gain.gain, change=_signed(gain.gain), reason=_small(apart[name], gain, clusters_min),
                )
            )  # fmt: skip
            continue
        if few:
            missing.append(
                Message(
                    "comparing.few_groups",
                    "Task {task} cannot be compared, because it has {groups:,|document group|document groups}, but a "
                    "comparison needs at least {needed:,}.",
                    task=name, groups=gain.clusters or 0, needed=clusters_min,
                )
            )  # fmt: skip
            continue
        if upper is None or gain.gain is None:
            missing.append(
                Message(
                    "comparing.not_finite",
                    "Task {task} cannot be compared, because its measured gain or the confidence bound is missing or not "
                    "finite.",
                    task=name,
                )
            )
            continue
        low, high = gain.compute_confidence_bound(0.025), gain.compute_confidence_bound(0.025, upper=True)
        compared = Message(
            "comparing.compared", "Task {task}: the score differs by {gain:+.3f} from the champion's (95 % confidence interval: {low} " "to {high})",
            task=name, gain=gain.gain, low=_signed(low), high=_signed(high),
        )  # fmt: skip
        data = {"compared": compared, "task": name, "gain": gain.gain, "margin": margin}
        if upper < -margin:
            against.append(
                Message(
                    "comparing.loss_shown",
                    "{compared}. A loss of at most {margin:.3f} is allowed, but the confidence bound shows a larger loss.",
                    **data,
                )
            )
        elif name in apart and apart[name].is_loss_informative and gain.gain < -margin:
            open_.append(
                Message(
                    "comparing.loss_measured",
                    "{compared}. The measured loss is larger than the allowed loss of {margin:.3f}.",
                    **data,
                )
            )
        elif name in apart:
            facts.append(
                Message(
                    "comparing.set_aside",
                    "{compared}. {reason}",
                    **data,
                    reason=_small(apart[name], gain, clusters_min),
                )
            )
        elif not shown[name]:
            open_.append(
                Message(
                    "comparing.loss_not_excluded",
                    "{compared}. A loss of at most {margin:.3f} is allowed, but the confidence bound does not exclude a "
                    "larger loss.",
                    **data,
                )
            )
        else:
            facts.append(Message("comparing.no_loss", "{compared}.", **data))
    return TaskReasons(tuple(against), (*evidence.problems, *missing), tuple(open_), tuple(facts))


def _small(known: ScoredGuard, gain: Gain, clusters_min: int) -> Message:
    """The reason why a task is not a guard, and the number of items that a guard needs."""
    clusters = gain.clusters or 0
    if clusters < clusters_min:
        return Message(
            "comparing.only_informs",
            "This task cannot block a release, because it has {groups:,|document group|document groups}. At least {needed:,} are needed.",
            groups=clusters, needed=clusters_min,
        )  # fmt: skip
    needed = known.find_items_needed()
    size = (
        Message(
            "comparing.items_needed",
            "With the loss that this task allows, a reliable guard needs about {items:,} test items",
            items=needed,
        )
        if needed
        else Message(
            "comparing.no_size", "With the loss that this task allows, no number of items makes the guard reliable"
        )
    )
    return Message(
        "comparing.no_guard",
        "This task has too few items for a reliable guard. With its {items:,} items, the guard would wrongly block {held:.0f} of 100 "
        "equally good models. At most {limit:.0f} are accepted. {size} (margin in tasks.yaml). {effect}",
        items=known.items,
        held=100 * (1 - known.pass_rate_of_equal_models),
        limit=100 * MOST_FAILED,
        size=size,
        effect=known.effect_when_set_aside,
    )


def _signed(value: float | None) -> str:
    return "?" if value is None else f"{value:+.3f}".replace("-", "−")
