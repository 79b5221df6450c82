"""Is the changed recipe valid, and does it change only keys that may be tried? 'missing' where no run here could tell.

Apart because each stage of the gate is one file.
"""

from __future__ import annotations

import math

from factory.core.errors import ConfigError
from factory.core.launching import check_ranks
from factory.gates.case import PatchCase, StageResult, failed, missing, passed
from factory.gates.patch.source_rules import problems
from factory.gates.recipe.policy import RecipePolicy
from factory.gates.recipe_changes import Changes, recipe_changes, unused_recipes
from trainer.contract.recipe import Recipe

MOST_REASONS = 8
# Keys that act on the first steps of a trunk only: (key, step of the recipe from which on it changes nothing).
EARLY = {"schedule.warmup_steps": lambda recipe: recipe.schedule.warmup_steps}


def run(case: PatchCase[RecipePolicy]) -> StageResult:
    """Passes the changed keys to the runs stage."""
    if found := [p for change in case.changes for p in problems(change, case.base_bytes(change.path))]:
        return StageResult(failed(*found[:MOST_REASONS]))
    if unmeasured := unused_recipes(case.workspace, case.paths):
        return StageResult(missing(*unmeasured))
    (change,) = case.changes
    changes = recipe_changes(change, (case.base_bytes(change.path) or b"").decode())
    new = Recipe.load(case.candidate / change.path)
    found = [f"{key} may not be changed in this way: see 'changes' in policies/gates/recipe.yaml"
             for key in changes if not case.policy.allows(key)]  # fmt: skip
    found += [f"{key} is not finite" for key, (_, value) in changes.items() if value in (math.inf, -math.inf)]
    found += _without_effect(case, changes, new)
    found = [f"{change.path}: {problem}" for problem in found]
    try:
        check_ranks(case.workspace, new)  # a batch that ranks can share fits the one of the runs, too
    except ConfigError as error:
        found.append(str(error))
    if found:
        return StageResult(failed(*found[:MOST_REASONS]))
    reasons = [f"{key}: {old} → {value}" for key, (old, value) in changes.items()]
    evidence = passed(*reasons, changes={key: list(values) for key, values in changes.items()})
    return StageResult(evidence, changes)


def _without_effect(case: PatchCase[RecipePolicy], changes: Changes, new: Recipe) -> list[str]:
    """Keys that act only on steps that the trunk has made already, under both recipes."""
    step = case.start.step if case.start else 0
    sides = (Recipe.load(case.baseline / case.paths[0]), new)
    past = [key for key in changes if key in EARLY and all(step >= EARLY[key](recipe) for recipe in sides)]
    return [f"{key} has no effect on the steps to come: the trunk is at step {step}" for key in past]
