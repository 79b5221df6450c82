"""The certificate of a code change: before a segment starts under another commit, its first steps are run under both.

Old and new code run N steps from the same checkpoint on the same data. What they differ by must lie inside seed noise:
what the *old* code alone differs by when only the seed of the data order is another (a run that starts from a checkpoint
has no other seed). Everything is measured in one way, as the difference of two runs; the noise is the root mean square of
that difference over all pairs of seeds.

Why this bound: it is the smallest change that could not have been seen in training anyway, and it needs no number chosen
by hand. It is wide: another order of the data moves the weights far more than another order of additions does, so the
distance of the weights alone would pass a rate that is 10 % off. Hence the other measures, whose seed noise is small: the
length of the update, whole and of each tensor, the optimiser's state, the gradient's norm; and what does not depend on the
seed at all (the rate, the optimiser's count of steps) may not differ beyond rounding. A change that 20 steps cannot show,
like another weight decay, passes; so the tighter numbers are recorded too: each difference as a share of its noise, and
next to the difference that the old code shows when it simply runs again (zero on CPU).

A segment that is computed in another precision or by other kernels than the one before it is judged in the same way: what ran
before is the old code, what will run the new.

The losses, norms and rates are those that the trainer wrote down; weights and optimiser state are read from its
checkpoints. This guards against mistakes, not against code that lies: for that there is the patch gate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from factory.core.policy_file import Count, StrictPolicy, load_policy

SERIES = ("loss", "grad_norm", "lr")  # of metrics.jsonl; the loss must be there
ROUNDING = 1e-6  # share of a value that fp32 rounding may change: the least noise of any measure
TRAINED_WITH = ("trainer/", "kernels/", "policies/kernels.yaml")  # all that a segment's process reads of the repository

Series = list[float | None]  # a value a step; None: not finite, or not written
Part = Literal["resume", "accumulation", "kernels", "compile", "ranks"]


class PreflightPolicy(StrictPolicy):
    """``preflight`` of the same file: ``factory/training/preflight.py``."""

    parts: list[Part] = ["resume", "accumulation", "kernels", "compile", "ranks"]
    """What is compared at each new commit, layout or environment; an empty list turns the preflight off."""
    steps: Count = 20
    """Of a small model; each way to train takes them once."""
    times_rounding: Annotated[float, Field(ge=1)] = 10.0
    """The largest difference that passes, in multiples of what one rounding of each weight does over the same steps."""


class CertificatePolicy(StrictPolicy):
    """``policies/gates/certificate.yaml``. Every key is optional."""

    steps: Count = 20
    """Run under both codes; all of them, when the segment is shorter."""
    seeds: Annotated[int, Field(ge=3)] = 3
    """Orders of the data that the noise is measured over, under the old code; each costs ``steps`` steps."""
    share_of_noise: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The largest difference that passes, as a share of the seed noise."""

    preflight: PreflightPolicy = PreflightPolicy()

    @classmethod
    def load(cls, path: Path) -> CertificatePolicy:
        """Raises: ConfigError naming the file and the key."""
        return load_policy(cls, path)


@dataclass(frozen=True)
class Numbers:
    """Of what one run left, the numbers that it is judged by."""

    series: dict[str, Series]  # by name, a value a step
    moved: dict[str, float]  # ‖weights − the checkpoint's‖ by tensor
    optimizer: dict[str, float]  # norm by tensor of the optimiser's state


@dataclass(frozen=True)
class CertificateEvidence:
    """What the runs measured. A missing measurement is empty, and the judge names it."""

    old_commit: str
    new_commit: str
    changed: list[str]  # files that training reads, precision and kernels that differ; none: no runs were needed
    first_step: int = 0
    steps: int = 0
    basis: Literal["segment", "parent", ""] = ""  # whose recipe and data plan both ran under
    seeds: tuple[int, ...] = ()
    old: Numbers | None = None
    again: Numbers | None = None  # the old code a second time
    new: Numbers | None = None
    others: tuple[Numbers, ...] = ()  # the old code under ``seeds``
    apart: float = math.nan  # ‖weights new − old‖
    apart_again: float = math.nan  # ‖weights again − old‖
    apart_seeds: float = math.nan  # root mean square over pairs of seeds of ‖weights − weights‖
    old_failed: str = ""  # the old code's last line when it could not run
    new_failed: str = ""


