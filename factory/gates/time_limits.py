"""Time limits of a candidate's process. They are multiples of the time that approved code just took for the same work on this machine.

A fixed limit would measure how busy the machine is, not how good a patch is. So only approved code has a fixed, large limit. A process that a limit
stopped gives missing evidence, which holds a patch and does not reject it. A stopped process of a candidate runs once more, with a longer limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field

from factory.core.policy_file import StrictPolicy
from factory.gates.stage_interface import StageEvidence, make_missing_evidence
from kernels.contract.message import Message

Seconds = Annotated[float, Field(gt=0)]
Ratio = Annotated[float, Field(ge=1)]
Found = TypeVar("Found")


class TimeLimits(StrictPolicy):
    """Time limits of a process that runs a candidate's code."""

    times: Ratio = 5.0
    """The limit, as a multiple of the baseline's time for the same work."""
    least_seconds: Seconds = 300.0
    """The shortest limit. New code must be compiled first, and the baseline's code is compiled already."""
    again: Ratio = 3.0
    """A stopped process runs once more with this multiple of the limit. 1: no second attempt."""
    again_seconds: Seconds = 3600.0
    """The longest limit of the second attempt. If the first limit was longer, no second attempt follows."""

    def compute_attempt_limits(self, baseline_seconds: float) -> tuple[float, ...]:
        """Return the limits of the attempts in seconds, in order."""
        first = max(self.least_seconds, self.times * baseline_seconds)
        second = min(self.again * first, self.again_seconds)
        return (first, second) if second > first else (first,)


def run_attempts_with_limits(
    limits: Sequence[float], attempt: Callable[[int, float], Found], was_stopped: Callable[[Found], bool]
) -> Found:
    """Return the result of the first attempt that was not stopped, else of the last one. ``attempt(number from 0, limit)`` makes an attempt."""
    for number, limit in enumerate(limits):
        found = attempt(number, limit)
        if not was_stopped(found):
            break
    return found


def make_out_of_time_evidence(reason: Message, **measured: Any) -> StageEvidence:
    """Return missing evidence for a stage that a time limit ended. The daemon judges the patch again later."""
    return make_missing_evidence(reason, out_of_time=True, **measured)


def make_stopped_message(process: str, limits: Sequence[float], baseline_seconds: float, key: str) -> Message:
    """Return the reason that every attempt of the candidate's ``process`` was stopped. ``key``: the policy's section with the limits."""
    return Message(
        "gates.stopped",
        "No attempt of the candidate's {what} ended within its time limit ({limits:.0f} s). The baseline's {what} ended after {baseline:.0f} "
        "s. Either the process never ends, or the machine is too busy. Close other programs and judge the patch again, or raise {key} in "
        "policies/gates/patch.yaml.",
        what=process, limits=list(limits), baseline=baseline_seconds, key=key,
    )  # fmt: skip


def make_baseline_stopped_message(process: str, seconds: float, key: str) -> Message:
    """Return the reason that a limit stopped a ``process`` of approved code. ``key``: the policy's key with the limit."""
    return Message(
        "gates.baseline_stopped",
        "The baseline's {what} did not end within {seconds:.0f} s, so the patch was not judged. Close other programs and judge the patch "
        "again, or raise {key} in policies/gates/patch.yaml.",
        what=process, seconds=seconds, key=key,
    )  # fmt: skip
