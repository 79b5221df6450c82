"""Anomalies that belong together: one cause shows as a spike here, a jump of the norm there, and again some steps later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agents.loss_doctor.curves import StepPoint, onset

GAP = 8  # steps without an anomaly end an episode
MOST_STEPS = 12  # of an episode that are replayed
TELLING = ("non_finite", "loss_spike", "loss_low", "divergence", "grad_norm_jump", "skipped_outlier", "plateau")


@dataclass(frozen=True)
class EpisodeSpan:
    """``kind``: of its anomalies the one that tells most; steps [onset, last], both included."""

    kind: str
    onset: int
    last: int
    anomalies: tuple[int, ...]  # their numbers


def spans(anomalies: Sequence[tuple[int, int, str]], lines: Sequence[StepPoint]) -> list[EpisodeSpan]:
    """The episodes of a segment's anomalies, given as (number, step, kind), oldest first. What is not about the loss is left out.

    >>> [(s.kind, s.onset, s.last) for s in spans([(1, 50, "grad_norm_jump"), (2, 51, "loss_spike"), (3, 90, "plateau")], [])]
    [('loss_spike', 50, 51), ('plateau', 90, 90)]
    """
    found: list[list[tuple[int, int, str]]] = []
    for anomaly in sorted((a for a in anomalies if a[2] in TELLING), key=lambda a: (a[1], a[0])):
        if found and anomaly[1] - found[-1][-1][1] <= GAP:
            found[-1].append(anomaly)
        else:
            found.append([anomaly])
    made = []
    for group in found:
        first = onset(lines, group[0][1])
        last = (
            max(step for _, step, _ in group if step < first + MOST_STEPS)
            if group[0][1] < first + MOST_STEPS
            else group[0][1]
        )
        kind = min((kind for _, step, kind in group if step <= last), key=TELLING.index)
        made.append(EpisodeSpan(kind, first, last, tuple(number for number, _, _ in group)))
    return made
