"""Anomalies that belong together: one cause shows as a spike here, a jump of the norm there, and again some steps later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agents.loss_doctor.curves import KINDS, StepPoint, onset

GAP = 8  # steps without an anomaly end an episode
LONGEST = 32  # steps of an episode, whatever comes after them
MOST_STEPS = 6  # of an episode, from its onset on, that are replayed; what follows is another diagnosis
NEAR = 6  # steps before the doctor's own onset of something sudden that the trainer's may lie: its search is early by up to 16
SLOW = (
    "divergence",
    "activation_jump",
    "attention_logits",
    "update_jump",
)  # begin long before they are noticed: the trainer's counts
REACH = 128  # steps before an anomaly that its onset, as the trainer has it, may lie


@dataclass(frozen=True)
class Noted:
    """An anomaly as the trainer noted it. ``began``: its own search for the onset; ``where``: domain/<name> or layer/<name>."""

    number: int
    step: int
    kind: str
    began: int | None = None
    where: str = ""

    @classmethod
    def of(cls, number: int, step: int, kind: str, detail: Mapping[str, Any] | None) -> Noted:
        """``detail``: its line of anomalies.jsonl, which patchable code wrote: what is no onset before the step is left out."""
        began, where = (detail or {}).get("onset"), (detail or {}).get("where", "")
        possible = type(began) is int and step - REACH <= began <= step
        return cls(number, step, kind, began if possible else None, where if isinstance(where, str) else "")


@dataclass(frozen=True)
class EpisodeSpan:
    """``kind``: of its anomalies the one that tells most, and ``where`` it was; steps [onset, last], both included, are replayed; ``noted``:
    the first and the last step with an anomaly."""

    kind: str
    onset: int
    last: int
    anomalies: tuple[int, ...]  # their numbers
    where: str = ""
    noted: tuple[int, int] = (0, 0)


def spans(anomalies: Sequence[Noted], lines: Sequence[StepPoint], begins: int = 0) -> list[EpisodeSpan]:
    """The episodes of a segment's anomalies, oldest first. What is not about the loss, the gradient or a layer is left out.

    What tells most in an episode says where it is. It begins where the doctor's own search says, or earlier, where the trainer's does and
    it is not far off; never before step ``begins``.

    >>> noted = [Noted(1, 50, "grad_norm_jump", 48), Noted(2, 51, "loss_spike"), Noted(3, 90, "plateau"), Noted(4, 200, "divergence", 150)]
    >>> [(s.kind, s.onset, s.last) for s in spans(noted, [])]
    [('loss_spike', 48, 51), ('plateau', 90, 90), ('divergence', 150, 200)]
    >>> [s.noted for s in spans([Noted(n, 8 * n, "loss_spike") for n in range(1, 9)], [])]  # a chain is cut
    [(8, 32), (40, 64)]
    """
    found: list[list[Noted]] = []
    for anomaly in sorted((a for a in anomalies if a.kind in KINDS), key=lambda a: (a.step, a.number)):
        near = found and anomaly.step - found[-1][-1].step <= GAP
        if near and anomaly.step - found[-1][0].step < LONGEST:
            found[-1].append(anomaly)
        else:
            found.append([anomaly])
    made: list[EpisodeSpan] = []
    for group in found:
        lead = min(group, key=lambda a: KINDS.index(a.kind))
        least = made[-1].last + 1 if made else begins
        first = own = onset(lines, lead.step)
        for anomaly in (a for a in group if own - NEAR <= a.step <= lead.step and a.kind != "plateau"):
            tells = anomaly.began is not None and (anomaly.kind in SLOW or anomaly.began >= own - NEAR)
            first = min(first, anomaly.began if tells and anomaly.began is not None else anomaly.step)
        first = min(lead.step, max(first, least))
        last = max(a.step for a in group if a.step < max(lead.step + 1, first + MOST_STEPS))
        noted = (group[0].step, group[-1].step)
        made.append(EpisodeSpan(lead.kind, first, last, tuple(a.number for a in group), lead.where, noted))
    return made
