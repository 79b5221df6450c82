"""Judges the certificate of a code change: before a segment starts under another commit than the last of its kind, both commits run its first steps.

Old and new code run N steps from the same checkpoint on the same data. Their difference must be inside seed noise. Seed noise is
the difference between two runs of the *old* code that have different seeds of the data order (a run that starts from a checkpoint
has no other seed). The noise of a measure is the root mean square of that difference over all pairs of seeds.

Why this bound: a smaller change could not be seen in training anyway, and the bound needs no number chosen by hand.
The bound is wide for the distance of the weights, which alone would accept a learning rate that is 10 % off. Other measures have
small seed noise: the length of the update (whole and of each tensor), the optimiser's state, the gradient norm. The learning rate
and the optimiser's step count do not depend on the seed, and may differ by rounding only. A change that N steps cannot
show, such as another weight decay, passes. The evidence therefore also holds each difference as a share of its noise, and the
difference between two runs of the old code with the same seed (zero on a CPU).

A segment with another precision or other kernels than its parent is judged in the same way: the parent's settings are the old code,
the new settings are the new code.

The trainer itself wrote the losses, norms and rates; weights and optimiser state are read from its checkpoints. The certificate
finds mistakes. It does not find code that lies: the patch gate does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from factory.core.policy_file import Count, StrictPolicy, load_policy
from kernels.contract.message import Message

SERIES = ("loss", "grad_norm", "lr")  # keys of metrics.jsonl; a run without a loss is not judged
ROUNDING = 1e-6  # share of a value that fp32 rounding may change: the least noise of any measure
TRAINING_FILES = (
    "trainer/",
    "models/",
    "kernels/",
    "policies/kernels.yaml",
)  # all files of the repository that a trainer reads

Series = list[float | None]  # one value for each step; None: not finite, or not written
TENSOR_UPDATE_MEASURE = "tensor's update length"  # name of a measure
PreflightPart = Literal["resume", "accumulation", "kernels", "compile", "ranks"]


class PreflightPolicy(StrictPolicy):
    """The key ``preflight`` of the same file; ``factory/training/preflight.py`` uses it."""

    parts: list[PreflightPart] = ["resume", "accumulation", "kernels", "compile", "ranks"]
    """Comparisons to make at each new commit, layout or environment. An empty list turns the preflight off."""
    steps: Count = 20
    """Steps that each way to train takes, with a small model."""
    times_rounding: Annotated[float, Field(ge=1)] = 10.0
    """The largest difference that passes, in multiples of the effect of rounding each weight once, over the same steps."""


class CertificatePolicy(StrictPolicy):
    """``policies/gates/certificate.yaml``. Every key is optional."""

    steps: Count = 20
    """Steps that each commit runs; a shorter segment is run whole."""
    seeds: Annotated[int, Field(ge=3)] = 3
    """Number of data orders that the old code runs to measure the noise. Each costs ``steps`` steps."""
    share_of_noise: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The largest difference that passes, as a share of the seed noise."""

    preflight: PreflightPolicy = PreflightPolicy()

    @classmethod
    def load(cls, path: Path) -> CertificatePolicy:
        """Raises: ConfigError naming the file and the key."""
        return load_policy(cls, path)


@dataclass(frozen=True)
class JudgedRunNumbers:
    """The numbers of one run that are judged."""

    series: dict[str, Series]  # by name, one value for each step
    moved: dict[str, float]  # ‖weights − the checkpoint's‖ by tensor
    optimizer: dict[str, float]  # norm by tensor of the optimiser's state


@dataclass(frozen=True)
class CertificateEvidence:
    """The measurements of all runs. A missing measurement is empty, and the judge names it."""

    old_commit: str
    new_commit: str
    changed: list[str]  # changed files that training reads, changed precision and kernels; empty: no runs were needed
    first_step: int = 0
    steps: int = 0
    # Both commits ran with the recipe and data plan of the segment, with those of the segment with the old code, or all of that segment's steps.
    basis: Literal["segment", "parent", "before", ""] = ""
    seeds: tuple[int, ...] = ()
    old: JudgedRunNumbers | None = None
    again: JudgedRunNumbers | None = None  # the old code a second time
    new: JudgedRunNumbers | None = None
    others: tuple[JudgedRunNumbers, ...] = ()  # the old code under ``seeds``
    apart: float = math.nan  # ‖weights new − old‖
    apart_again: float = math.nan  # ‖weights again − old‖
    apart_seeds: float = math.nan  # root mean square over pairs of seeds of ‖weights − weights‖
    old_failed: str = ""  # the last line of the old code's log, when it could not run
    new_failed: str = ""


