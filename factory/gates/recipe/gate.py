"""The gate of recipe changes that change what is learnt: scope → static → paired runs with an anneal tail → bits per byte.

A patch that touches recipes alone, and more in them than how a step is computed, is judged here instead of by the patch
gate, whose weights-stay-the-same rule it breaks on purpose. ``gather`` of the patch gate runs the stages, ``judge_recipe`` decides.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from factory.core import devices
from factory.core.errors import ConfigError
from factory.core.policy_file import policy_sha256
from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.gates.patch import gate as patch_gate
from factory.gates.patch import static as patch_static
from factory.gates.patch.gate import NO_START, RECIPE_KNOBS, RECIPES, Case, Stage, flat
from factory.gates.patch.held_out import held_out_texts, weights_bits
from factory.gates.patch.policy import PatchPolicy
from factory.gates.recipe.judge import compare, judge_recipe
from factory.gates.recipe.policy import RecipePolicy, RunsPolicy
from factory.gates.recipe.runs import Measured, lengths, paired_runs, patient
from factory.gates.release.judge import Verdict
from factory.git import repository
from factory.git.repository import Applied
from factory.git.scope import Change
from factory.ledger.ledger import Ledger, verdicts
from factory.training.planning import check_ranks
from kernels.contract.strict_yaml import read_yaml
from trainer.contract.checkpoint import format as checkpoint_files
from trainer.contract.errors import RecipeError, TrainerError
from trainer.contract.recipe import Recipe

GATE = "recipe"
# Same code on as many positions: these change no step's time or memory, and a busy machine must not say that they do.
FREE = ("optimizer.", "mixture.", "schedule.", "stability.")
# Keys that act on the first steps of a trunk only: (key, step of the recipe from which on it changes nothing).
EARLY = {"schedule.warmup_steps": lambda recipe: recipe.schedule.warmup_steps}


def concerns(workspace: Workspace, applied: Applied) -> bool:
    """Is a patch this gate's: recipes alone, that stay recipes, and more changed in one than how a step is computed?"""
    repo = workspace.repository
    changes = repository.changes(repo, applied.base, applied.commit)
    if not changes or not all(change.path.startswith(RECIPES) for change in changes):
        return False
    try:
        return any(_learnt(_differing(repo, applied.base, change)) for change in changes)
    except TrainerError:
        return False  # no recipe: the patch gate says what is wrong with it


def decide(
    workspace: Workspace,
    ledger: Ledger,
    number: int,
    applied: Applied,
    progress: Progress,
    *,
    tries: int,
    patch_id: str = "",
) -> tuple[int, Verdict, dict[str, Any]]:
    """Judge a proposal: (verdict id, verdict, evidence). Raises: IsolationError, ConfigError; nothing is recorded then."""
    policy = RecipePolicy.load(workspace.policy("gates/recipe.yaml"))
    tries = max(tries, 1 + _tried_before(workspace, ledger, applied))
    patch_policy = PatchPolicy.load(workspace.policy("gates/patch.yaml"))
    stages: dict[str, Callable[[Case], Stage]]
    stages = {"scope": patch_gate.scope, "static": partial(static, policy), "runs": partial(runs, policy.runs)}
    evidence = patch_gate.gather(workspace, ledger, patch_policy, applied, tries, progress, stages)
    shown = compare(policy.runs, evidence["stages"].get("runs") or {}, tries)
    evidence |= {"gate": GATE, "patch_id": patch_id, "gain": shown.to_json() if shown else None}
    verdict = judge_recipe(policy, evidence)
    recorded = patch_gate.record_verdict(ledger, GATE, number, applied, policy_sha256(policy), verdict, evidence)
    return recorded, verdict, evidence


def _tried_before(workspace: Workspace, ledger: Ledger, applied: Applied) -> int:
    """Verdicts on any of the same keys, whoever proposed the change and whatever target was named."""
    repo = workspace.repository
    keys = {
        key
        for change in repository.changes(repo, applied.base, applied.commit)
        for key in _differing(repo, applied.base, change)
    }
    rows = ledger.rows(sa.select(verdicts.c.evidence).where(verdicts.c.gate == GATE))
    return sum(bool(keys & set(_changed_keys(row["evidence"]))) for row in rows)


def _changed_keys(evidence: dict[str, Any]) -> list[str]:
    return list(((evidence.get("stages") or {}).get("static") or {}).get("changes") or ())


# -- static ------------------------------------------------------------------------------------------------------------
def static(policy: RecipePolicy, case: Case) -> Stage:
    """Does the recipe read clean, and change only what may be? 'missing' where no run here could tell."""
    found = [p for change in case.changes for p in patch_static.problems(change, case.base_bytes(change.path))]
    if found:
        return {"state": "failed", "reasons": found[:8]}
    used = f"{RECIPES}{case.workspace.config.recipe}.yaml"
    if case.paths != [used]:
        return {"state": "missing", "reasons": [f"only {used} trains here: no other recipe can be judged by runs"]}
    if case.workspace.own_recipe().exists():
        words = f"{case.workspace.own_recipe()} is what trains here: a patch of the repository's recipe changes nothing"
        return {"state": "missing", "reasons": [words]}
    differing = _differing(case.workspace.repository, case.applied.base, case.changes[0])
    new = Recipe.load(case.applied.worktree / used)
    found = [
        f"{used}: {key} may not be changed by a patch that changes what is learnt"
        for key in differing
        if not policy.allows(key)
    ]
    found += [f"{used}: {key} is not finite" for key, (_, value) in differing.items() if value in (math.inf, -math.inf)]
    found += _without_effect(case, differing, used)
    try:
        check_ranks(case.workspace, new)
        new.batch.check_ranks(1)
    except (ConfigError, RecipeError) as error:
        found.append(str(error))
    if found:
        return {"state": "failed", "reasons": found[:8]}
    changes = {key: list(values) for key, values in differing.items()}
    return {
        "state": "passed",
        "reasons": [f"{key}: {old} → {new}" for key, (old, new) in changes.items()],
        "changes": changes,
    }


