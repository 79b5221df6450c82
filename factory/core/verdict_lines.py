"""Cuts a verdict to the few lines that a person reads. The report has all reasons, with the numbers behind them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from agents.core.untrusted import fold_to_one_line
from kernels.contract.message import Message

MOST_LINES = 5
WIDTH = 110  # characters of a line; indents come on top
LONGEST_REASON = 1000  # characters
FURTHER = "│ "  # begins a further line of a reason


def format_verdict_lines(outcome: str, reasons: Sequence[str], proposal: int, report: str | None = None) -> list[str]:
    """Return the verdict on a proposal as at most ``MOST_LINES`` lines: first the outcome, then the reasons in their order, the most important first.

    A long reason is wrapped, and each further line of it begins with a mark, so that quoted text cannot look like a line of its own. What does not
    fit is left out, and the last line says where it is: in ``report``, or in the output of a command if no report was written yet. A reason may quote
    a patch, so it is made harmless (``fold_to_one_line``).

    >>> format_verdict_lines("HOLD", ["The machine was busy."], 3)
    ['HOLD', 'The machine was busy.']
    >>> len(format_verdict_lines("HOLD", [f"reason {number}" for number in range(9)], 3))
    5
    """
    texts = [
        line
        for reason in reasons
        for line in textwrap.wrap(fold_to_one_line(reason, LONGEST_REASON), WIDTH, subsequent_indent=FURTHER)
    ]
    if len(texts) < MOST_LINES:
        return [outcome, *texts]
    by_command = Message("verdict_lines.command", "factory proposals show {proposal} --json", proposal=proposal)
    more = Message("verdict_lines.more", "… all reasons and numbers: {report}", report=report or by_command)
    return [outcome, *texts[: MOST_LINES - 2], more]
