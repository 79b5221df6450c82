"""N real training steps, baseline and candidate: do they leave the same weights, and does the whole step take less time?"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from factory.gates.case import NO_START, PatchCase, StageResult
from factory.gates.patch.policy import PatchPolicy
from factory.gates.patch.training import Side, compare_training
from factory.gates.recipe_changes import used_recipe
from factory.gates.training_start import Start
from trainer.contract.recipe import Recipe

DRAWN = 5  # the number of steps is the policy's and up to one in so many more


def run(case: PatchCase[PatchPolicy]) -> StageResult:
    """Passes to the evals stage the pair of runs whose weights differ most."""
    if case.start is None:
        return StageResult(NO_START)
    baseline, candidate = (
        Side(code, commit, recipe_for(case, case.start, code), case.work / name)
        for name, code, commit in (
            ("baseline", case.baseline, case.applied.base),
            ("candidate", case.candidate, case.applied.commit),
        )
    )
    new_code = any(path.endswith(".py") for path in case.paths)
    policy = case.policy.training
    steps = policy.steps + secrets.randbelow(
        1 + policy.steps // DRAWN
    )  # a fixed number would tell a run that it is judged
    policy = policy.model_copy(update={"steps": steps})
    return StageResult(
        *compare_training(policy, case.start, baseline, candidate, case.workspace, case.progress, new_code, case.tries)
    )


def recipe_for(case: PatchCase[PatchPolicy], start: Start, code: Path) -> dict[str, Any]:
    """The trunk's recipe with the gate's batch; where the patch changes how the recipe's step is computed, as ``code`` has it.

    The trunk may be older than a change that was merged since, whose gain must not be credited to this patch.
    """
    recipe = dict(start.recipe)
    batch = dict(recipe["batch"])
    if case.policy.training.sequences:
        batch |= {"sequences": case.policy.training.sequences, "micro_sequences": None}
    changed = used_recipe(case.workspace)
    if changed in case.paths:
        own = Recipe.load(code / changed).model_dump()
        recipe["compile"] = own["compile"]
        micro = own["batch"]["micro_sequences"]
        batch["micro_sequences"] = micro if micro and batch["sequences"] % micro == 0 else None
    # The noise scale splits a step, whose new shapes would be compiled within one of the few steps that are timed.
    return recipe | {"batch": batch, "stability": recipe["stability"] | {"noise_scale_every": 0}}
