"""May the patch touch these files, with this content? The rules are ``factory.git.scope``'s."""

from __future__ import annotations

from typing import Any

from factory.gates.case import PatchCase, StageResult, failed, passed
from factory.git import repository
from factory.git.scope import problems


def run(case: PatchCase[Any]) -> StageResult:
    modes = repository.modes(case.workspace.repository, case.applied.base)
    if found := problems(case.agents, case.changes, modes):
        return StageResult(failed(*(f"out of scope: {problem}" for problem in found)))
    return StageResult(passed(f"{len(case.changes)} files, all in scope"))
