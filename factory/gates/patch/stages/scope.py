"""Checks by the rules of ``factory.git.scope`` that the patch may change these files, and that their names and contents are allowed."""

from __future__ import annotations

from typing import Any

from factory.gates.stage_interface import PatchCase, StageResult, make_failed_evidence, make_passed_evidence
from factory.git import repository
from factory.git.scope import find_scope_problems
from kernels.contract.message import Message


def run(case: PatchCase[Any]) -> StageResult:
    modes = repository.read_file_modes(case.workspace.repository, case.applied.base)
    if found := find_scope_problems(case.agents, case.changes, modes):
        outside = [
            Message("scope.outside", "The patch is out of scope: {problem}", problem=problem) for problem in found
        ]
        return StageResult(make_failed_evidence(*outside))
    inside = Message("scope.inside", "All changed files are in scope ({files:|file|files}).", files=len(case.changes))
    return StageResult(make_passed_evidence(inside))