@dataclass(frozen=True)
class RunDifference:
    """One way in which two runs differ."""

    name: str
    difference: float  # between new and old code
    noise: float  # between two seeds
    again: float  # between two runs of the old code with one seed
    where: str = ""  # step or tensor of the difference

    @property
    def multiple_of_noise(self) -> float:
        """The difference as a multiple of the noise."""
        return self.difference / self.noise if self.noise > 0 else (0.0 if self.difference == 0 else math.inf)


@dataclass(frozen=True)
class CodeJudgement:
    """The outcome of a certificate or preflight, and its reasons."""

    outcome: Literal["promote", "hold", "reject"]  # promote: the segment may start
    reasons: list[Message]
    measures: list[RunDifference]


# -- the judge ---------------------------------------------------------------------------------------------------------
def judge_certificate(policy: CertificatePolicy, evidence: CertificateEvidence) -> CodeJudgement:
    """Decide whether the segment may start. Pure. Missing evidence is ``hold``."""
    if not evidence.changed:
        why = Message(
            "training.certificate.no_change",
            "The two commits have the same files for training, so no runs were needed.",
        )
        return CodeJudgement("promote", [why], [])
    if evidence.old_failed or evidence.old is None:
        why = Message(
            "training.certificate.old_code_failed",
            "The old code could not run: {why}.",
            why=evidence.old_failed or "no run",
        )
        return CodeJudgement("hold", [why], [])
    if evidence.new_failed or evidence.new is None:
        why = Message(
            "training.certificate.new_code_failed",
            "The new code could not run: {why}.",
            why=evidence.new_failed or "no run",
        )
        return CodeJudgement("reject", [why], [])
    if len(evidence.others) < policy.seeds:
        why = Message(
            "training.certificate.too_few_seeds", "The noise was measured with {measured:,|seed|seeds}, but the policy needs {needed}.",
            measured=len(evidence.others), needed=policy.seeds,
        )  # fmt: skip
        return CodeJudgement("hold", [why], [])
    if evidence.steps < 1 or not any(value is not None for value in evidence.old.series.get("loss", [])):
        why = Message("training.certificate.no_losses", "The run of the old code wrote no loss to compare with.")
        return CodeJudgement("hold", [why], [])
    found = compute_run_differences(evidence)
    unmeasured = [m.name for m in found if math.isnan(m.noise) or m.name in ("loss", "weights") and m.noise == 0]
    if unmeasured:
        why = Message(
            "training.certificate.no_noise", "The noise between seeds could not be measured for: {measures}.",
            measures=unmeasured,
        )  # fmt: skip
        return CodeJudgement("hold", [why], found)
    outside = [m for m in found if not m.multiple_of_noise <= policy.share_of_noise]
    if outside:
        return CodeJudgement("reject", [_outside_noise(m) for m in _worst_first(outside)], found)
    facts = [_inside_noise(m) for m in _worst_first(found)]
    if all(m.difference == 0 for m in found):
        facts = [
            Message(
                "training.certificate.same_bits",
                "Old and new code gave the same bits over {steps:,|step|steps}.",
                steps=evidence.steps,
            )
        ]
    series = [name for name in SERIES if (name in evidence.old.series) != (name in evidence.new.series)]
    state = sorted(evidence.old.optimizer.keys() ^ evidence.new.optimizer.keys())
    lost = [name for name in SERIES if name in evidence.old.series and name not in evidence.new.series]
    lost += sorted(evidence.old.optimizer.keys() - evidence.new.optimizer.keys())[:3]
    if lost:
        why = Message(
            "training.certificate.measures_lost", "The new code no longer writes these values that the certificate compares: {lost}.",
            lost=lost,
        )  # fmt: skip
        return CodeJudgement("hold", [why], found)
    if series:
        facts.append(
            Message(
                "training.certificate.series_not_compared",
                "Only one of the two commits wrote these series, which were not compared: {series}.",
                series=series,
            )  # fmt: skip
        )
    if state:
        facts.append(
            Message(
                "training.certificate.state_not_compared",
                "Only one of the two commits wrote {tensors:,|tensor|tensors} of the optimiser's state, for example {first}. "
                "The certificate did not compare them.",
                tensors=len(state),
                first=state[0],
            )  # fmt: skip
        )
    return CodeJudgement("promote", facts, found)


