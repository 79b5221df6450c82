from __future__ import annotations

import json
import math
import random

import pytest

from tests.trainer.conftest import recipe_with
from trainer.stability import Detector

RECIPE = recipe_with(stability={"window": 32, "spike_deviations": 8.0, "skip_deviations": 40.0}).stability


def warmed(steps: int = 40) -> Detector:
    detector, noise = Detector(RECIPE), random.Random(1)
    for step in range(steps):
        assert detector.observe(step, 3 + noise.gauss(0, 0.05), 1 + noise.gauss(0, 0.05), False) == []
    return detector


def test_spikes_and_jumps_are_named_with_step_and_size() -> None:
    detector = warmed()
    found = detector.observe(40, 5.0, 4.0, False)
    assert [(a.step, a.kind, a.value) for a in found] == [(40, "loss_spike", 5.0), (40, "grad_norm_jump", 4.0)]
    assert found[0].usual == pytest.approx(3, abs=0.1) and found[0].deviations > 8


def test_one_spike_does_not_hide_the_next() -> None:
    detector = warmed()
    assert detector.observe(40, 50.0, 1.0, False)
    assert [a.kind for a in detector.observe(41, 5.0, 1.0, False)] == ["loss_spike"]


def test_a_new_level_is_taken_for_usual_in_the_end() -> None:
    detector = warmed()
    flagged = [bool(detector.observe(step, 6.0, 1.0, False)) for step in range(40, 80)]
    assert flagged[0] and not flagged[-1]


def test_what_is_not_finite_is_an_anomaly_from_the_first_step_and_never_joins_the_window() -> None:
    detector = Detector(RECIPE)
    assert [a.kind for a in detector.observe(0, math.nan, math.inf, True)] == ["non_finite", "non_finite"]
    state = detector.state_dict()
    assert state["loss"] == state["grad_norm"] == []


def test_the_limit_is_infinite_until_there_is_something_to_judge_by() -> None:
    assert Detector(RECIPE).grad_norm_limit() == math.inf
    assert 1.5 < warmed().grad_norm_limit() < 6


def test_state_goes_through_json_and_decides_the_same() -> None:
    detector, again = warmed(), Detector(RECIPE)
    again.load_state_dict(json.loads(json.dumps(detector.state_dict())))
    assert again.grad_norm_limit() == detector.grad_norm_limit()
    assert again.observe(40, 5.0, 1.0, False) == detector.observe(40, 5.0, 1.0, False)


def test_a_skipped_outlier_says_so() -> None:
    assert [a.kind for a in warmed().observe(40, 3.0, 500.0, True)] == ["skipped_outlier"]
