"""How long a candidate's process may take: by what approved code took for the same, on this machine, just before.

A fixed number of seconds would measure how busy the machine is, and not how good a patch is. So only approved code has one, a large one;
and what a limit stopped is missing evidence, which holds a patch back and does not reject it. A candidate that was stopped is tried
once more, with a longer limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field

from factory.core.policy_file import StrictPolicy
from factory.gates.case import StageEvidence, missing

Seconds = Annotated[float, Field(gt=0)]
Ratio = Annotated[float, Field(ge=1)]
Found = TypeVar("Found")


class Patience(StrictPolicy):
    """Time limits of a process that runs a candidate's code."""

    times: Ratio = 5.0
    """It may take this many times as long as the baseline took for the same."""
    least_seconds: Seconds = 300.0
    """It may always take this long: new code must be compiled first, the baseline's is compiled already."""
    again: Ratio = 3.0
    """One that was stopped is tried once more, with a limit this many times as long; 1: it is not tried again."""
    again_seconds: Seconds = 3600.0
    """The longest limit of that second attempt, which is left out where the first's was longer."""

    def limits(self, baseline_seconds: float) -> tuple[float, ...]:
        """Of each attempt, in order."""
        first = max(self.least_seconds, self.times * baseline_seconds)
        second = min(self.again * first, self.again_seconds)
        return (first, second) if second > first else (first,)


def patiently(
    limits: Sequence[float], attempt: Callable[[int, float], Found], out_of_time: Callable[[Found], bool]
) -> Found:
    """The result of the first attempt that was not stopped, else of the last. ``attempt`` takes its number, from 0, and its limit."""
    for number, limit in enumerate(limits):
        found = attempt(number, limit)
        if not out_of_time(found):
            break
    return found


def out_of_time(reason: str, **measured: Any) -> StageEvidence:
    """Evidence of a stage that a time limit ended: it is missing, and the patch is judged again later."""
    return missing(reason, out_of_time=True, **measured)


def missing_alone(evidence: Mapping[str, Any]) -> Mapping[str, Any]:
    """The stage whose missing evidence alone held a patch back; empty where another stage has a say. ``evidence``: of its verdict."""
    stages = evidence.get("stages") or {}
    found = [stage for stage in stages.values() if stage["state"] not in ("passed", "not needed")]
    return found[0] if len(found) == 1 and found[0]["state"] == "missing" else {}


def ran_out(evidence: Mapping[str, Any]) -> bool:
    """Was a patch held back by a time limit alone? ``evidence``: of its verdict."""
    return missing_alone(evidence).get("out_of_time") is True


def stopped(who: str, limits: Sequence[float], baseline_seconds: float, key: str) -> str:
    """A reason: ``who`` was stopped at each limit; ``key``: the policy's section that has the limits."""
    each = ", then ".join(f"{limit:.0f} s" for limit in limits)
    return (
        f"{who} did not end within its time limit ({each}; the baseline took {baseline_seconds:.0f} s for the same): either it never "
        f"ends, or the machine is too busy; close other programs and have it judged again, or raise {key} in policies/gates/patch.yaml"
    )


def baseline_stopped(what: str, seconds: float, key: str) -> str:
    """A reason: approved code itself ran out of time."""
    return (
        f"{what} did not end within {seconds:.0f} s with approved code, which says nothing about the patch: close other "
        f"programs and have it judged again, or raise {key} in policies/gates/patch.yaml"
    )
