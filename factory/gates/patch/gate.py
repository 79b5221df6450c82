"""The patch gate: cheap to dear, the first failing stage ends it, every stage leaves its evidence (DESIGN §5).

    scope → static → op oracle → exploit checks → isolated A/B → N-step training A/B, judged by weights and by the whole
    step's time → held-out evaluations of those weights

``gather`` measures, ``judge_patch`` decides, ``decide`` does both and records the verdict, bound to the patch's hash. All
code that a patch could have changed runs in the sandbox; what is believed of it is what approved code sees from outside.
"""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.core.untrusted import one_line
from factory.core import devices
from factory.core.errors import FactoryError
from factory.core.policy_file import policy_sha256
from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.gates.patch import exploits as patch_exploits
from factory.gates.patch import ops as patch_ops
from factory.gates.patch import static as patch_static
from factory.gates.patch.held_out import gains, held_out_texts, scores
from factory.gates.patch.judge import judge_patch, told_gain
from factory.gates.patch.policy import PatchPolicy
from factory.gates.patch.training import Pair, Side, compare_training
from factory.gates.release.judge import Verdict
from factory.gates.training_start import Start, find_start
from factory.git import repository
from factory.git import scope as patch_scope
from factory.git.repository import Applied
from factory.git.scope import AgentsPolicy, Change
from factory.ledger import writing
from factory.ledger.ledger import Ledger, record
from factory.ledger.rows import Subject
from kernels.contract.files import finite
from trainer.contract.errors import TrainerError
from trainer.contract.recipe import Recipe

KERNELS = "policies/kernels.yaml"
RECIPES = "policies/recipes/"
# What a recipe patch may change here: how a step is computed, never what it computes.
RECIPE_KNOBS = ("compile", "batch.micro_sequences")
Stage = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Everything the stages look at."""

    workspace: Workspace
    ledger: Ledger
    policy: PatchPolicy
    agents: AgentsPolicy
    applied: Applied
    changes: list[Change]
    baseline: Path  # worktree of the base commit
    work: Path  # scratch, removed afterwards
    start: Start | None
    progress: Progress
    tries: int = 1  # on the same target, with this one
    furthest: list[Pair] = field(default_factory=list)  # what training left for the stage after it
    measured: dict[str, Stage] = field(default_factory=dict)  # evidence of stages to come, found by one before them

    @property
    def paths(self) -> list[str]:
        return [change.path for change in self.changes]

    def base_bytes(self, path: str) -> bytes | None:
        file = self.baseline / path
        return file.read_bytes() if file.is_file() else None


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
    policy = PatchPolicy.load(workspace.policy("gates/patch.yaml"))
    evidence = gather(workspace, ledger, policy, applied, tries, progress) | {"patch_id": patch_id}
    verdict = judge_patch(policy, evidence)
    return record_verdict(ledger, "patch", number, applied, policy_sha256(policy), verdict, evidence), verdict, evidence


def record_verdict(
    ledger: Ledger, gate: str, number: int, applied: Applied, policy: str, verdict: Verdict, evidence: dict[str, Any]
) -> int:
    """Bound to the patch's hash; ``policy`` is the SHA-256 of the policy that judged. Returns the verdict's id."""
    subject = Subject("proposal", number)
    with ledger.begin() as tx:
        record(tx, "judged", subject, {"outcome": verdict.outcome})
        return writing.record_verdict(
            tx,
            gate,
            subject,
            against=applied.base,
            policy_sha256=policy,
            subject_sha256=applied.patch_sha256,
            outcome=verdict.outcome,
            reasons=verdict.reasons,
            evidence=evidence,
        )


def gather(
    workspace: Workspace,
    ledger: Ledger,
    policy: PatchPolicy,
    applied: Applied,
    tries: int,
    progress: Progress,
    stages: Mapping[str, Callable[[Case], Stage]] | None = None,
) -> dict[str, Any]:
    """What each stage found, up to the first that failed. ``stages``: another gate's, in its order."""
    stages = RUN if stages is None else stages
    repo = workspace.repository
    baseline = repository.checkout_live(workspace, applied.base)
    work = applied.worktree.with_name(applied.worktree.name + "-gate")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    agents = AgentsPolicy.load(workspace.policy("agents.yaml"))
    changes = repository.changes(repo, applied.base, applied.commit)
    start = find_start(ledger)
    case = Case(workspace, ledger, policy, agents, applied, changes, baseline, work, start, progress, tries)
    evidence: dict[str, Any] = {
        "base": applied.base,
        "patch_sha256": applied.patch_sha256,
        "tries": tries,
        "stages": {},
    }
    evidence["files"] = case.paths
    try:
        for name, stage in stages.items():
            began = time.monotonic()
            with progress.task(f"gate: {name}"):
                found = _tried(name, stage, case)
            found["reasons"] = [one_line(reason, 1000) for reason in found["reasons"]]  # some quote what a patch holds
            evidence["stages"][name] = found | {"stage_seconds": round(time.monotonic() - began, 2)}
            progress.line(f"  {name:<9} {found['state']:<10} {'; '.join(found['reasons'])[:160]}")
            if found["state"] not in ("passed", "not needed"):
                break
        if repository.patch_sha256(repo, applied.base, applied.commit) != applied.patch_sha256:
            evidence["stages"]["scope"] = {"state": "failed", "reasons": ["the patch is not the one that was proposed"]}
    finally:
        shutil.rmtree(work, ignore_errors=True)
    training = evidence["stages"].get("training", {})
    shown = told_gain(policy.training, training, tries)
    evidence["gain"] = shown.to_json() if shown else None
    return finite(evidence)  # type: ignore[no-any-return]


