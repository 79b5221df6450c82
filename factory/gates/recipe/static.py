"""Checks that the changed recipe is valid and that only allowed keys change. The evidence is 'missing' if no run here could measure the change.

A separate file, because each stage of the gate is one file.
"""

from __future__ import annotations

import math

from factory.core.errors import ConfigError
from factory.core.launching import check_ranks_fit
from factory.gates.patch.source_rules import find_source_problems
from factory.gates.recipe.policy import RecipePolicy
from factory.gates.recipe_changes import Changes, find_unused_recipes, read_recipe_changes
from factory.gates.stage_interface import (
    PatchCase,
    StageResult,
    make_failed_evidence,
    make_missing_evidence,
    make_passed_evidence,
)
from kernels.contract.message import Message
from trainer.contract.recipe import Recipe

MOST_REASONS = 8
# Keys that act only on the first steps of a trunk: key → function from the recipe to the step from which the key has no effect.
EARLY_KEYS = {"schedule.warmup_steps": lambda recipe: recipe.schedule.warmup_steps}


def run(case: PatchCase[RecipePolicy]) -> StageResult:
    """Return the result. It hands the changed keys to the runs stage."""
    if found := [p for change in case.changes for p in find_source_problems(change, case.read_base_file(change.path))]:
        return StageResult(make_failed_evidence(*found[:MOST_REASONS]))
    if unmeasured := find_unused_recipes(case.workspace, case.changed_paths):
        return StageResult(make_missing_evidence(*unmeasured))
    (change,) = case.changes
    changes = read_recipe_changes(change, (case.read_base_file(change.path) or b"").decode())
    new = Recipe.load(case.candidate / change.path)
    wrong = [
        Message(
            "recipe.not_allowed",
            "the recipe gate does not allow a change of {key} (see 'changes' in policies/gates/recipe.yaml)",
            key=key,
        )
        for key in changes
        if not case.policy.allows_change_of_key(key)
    ]
    wrong += [
        Message("recipe.not_finite", "{key} is not finite", key=key)
        for key, (_, value) in changes.items()
        if value in (math.inf, -math.inf)
    ]
    wrong += _without_effect(case, changes, new)
    found = [Message("recipe.wrong", "{path}: {problem}", path=change.path, problem=problem) for problem in wrong]
    try:
        check_ranks_fit(case.workspace, new)  # a batch that ranks can share also fits the single rank of the runs
    except ConfigError as error:
        found.append(Message("recipe.ranks", "{error}", error=error.message))
    if found:
        return StageResult(make_failed_evidence(*found[:MOST_REASONS]))
    reasons = [
        Message("recipe.change", "{key}: {old} → {new}", key=key, old=old, new=value)
        for key, (old, value) in changes.items()
    ]
    evidence = make_passed_evidence(*reasons, changes={key: list(values) for key, values in changes.items()})
    return StageResult(evidence, changes)


def _without_effect(case: PatchCase[RecipePolicy], changes: Changes, new: Recipe) -> list[Message]:
    """Return a message for each key that, in both recipes, acts only on steps that the trunk has already made."""
    step = case.start.step if case.start else 0
    sides = (Recipe.load(case.baseline / case.changed_paths[0]), new)
    past = [key for key in changes if key in EARLY_KEYS and all(step >= EARLY_KEYS[key](recipe) for recipe in sides)]
    return [
        Message(
            "recipe.no_effect",
            "{key} acts only on earlier steps: the trunk is already at step {step}",
            key=key,
            step=step,
        )
        for key in past
    ]
