"""How far may rounding move a run? Where a candidate is beyond ``MatrixCase.rounding``, that is measured on this verdict's own data.

Data, weights and lengths are drawn for each verdict, and in some draws a run is a hundred times as sensitive as in others: a gradient
near zero decides the sign of Adam's first step, two experts have nearly the same score. Then the baseline's code runs the case again,
with every op's results some roundings off (``train_cases.disturb_ops``), and what that moves is no fault of a candidate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from factory.gates.patch.matrix.cases import CASES
from factory.gates.patch.matrix.compare import Compared, Difference, farthest, find_discrepancies
from factory.gates.patch.matrix.runs import MatrixPlan, MatrixRuns, SideCode, run_cases

TWINS = 4  # disturbed runs of each case
# Of other kernels of ours 41 of 44 runs are nearer to the baseline than the farthest twin, the others within 1.1 times that.
MARGIN = 3.0


def beyond_rounding(
    plan: MatrixPlan, side: SideCode, baseline: MatrixRuns, compared: Sequence[Compared]
) -> tuple[list[Difference], str]:
    """The differences that are larger than rounding makes them, and why that could not be measured, if it could not.

    side: approved code, and the folder of the twins. Raises: IsolationError.
    """
    worst = {one.worst.case: one.worst for one in compared if one.worst is not None}
    measurable = [case for case in CASES if case.name in worst and math.isfinite(worst[case.name].share)]
    if not measurable:
        return list(worst.values()), ""
    for twin in range(1, TWINS + 1):
        runs = run_cases(plan, replace(side, folder=side.folder / str(twin), disturbed=twin), measurable)
        if runs.failed:
            return list(worst.values()), runs.failed
        for case in measurable:
            known = worst[case.name]
            folders = baseline.opened[case.name], runs.opened[case.name]
            share = farthest(case, find_discrepancies(case, *folders, plan.weights_before(case))).share
            if math.isfinite(share):
                worst[case.name] = replace(known, allowed=max(known.allowed, MARGIN * share))
    return [difference for difference in worst.values() if difference.share > difference.allowed], ""
