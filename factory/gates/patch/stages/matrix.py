"""Compares tiny training runs of candidate and baseline, which together execute every line of the trainer.

The candidate's files must equal the baseline's, up to rounding. The runs must execute all code of the patch: code that no run executed was not
judged, so it is not approved. The training stage cannot check this, because its steps have no anneal, resume, skipped step, other optimiser, ranks or
late step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from factory.computing.tuned_kernels import KERNELS
from factory.core import devices
from factory.gates.patch.execution_recorder import ExecutedCode
from factory.gates.patch.matrix.cases import CASES, TOOLS, MatrixCase, MatrixTool
from factory.gates.patch.matrix.compare import compare_runs, measure_rounding_effect
from factory.gates.patch.matrix.runs import MatrixPlan, MatrixRuns, MatrixSide, make_matrix_plan, run_cases
from factory.gates.patch.matrix.sized_cases import SizedRuns, make_sized_runs
from factory.gates.patch.matrix.unexecuted_code import (
    UnexecutedPart,
    find_unexecuted_native_files,
    find_unexecuted_parts,
    find_unexecuted_removals,
    find_watched_lines,
    iterate_python_changes,
)
from factory.gates.patch.op_answers import OpAnswers, record_old_code
from factory.gates.patch.policy import MatrixPolicy, PatchPolicy
from factory.gates.stage_interface import (
    PatchCase,
    StageResult,
    changes_code,
    make_failed_evidence,
    make_missing_evidence,
    make_not_needed_evidence,
    make_passed_evidence,
)
from factory.gates.time_limits import (
    make_baseline_stopped_message,
    make_out_of_time_evidence,
    make_stopped_message,
    run_attempts_with_limits,
)
from factory.git import repository
from factory.runs.arm_runner import ArmRunner
from kernels.contract.message import Message
from trainer.contract.recipe import Recipe

MOST_REASONS = 8
DRAWS = 3  # the most draws of data for a run whose result rounding decides
REFERENCE = "{}\n"  # a kernels.yaml without choices, which stands for the reference of every op
NATIVE = "factory-kernels"  # the folder of kernels/native's builds, below torch.compile's cache


def run(case: PatchCase[PatchPolicy]) -> StageResult:
    if not changes_code(case.changed_paths):
        return StageResult(
            make_not_needed_evidence(Message("patch.no_code", "The patch changes no Python and no C++ file."))
        )
    rounds, runs, same, executed, old = may_round_differently(case), 0, 0, ExecutedCode(), ExecutedCode()
    seconds = {"baseline_seconds": 0.0, "candidate_seconds": 0.0}
    sized = _find_sized_runs(case)
    every: Sequence[MatrixCase] = (*CASES, *(sized.cases if sized else ()))
    cases, tools = every, (*TOOLS, *(sized.tools if sized else ()))
    for draw in range(1, DRAWS + 1):
        found = _draw(case, case.work / "matrix" / str(draw), cases, tools, sized)
        if isinstance(found, StageResult):
            return found
        plan, approved, baseline, candidate = found
        executed.merge_executed_code(candidate.executed)
        old.merge_executed_code(baseline.executed)
        seconds = {name: seconds[name] + side.seconds for name, side in zip(seconds, (baseline, candidate))}
        compared = compare_runs(plan, baseline, candidate, cases, tools)
        differences, undecided = [one.worst for one in compared if one.worst is not None], []
        if differences and rounds:
            with case.progress.task("effect of rounding", 1):
                rounding = measure_rounding_effect(
                    plan, replace(approved, folder=approved.folder / "disturbed"), baseline, compared
                )
            if rounding.problem:
                return StageResult(
                    make_missing_evidence(
                        Message(
                            "patch.rounding_not_measured",
                            "The effect of rounding could not be measured: {problem}",
                            problem=rounding.problem,
                        )
                    )
                )
            differences, undecided = rounding.beyond, rounding.undecided
        runs, same = runs + len(compared) - len(undecided), same + sum(one.same_bits for one in compared)
        measured = {"runs": runs, "same_bits": same, "draws": draw, **seconds}
        if differences or (undecided and draw == DRAWS):
            listed = [difference.message for difference in differences] + [
                Message(
                    "patch.rounding_decides",
                    "run '{run}': on each of {draws} random draws of data, rounding decided the result, so candidate and baseline cannot be compared",
                    run=name, draws=DRAWS,
                )
                for name in undecided
            ]  # fmt: skip
            return StageResult(
                make_failed_evidence(*listed[:MOST_REASONS], differences=[str(one) for one in listed], **measured)
            )
        cases, tools = [one for one in every if one.name in undecided], ()
        if not cases:
            break
        sized = sized if any(one.drawn_domains for one in cases) else None
    if same < runs and not rounds:
        return StageResult(make_failed_evidence(_rounds(runs - same, runs), **measured))
    if answers := case.handed_on.get("oracle"):
        executed.merge_executed_code(answers.executed)
    if left_out := find_unexecuted_changes(case, executed, old):
        return StageResult(make_missing_evidence(*_reasons(left_out), **_unexecuted(left_out), **measured))
    return StageResult(
        make_passed_evidence(
            Message(
                "patch.runs_alike",
                "In {runs} tiny training runs, the candidate's results match the baseline's. In {same} of these runs, the results are equal to the "
                "bit. The runs executed all of the patch.",
                runs=runs, same=same,
            ),
            **measured,
        ),
        handed_on=same == runs,
    )  # fmt: skip


def _draw(
    case: PatchCase[PatchPolicy],
    work: Path,
    cases: Sequence[MatrixCase],
    tools: Sequence[MatrixTool],
    sized: SizedRuns | None = None,
) -> tuple[MatrixPlan, MatrixSide, MatrixRuns, MatrixRuns] | StageResult:
    """Draw new data and train both sides on it. Returns the plan, the approved code, the runs of baseline and candidate; or the stage's result if
    one of these failed."""
    policy = case.policy.matrix
    compiled = (
        devices.get_compiled_code_folder(case.workspace.root, case.start.commit) / "inductor" / NATIVE
        if case.start
        else None
    )
    kernels = write_kernels_files(case, case.baseline, work / "a")
    approved = MatrixSide(case.baseline, kernels, work, policy.wall_seconds, case.after_stages, compiled)
    with case.progress.task("tiny runs of both sides", 3) as task:
        name = _find_recipe(case)["name"]
        plan, begun = make_matrix_plan(replace(approved, folder=work / "0"), work / "plan", name, sized)
        if begun.failed:
            return _approved_failed(policy, begun)
        task.advance(1, "data and checkpoints")
        old = replace(approved, folder=work / "1", watched=find_watched_lines(case, old=True))
        baseline = _side(case, plan, old, cases, tools, "baseline")
        if baseline.failed:
            return _approved_failed(policy, baseline)
        task.advance(1, f"baseline {baseline.seconds:.0f} s")
        limits = policy.patience.compute_attempt_limits(baseline.seconds)
        kernels = write_kernels_files(case, case.candidate, work / "b")
        watched = find_watched_lines(case)

        def attempt(number: int, limit: float) -> MatrixRuns:
            side = replace(approved, code=case.candidate, kernels=kernels, folder=work / f"{2 + number}")
            return _side(case, plan, replace(side, wall_seconds=limit, watched=watched), cases, tools, "candidate")

        candidate = run_attempts_with_limits(limits, attempt, lambda side: side.out_of_time)
        task.advance(1, f"candidate {candidate.seconds:.0f} s")
    if candidate.out_of_time:
        return StageResult(
            make_out_of_time_evidence(make_stopped_message("tiny runs", limits, baseline.seconds, "matrix.patience"))
        )
    if candidate.failed:
        return StageResult(
            make_failed_evidence(
                Message(
                    "patch.runs_failed",
                    "The candidate's tiny training runs failed: {problem}",
                    problem=candidate.failed,
                )
            )
        )
    return plan, approved, baseline, candidate


def _find_recipe(case: PatchCase[PatchPolicy]) -> Mapping[str, Any]:
    """Return the recipe of the trunk; before the first checkpoint, the workspace's."""
    return case.start.recipe if case.start else Recipe.load(case.workspace.recipe_path()).model_dump()


