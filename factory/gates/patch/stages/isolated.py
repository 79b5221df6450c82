"""Is every op whose implementation the patch switches faster alone? By ``kernels.contract.bench`` of the baseline's code.

Asked only where both implementations are approved code, as a process cannot be trusted to time itself. Each timing is
followed by one of the old implementation against itself (A/A): while that shows a difference, another program disturbs the clock.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from factory.core import devices
from factory.gates.case import NO_START, PatchCase, StageEvidence, StageResult, failed, missing, not_needed, passed
from factory.gates.patch.changed_ops import ChangedOp, ops_of
from factory.gates.patch.policy import IsolatedPolicy, PatchPolicy
from factory.gates.patch.stages.training import recipe_for
from factory.gates.patience import baseline_stopped
from factory.sandbox import sandbox
from factory.sandbox.sandbox import Limits

UNLIKE = 1.02  # A/A ratio beyond which the clock is not trusted


def run(case: PatchCase[PatchPolicy]) -> StageResult:
    if case.start is None:
        return StageResult(NO_START)
    if any(path.endswith(".py") for path in case.paths):
        return StageResult(not_needed("new code is not timed alone; the time of the whole training step decides"))
    # Only approved code runs, so what it compiled before may be used.
    work = case.workspace.root / "cache" / f"workbench{devices.label()}"
    recipe = recipe_for(case, case.start, case.baseline)
    return StageResult(compare(case.policy.isolated, ops_of(case), recipe, case.baseline, work))


def compare(
    policy: IsolatedPolicy, ops: Sequence[ChangedOp], recipe: dict[str, Any], baseline: Path, work: Path
) -> StageEvidence:
    """Raises: IsolationError."""
    switched = [op for op in ops if op.before != op.after]
    if not switched:
        return not_needed("the patch switches no op to another implementation")
    work.mkdir(parents=True, exist_ok=True)
    recipe_path = work.with_name(f"{work.name}-recipe.yaml")  # where the code that is timed cannot write
    recipe_path.write_text(yaml.safe_dump(recipe))
    found: dict[str, Any] = {}
    for op in switched:
        command = [sys.executable, "-m", "kernels.contract.bench", "--op", op.op, "--against", op.before]
        command += ["--recipe", str(recipe_path), "--pairs", str(policy.pairs), "--device", devices.kind()]
        command += ["--implementation"]
        for _ in range(policy.tries):
            answers = []
            for implementation in (op.after, op.before):  # A/B, then A/A
                limits = Limits(wall_seconds=policy.wall_seconds)
                timed = sandbox.run(
                    [*command, implementation],
                    output=work,
                    readonly=[baseline, recipe_path],
                    cwd=baseline,
                    limits=limits,
                )
                try:
                    answers.append(json.loads(timed.stdout))
                except ValueError:
                    why = f"{op.op} could not be timed alone: {timed.why()}"
                    if timed.timed_out:
                        why = baseline_stopped(f"timing {op.op} alone", policy.wall_seconds, "isolated.wall_seconds")
                    return missing(why)
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
            reason = (
                f"the timing of {op.op} cannot be trusted: {policy.tries} times in a row it was measured as {untrusted} than "
                f"itself, the last time {control['ratio']:.2f}×; close other programs and have it judged again"
            )
            return missing(reason, ops=found)
        if changed["ratio_high"] < policy.min_ratio:  # a difference within the noise is left to the whole step
            reason = (
                f"{op.op}: {op.after} is {changed['ratio']:.2f}× as fast as {op.before} alone (three of four pairs are below "
                f"{changed['ratio_high']:.2f}×); at least {policy.min_ratio:.2f}× is needed"
            )
            return failed(reason, ops=found)
    return passed(*(f"{name}: {n['ratio']:.2f}× alone (A/A {n['a_a']:.2f})" for name, n in found.items()), ops=found)


def _unlike_itself(control: Mapping[str, float]) -> str:
    """'faster' or 'slower', as an implementation was measured against itself; '': neither."""
    if control["ratio_low"] > UNLIKE:
        return "faster"
    return "slower" if control["ratio_high"] < 1 / UNLIKE else ""
