"""The kernel engineer at work in a workspace: a line profile, a target for each run, and its role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agents.core.workbench import Workbench
from agents.kernel_engineer.role import KernelEngineer
from agents.kernel_engineer.targets import targets, worthwhile
from factory.code_loop.agent_runs import AgentRun, AgentRuns
from factory.code_loop.profiling import QUICK, profile, read_profile
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant


def runs_to_work_on(runs: AgentRuns, bench: Workbench, base: str, count: int) -> list[AgentRun]:
    """Continue this target's run on this commit, or profile and begin one. ``count`` above 1: a target each, the most promising.

    Raises: ProfileError.
    """
    found = runs.unfinished(base, count)
    if len(found) < count:
        number = profile(Plant(runs.workspace, runs.ledger, runs.progress), QUICK)
        aims = [runs.options.target]
        if count > 1:
            promising = targets(_read(runs.ledger, number), set(bench.files(patchable=True)))
            names = [target.name for target in worthwhile(promising, bench.history)]
            # A run without a target chose the first.
            taken = {run.target or next(iter(names), "") for run in found}
            aims = [name for name in names if name not in taken] or ([] if found else aims)
        found += [runs.begin(base, target, number) for target in aims[: count - len(found)]]
    return found


def role(ledger: Ledger, run: AgentRun, bench: Workbench) -> KernelEngineer:
    """Raises: ProfileError when the profile cannot be read any more."""
    return KernelEngineer(_read(ledger, run.profile), bench, run.target)


def _read(ledger: Ledger, number: int) -> dict[str, Any]:
    return read_profile(Path(ledger.read("SELECT path FROM profiles WHERE id = :id", id=number)[0]["path"]))