def _find_sized_runs(case: PatchCase[PatchPolicy]) -> SizedRuns | None:
    return make_sized_runs(_find_recipe(case))


def _side(
    case: PatchCase[PatchPolicy],
    plan: MatrixPlan,
    side: MatrixSide,
    cases: Sequence[MatrixCase],
    tools: Sequence[MatrixTool],
    who: str,
) -> MatrixRuns:
    """Run the cases and tools of one side, with a row in the ledger."""
    code = case.applied.commit if who == "candidate" else case.applied.base
    runs = ArmRunner(case.plant, side.folder, "patch gate", case.subject)
    arm = plan.make_combined_arm(cases, code, who)
    with runs.record_arm_states({side.folder: arm}) as ends:
        found = run_cases(plan, side, cases, tools)
        ends[arm.key] = found.failed
    return found


def write_kernels_files(case: PatchCase[PatchPolicy], code: Path, folder: Path) -> Mapping[str, Path]:
    """Write two kernels.yaml for one side's runs and return their paths: 'reference' has no choices, 'chosen' has those of ``code``."""
    folder.mkdir(parents=True)
    chosen = case.start.resolve_kernels(code) if case.start else (code / KERNELS).read_text()
    paths = {}
    for name, text in (("reference", REFERENCE), ("chosen", chosen)):
        paths[name] = folder / f"{name}.yaml"
        paths[name].write_text(text)
    return paths


