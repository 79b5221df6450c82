"""How far may rounding move a run? Where a candidate is beyond ``MatrixCase.rounding``, that is measured on this verdict's own data.

Data, weights and lengths are drawn for each verdict, and in some draws a run is a hundred times as sensitive as in others: a gradient
near zero decides the sign of Adam's first step, two experts have nearly the same score. Then the baseline's code runs the case again,
with every op's results some roundings off (``train_cases.disturb_ops``), and what that moves is no fault of a candidate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from factory.gates.patch.matrix.cases import CASES
from factory.gates.patch.matrix.compare import Compared, Difference, farthest, find_discrepancies
from factory.gates.patch.matrix.runs import MatrixPlan, MatrixRuns, SideCode, run_cases

TWINS = 4  # disturbed runs of each case
# Of 140 runs with other kernels of ours, on data drawn twice, 137 are nearer to the baseline than the farthest twin, the others at
# most 1.24 times as far; 9 of them are beyond ``MatrixCase.rounding``, by up to 3.1.
MARGIN = 3.0


@dataclass(frozen=True)
class Rounding:
    """beyond: the differences that are larger than rounding makes them. undecided: cases whose difference has no size, such as a step skipped
    by one side, where rounding alone makes such a difference too. problem: why it could not be measured."""

    beyond: list[Difference] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    problem: str = ""


def measure_rounding(plan: MatrixPlan, side: SideCode, baseline: MatrixRuns, compared: Sequence[Compared]) -> Rounding:
    """What rounding does in the cases that differ. side: approved code, and the folder of the twins. Raises: IsolationError."""
    worst = {one.worst.case: one.worst for one in compared if one.worst is not None}
    cases = [case for case in CASES if case.name in worst]  # a tool rounds nothing
    explained = dict.fromkeys(worst, 0.0)
    for twin in range(1, TWINS + 1):
        runs = run_cases(plan, replace(side, folder=side.folder / str(twin), disturbed=twin), cases)
        if runs.failed:
            return Rounding(problem=runs.failed)
        for case in cases:
            folders = baseline.opened[case.name], runs.opened[case.name]
            share = farthest(case, find_discrepancies(case, *folders, plan.weights_before(case))).share
            explained[case.name] = max(explained[case.name], MARGIN * share)
    found = Rounding()
    for name, difference in worst.items():
        difference = replace(difference, allowed=max(difference.allowed, explained[name]))
        if math.isinf(difference.allowed):
            found.undecided.append(name)
        elif difference.share > difference.allowed:
            found.beyond.append(difference)
    return found