@dataclass(frozen=True)
class Measure:
    """One way in which two runs differ."""

    name: str
    difference: float  # new from old
    noise: float  # between two seeds
    again: float  # the old code from itself
    where: str = ""  # step or tensor of the difference

    @property
    def share(self) -> float:
        """Of the noise."""
        return self.difference / self.noise if self.noise > 0 else (0.0 if self.difference == 0 else math.inf)


@dataclass(frozen=True)
class Judgement:
    outcome: Literal["promote", "hold", "reject"]  # promote: the segment may start
    reasons: list[str]
    measures: list[Measure]


# -- the judge ---------------------------------------------------------------------------------------------------------
def judge_certificate(policy: CertificatePolicy, evidence: CertificateEvidence) -> Judgement:
    """May the segment start? Pure. Missing evidence is ``hold``."""
    if not evidence.changed:
        words = "Nothing that training reads differs between the two commits: no runs were needed."
        return Judgement("promote", [words], [])
    if evidence.old_failed or evidence.old is None:
        return Judgement("hold", [f"The old code could not be run: {evidence.old_failed or 'no run'}."], [])
    if evidence.new_failed or evidence.new is None:
        return Judgement("reject", [f"The new code could not be run: {evidence.new_failed or 'no run'}."], [])
    if len(evidence.others) < policy.seeds:
        words = f"The noise was measured over {len(evidence.others)} seeds, {policy.seeds} are needed."
        return Judgement("hold", [words], [])
    if evidence.steps < 1 or not any(value is not None for value in evidence.old.series.get("loss", [])):
        return Judgement("hold", ["The old code left no losses to compare with."], [])
    found = measures(evidence)
    unmeasured = [m.name for m in found if math.isnan(m.noise) or m.name in ("loss", "weights") and m.noise == 0]
    if unmeasured:
        words = f"Other seeds gave no noise to compare with: {', '.join(unmeasured)}."
        return Judgement("hold", [words], found)
    outside = [m for m in found if not m.share <= policy.share_of_noise]
    if outside:
        return Judgement("reject", [f"Outside seed noise: {_sentence(m)}." for m in _worst_first(outside)], found)
    facts = [f"Inside seed noise: {_sentence(m)}." for m in _worst_first(found)]
    if all(m.difference == 0 for m in found):
        facts = [f"The same to the last bit over {evidence.steps} steps."]
    series = [name for name in SERIES if (name in evidence.old.series) != (name in evidence.new.series)]
    state = sorted(evidence.old.optimizer.keys() ^ evidence.new.optimizer.keys())
    lost = [name for name in SERIES if name in evidence.old.series and name not in evidence.new.series]
    lost += sorted(evidence.old.optimizer.keys() - evidence.new.optimizer.keys())[:3]
    if lost:
        return Judgement("hold", [f"The new code no longer leaves what it is judged by: {', '.join(lost)}."], found)
    if series or state:
        uncompared = [*series, *([f"{len(state)} tensors of the optimiser's state, first {state[0]}"] if state else [])]
        facts.append(f"Not compared, because only one of them left it: {', '.join(uncompared)}.")
    return Judgement("promote", facts, found)


def measures(evidence: CertificateEvidence) -> list[Measure]:
    """Every way in which the new code's run may differ from the old code's."""
    old, new, again, others = evidence.old, evidence.new, evidence.again or evidence.old, evidence.others
    assert old is not None and new is not None and again is not None
    found = []
    for name in SERIES:
        if name in new.series and name in old.series or name == "loss":
            found.append(_by_step(name, old, new, again, others, evidence.first_step))
    means = [_mean(trace.series.get("loss", []), old.series["loss"]) for trace in (old, new, again, *others)]
    found.append(_scalar("mean loss", *means))
    found.append(Measure("weights", evidence.apart, evidence.apart_seeds, evidence.apart_again))
    found.append(_scalar("length of the update", *(_length(trace.moved) for trace in (old, new, again, *others))))
    found.append(_by_tensor("length of a tensor's update", *(trace.moved for trace in (old, new, again, *others))))
    kinds = sorted({name.partition(".")[0] for name in old.optimizer.keys() & new.optimizer.keys()})
    for kind in kinds:
        of = lambda trace: {n: v for n, v in trace.optimizer.items() if n.partition(".")[0] == kind}  # noqa: B023
        found.append(_by_tensor(f"optimiser's {kind}", *(of(trace) for trace in (old, new, again, *others))))
    return found


