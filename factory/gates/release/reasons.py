"""The reasons of the release judge. A reason has a message, whose code later versions keep, and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kernels.contract.message import Message


@dataclass(frozen=True)
class Reason:
    """``message`` says what is wrong. ``remedy`` says what to do, with commands; None: this reason has no remedy of its own."""

    message: Message
    remedy: Message | None = None

    @property
    def code(self) -> str:
        return self.message.code


def make_reason(code: str, template: str, /, remedy: Message | None = None, **data: Any) -> Reason:
    """Return a reason with a message of this code, template and data."""
    return Reason(Message(code, template, **data), remedy)


OVERRIDABLE_CODES = frozenset(
    {
        "release.few_documents", "release.target_few_groups", "release.guard_few_groups", "release.not_better", "release.guard_not_shown",
        "release.guard_loss_measured", "release.noise_floor", "release.task_not_shown",
    }
)  # fmt: skip
"""Codes of the reasons to hold that a person may override ('factory releases override'): the measurements are too few to be sure. All other reasons
are about failed checks, licences, anomalies, memorised documents, or missing evidence."""

TO_DO_CODES = frozenset({"release.to_do", "release.override"})
"""Codes of the lines that tell a person what to do about a hold."""


def are_reasons_overridable(reasons: Sequence[Reason]) -> bool:
    """True if a person may release a candidate that is held for these reasons."""
    return bool(reasons) and all(reason.code in OVERRIDABLE_CODES for reason in reasons)


def make_to_do_lines(reasons: Sequence[Reason], candidate: int | None) -> list[Message]:
    """Return lines that say what a person can do about a hold, one for each remedy. The override is the last line, if it is allowed.

    >>> train = Message("release.remedy_train_on", "train on.")
    >>> make_to_do_lines([make_reason("release.not_better", "Not shown.", train), make_reason("release.guard_not_shown", "Not shown.", train)], 3)
    ['To do: train on.', 'Or: release the candidate anyway, under your name: \\'factory releases override 3 --reason "…"\\'.']
    """
    number = "N" if candidate is None else candidate
    remedies = dict.fromkeys(reason.remedy for reason in reasons if reason.remedy)
    if not remedies or any(not reason.remedy and reason.code not in OVERRIDABLE_CODES for reason in reasons):
        evaluate = Message(
            "release.remedy_evaluate",
            "make the missing measurements: 'factory evaluate {candidate}'.",
            candidate=number,
        )
        remedies[evaluate] = None
    lines = [Message("release.to_do", "To do: {remedy}", remedy=remedy) for remedy in remedies]
    if are_reasons_overridable(reasons):
        lines.append(
            Message(
                "release.override",
                "Or: release the candidate anyway, under your name: 'factory releases override {candidate} --reason \"…\"'.",
                candidate=number,
            )
        )
    return lines


def is_to_do_line(text: str) -> bool:
    """True if a recorded reason tells a person what to do. Reasons that older versions recorded have no code, so their first words decide."""
    code = getattr(text, "code", "")
    return code in TO_DO_CODES or (not code and text.startswith(("To do: ", "Or: ")))
