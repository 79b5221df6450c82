"""The noise of the preflight: how often rounding alone is refused in a simulation, and what cannot make the noise small or large by chance."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from factory.training.certificate import PreflightPolicy
from factory.training.preflight import PERTURBED_RUNS, PreflightEvidence, judge_preflight
from factory.training.preflight_noise import DistanceFromStraightRun, compute_early_excess, estimate_rounding_noise

STEPS, TENSORS = 20, 12
WAYS = ("accumulated", "reference", "compiled")
Draw = Callable[[np.random.Generator], DistanceFromStraightRun]


def draw_run_whose_steps_are_independent(random: np.random.Generator) -> DistanceFromStraightRun:
    """Each number is drawn by itself. The spread grows eightfold over the steps."""
    spread = 1e-6 * np.exp(np.linspace(0, 2, STEPS))
    series = {name: np.abs(spread * random.standard_normal(STEPS)).tolist() for name in ("loss", "grad_norm")}
    return DistanceFromStraightRun(
        series, {f"exp_avg.{at}": abs(1e-5 * random.standard_normal()) for at in range(TENSORS)}
    )


def draw_run_that_departs_in_one_direction(random: np.random.Generator) -> DistanceFromStraightRun:
    """One random number decides how far the run departs in every step and tensor: the hardest case, as a run then has one degree of freedom."""
    far = abs(random.standard_normal())
    grown = (1e-6 * np.exp(np.linspace(0, 6, STEPS)) * far).tolist()
    return DistanceFromStraightRun(
        {"loss": grown, "grad_norm": grown}, {f"exp_avg.{at}": 4e-4 * far for at in range(TENSORS)}
    )


def count_refusals(draw: Draw, preflights: int, factor: float = 1.0) -> int:
    """The number of preflights that are refused although all their runs are drawn alike. ``factor``: by which the ways' differences are larger."""
    random, refused = np.random.default_rng(5), 0
    policy = PreflightPolicy(parts=["accumulation", "kernels", "compile"])
    for _ in range(preflights):
        apart = {way: scale(draw(random), factor) for way in WAYS}
        evidence = PreflightEvidence(
            "c0ffee", 10, STEPS, True, rounding=[draw(random) for _ in PERTURBED_RUNS], apart=apart
        )
        refused += judge_preflight(policy, evidence).outcome != "promote"
    return refused


def scale(run: DistanceFromStraightRun, factor: float) -> DistanceFromStraightRun:
    return DistanceFromStraightRun(
        {name: [factor * share for share in shares] for name, shares in run.series.items()},
        {name: factor * share for name, share in run.tensors.items()},
    )


@pytest.mark.parametrize(
    ("draw", "most"),
    [(draw_run_whose_steps_are_independent, 0), (draw_run_that_departs_in_one_direction, 5)],
    ids=["independent steps", "one direction"],
)
def test_rounding_alone_is_refused_as_seldom_as_the_docstring_says(draw: Draw, most: int) -> None:
    """Three ways × 0.06 % of 1,000 preflights are 1.7 refusals in the hardest case, of which more than 5 have a probability of 0.8 %."""
    assert count_refusals(draw, 1000) <= most


def test_differences_of_a_hundred_times_the_noise_are_refused() -> None:
    assert count_refusals(draw_run_whose_steps_are_independent, 100, factor=100.0) == 100
    assert count_refusals(draw_run_that_departs_in_one_direction, 100, factor=100.0) >= 80, "a small one can pass"


def test_a_step_at_which_all_runs_agree_by_chance_has_the_noise_of_the_steps_around_it() -> None:
    run = DistanceFromStraightRun({"grad_norm": [0.0] + [1e-6] * 9}, {})
    assert estimate_rounding_noise([run] * 4).series["grad_norm"][0] == pytest.approx(1e-6 * math.sqrt(4 / 5))


def test_the_noise_of_a_step_at_which_all_runs_scatter_is_its_own_and_that_of_the_later_steps() -> None:
    run = DistanceFromStraightRun({"loss": [1e-7] * 10 + [4e-6] + [1e-7] * 9}, {})
    noise = estimate_rounding_noise([run] * 4).series["loss"]
    assert noise[:8] == pytest.approx([1e-7] * 8) and noise[10:] == pytest.approx([4e-6] * 10)
    assert noise[7] < noise[8] <= noise[9] < noise[10], "a step's window reaches two steps ahead"


def test_a_step_without_a_finite_number_has_infinite_noise_and_leaves_the_other_steps_alone() -> None:
    run = DistanceFromStraightRun({"loss": [1e-7, math.inf, 1e-7, 1e-7]}, {})
    noise = estimate_rounding_noise([run] * 4)
    assert noise.series["loss"] == pytest.approx([1e-7, math.inf, 1e-7, 1e-7]) and noise.is_measured
    assert not estimate_rounding_noise([]).is_measured


def test_a_tensor_that_moved_by_chance_by_almost_nothing_has_the_noise_of_its_kind() -> None:
    run = DistanceFromStraightRun({}, {"a": 2e-6, "b": 3e-6, "c": 0.0, "exp_avg.a": 5e-5})
    noise = estimate_rounding_noise([run] * 4)
    assert noise.estimate_tensor_noise("c") == pytest.approx(2e-6)
    assert noise.estimate_tensor_noise("b") == pytest.approx(3e-6)
    assert noise.estimate_tensor_noise("exp_avg.b") == pytest.approx(5e-5)


def test_an_excess_is_explained_only_as_far_as_sums_of_the_number_format_are_wrong() -> None:
    noise = estimate_rounding_noise([DistanceFromStraightRun({"grad_norm": [1e-7] * STEPS}, {})] * 4)
    compute = lambda share, explained: compute_early_excess(noise, [share] * STEPS, explained)
    assert compute(4e-6, 9e-6) == pytest.approx(40) and compute(4e-3, 9e-6) == pytest.approx(90)
    assert compute(4e-6, 0.0) == 0.0
