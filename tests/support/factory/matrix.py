"""The gate's tiny runs outside a whole gate: baseline once, then one changed file after the other."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from factory.gates.patch.matrix.cases import CASES, TOOLS, MatrixCase, MatrixTool, make_tool_name
from factory.gates.patch.matrix.compare import compare_runs, measure_rounding_effect
from factory.gates.patch.matrix.runs import MatrixPlan, MatrixRuns, MatrixSide, make_matrix_plan, run_cases
from factory.gates.patch.matrix.sized_cases import make_sized_runs
from factory.gates.patch.matrix.unexecuted_code import (
    UnexecutedPart,
    find_changed_lines,
    find_unexecuted_parts,
    find_unexecuted_removals,
)
from factory.gates.patch.stages.matrix import NATIVE
from tests.support.paths import ROOT
from trainer.contract.recipe import Recipe

REFERENCE = "cpu: {}\n"
PATIENCE_SECONDS = 3600.0
RECIPE_NAME = "demo"


@dataclass(frozen=True)
class Prepared:
    """A plan, and what the baseline's code made of some of its cases."""

    plan: MatrixPlan
    side: MatrixSide
    baseline: MatrixRuns
    cases: Sequence[MatrixCase]
    tools: Sequence[MatrixTool]
    work: Path


@dataclass(frozen=True)
class Judged:
    """differences: of the runs that are too different, a sentence each. same_bits: all are the same. unexecuted: parts of the changed file.
    undecided: runs in which rounding alone makes differences without a size, on these data: the gate draws others, three times at most."""

    differences: list[str]
    same_bits: bool
    unexecuted: list[str]
    runs: MatrixRuns
    undecided: list[str] = field(default_factory=list)
    parts: list[UnexecutedPart] = field(default_factory=list)  # the same as ``unexecuted``


def copy_of_code(folder: Path) -> Path:
    """This checkout's kernels/, trainer/ and what else they need."""
    for name in ("kernels", "models", "trainer", "policies"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def prepare(work: Path, after: ExitStack, names: Sequence[str] | None = None, chosen: str = REFERENCE) -> Prepared:
    """``names``: of cases and tools; None: all of them."""
    sized = make_sized_runs(Recipe.load(ROOT / "policies" / "recipes" / f"{RECIPE_NAME}.yaml").model_dump())
    assert sized is not None
    cases = [case for case in (*CASES, *sized.cases) if names is None or case.name in names]
    tools = [tool for tool in (*TOOLS, *sized.tools) if names is None or make_tool_name(tool) in names]
    if not any(case.drawn_domains for case in cases) and not set(sized.tools) & set(tools):
        sized = None
    kernels = {"reference": work / "reference.yaml", "chosen": work / "chosen.yaml"}
    for path, text in zip(kernels.values(), (REFERENCE, chosen)):
        path.write_text(text)
    side = MatrixSide(ROOT, kernels, work / "begin", PATIENCE_SECONDS, after)
    plan, begun = make_matrix_plan(side, work / "plan", RECIPE_NAME, sized)
    assert not begun.failed, begun.failed
    side = replace(side, compiled=work / "plan" / "trunk" / "0" / "cache" / "inductor" / NATIVE)  # built once
    baseline = run_cases(plan, replace(side, folder=work / "baseline"), cases, tools)
    assert not baseline.failed, baseline.failed
    return Prepared(plan, side, baseline, cases, tools, work)


def find_removals(prepared: Prepared, code: Path, path: str, names: Sequence[str]) -> list[UnexecutedPart]:
    """What ``code`` removes from the file ``path`` that the old code did not execute in the cases ``names``."""
    base, text = ((top / path).read_text() for top in (ROOT, code))
    folder = prepared.work / f"old-{len(list(prepared.work.glob('old-*')))}"
    side = replace(prepared.side, folder=folder, watched={path: sorted(find_changed_lines(text, base))})
    runs = run_cases(prepared.plan, side, [case for case in prepared.cases if case.name in names])
    assert not runs.failed, runs.failed
    return find_unexecuted_removals(path, base, text, runs.executed)


def judge(
    prepared: Prepared,
    code: Path,
    path: str | None,
    names: Sequence[str] | None = None,
    chosen: str | None = None,
    watched: Mapping[str, Sequence[int]] | None = None,
) -> Judged:
    """``code`` against the baseline in the cases ``names``; ``path``: the file that was changed. ``watched``: lines in place of the changed ones."""
    cases = [case for case in prepared.cases if names is None or case.name in names]
    tools = [tool for tool in prepared.tools if names is None or make_tool_name(tool) in names]
    folder = prepared.work / f"candidate-{len(list(prepared.work.glob('candidate-*')))}"
    base, text = ((top / path).read_text() if path else "" for top in (ROOT, code))
    watched = watched or ({path: sorted(find_changed_lines(base, text))} if path else {})
    side = replace(prepared.side, code=code, folder=folder, watched=watched)
    if chosen is not None:
        kernels = folder.with_suffix(".yaml")
        kernels.write_text(chosen)
        side = replace(side, kernels={"reference": kernels, "chosen": kernels})
    runs = run_cases(prepared.plan, side, cases, tools)
    if runs.failed:
        return Judged([runs.failed], False, [], runs)
    compared = compare_runs(prepared.plan, prepared.baseline, runs, cases, tools)
    left_out = []
    if path is not None:
        left_out = find_unexecuted_parts(path, base, text, runs.executed)
    beyond, undecided = [one.worst for one in compared if one.worst is not None], []
    if chosen is not None or (path or "").startswith("kernels/"):
        twins = replace(prepared.side, folder=folder.with_name(f"{folder.name}-twins"))
        rounding = measure_rounding_effect(prepared.plan, twins, prepared.baseline, compared)
        assert not rounding.problem, rounding.problem
        beyond, undecided = rounding.beyond, rounding.undecided
    differences, same = [str(difference) for difference in beyond], all(one.same_bits for one in compared)
    return Judged(differences, same, [str(part) for part in left_out], runs, undecided, left_out)