def _tried(name: str, stage: Callable[[Case], Stage], case: Case) -> Stage:
    """The stage's evidence. One that breaks, over something that nobody thought of, holds the patch back and says where.

    Raises: FactoryError, when it is the machine or a policy that is not as it should be.
    """
    try:
        return stage(case)
    except FactoryError:
        raise
    except Exception as error:
        log = traceback.format_exc()
        return {"state": "missing", "reasons": [f"the {name} stage broke: {type(error).__name__}: {error}"], "log": log}


def scope(case: Case) -> Stage:
    found = patch_scope.problems(
        case.agents, case.changes, repository.modes(case.workspace.repository, case.applied.base)
    )
    reasons = [f"out of scope: {problem}" for problem in found]
    return {
        "state": "failed" if found else "passed",
        "reasons": reasons or [f"{len(case.changes)} files, all in scope"],
    }


def _static(case: Case) -> Stage:
    found = [
        problem for change in case.changes for problem in patch_static.problems(change, case.base_bytes(change.path))
    ]
    if not found:
        found = [problem for change in case.changes for problem in _settings(case, change)]
    if found:
        return {"state": "failed", "reasons": found[:8]}
    elsewhere = _elsewhere(case)
    return {"state": "missing" if elsewhere else "passed", "reasons": elsewhere[:8] or ["reads clean"]}


def _settings(case: Case, change: Change) -> list[str]:
    """Does a changed recipe say what recipes may say, and change only how a step is computed?"""
    if change.path == KERNELS and "fallback" in _sections(case):
        return [f"{KERNELS}: fallback: whether a kernel that fails is hidden is people's to say"]
    if not change.path.startswith(RECIPES) or change.content is None:
        return []
    try:
        new = Recipe.load(case.applied.worktree / change.path).model_dump()
        base = case.baseline / change.path
        old = Recipe.load(base).model_dump() if base.is_file() else {}
    except TrainerError as error:
        return [str(error)]
    differing = sorted(key for key in flat(new) if flat(old).get(key, None) != flat(new)[key])
    learnt = [f"{change.path}: {key} changes what is computed" for key in differing if key not in RECIPE_KNOBS]
    return learnt + (["what is learnt changes in a patch of its own, judged by what it learns"] if learnt else [])


def _elsewhere(case: Case) -> list[str]:
    """What of the patch nothing here would run: a gain measured beside it says nothing about it."""
    used, own = f"{RECIPES}{case.workspace.config.recipe}.yaml", case.workspace.own_recipe()
    recipes = [path for path in case.paths if path.startswith(RECIPES)]
    found = [
        f"{path}: only {used} trains here: no other recipe can be judged by runs" for path in recipes if path != used
    ]
    if used in recipes and own.exists():
        found.append(f"{own} is what trains here: a patch of the repository's recipe changes nothing")
    found += [
        f"{KERNELS}: the kernels of {key!r} do not run here, on {devices.kind()}, and are judged where they do"
        for key in (_sections(case) if KERNELS in case.paths else ())
        if key != devices.kind()
    ]
    return found


def _sections(case: Case) -> list[str]:
    return patch_ops.changed_sections(case.base_bytes(KERNELS), _after(case))


