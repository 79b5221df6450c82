"""Tiny runs that execute every line of the trainer: does the candidate leave what the baseline leaves, and was all of the patch executed?

Training's few steps from one checkpoint see neither an anneal nor a resume, a skipped step, another optimiser, ranks or a
hundred later steps. What no run executed was not judged, and is not approved.
"""

from __future__ import annotations

from pathlib import Path

from factory.gates.case import Case, StageResult, failed, missing, not_needed, passed
from factory.gates.patch.matrix.changed import Unexecuted, unexecuted
from factory.gates.patch.matrix.compare import compare_runs
from factory.gates.patch.matrix.runs import Executed, SideRuns, make_plan, run_cases
from factory.gates.patch.policy import PatchPolicy
from factory.gates.patience import baseline_stopped, patiently, stopped
from factory.gates.training_start import Start

MOST_REASONS = 8
REFERENCE = "cpu: {}\ncuda: {}\n"


def run(case: Case[PatchPolicy]) -> StageResult:
    changed = [change for change in case.changes if change.path.endswith(".py") and change.content is not None]
    if not any(path.endswith(".py") for path in case.paths):
        return StageResult(not_needed("the patch has no code"))
    policy, work = case.policy.matrix, case.work / "matrix"
    baseline_kernels, candidate_kernels = (
        _kernels(case.start, code, work / f"kernels-{side}")
        for side, code in (("baseline", case.baseline), ("candidate", case.candidate))
    )
    with case.progress.task("matrix of tiny runs, both sides", 3) as task:
        plan, why = make_plan(case.baseline, baseline_kernels, work / "plan", policy.wall_seconds)
        if why:
            return StageResult(missing(f"the baseline's own tiny runs failed: {why}"))
        task.advance(1, "data and checkpoints")
        baseline = run_cases(plan, case.baseline, baseline_kernels, work / "baseline", policy.wall_seconds)
        if baseline.failed:
            words = baseline_stopped("the tiny runs", policy.wall_seconds, "matrix.wall_seconds")
            return StageResult(
                missing(words if baseline.out_of_time else f"the baseline's own tiny runs failed: {baseline.failed}")
            )
        task.advance(1, f"baseline: {baseline.seconds:.0f} s")
        limits = policy.patience.limits(baseline.seconds)

        def attempt(number: int, limit: float) -> SideRuns:
            paths = [change.path for change in changed]
            return run_cases(
                plan, case.candidate, candidate_kernels, work / f"candidate-{number}", limit, instructions=paths
            )

        candidate = patiently(limits, attempt, lambda side: side.out_of_time)
        task.advance(1, f"candidate: {candidate.seconds:.0f} s")
    if candidate.out_of_time:
        return StageResult(missing(stopped("the candidate's tiny runs", limits, baseline.seconds, "matrix.patience")))
    if candidate.failed:
        return StageResult(failed(f"tiny training runs: {candidate.failed}"))
    compared = compare_runs(plan, baseline, candidate)
    differences = [str(one.worst) for one in compared if one.worst is not None]
    same = sum(one.same_bits for one in compared)
    measured = {
        "cases": len(compared),
        "same_bits": same,
        "baseline_seconds": baseline.seconds,
        "candidate_seconds": candidate.seconds,
    }
    if differences:
        return StageResult(failed(*differences[:MOST_REASONS], **measured))
    executed = candidate.executed
    if (answers := case.handed_on.get("oracle")) is not None:
        executed.merge(answers.executed)
    left_out = [
        part
        for change in changed
        for part in unexecuted(
            change.path, _text(case.base_bytes(change.path)), _text(change.content), _of(executed, change.path)
        )
    ]
    if left_out:
        return StageResult(missing(*_not_executed(left_out), unexecuted=[str(part) for part in left_out], **measured))
    return StageResult(
        passed(f"{len(compared)} tiny runs alike, {same} of them to the bit; all of the patch was executed", **measured)
    )