def _without_effect(case: Case, differing: dict[str, Any], used: str) -> list[str]:
    """Keys that rule only steps which the trunk has behind it, under both recipes."""
    step = case.start.step if case.start else 0
    sides = (_base(case, used), Recipe.load(case.applied.worktree / used))
    past = [key for key in differing if key in EARLY and all(step >= EARLY[key](recipe) for recipe in sides)]
    return [f"{used}: {key} rules no step that is still to come: the trunk is at step {step}" for key in past]


def _differing(repo: Path, base: str, change: Change) -> dict[str, tuple[Any, Any]]:
    """Flat key → (old, new) where a changed recipe says something else. Raises: TrainerError; RecipeError for a deleted one."""
    if change.content is None:
        raise RecipeError(f"{change.path}: is deleted")
    new = flat(_parse(change.content.decode("utf-8", "replace"), change.path).model_dump())
    text = repository.file_text(repo, base, change.path) if change.old_mode is not None else ""
    old = flat(_parse(text, change.path).model_dump()) if text else {}
    return {
        key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    }


def _parse(text: str, where: str) -> Recipe:
    return Recipe.parse(read_yaml(text, where, RecipeError), where)


def _learnt(keys: dict[str, Any]) -> list[str]:
    return [key for key in keys if key not in RECIPE_KNOBS]


def _base(case: Case, path: str) -> Recipe:
    return Recipe.load(case.baseline / path)


# -- the runs ----------------------------------------------------------------------------------------------------------
def runs(policy: RunsPolicy, case: Case) -> Stage:
    """The stage's evidence. Raises: IsolationError."""
    start = case.start
    if start is None:
        return {"state": "missing", "reasons": [NO_START]}
    path = case.paths[0]
    recipes = {"baseline": _base(case, path), "candidate": Recipe.load(case.applied.worktree / path)}
    policy = patient(policy, start.step, recipes["baseline"], recipes["candidate"])
    trained = Recipe.parse(start.recipe)
    if (trained.model, trained.optimizer.name) != (recipes["baseline"].model, recipes["baseline"].optimizer.name):
        return {
            "state": "missing",
            "reasons": [f"the trunk was trained with another model or optimiser than {path} has"],
        }
    texts, eval_policy = held_out_texts(policy.held_out_documents, policy.held_out_bytes, case.workspace, case.ledger)
    if not texts:
        return {"state": "missing", "reasons": ["nothing is held out to score weights on: ingest more documents"]}
    origin = checkpoint_files.read_tensors(start.checkpoint, "model")
    shape = recipes["baseline"].model_dump()
    changed = set(_differing(case.workspace.repository, case.applied.base, case.changes[0]))
    compiled = devices.compiled(case.workspace.root)  # by approved code while it trained
    if compiled.is_dir():
        shutil.copytree(compiled, case.work / "recipe" / "cache" / "inductor", symlinks=True)
    with case.progress.task("runs, both recipes", 2 * policy.seeds) as task:
        try:
            found = paired_runs(
                policy,
                start,
                recipes,
                changed,
                case.baseline,
                case.work / "recipe",
                origin,
                lambda weights: weights_bits(weights, shape, texts, eval_policy),
                lambda words: task.advance(1, words),
            )
        except TrainerError as error:
            return {"state": "missing", "reasons": [str(error)]}
    sizes = lengths(policy, start.step, recipes["baseline"], recipes["candidate"])
    evidence = _evidence(found) | {"held_out_documents": len(texts), "from_step": start.step}
    evidence["same_cost"] = all(key.startswith(FREE) for key in changed)
    evidence["steps"] = {side: [size.trunk, size.tail] for side, size in sizes.items()}
    if found.failed:
        # What breaks the baseline, or only takes too long, says nothing about the candidate.
        state = "failed" if found.failed_side == "candidate" else "missing"
        whose = f"the {found.failed_side}'s run failed" if found.failed_side else "the runs were cut short"
        return {"state": state, "reasons": [f"{whose}: {found.failed}"], **evidence}
    size = sizes["candidate"]
    words = f"{policy.seeds} seeds, {size.trunk} steps and an anneal of {size.tail}, from step {start.step}"
    return {"state": "passed", "reasons": [words], **evidence}


def _evidence(found: Measured) -> dict[str, Any]:
    evidence: dict[str, Any] = dict(found.bits)
    for side, speeds in found.tokens_per_s.items():
        evidence |= {f"{side}_tokens_per_s": speeds, f"{side}_memory": found.memory.get(side)}
    return evidence
