"""Rounding is measured where a bound that was set beforehand is too narrow for the data that a verdict drew."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from factory.gates.patch.matrix.compare import Compared, Difference, farthest, find_discrepancies
from factory.gates.patch.matrix.rounding import MARGIN, TWINS, beyond_rounding
from factory.gates.patch.matrix.runs import run_cases
from tests.support.factory.matrix import prepare


@pytest.mark.slow("tiny trainings of several processes")
def test_what_rounding_explains_is_no_difference_and_the_rest_is(tmp_path: Path) -> None:
    with ExitStack() as after:
        prepared = prepare(tmp_path, after, ["first steps", "bf16"])
        shares: dict[str, list[float]] = {}
        for twin in range(1, TWINS + 1):
            side = replace(prepared.side, folder=tmp_path / f"twin-{twin}", disturbed=twin)
            runs = run_cases(prepared.plan, side, prepared.cases)
            assert not runs.failed, runs.failed
            for case in prepared.cases:
                folders = prepared.baseline.opened[case.name], runs.opened[case.name]
                found = find_discrepancies(case, *folders, prepared.plan.weights_before(case))
                shares.setdefault(case.name, []).append(farthest(case, found).share)
        print(shares)
        assert all(len(set(several)) > 1 for several in shares.values())  # and each otherwise
        assert all(0 < share < math.inf for several in shares.values() for share in several)
        assert max(shares["first steps"]) < max(shares["bf16"])
        explained = {name: MARGIN * max(several) for name, several in shares.items()}
        compared = [
            Compared(False, Difference("first steps", "a", 0.9 * explained["first steps"], 0.0)),
            Compared(False, Difference("bf16", "b", 1.1 * explained["bf16"], 0.0)),
            Compared(False, Difference("bf16", "b", math.inf, 0.0)),
            Compared(True, None),
        ]
        for number, left in ((slice(0, 2), ["bf16"]), (slice(2, 4), ["bf16"])):
            side = replace(prepared.side, folder=tmp_path / f"beyond-{number.start}-{number.stop}")
            beyond, problem = beyond_rounding(prepared.plan, side, prepared.baseline, compared[number])
            assert not problem and [difference.case for difference in beyond] == left
