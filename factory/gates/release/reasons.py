"""A reason of the release judge as data: a stable code, the sentence that says it, and what a person can do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """``code``: its kind, which later versions keep; ``text``: a sentence; ``remedy``: what to do, with commands; '': nothing is to be done."""

    code: str
    text: str
    remedy: str = ""


NOTHING_SHOWN = frozenset(
    {
        "few_documents", "few_groups", "not_better", "guard_not_shown", "noise_floor", "task_not_shown",
    }
)  # fmt: skip
"""Reasons to hold that say that too little was measured to be sure. A person may release all the same (``factory releases override``). All others
speak of parity, contamination or smoke, of licences, of an anomaly, of held-out documents that it may have seen, or of what nobody looked up."""

TO_DO, OR = "To do: ", "Or: "


def may_be_overridden(held_by: Sequence[Reason]) -> bool:
    """May a person release what is held for these reasons?"""
    return bool(held_by) and all(reason.code in NOTHING_SHOWN for reason in held_by)


def to_do(held_by: Sequence[Reason], candidate: int | None) -> list[str]:
    """What a person can do about a hold, a sentence each; a person's own decision last, where it is one.

    >>> to_do([Reason("not_better", "Not shown.", "Train on."), Reason("guard_not_shown", "Not shown.", "Train on.")], 3)
    ['To do: Train on.', 'Or: release it all the same, under your name: \\'factory releases override 3 --reason "…"\\'.']
    """
    number = "N" if candidate is None else candidate
    remedies = dict.fromkeys(reason.remedy for reason in held_by if reason.remedy)
    lines = [f"{TO_DO}{remedy}" for remedy in remedies]
    if not lines or any(not reason.remedy and reason.code not in NOTHING_SHOWN for reason in held_by):
        lines.append(f"{TO_DO}'factory evaluate {number}' measures what is missing.")
    if may_be_overridden(held_by):
        lines.append(
            f"{OR}release it all the same, under your name: 'factory releases override {number} --reason \"…\"'."
        )
    return lines
