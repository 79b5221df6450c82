"""How far may rounding move a run? Where a candidate is beyond ``MatrixCase.rounding``, that is measured on this verdict's own data.

Data, weights and lengths are drawn for each verdict, and in some draws a run is a hundred times as sensitive as in others: a gradient
near zero decides the sign of Adam's first step, two experts have nearly the same score. Then the baseline's code runs the case again,
with every op's results some roundings off (``train_cases.disturb_ops``), and what that moves is no fault of a candidate.

What rounding decides it decides in some runs and not in others, so a few such twins may all miss it: where each does with probability p
what the candidate did, n twins miss it with p (1 - p)^n, at worst 8 % for 4 and 1.5 % for 24. So a patch is refused for one case only, and
that case has ``MOST_TWINS`` twins by then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from factory.gates.patch.matrix.cases import CASES
from factory.gates.patch.matrix.compare import Compared, Difference, farthest, find_discrepancies
from factory.gates.patch.matrix.runs import MatrixPlan, MatrixRuns, SideCode, run_cases

TWINS = 4  # disturbed runs of each case that differs
MOST_TWINS = 24  # of the case for which a patch is refused
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
    measured = _Twins(plan, side, baseline, {one.worst.case: one.worst for one in compared if one.worst is not None})
    for _ in range(TWINS):
        measured.once_more(measured.beyond())
    for _ in range(TWINS, MOST_TWINS):
        if beyond := measured.beyond():
            measured.once_more(beyond[:1])
    undecided = [name for name, difference in measured.worst.items() if math.isinf(difference.allowed)]
    return Rounding([measured.worst[name] for name in measured.beyond()], undecided, measured.problem)


@dataclass
class _Twins:
    """``worst``: of each case what differs most, and how much of it rounding was seen to do."""

    plan: MatrixPlan
    side: SideCode
    baseline: MatrixRuns
    worst: dict[str, Difference]
    runs: int = 0
    problem: str = ""

    def beyond(self) -> list[str]:
        """The cases that rounding was not seen to explain, that which it explains least first; none once there is a problem."""
        found = [one for one in self.worst.values() if one.share > one.allowed and not self.problem]
        return [one.case for one in sorted(found, key=lambda one: one.allowed / one.share)]

    def once_more(self, names: Sequence[str]) -> None:
        """Run the baseline's code in these cases, disturbed in another way than before."""
        cases = [case for case in CASES if case.name in names]  # a tool rounds nothing
        if not cases:
            return
        self.runs += 1
        folder = self.side.folder / str(self.runs)
        twins = run_cases(self.plan, replace(self.side, folder=folder, disturbed=self.runs), cases)
        self.problem = twins.failed
        for case in cases if not self.problem else ():
            folders = self.baseline.opened[case.name], twins.opened[case.name]
            share = farthest(case, find_discrepancies(case, *folders, self.plan.weights_before(case))).share
            was = self.worst[case.name]
            self.worst[case.name] = replace(was, allowed=max(was.allowed, MARGIN * share))
