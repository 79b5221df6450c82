"""The demo's sizes for a machine and the given minutes. The functions are pure, so every machine can be tested here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from factory.core.errors import InputError
from factory.demo.demo_size import (
    LADDER,
    LEAST,
    OVERHEAD,
    STEP_SECONDS,
    DemoShape,
    DemoTimings,
    check_minutes,
    guess_first_shape,
    guess_next_shape,
    plan_demo,
)
from tests.support.messages import refused
from tests.support.paths import ROOT
from trainer.contract.recipe import Recipe

RAW = Recipe.load(ROOT / "policies" / "recipes" / "demo.yaml").model_dump(mode="json")
SEEN = DemoTimings(spent=58.0, ingest=21.0, start=5.0, step=0.1)  # two cores, AVX2


@pytest.mark.parametrize("minutes", [0, 1, 1.99, -3, 121, float("nan"), float("inf")])
def test_minutes_out_of_range_are_one_error(minutes: float) -> None:
    with refused("demo.minutes", InputError, least=2.0, most=120.0, default=6.0) as raised:
        check_minutes(minutes)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("shape", LADDER, ids=str)
def test_every_shape_is_a_recipe_that_the_trainer_takes(shape: DemoShape) -> None:
    recipe = Recipe.parse(shape.apply_to_recipe(RAW))
    assert (recipe.model.d_model, recipe.batch.sequences) == (shape.d_model, shape.sequences)
    assert not recipe.model.list_warnings()
    assert yaml.safe_load(yaml.safe_dump(shape.apply_to_recipe(RAW))) == shape.apply_to_recipe(RAW)


def test_each_shape_of_the_ladder_needs_more_work_than_the_one_before() -> None:
    work = [Recipe.parse(s.apply_to_recipe(RAW)).model.count_flops_per_token() * s.sequences for s in LADDER]
    ratios = [after / before for before, after in zip(work, work[1:])]
    assert all(1.2 < ratio < 6 for ratio in ratios), ratios


def test_a_faster_machine_gets_a_larger_model() -> None:
    work = {s: Recipe.parse(s.apply_to_recipe(RAW)).model.count_flops_per_token() * s.sequences * 256 for s in LADDER}
    chosen = [
        guess_first_shape(6, {s: flops / rate for s, flops in work.items()}) for rate in (1e9, 2.5e11, 5e11, 1e12, 1e15)
    ]
    places = [LADDER.index(shape) for shape in chosen]
    assert places == sorted(places) and places[0] == 0 and places[-1] == len(LADDER) - 1
    for shape, rate in zip(chosen[1:], (2.5e11, 5e11, 1e12, 1e15)):
        assert work[shape] / rate * OVERHEAD <= STEP_SECONDS


@pytest.mark.parametrize(
    ("place", "step", "then"),
    [
        (3, 0.19, 3),
        (3, 0.21, 2),
        (3, 2.0, 1),
        (0, 9.0, 0),
        (3, 0.03, 4),
        (3, 0.06, 3),
        (7, 0.01, 7),
    ],
)
def test_a_measured_step_corrects_the_guess(place: int, step: float, then: int) -> None:
    assert LADDER.index(guess_next_shape(6, LADDER[place], step)) == then


def test_the_demo_fits_into_six_minutes_on_two_cores_with_avx2() -> None:
    size = plan_demo(6, SEEN)
    assert size.over == 0 and sum(size.seconds.values()) <= 360
    assert size.first + size.anneal >= 120 and size.patch["pairs"] == 3


def test_a_slower_step_leaves_fewer_steps_and_too_slow_a_step_is_reported() -> None:
    fast, slow, hopeless = (plan_demo(6, replace(SEEN, step=step)) for step in (0.05, 0.1, 4.0))
    assert fast.first > slow.first > LEAST["first"] == hopeless.first
    assert hopeless.over > 60 and slow.over == 0


@given(
    minutes=st.floats(2, 120),
    spent=st.floats(1, 600),
    ingest=st.floats(0.1, 300),
    start=st.floats(0.1, 60),
    step=st.floats(1e-4, 60),
)
def test_a_plan_fits_or_states_by_how_many_seconds_it_does_not(
    minutes: float, spent: float, ingest: float, start: float, step: float
) -> None:
    size = plan_demo(minutes, DemoTimings(spent, ingest, start, step))
    assert all(getattr(size, name) >= least for name, least in LEAST.items())
    expected = sum(size.seconds.values())
    assert size.over == max(0.0, expected - 60 * minutes)
    if size.over > 1e-6:  # only because there is no less to do
        shortest = {name: getattr(size, name) for name in LEAST}
        assert any(shortest[name] == LEAST[name] for name in LEAST)
