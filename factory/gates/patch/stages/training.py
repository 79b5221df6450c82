"""Trains N real steps with baseline and candidate in the sandbox (``timed_session``), and compares their weights and times.

Time. A run is timed from outside, from the moment when its data are revealed until its weights are there. The CPU seconds of the sandbox's processes
are read at the same moments. ``make_step_seconds_evidence`` computes the seconds of a step. The measurement has rounds (``paired_rounds``), which
are added until the gain is clear or ``budget_seconds`` are used. A gain that is not clear then is missing evidence (``undecided``): it is judged
again later.

Result. A fresh random seed decides the data of each pair of runs, so no weights can be prepared or stored from an earlier run. The gate reads nothing
but the checkpoint from a candidate's run. The weights are compared with the baseline's after the same steps on the same data, and the next stage
scores the pair of runs that is furthest apart. The allowed distance is measured too. Another baseline run leaves out as many steps as would save the
smallest time that counts as a gain. The candidate's weights must be much nearer to the baseline's than the weights of that run. So code that computes
less gains nothing. If the patch changes no op and the matrix saw the same bits, the weights must be the same to the bit here too.

The next segment continues from a whole checkpoint, so every run must leave one. In each of the first two rounds, one pair of runs is drawn at random.
Its optimiser moments, position in the data, recipe and state of the anomaly detector are compared as well.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from factory.core import devices
from factory.gates.patch.paired_rounds import EndedEarlyError, PairedRounds, RunPair, Suspicions, TrainingSide
from factory.gates.patch.policy import PatchPolicy, TrainingPolicy
from factory.gates.patch.round_plan import BASELINE, CANDIDATE
from factory.gates.patch.stages.matrix import may_round_differently
from factory.gates.recipe_changes import get_used_recipe_path
from factory.gates.stage_interface import (
    NO_START,
    PatchCase,
    StageEvidence,
    StageResult,
    changes_code,
)
from factory.gates.training_start import TrainingStart
from factory.runs.arm_runner import ArmRunner
from factory.runs.compile_cache import copy_cache
from trainer.contract.checkpoint import format as checkpoint_files
from trainer.contract.recipe import Recipe

DRAWN = 5  # a random number of steps, at most steps / DRAWN, is added to the policy's steps


def run(case: PatchCase[PatchPolicy]) -> StageResult:
    """Return the result. It hands the pair of runs whose weights differ most to the evals stage."""
    if case.start is None:
        return StageResult(NO_START)
    baseline, candidate = (
        TrainingSide(code, commit, make_gate_recipe(case, case.start, code), case.work / name)
        for name, code, commit in (
            (BASELINE, case.baseline, case.applied.base),
            (CANDIDATE, case.candidate, case.applied.commit),
        )
    )
    new_code = changes_code(case.changed_paths)
    same_bits = case.handed_on.get("matrix") is True and devices.get_device_kind() == "cpu"
    suspicions = Suspicions(new_code, new_code and same_bits and not may_round_differently(case))
    policy = case.policy.training
    more = secrets.randbelow(1 + policy.steps // DRAWN)  # a fixed number would tell a run that it is being judged
    policy = policy.model_copy(update={"steps": policy.steps + more})
    runs = ArmRunner(case.plant, case.work, "patch gate", case.subject)
    return StageResult(*compare_training(runs, policy, case.start, baseline, candidate, suspicions, case.tries))


def make_gate_recipe(case: PatchCase[PatchPolicy], start: TrainingStart, code: Path) -> dict[str, Any]:
    """Return the trunk's recipe with the gate's batch. If the patch changes the recipe, the settings that compute a step are those of ``code``.

    Otherwise they are the trunk's. The trunk may be older than a merged change, and this patch must not be credited with the gain of that change.
    """
    recipe = dict(start.recipe)
    batch = dict(recipe["batch"])
    if case.policy.training.sequences:
        batch |= {"sequences": case.policy.training.sequences, "micro_sequences": None}
    changed = get_used_recipe_path(case.workspace)
    if changed in case.changed_paths:
        own = Recipe.load(code / changed).model_dump()
        recipe["compile"] = own["compile"]
        micro = own["batch"]["micro_sequences"]
        batch["micro_sequences"] = micro if micro and batch["sequences"] % micro == 0 else None
    # To measure the noise scale, a step is split. The new shapes would be compiled during one of the few timed steps.
    return recipe | {"batch": batch, "stability": recipe["stability"] | {"noise_scale_every": 0}}


def compare_training(
    runs: ArmRunner,
    policy: TrainingPolicy,
    start: TrainingStart,
    baseline: TrainingSide,
    candidate: TrainingSide,
    suspicions: Suspicions,
    tries: int,
) -> tuple[StageEvidence, RunPair | None]:
    """Return the stage's evidence, and the pair of runs whose weights are furthest apart. Raises: IsolationError.

    ``tries``: the number of tries on this target, this one included.
    """
    compiled = devices.get_compiled_code_folder(
        runs.plant.workspace.root, start.commit
    )  # by approved code during training
    origin = checkpoint_files.read_tensors(start.checkpoint, "model")
    for side in (baseline, candidate):
        copy_cache(compiled, side.folder / "known" / "cache")
    sides = {BASELINE: baseline, CANDIDATE: candidate}
    measured = PairedRounds(runs, policy, start, sides, suspicions, tries, compiled, origin)
    try:
        return measured.measure(), measured.furthest
    except EndedEarlyError as ended:
        return ended.evidence, None
