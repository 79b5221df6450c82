"""Times each op by itself whose implementation the patch switches. The new implementation must not be slower.

``kernels.contract.bench`` of the baseline's code measures. The stage runs only if both implementations are approved code, because a process with new
code cannot be trusted to time itself. After each timing, the old implementation is timed against itself (A/A). If this shows a difference, another
program disturbed the clock.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from factory.core import devices
from factory.gates.patch.changed_ops import ChangedOp, find_changed_ops_of_patch
from factory.gates.patch.policy import IsolatedTimingPolicy, PatchPolicy
from factory.gates.patch.stages.training import make_gate_recipe
from factory.gates.stage_interface import (
    NO_START,
    PatchCase,
    StageEvidence,
    StageResult,
    changes_code,
    make_failed_evidence,
    make_missing_evidence,
    make_not_needed_evidence,
    make_passed_evidence,
)
from factory.gates.time_limits import make_baseline_stopped_message, make_out_of_time_evidence
from factory.sandbox import sandbox
from factory.sandbox.sandbox import SandboxLimits
from kernels.contract.message import Message

UNLIKE = 1.02  # the A/A ratio above which the clock is not trusted


def run(case: PatchCase[PatchPolicy]) -> StageResult:
    if case.start is None:
        return StageResult(NO_START)
    if changes_code(case.changed_paths):
        return StageResult(
            make_not_needed_evidence(
                Message(
                    "patch.new_code_alone",
                    "New code is not timed op by op: the time of the whole training step decides.",
                )
            )
        )
    # Only approved code runs, so its compiled files may be used.
    work = case.workspace.root / "cache" / f"workbench{devices.get_device_folder_suffix()}"
    recipe = make_gate_recipe(case, case.start, case.baseline)
    return StageResult(
        time_switched_ops(case.policy.isolated, find_changed_ops_of_patch(case), recipe, case.baseline, work)
    )


def time_switched_ops(
    policy: IsolatedTimingPolicy, ops: Sequence[ChangedOp], recipe: dict[str, Any], baseline: Path, work: Path
) -> StageEvidence:
    """Return the evidence on the ops that the patch switches to another implementation. Raises: IsolationError."""
    switched = [op for op in ops if op.before != op.after]
    if not switched:
        return make_not_needed_evidence(
            Message("patch.no_switch", "The patch switches no op to another implementation.")
        )
    work.mkdir(parents=True, exist_ok=True)
    recipe_path = work.with_name(f"{work.name}-recipe.yaml")  # outside the folder that the timed code can write
    recipe_path.write_text(yaml.safe_dump(recipe))
    found: dict[str, Any] = {}
    for op in switched:
        command = [sys.executable, "-m", "kernels.contract.bench", "--op", op.op, "--against", op.before]
        command += ["--recipe", str(recipe_path), "--pairs", str(policy.pairs), "--device", devices.get_device_kind()]
        command += ["--implementation"]
        for _ in range(policy.tries):
            answers = []
            for implementation in (op.after, op.before):  # A/B, then A/A
                limits = SandboxLimits(wall_seconds=policy.wall_seconds)
                timed = sandbox.run_in_sandbox(
                    [*command, implementation],
                    output=work,
                    readonly=[baseline, recipe_path],
                    cwd=baseline,
                    limits=limits,
                )
                try:
                    answers.append(json.loads(timed.stdout))
                except ValueError:
                    if timed.timed_out:
                        what = f"timing of {op.op}"
                        return make_out_of_time_evidence(
                            make_baseline_stopped_message(what, policy.wall_seconds, "isolated.wall_seconds")
                        )
                    why = timed.describe_ending()
                    return make_missing_evidence(
                        Message("patch.not_timed_alone", "{op} could not be timed by itself: {why}", op=op.op, why=why)
                    )
            changed, control = answers
            if not (untrusted := _unlike_itself(control)):
                break
        found[op.op] = {
            "ratio": changed["ratio"],
            "low": changed["ratio_low"],
            "high": changed["ratio_high"],
            "a_a": control["ratio"],
        }
        if untrusted:
            reason = Message(
                "patch.unlike_itself",
                "The timing of {op} cannot be trusted: in {tries} measurements in a row, the same code seemed {slower} than itself (last ratio "
                "{ratio:.2f}×). Close other programs and judge the patch again.",
                op=op.op, tries=policy.tries, slower=untrusted, ratio=control["ratio"],
            )  # fmt: skip
            return make_missing_evidence(reason, ops=found)
        if (
            changed["ratio_high"] < policy.min_ratio
        ):  # for a difference within the noise, the timing of the whole step decides
            reason = Message(
                "patch.slower_alone",
                "{op}, timed by itself: the new implementation ({after}) is {ratio:.2f}× as fast as the old one ({before}), but at least "
                "{least:.2f}× is needed. Three quarters of the pairs of runs gave less than {high:.2f}×.",
                op=op.op, after=op.after, before=op.before, ratio=changed["ratio"], high=changed["ratio_high"], least=policy.min_ratio,
            )  # fmt: skip
            return make_failed_evidence(reason, ops=found)
    alone = [
        Message(
            "patch.alone",
            "{op}, timed by itself: the candidate is {ratio:.2f}× as fast as the baseline. With the same code on both sides, the ratio is "
            "{a_a:.2f}×.",
            op=name,
            ratio=n["ratio"],
            a_a=n["a_a"],
        )
        for name, n in found.items()
    ]
    return make_passed_evidence(*alone, ops=found)


def _unlike_itself(control: Mapping[str, float]) -> str:
    """Return 'faster' or 'slower' if an implementation seemed so against itself; else ''."""
    if control["ratio_low"] > UNLIKE:
        return "faster"
    return "slower" if control["ratio_high"] < 1 / UNLIKE else ""