def compute_run_differences(evidence: CertificateEvidence) -> list[RunDifference]:
    """All measured differences between the run of the new code and the run of the old code."""
    old, new, again, others = evidence.old, evidence.new, evidence.again or evidence.old, evidence.others
    assert old is not None and new is not None and again is not None
    found = []
    for name in SERIES:
        if name in new.series and name in old.series or name == "loss":
            found.append(_by_step(name, old, new, again, others, evidence.first_step))
    means = [_mean(trace.series.get("loss", []), old.series["loss"]) for trace in (old, new, again, *others)]
    found.append(_scalar("mean loss", *means))
    found.append(RunDifference("weights", evidence.apart, evidence.apart_seeds, evidence.apart_again))
    found.append(_scalar("length of the update", *(_length(trace.moved) for trace in (old, new, again, *others))))
    found.append(_by_tensor(TENSOR_UPDATE_MEASURE, *(trace.moved for trace in (old, new, again, *others))))
    kinds = sorted({name.partition(".")[0] for name in old.optimizer.keys() & new.optimizer.keys()})
    for kind in kinds:
        of = lambda trace: {n: v for n, v in trace.optimizer.items() if n.partition(".")[0] == kind}  # noqa: B023
        found.append(_by_tensor(f"optimiser's {kind}", *(of(trace) for trace in (old, new, again, *others))))
    return found


# -- one measure each --------------------------------------------------------------------------------------------------
def _by_step(
    name: str,
    old: JudgedRunNumbers,
    new: JudgedRunNumbers,
    again: JudgedRunNumbers,
    others: Sequence[JudgedRunNumbers],
    first_step: int,
) -> RunDifference:
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
    return RunDifference(
        name, max(apart, default=0.0), _least(noise, scale, name), max(reruns, default=0.0), f"step {first_step + at}"
    )


def _scalar(name: str, old: float, new: float, again: float, *others: float) -> RunDifference:
    noise = _rooted_mean([(a - b) ** 2 for a, b in itertools.combinations(others, 2)])
    return RunDifference(name, abs(new - old), max(noise, ROUNDING * abs(old)), abs(again - old))


def _by_tensor(
    name: str, old: dict[str, float], new: dict[str, float], again: dict[str, float], *others: dict[str, float]
) -> RunDifference:
    """The largest difference of any tensor, as a share of the tensor's own norm.

    The noise is pooled over the tensors, because the spread of one tensor over a few seeds can be small by chance.
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
    return RunDifference(name, apart.get(at, 0.0), noise, max(reruns, default=0.0), at)


def _apart(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    return abs(a - b)


def _mean(values: Series, like: Series) -> float:
    """The mean over the steps at which ``like`` has a value; NaN if ``values`` lacks one of them."""
    held = [value for value, other in itertools.zip_longest(values, like) if other is not None]
    return math.fsum(v for v in held if v is not None) / len(held) if held and None not in held else math.nan


def _length(parts: dict[str, float]) -> float:
    return math.sqrt(math.fsum(part * part for part in parts.values()))


def _rooted_mean(squares: Sequence[float]) -> float:
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else math.nan


def _least(noise: float, scale: float, name: str) -> float:
    """The noise, or the effect of rounding if no seed changes the value. The noise of a loss that no seed changes was not measured: it stays 0."""
    return noise if name == "loss" else max(noise, ROUNDING * scale)


# -- messages ----------------------------------------------------------------------------------------------------------
def _worst_first(found: Iterable[RunDifference]) -> list[RunDifference]:
    by_share: Callable[[RunDifference], float] = lambda m: (
        math.inf if math.isnan(m.multiple_of_noise) else m.multiple_of_noise
    )
    return sorted(found, key=by_share, reverse=True)


def _inside_noise(measure: RunDifference) -> Message:
    return Message(
        "training.certificate.inside_noise",
        "The old and new code agree within seed noise: {measure}{place} differs by {difference:.3g}. The noise is "
        "{noise:.3g}, so the difference is {share:.2g} times the noise. Two runs of the old code differ by {again:.2g}.", **_numbers(measure),
    )  # fmt: skip


def _outside_noise(measure: RunDifference) -> Message:
    return Message(
        "training.certificate.outside_noise", "The old and new code differ by more than seed noise allows: {measure}{place} differs by "
        "{difference:.3g}. The noise is {noise:.3g}, so the difference is {share:.2g} times the noise. Two runs of the old code "
        "differ by {again:.2g}.", **_numbers(measure),
    )  # fmt: skip


def _numbers(measure: RunDifference) -> dict[str, Any]:
    return {
        "measure": measure.name,
        "place": f" ({measure.where})" if measure.where and measure.difference else "",
        "difference": measure.difference,
        "noise": measure.noise,
        "share": measure.multiple_of_noise,
        "again": measure.again,
    }