# -- one measure each --------------------------------------------------------------------------------------------------
def _by_step(
    name: str, old: Numbers, new: Numbers, again: Numbers, others: Sequence[Numbers], first_step: int
) -> Measure:
    """The largest difference of any step; the noise is pooled over the steps."""
    values = old.series.get(name, [])
    apart = [_apart(a, b) for a, b in itertools.zip_longest(values, new.series.get(name, []))]
    reruns = [_apart(a, b) for a, b in itertools.zip_longest(values, again.series.get(name, []))]
    between = [
        (a - b) ** 2
        for one, other in itertools.combinations(others, 2)
        for a, b in zip(one.series.get(name, []), other.series.get(name, []))
        if a is not None and b is not None
    ]
    scale = max((abs(value) for value in values if value is not None), default=0.0)
    at = max(range(len(apart)), key=apart.__getitem__, default=0)
    noise = _rooted_mean(between) if between else math.nan
    return Measure(
        name, max(apart, default=0.0), _least(noise, scale, name), max(reruns, default=0.0), f"step {first_step + at}"
    )


def _scalar(name: str, old: float, new: float, again: float, *others: float) -> Measure:
    noise = _rooted_mean([(a - b) ** 2 for a, b in itertools.combinations(others, 2)])
    return Measure(name, abs(new - old), max(noise, ROUNDING * abs(old)), abs(again - old))


def _by_tensor(
    name: str, old: dict[str, float], new: dict[str, float], again: dict[str, float], *others: dict[str, float]
) -> Measure:
    """The largest difference of any tensor, as a share of the tensor's own norm; the noise is pooled over the tensors.

    Pooled, because the spread of one tensor over a few seeds is now and then small by chance.
    """
    share = lambda a, b, norm: abs(a - b) / norm if norm > 0 else (0.0 if a == b else math.inf)
    apart = {tensor: share(old[tensor], new[tensor], old[tensor]) for tensor in old.keys() & new.keys()}
    reruns = [share(old[tensor], again[tensor], old[tensor]) for tensor in old.keys() & again.keys()]
    between = [
        share(one[tensor], other[tensor], old[tensor]) ** 2
        for one, other in itertools.combinations(others, 2)
        for tensor in old.keys() & one.keys() & other.keys()
        if old[tensor] > 0
    ]
    at = max(sorted(apart), key=apart.__getitem__, default="")
    noise = max(_rooted_mean(between) if between else 0.0, ROUNDING)
    return Measure(name, apart.get(at, 0.0), noise, max(reruns, default=0.0), at)


def _apart(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    return abs(a - b)


def _mean(values: Series, like: Series) -> float:
    """Over the steps at which ``like`` has a value; NaN where one is missing."""
    held = [value for value, other in itertools.zip_longest(values, like) if other is not None]
    return math.fsum(v for v in held if v is not None) / len(held) if held and None not in held else math.nan


def _length(parts: dict[str, float]) -> float:
    return math.sqrt(math.fsum(part * part for part in parts.values()))


def _rooted_mean(squares: Sequence[float]) -> float:
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else math.nan


def _least(noise: float, scale: float, name: str) -> float:
    """Rounding, where a seed changes nothing; but a loss that no seed changes was not measured."""
    return noise if name == "loss" else max(noise, ROUNDING * scale)


# -- words -------------------------------------------------------------------------------------------------------------
def _worst_first(found: Iterable[Measure]) -> list[Measure]:
    by_share: Callable[[Measure], float] = lambda m: math.inf if math.isnan(m.share) else m.share
    return sorted(found, key=by_share, reverse=True)


def _sentence(measure: Measure) -> str:
    where = f" ({measure.where})" if measure.where and measure.difference else ""
    return (
        f"{measure.name}{where} differs by {measure.difference:.3g}, between seeds by {measure.noise:.3g}: "
        f"{measure.share:.2g} of it; the old code run again: {measure.again:.2g}"
    )
