"""Checks the patch without running it: its source, its recipes, and whether its settings apply to this machine.

A patch that this gate judges may change how a step is computed, but not its result. If no run here would measure a part of the patch, the evidence is
'missing', because the gain of the other parts says nothing about that part.

A separate file, because each stage of the gate is one file.
"""

from __future__ import annotations

from factory.computing.tuned_kernels import KERNELS
from factory.gates.patch.changed_ops import (
    find_changed_sections_of_kernels_file,
    find_sections_of_other_devices,
    find_unknown_ops,
)
from factory.gates.patch.policy import PatchPolicy
from factory.gates.patch.source_rules import find_source_problems
from factory.gates.recipe_changes import RECIPES, find_unused_recipes, read_recipe_changes, select_result_changing_keys
from factory.gates.stage_interface import (
    PatchCase,
    StageResult,
    make_failed_evidence,
    make_missing_evidence,
    make_passed_evidence,
)
from factory.git.scope import FileChange
from kernels.contract.message import Message
from trainer.contract.errors import TrainerError

MOST_REASONS = 8


def run(case: PatchCase[PatchPolicy]) -> StageResult:
    found = [
        problem for change in case.changes for problem in find_source_problems(change, case.read_base_file(change.path))
    ]
    found = found or [problem for change in case.changes for problem in _settings(case, change)]
    if found:
        return StageResult(make_failed_evidence(*found[:MOST_REASONS]))
    unmeasured = find_unused_recipes(case.workspace, case.changed_paths)
    for change in case.changes:
        if change.path == KERNELS:
            unmeasured += find_sections_of_other_devices(case.read_base_file(KERNELS), change.content)
    return StageResult(
        make_missing_evidence(*unmeasured[:MOST_REASONS])
        if unmeasured
        else make_passed_evidence(Message("patch.static_passed", "The source breaks no rule."))
    )


def _settings(case: PatchCase[PatchPolicy], change: FileChange) -> list[Message]:
    """Return the problems of a changed recipe or ``kernels.yaml``."""
    base = case.read_base_file(change.path) or b""
    if change.path == KERNELS and "fallback" in find_changed_sections_of_kernels_file(base, change.content):
        return [
            Message(
                "patch.fallback",
                "{file}: only people may change 'fallback', which decides what happens when a kernel fails.",
                file=KERNELS,
            )
        ]
    if change.path == KERNELS:
        return find_unknown_ops(change.content)
    if not change.path.startswith(RECIPES):
        return []
    try:
        keys = select_result_changing_keys(read_recipe_changes(change, base.decode("utf-8", "replace")))
    except TrainerError as error:
        return [Message("patch.wrong_recipe", "{error}", error=error.message)]
    found = [
        Message(
            "patch.computes_other",
            "{path}: a change of {key} changes the result of a training step.",
            path=change.path,
            key=key,
        )
        for key in keys
    ]
    only_recipes = Message(
        "patch.only_recipes",
        "Put changes of recipes into a patch of their own: the recipe gate judges patches that change only recipes.",
    )
    return [*found, only_recipes] if found else []
