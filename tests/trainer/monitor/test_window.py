"""The step at which a quantity left its usual value, for series whose onset is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from trainer.monitor.window import find_rise_onset


def usual(seed: int, count: int = 100) -> list[float]:
    noise = random.Random(seed)
    return [0.3 * math.exp(noise.gauss(0, 0.2)) for _ in range(count)]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("factor", "steps"),
    [
        (lambda t: 4000 ** ((t + 1) / 5), 5),  # BLOOM: 0.24 → 960
        (lambda t: 5.0, 1),
        (lambda t: 5.0, 30),
        (lambda t: 1.3 ** (t + 1), 12),
    ],
    ids=["bloom", "one step", "new level", "slow climb"],
)
def test_the_onset_of_a_rise_is_found_to_within_a_few_steps(
    factor: Callable[[int], float], steps: int, seed: int
) -> None:
    values = usual(seed)
    risen = [factor(t) * value for t, value in enumerate(usual(seed + 100, steps))]
    found = find_rise_onset([*values, *risen])
    assert found is not None and -6 <= found - len(values) <= min(steps - 1, 3)


def test_a_fall_is_found_only_with_sign_minus_one() -> None:
    values = [*usual(1), 0.02, 0.02]
    assert find_rise_onset(values) is None
    assert find_rise_onset(values, -1) == 100


@pytest.mark.parametrize("spike", range(60, 90, 6))
def test_an_old_spike_is_no_onset(spike: int) -> None:
    values = usual(3)
    values[spike] *= 1e4
    values[-1] *= 50
    found = find_rise_onset(values)
    assert found is not None and found >= 95


@pytest.mark.parametrize("values", [[], [1.0], [1.0] * 50, [0.0] * 50, usual(4)])
def test_without_a_rise_there_is_no_onset(values: list[float]) -> None:
    assert find_rise_onset(values) is None
