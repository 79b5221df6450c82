"""How the doctor did: a run's outcome, the numbers that the aims are about, and the report with its confusion matrix."""

from __future__ import annotations

import functools
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agents.loss_doctor.causes import HEALTHY
from benchmarks.loss_doctor.faults import ELSEWHERE, FAULTS


@dataclass(frozen=True)
class Tried:
    """How the doctor did on one fault; ``causes`` is empty where there was no anomaly."""

    fault: str
    seed: int
    causes: tuple[str, ...] = ()
    kind: str = ""
    steps: int = 0  # replayed
    window_steps: int = 0
    guilty: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()  # documents in the window that are bad
    seconds: float = 0.0
    why: str = ""
    arms: tuple[tuple[str, bool | None, str], ...] = ()
    commit: str = ""
    episodes: int = 0  # of anomalies

    @classmethod
    def of_json(cls, stored: Mapping[str, Any]) -> Tried:
        lists = {key: tuple(stored[key]) for key in ("causes", "guilty", "bad")}
        return cls(**{**stored, **lists, "arms": tuple((a, f, w) for a, f, w in stored["arms"])})

    @property
    def named(self) -> str:
        return " | ".join(self.causes) or "no anomaly"

    @property
    def expected(self) -> tuple[tuple[str, ...], ...]:
        return next(fault.causes for fault in FAULTS if fault.name == self.fault)

    @property
    def healthy(self) -> bool:
        return not self.expected

    @property
    def right(self) -> bool:
        """Of a healthy run: no anomaly, or one that was closed as healthy without a person."""
        return self.causes in (self.expected or ((), *HEALTHY))

    @property
    def wrongly_quarantined(self) -> set[str]:
        return {key for key in self.guilty if not key.startswith("bad-")}


@functools.cache  # of the code that was imported
def commit() -> str:
    """Of this checkout, '' where there is none."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def summary(every: list[Tried]) -> dict[str, Any]:
    """The numbers that the aims are about."""
    faulty, healthy = [t for t in every if not t.healthy], [t for t in every if t.healthy]
    costs = sorted(t.steps / t.window_steps for t in faulty if t.causes)
    return {
        "right": sum(t.right for t in faulty),
        "faults": len(faulty),
        "abstained": sum(t.causes == ("unknown",) for t in faulty),
        "not_noticed": sum(not t.causes for t in faulty),
        "wrongly_quarantined": sum(len(t.wrongly_quarantined) for t in every),
        "bad_named": sum(len(set(t.guilty) & set(t.bad)) for t in every if t.expected == (("bad data",),)),
        "bad_in_window": sum(len(t.bad) for t in every if t.expected == (("bad data",),)),
        "alarms": sum(not t.right for t in healthy),
        "healthy": len(healthy),
        "closed": sum(t.right and bool(t.causes) for t in healthy),
        "median_cost": costs[len(costs) // 2] if costs else None,
    }


def report(every: list[Tried], arms: bool) -> list[str]:
    """The table of runs, the confusion matrix, and the aims."""
    lines = [
        f"{'fault':<50}{'seed':>4}  {'anomaly':<24}{'named':<40}{'right':<7}{'steps':>6}{'× window':>9}{'s':>7}  documents"
    ]
    for tried in every:
        cost = f"{tried.steps / tried.window_steps:.1f}" if tried.causes else ""
        exact = ""
        if tried.guilty or (tried.bad and tried.causes):
            exact = f"{len(set(tried.guilty) & set(tried.bad))} of {len(tried.bad)} bad named, {len(tried.wrongly_quarantined)} wrong"
        right = "yes" if tried.right else "NO"
        lines.append(
            f"{tried.fault:<50}{tried.seed:>4}  {tried.kind:<24}{tried.named:<40}{right:<7}{tried.steps:>6}{cost:>9}{tried.seconds:>7.1f}  {exact}"
        )
        if arms and tried.causes:
            lines += [
                f"      {arm:<40}{ {True: 'there', False: 'gone', None: 'unclear'}[fires] } {failed}"
                for arm, fires, failed in tried.arms
            ]
            lines.append(f"      {tried.why}")
    confusion = Counter((" / ".join(" | ".join(c) for c in t.expected) or "healthy", t.named) for t in every)
    lines += ["", "confusion matrix: true cause → named, how often"]
    lines += [f"  {true:<50} → {named:<42} {count}" for (true, named), count in sorted(confusion.items())]
    told = summary(every)
    return [
        *lines,
        "",
        f"right cause: {told['right']} of {told['faults']}; abstained: {told['abstained']}; not noticed: {told['not_noticed']}",
        f"bad documents named: {told['bad_named']} of {told['bad_in_window']} in the windows; wrongly quarantined: {told['wrongly_quarantined']}",
        f"healthy runs with an alarm: {told['alarms']} of {told['healthy']}; with an anomaly that was closed as healthy: {told['closed']}",
        f"median cost: {told['median_cost']:.1f} × the window's own steps" if told["median_cost"] else "no diagnosis",
        "",
        "never in the loss of one small run, so not tried here:",
        *(f"  {fault:<50} {found}" for fault, found in ELSEWHERE),
    ]
