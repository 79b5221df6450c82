from __future__ import annotations

import math

import pytest

from tests.trainer.conftest import recipe_with
from trainer.schedule import lr_share

SCHEDULE = recipe_with(schedule__warmup_steps=4).schedule


@pytest.mark.parametrize(
    ("kind", "step", "first", "last", "share"),
    [
        ("trunk", 0, 0, 20, 0.25),
        ("trunk", 2, 0, 20, 0.75),
        ("trunk", 3, 0, 20, 1.0),
        ("trunk", 19, 0, 20, 1.0),  # the trunk has no end that it decays to
        ("trunk", 10**9, 20, 10**9 + 1, 1.0),
        ("anneal", 20, 20, 29, 1 - math.sqrt(0.1)),
        ("anneal", 24, 20, 29, 1 - math.sqrt(0.5)),
        ("anneal", 28, 20, 29, 1 - math.sqrt(0.9)),
    ],
)
def test_warm_up_stable_decay(kind: str, step: int, first: int, last: int, share: float) -> None:
    assert lr_share(SCHEDULE, kind, step, first, last) == pytest.approx(share)  # type: ignore[arg-type]


@pytest.mark.parametrize(("shape", "middle"), [("1-sqrt", 1 - math.sqrt(0.5)), ("linear", 0.5), ("cosine", 0.5)])
def test_tails_fall_to_their_floor(shape: str, middle: float) -> None:
    schedule = recipe_with(schedule__shape=shape, schedule__final_lr_share=0.1).schedule
    shares = [lr_share(schedule, "anneal", step, 100, 199) for step in range(100, 199)]
    assert shares == sorted(shares, reverse=True)
    assert shares[49] == pytest.approx(0.1 + 0.9 * middle)
    assert 0.1 < shares[-1] < 0.12