def _oracle(case: Case) -> Stage:
    ops = _changed_ops(case)
    recipe = case.start.recipe if case.start else Recipe.load(case.workspace.recipe_path()).model_dump()
    found = patch_exploits.check(
        case.policy.oracle,
        case.policy.exploits,
        ops,
        recipe,
        case.baseline,
        case.applied.worktree,
        case.work / "oracle",
        redefines=any(path.startswith("kernels/") for path in case.paths),
    )
    case.measured["exploits"] = found["exploits"]
    return found["oracle"]


def _exploits(case: Case) -> Stage:
    return case.measured["exploits"]


def _isolated(case: Case) -> Stage:
    approved = not any(path.endswith(".py") for path in case.paths)
    if case.start is None:
        return {"state": "missing", "reasons": [NO_START]}
    recipe = _recipe(case, case.start, candidate=False)
    return patch_ops.isolated(
        case.policy.isolated,
        _changed_ops(case),
        recipe,
        case.baseline,
        approved,
        # Approved code alone runs here: what it compiled before may be used.
        case.workspace.root / "cache" / f"workbench{devices.label()}",
    )


def _training(case: Case) -> Stage:
    if case.start is None:
        return {"state": "missing", "reasons": [NO_START]}
    sides = [
        Side(code, _recipe(case, case.start, candidate=name == "candidate"), case.work / name)
        for name, code in (("baseline", case.baseline), ("candidate", case.applied.worktree))
    ]
    new_code = any(path.endswith(".py") for path in case.paths)
    found, pair = compare_training(
        case.policy.training, case.start, sides[0], sides[1], case.workspace, case.progress, new_code, case.tries
    )
    case.furthest.extend([pair] if pair else [])
    return found


def _evals(case: Case) -> Stage:
    policy, start, pair = case.policy.evals, case.start, case.furthest[0]
    assert start is not None
    texts, how = held_out_texts(policy.documents, policy.document_bytes, case.workspace, case.ledger)
    if not texts:
        return {"state": "missing", "reasons": ["nothing is held out to score weights on: ingest more documents"]}
    ours, theirs = (scores(run.weights, start.recipe, texts, how) for run in pair)
    found = gains(ours, theirs)
    worst = min(found, key=lambda domain: sum(found[domain]) / len(found[domain]))
    change = -sum(found[worst]) / len(found[worst])
    return {
        "state": "passed",
        "reasons": [f"{len(texts)} held-out documents; the worst domain, {worst}, {change:+.4f} bits per byte"],
        "gains": found,
    }


NO_START = "there is no trunk checkpoint to train from yet: run 'factory train' first"
RUN: dict[str, Callable[[Case], Stage]] = {
    "scope": scope,
    "static": _static,
    "oracle": _oracle,
    "exploits": _exploits,
    "isolated": _isolated,
    "training": _training,
    "evals": _evals,
}


def _changed_ops(case: Case) -> list[patch_ops.ChangedOp]:
    return patch_ops.changed_ops(
        case.base_bytes(KERNELS), _after(case), case.paths, devices.kind(), case.start.kernels if case.start else {}
    )


def _after(case: Case) -> bytes:
    return (case.applied.worktree / KERNELS).read_bytes()


def _recipe(case: Case, start: Start, *, candidate: bool) -> dict[str, Any]:
    """The trunk's recipe, with the gate's batch; where the patch changes the recipe's knobs, each side's own.

    The trunk may be older than a knob that was merged since: its gain is no later patch's.
    """
    recipe = dict(start.recipe)
    batch = dict(recipe["batch"])
    if case.policy.training.sequences:
        batch |= {"sequences": case.policy.training.sequences, "micro_sequences": None}
    changed = f"{RECIPES}{case.workspace.config.recipe}.yaml"
    if changed in case.paths:
        own = Recipe.load((case.applied.worktree if candidate else case.baseline) / changed).model_dump()
        recipe["compile"] = own["compile"]
        micro = own["batch"]["micro_sequences"]
        batch["micro_sequences"] = micro if micro and batch["sequences"] % micro == 0 else None
    # A split step, whose shapes are compiled anew, would be one of few that are timed.
    return recipe | {"batch": batch, "stability": recipe["stability"] | {"noise_scale_every": 0}}


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one: ``{"batch": {"sequences": 8}}`` is ``{"batch.sequences": 8}``."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
