"""The recipe gate judges changes of recipes that change what the model learns. Its stages are scope, static, and runs (paired, with an anneal).

A patch belongs to this gate if it changes only recipes, and changes more than how a step is computed. The patch gate would refuse such a patch,
because there the weights must stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from factory.core.workspace import Workspace
from factory.gates.patch.stages import scope
from factory.gates.recipe import runs, static
from factory.gates.recipe.judge import RecipeComparison, compare_recipes, judge_recipe
from factory.gates.recipe.policy import RecipePolicy
from factory.gates.recipe_changes import RECIPES, Changes, read_recipe_changes, select_result_changing_keys
from factory.gates.stage_interface import Stage
from factory.gates.staged_gate import StagedGate
from factory.git import repository
from factory.git.repository import AppliedPatch
from factory.ledger.ledger import verdicts
from factory.ledger.plant import Plant
from trainer.contract.errors import TrainerError

GATE = "recipe"
STAGES: tuple[Stage, ...] = (scope, static, runs)


def is_recipe_patch(workspace: Workspace, applied: AppliedPatch) -> bool:
    """True if this gate judges the patch: the patch changes only recipes, they stay valid, and one of them changes what the model learns."""
    try:
        return any(select_result_changing_keys(changes) for changes in _changes(workspace, applied))
    except TrainerError:
        return False  # not a recipe: the patch gate names the problem


def make_recipe_gate(workspace: Workspace) -> StagedGate[RecipePolicy]:
    """Make the recipe gate with the workspace's policy. Raises: ConfigError."""
    return StagedGate(GATE, RecipePolicy.load(workspace.policy_path("gates/recipe.yaml")), STAGES, judge_recipe, _gain)


def _gain(policy: RecipePolicy, stages: Mapping[str, Any], tries: int) -> RecipeComparison | None:
    return compare_recipes(policy.runs, stages.get("runs", {}), tries)


def _changes(workspace: Workspace, applied: AppliedPatch) -> list[Changes]:
    """Return the changes of each recipe; [] if the patch changes any other file. Raises: TrainerError."""
    repo = workspace.repository
    changes = repository.read_file_changes(repo, applied.base, applied.commit)
    if not all(change.path.startswith(RECIPES) for change in changes):
        return []
    old = [repository.read_file_text(repo, applied.base, c.path) if c.old_mode is not None else "" for c in changes]
    return [read_recipe_changes(change, text) for change, text in zip(changes, old, strict=True)]


def count_tries_of_same_keys(plant: Plant, applied: AppliedPatch) -> int:
    """Return the number of verdicts on patches that change any of the same keys, whoever proposed them and for whatever target."""
    keys = {key for changes in _changes(plant.workspace, applied) for key in changes}
    rows = plant.ledger.select_rows(sa.select(verdicts.c.evidence).where(verdicts.c.gate == GATE))
    return sum(bool(keys & set(_changed_keys(row["evidence"]))) for row in rows)


def _changed_keys(evidence: dict[str, Any]) -> list[str]:
    return list(((evidence.get("stages") or {}).get("static") or {}).get("changes") or ())