def may_round_differently(case: PatchCase[PatchPolicy]) -> bool:
    """True if the patch may change rounding. A patch of ops may, because the oracle judges it. Other patches may only if the proposal says so."""
    if any(path.startswith("kernels/") for path in case.changed_paths):
        return True
    message = repository.read_commit_message(case.workspace.repository, case.applied.commit)
    return re.search(r"\brounding\b", message, re.IGNORECASE) is not None


def find_unexecuted_changes(
    case: PatchCase[PatchPolicy], executed: ExecutedCode, old: ExecutedCode
) -> list[UnexecutedPart]:
    """Return the parts of the patch that neither the tiny runs nor the op checks executed, and the conditions without one result.

    ``executed``: what the patched code executed. ``old``: what the old code executed; removed lines are looked up there. If a removed line of an
    op is missing there, the old code answers the op checks, too: an implementation that the patch chooses was perhaps not chosen before.
    """
    answers: OpAnswers | None = case.handed_on.get("oracle")
    checked = {job["op"] for job in answers.jobs} if answers else set()
    found = find_unexecuted_native_files([change.path for change in case.changes], checked, executed)
    found += [
        part
        for path, base, text in iterate_python_changes(case)
        for part in find_unexecuted_parts(path, base, text, executed)
    ]
    removals = _find_removals(case, old)
    if answers and any(part.path.startswith("kernels/") for part in removals):
        lines = find_watched_lines(case, old=True)
        limit = case.policy.matrix.wall_seconds
        old.merge_executed_code(record_old_code(answers, lines, case.baseline, case.work / "oracle", limit))
        removals = _find_removals(case, old)
    return found + removals


def _find_removals(case: PatchCase[PatchPolicy], old: ExecutedCode) -> list[UnexecutedPart]:
    return [
        part
        for path, base, text in iterate_python_changes(case)
        for part in find_unexecuted_removals(path, base, text, old)
    ]


def _approved_failed(policy: MatrixPolicy, side: MatrixRuns) -> StageResult:
    if side.out_of_time:
        return StageResult(
            make_out_of_time_evidence(
                make_baseline_stopped_message("tiny runs", policy.wall_seconds, "matrix.wall_seconds")
            )
        )
    return StageResult(
        make_missing_evidence(
            Message(
                "patch.baseline_runs_failed",
                "The baseline's own tiny training runs failed, so the patch was not judged: {problem}",
                problem=side.failed,
            )
        )
    )


def _rounds(differ: int, runs: int) -> Message:
    return Message(
        "patch.rounds",
        "In {differ} of {runs} tiny training runs, the candidate's results differ from the baseline's by rounding. The proposal does not say "
        "that the patch changes rounding. Keep the order of the operations, or say in the hypothesis that the patch changes rounding.",
        differ=differ, runs=runs,
    )  # fmt: skip


def _unexecuted(left_out: Sequence[UnexecutedPart]) -> dict[str, Any]:
    """Return evidence about the unexecuted parts. ``waits_for``: the device on which the patch is judged again, if all these parts are for it."""
    found: dict[str, Any] = {"unexecuted": [str(part) for part in left_out]}
    (device, *others) = {part.required_device for part in left_out}
    return found | ({"waits_for": device} if device not in ("", devices.get_device_kind()) and not others else {})


def _reasons(left_out: Sequence[UnexecutedPart]) -> list[Message]:
    device = _unexecuted(left_out).get("waits_for")
    if all(part.result for part in left_out):
        first = Message(
            "patch.one_sided",
            "In all runs of the gate, some conditions in the patch had the same result, so the gate did not judge what the patch does otherwise. "
            "Leave these conditions out, or make each depend on something that differs among the runs:",
        )
    elif device:
        first = Message(
            "patch.waits_for_device",
            "No run of the gate executed some parts of the patch, so the gate did not judge them. The patch waits until a daemon of this workspace "
            "runs on {device}. That daemon judges the patch again. To have the rest of the patch judged on this machine, leave these parts out:",
            device=device,
        )
    else:
        first = Message(
            "patch.not_executed",
            "No run of the gate executed some parts of the patch, so the gate did not judge them. If these parts need another device, propose them "
            "on a machine with that device. Otherwise leave these parts out:",
        )
    parts = [part.message for part in left_out[:MOST_REASONS]]
    more = len(left_out) - MOST_REASONS
    return [
        first,
        *parts,
        *([Message("patch.more_lines", "and {more} more lines that no run executed", more=more)] if more > 0 else []),
    ]
