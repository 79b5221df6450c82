"""Checks the results and gradients of every changed op against the reference in fp64, with several shapes and hostile values.

One pair of processes computes the answers for this stage and for the exploits stage.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from typing import Any

from factory.gates.patch.changed_ops import NO_OP, ChangedOp, find_changed_ops_of_patch
from factory.gates.patch.matrix.unexecuted_code import find_watched_lines
from factory.gates.patch.op_answers import OpAnswers, check_tests_unchanged, run_op_jobs
from factory.gates.patch.policy import OraclePolicy, PatchPolicy
from factory.gates.patch.stages.exploits import make_exploit_calls
from factory.gates.stage_interface import PatchCase, StageEvidence, StageResult
from kernels.contract.message import Message
from trainer.contract.recipe import Recipe

HOSTILE = ("normal", "large", "tiny", "zero", "constant", "outlier")


def run(case: PatchCase[PatchPolicy]) -> StageResult:
    ops = find_changed_ops_of_patch(case)
    if not ops:
        return StageResult(NO_OP)
    policy, work = case.policy.oracle, case.work / "oracle"
    recipe = case.start.recipe if case.start else Recipe.load(case.workspace.recipe_path()).model_dump()
    jobs = make_oracle_jobs(policy, ops, recipe["precision"])
    jobs += make_exploit_calls(case.policy.exploits, ops, recipe, random.SystemRandom())
    watched = find_watched_lines(case)
    answers = case.after_stages.enter_context(run_op_jobs(jobs, policy, case.baseline, case.candidate, work, watched))
    found = make_oracle_evidence(answers)
    if found["state"] == "passed" and any(path.startswith("kernels/") for path in case.changed_paths):
        found |= check_tests_unchanged(answers, policy.patience, case.candidate, work)
    return StageResult(found, answers)


def make_oracle_evidence(answers: OpAnswers, job_numbers: Sequence[int] | None = None) -> StageEvidence:
    """Return the evidence of the answers to ``make_oracle_jobs``. An early end of the process counts only if no other jobs follow these.

    ``job_numbers``: the jobs that the process answered, if it did not answer all.
    """
    numbers = (
        [number for number, job in enumerate(answers.jobs) if "case" in job] if job_numbers is None else job_numbers
    )
    last = job_numbers is not None or len(numbers) == len(answers.jobs)
    right = Message(
        "patch.ops_right",
        "{checks} checks of results and gradients against fp64 passed.",
        checks=len(numbers),
    )
    return answers.make_evidence(numbers, right, last=last)


def make_oracle_jobs(policy: OraclePolicy, ops: Sequence[ChangedOp], precision: str) -> list[dict[str, Any]]:
    """Return the oracle's jobs. Their seeds are random, so that no answer can be prepared.

    The policy's first case is tried with all kinds of values, in the recipe's precision and in fp32. The other cases are tried in the recipe's
    precision. One optional job is in fp64, which no training uses: an op may refuse it, but a computed result must be right.
    """
    from kernels.contract.precision import find_compute_precision

    jobs, precision = [], find_compute_precision(precision)
    for op in ops:
        for case in policy.cases:
            first = case == policy.cases[0]
            for values in HOSTILE if first else HOSTILE[:1]:
                for dtype in sorted({"fp32", precision}) if first else (precision,):
                    job = {"op": op.op, "implementation": op.after, "case": case, "dtype": dtype, "values": values}
                    jobs.append(job | {"seed": secrets.randbelow(1 << 31)})
        double = {
            "op": op.op,
            "implementation": op.after,
            "case": policy.cases[0],
            "dtype": "fp64",
            "values": HOSTILE[0],
        }
        jobs.append(double | {"seed": secrets.randbelow(1 << 31), "optional": True})
    return jobs
