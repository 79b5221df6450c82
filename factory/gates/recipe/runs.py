"""Paired runs of the recipe as it is and as proposed, with an anneal tail; the weights are scored on held-out documents."""

from __future__ import annotations

import shutil
from typing import Any

from factory.core import devices
from factory.gates.case import NO_START, NOTHING_HELD_OUT, PatchCase, StageResult, failed, missing, passed
from factory.gates.patch.held_out import held_out_texts, weights_bits
from factory.gates.patience import out_of_time
from factory.gates.recipe.paired_runs import MeasuredRuns, lengthened, lengths, paired_runs
from factory.gates.recipe.policy import RecipePolicy
from factory.ledger.plant import Plant
from trainer.contract.checkpoint import format as checkpoint_files
from trainer.contract.errors import TrainerError
from trainer.contract.recipe import Recipe

# A change of these, with the same code on as many positions, changes no step's time or memory, whatever a busy machine's clock says.
FREE = ("optimizer.", "mixture.", "schedule.", "stability.")


def run(case: PatchCase[RecipePolicy]) -> StageResult:
    """Raises: IsolationError."""
    start, (path,), changes = case.start, case.paths, case.handed_on["static"]
    if start is None:
        return StageResult(NO_START)
    recipes = {"baseline": Recipe.load(case.baseline / path), "candidate": Recipe.load(case.candidate / path)}
    policy = lengthened(case.policy.runs, start.step, recipes["baseline"], recipes["candidate"])
    trained = Recipe.parse(start.recipe)
    if (trained.model, trained.optimizer.name) != (recipes["baseline"].model, recipes["baseline"].optimizer.name):
        return StageResult(missing(f"the trunk was trained with a different model or optimiser than {path} has"))
    texts, eval_policy = held_out_texts(
        policy.held_out_documents, policy.held_out_bytes, Plant(case.workspace, case.ledger)
    )
    if not texts:
        return StageResult(NOTHING_HELD_OUT)
    origin = checkpoint_files.read_tensors(start.checkpoint, "model")
    shape = recipes["baseline"].model_dump()
    compiled = devices.compiled(case.workspace.root, start.commit)  # by approved code while it trained
    if compiled.is_dir():
        shutil.copytree(compiled, case.work / "recipe" / "cache", symlinks=True)
    with case.progress.task("runs, both recipes", 2 * policy.seeds) as task:
        try:
            found = paired_runs(
                policy,
                start,
                recipes,
                set(changes),
                case.baseline,
                case.applied.base,
                case.work / "recipe",
                origin,
                lambda weights: weights_bits(weights, shape, texts, eval_policy),
                lambda words: task.advance(1, words),
            )
        except TrainerError as error:
            return StageResult(missing(str(error)))
    sizes = lengths(policy, start.step, recipes["baseline"], recipes["candidate"])
    evidence = _evidence(found) | {
        "held_out_documents": len(texts),
        "from_step": start.step,
        "same_cost": all(key.startswith(FREE) for key in changes),
        "steps": {side: [size.trunk, size.tail] for side, size in sizes.items()},
    }
    if found.failed and found.failed_side == "candidate":
        return StageResult(failed(f"the candidate's run failed: {found.failed}", **evidence))
    if found.out_of_time:
        return StageResult(out_of_time(f"the runs were stopped: {found.failed}", **evidence))
    if found.failed:  # which says nothing about the candidate
        return StageResult(missing(f"the baseline's run failed: {found.failed}", **evidence))
    size = sizes["candidate"]
    reason = f"{policy.seeds} seeds, {size.trunk} steps and an anneal of {size.tail}, from step {start.step}"
    return StageResult(passed(reason, **evidence))


def _evidence(found: MeasuredRuns) -> dict[str, Any]:
    evidence: dict[str, Any] = dict(found.bits)
    for side, speeds in found.tokens_per_s.items():
        evidence |= {f"{side}_tokens_per_s": speeds, f"{side}_memory": found.memory.get(side)}
    return evidence
