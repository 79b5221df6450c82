"""The kernel engineer in the plant: a line profile to work from, a target for each run, and its role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agents.core.workbench import Workbench
from agents.kernel_engineer.role import KernelEngineer
from agents.kernel_engineer.targets import targets, worthwhile
from factory.code_loop.agent_runs import Desk, Job
from factory.code_loop.profiling import QUICK, profile, read_profile
from factory.ledger.ledger import Ledger


def take_up(desk: Desk, bench: Workbench, base: str, count: int = 1) -> list[Job]:
    """Go on with this target's run on this commit, or profile and begin one. More than one: a target each, the most promising.

    Raises: ProfileError.
    """
    jobs = desk.running(base, count)
    if len(jobs) < count:
        number = profile(desk.workspace, desk.ledger, desk.progress, QUICK)
        aims = [desk.hire.target]
        if count > 1:
            found = targets(_read(desk.ledger, number), set(bench.files(patchable=True)))
            names = [target.name for target in worthwhile(found, bench.history)]
            # A run that chose for itself took the first.
            taken = {job.hire.target or next(iter(names), "") for job in jobs}
            aims = [name for name in names if name not in taken] or ([] if jobs else aims)
        jobs += [desk.begin(base, asked, number) for asked in aims[: count - len(jobs)]]
    return jobs


def role(ledger: Ledger, job: Job, bench: Workbench) -> KernelEngineer:
    """Raises: ProfileError when the profile cannot be read any more."""
    return KernelEngineer(_read(ledger, job.profile), bench, job.hire.target)


def _read(ledger: Ledger, number: int) -> dict[str, Any]:
    return read_profile(Path(ledger.read("SELECT path FROM profiles WHERE id = :id", id=number)[0]["path"]))
