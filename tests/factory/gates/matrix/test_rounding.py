"""Rounding is measured where a bound that was set beforehand is too narrow for the data that a verdict drew."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from factory.gates.patch.matrix import rounding
from factory.gates.patch.matrix.compare import Compared, Difference
from factory.gates.patch.matrix.rounding import Rounding, measure_rounding
from tests.support.factory.matrix import prepare


@pytest.mark.long("tiny trainings of several processes")
def test_what_rounding_explains_is_no_difference_and_the_rest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "MOST_TWINS", rounding.TWINS + 2)  # fewer than a gate runs: the rule is the same
    with ExitStack() as after:
        prepared = prepare(tmp_path, after, ["first steps", "bf16"])

        def measured(folder: str, **shares: float) -> Rounding:
            compared = [Compared(False, Difference(name, "a", share, 0.0)) for name, share in shares.items()]
            side = replace(prepared.side, folder=tmp_path / folder)
            found = measure_rounding(prepared.plan, side, prepared.baseline, [*compared, Compared(True, None)])
            assert not found.problem
            return found

        large = measured("large", **{"first steps": 1e9, "bf16": math.inf})
        assert not large.undecided
        allowed = {difference.case: difference.allowed for difference in large.beyond}
        print(allowed)
        assert 0 < allowed["first steps"] < 0.1 and 1e-4 < allowed["bf16"] < math.inf
        small = measured("small", **{"first steps": 0.9 * allowed["first steps"]})  # the same twins
        assert not small.beyond and not small.undecided
        lines = prepared.baseline.folders["first steps"] / "metrics.jsonl"
        lines.write_text(
            "".join(lines.read_text().splitlines(keepends=True)[:-1])
        )  # as if all twins told one line more
        found = measured("undecided", **{"first steps": math.inf})
        assert found.undecided == ["first steps"] and not found.beyond
