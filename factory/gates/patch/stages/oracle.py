"""Is every changed op right? Against the reference in fp64: forward and every gradient, several shapes, hostile values.

One pair of processes answers for this stage and for the exploits stage, which reads its part of the answers.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from factory.gates.case import PatchCase, StageEvidence, StageResult
from factory.gates.patch.changed_ops import NO_OP, ChangedOp, ops_of
from factory.gates.patch.op_answers import Answers, answered, changed_tests
from factory.gates.patch.policy import OraclePolicy, PatchPolicy
from factory.gates.patch.stages.exploits import calls
from trainer.contract.recipe import Recipe

HOSTILE = ("normal", "large", "tiny", "zero", "constant", "outlier")


def run(case: PatchCase[PatchPolicy]) -> StageResult:
    ops = ops_of(case)
    if not ops:
        return StageResult(NO_OP)
    policy, work = case.policy.oracle, case.work / "oracle"
    recipe = case.start.recipe if case.start else Recipe.load(case.workspace.recipe_path()).model_dump()
    jobs = oracle_jobs(policy, ops, recipe["precision"])
    jobs += calls(case.policy.exploits, ops, recipe, random.SystemRandom())
    files = [change.path for change in case.changes if change.path.endswith(".py")]
    answers = case.after_stages.enter_context(answered(jobs, policy, case.baseline, case.candidate, work, files))
    found = evidence(answers)
    if found["state"] == "passed" and any(path.startswith("kernels/") for path in case.paths):
        found |= changed_tests(answers, policy.patience, case.candidate, work)
    return StageResult(found, answers)


def evidence(answers: Answers) -> StageEvidence:
    """From the answers to ``oracle_jobs``. The process ends after all jobs: its end counts here only where there are no others."""
    numbers = [number for number, job in enumerate(answers.jobs) if "case" in job]
    last = len(numbers) == len(answers.jobs)
    return answers.evidence(numbers, "checks against fp64, forward and gradients", last=last)


def quick_check(
    policy: OraclePolicy, ops: Sequence[ChangedOp], precision: str, baseline: Path, candidate: Path, work: Path
) -> StageEvidence:
    """The oracle's checks alone. Raises: IsolationError."""
    jobs = oracle_jobs(policy, ops, precision)
    with answered(jobs, policy, baseline, candidate, work) as answers:
        return evidence(answers)


def oracle_jobs(policy: OraclePolicy, ops: Sequence[ChangedOp], precision: str) -> list[dict[str, Any]]:
    """Seeds are drawn each time, so that no answer can be prepared.

    All values and fp32 are tried on the policy's first case; the other cases at the recipe's own precision. In fp64, which
    no training uses, an op may refuse to compute; where it does not, it must be right.
    """
    from kernels.contract.precision import of_values

    jobs, precision = [], of_values(precision)
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
