"""The recipes of the matrix's tiny runs cover the keys, starts and layouts that the trainer has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from factory.gates.patch.matrix.cases import (
    BF16_ROUNDING,
    CASES,
    LONG_STEPS,
    MUON_ROUNDING,
    ROUNDING,
    Begin,
    MatrixCase,
)
from factory.gates.patch.matrix.runs import MatrixPlan
from factory.gates.patch.matrix.start_checkpoints import make_data_plans
from factory.runs.arm import check_arms
from trainer.contract.recipe import Recipe

# What no trainer reads, or what is drawn for each verdict.
NOT_VARIED = {
    "name": "the live recipe's",
    "seed": "drawn",
    "export_dtype": "read where a release is exported",
    "export_dtypes": "read where a release is exported",
    "export_shard_bytes": "read where a release is exported",
    "batch.max_padding": "read where a segment is planned",
    "mixture.anneal_weights": "in the data plan",
    "mixture.max_epochs": "in the data plan",
    "mixture.replay": "in the data plan",
    "mixture.weights": "in the data plan, and a domain's own value counts",
    "schedule.anneal_steps": "read where a segment is planned",
    "schedule.trunk_steps": "read where a segment is planned",
    "stability.throughput_drop": "what it reports depends on a clock",
}


def keys(recipe: dict[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    """Each key with its value, as text."""
    for name, value in recipe.items():
        if isinstance(value, dict):
            yield from keys(value, f"{within}{name}.")
        yield within + name, repr(value)


def one_valued(cases: tuple[MatrixCase, ...]) -> set[str]:
    """The keys that have one value in all of these runs: code that put it in place of the key would leave what the key leaves.

    A recipe leaves out later keys that have their default: that is a value too.
    """
    recipes = [dict(keys(case.make_recipe())) for case in cases if not case.exit_code]
    values = defaultdict(set)
    for recipe in recipes:
        for key in {key for one in recipes for key in one}:
            values[key].add(recipe.get(key, "left out"))
    return {key for key, found in values.items() if len(found) < 2 and not within(key, NOT_VARIED)}


def within(key: str, outer: Any) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in outer)


def test_every_recipe_key_that_the_trainer_reads_has_several_values_in_the_cases() -> None:
    assert one_valued(CASES) == set()


@pytest.mark.parametrize(
    "without", ["Muon without Nesterov, a wider base", "truncated rows, another AdamW, a narrower base"]
)
def test_a_recipe_key_with_only_one_value_is_found(without: str) -> None:
    assert one_valued(tuple(case for case in CASES if case.name != without))


def test_the_cases_with_several_ranks_cover_every_layout_and_start() -> None:
    layouts = set()
    for case in CASES:
        if case.ranks > 1 and not case.exit_code:
            recipe = Recipe.parse(case.make_recipe())
            assert recipe.parallel.data_ranks(case.ranks, recipe.model) * recipe.parallel.tensor == case.ranks
            of = recipe.parallel
            layouts.add(
                (case.begin, of.tensor, of.replicas, of.recompute, recipe.optimizer.name, bool(recipe.model.experts))
            )
    assert layouts == {
        ("nothing", 1, 1, "none", "adamw", True),
        ("trunk", 1, 1, "none", "adamw", False),
        ("nothing", 1, 2, "none", "muon", False),
        ("nothing", 2, 1, "block", "adamw", False),
        ("nothing", 2, 1, "none", "adamw", True),
    }


def test_cases_are_distinct_and_cover_each_kind() -> None:
    """Nothing is run twice; each way to begin and to compute is run."""
    trained = [repr(replace(case, name="", rounding=0.0, totals=False)) for case in CASES]
    assert len(set(trained)) == len({case.name for case in CASES}) == len(CASES)
    assert {case.begin for case in CASES} == set(get_args(Begin)) and {case.kind for case in CASES} == {
        "trunk",
        "anneal",
    }
    computed = {(case.kernels, case.make_recipe()["precision"], case.make_recipe()["compile"]) for case in CASES}
    assert computed == {
        *((kernels, precision, False) for kernels in ("chosen", "reference") for precision in ("fp32", "bf16")),
        *(("chosen", precision, True) for precision in ("fp32", "bf16")),
        ("chosen", "fp8", False),
    }
    for flag in ("waits", "rewarm", "restart_data", "slow_threads"):
        assert [getattr(case, flag) for case in CASES].count(True) == 1, flag
    for field in fields(MatrixCase):
        every = (*CASES, MatrixCase("sized", drawn_domains=True))
        assert len({repr(getattr(case, field.name)) for case in every}) > 1, field.name
    stopped = {
        (case.begin, bool(case.make_recipe()["model"]["experts"])): 0 < case.stop_after < case.steps
        for case in CASES
        if case.stop_after
    }
    assert stopped == {("trunk", False): True, ("nothing", True): True}
    assert [(case.begin, case.exit_code) for case in CASES if case.exit_code] == [("broken", 2), *[("trunk", 2)] * 3]
    assert sorted(case.steps for case in CASES)[-4:] == [10, 48, 100, LONG_STEPS[0]]


def test_the_changes_of_a_case_take_effect_within_its_run() -> None:
    """A part of the schedule that begins after the last step, or was over before the first, is not executed."""
    for case in CASES:
        recipe, changed, last = case.make_recipe(), {key.partition(".")[2] for key in case.changes}, case.steps
        schedule, batch = recipe["schedule"], recipe["batch"]
        inside = [schedule["cosine_steps"]] if schedule["kind"] == "cosine" and case.kind == "trunk" else []
        inside += [one["from_step"] for one in [*(schedule["milestones"] or []), *(recipe["mixture"]["phases"] or [])]]
        inside += [one["until_step"] for one in batch["warmup"] or []] + [case.stop_after] * (case.stop_after > 0)
        inside += [schedule["rewarmup_steps"]] if "rewarmup_steps" in changed else []
        inside += [schedule["warmup_steps"] or 1] * (case.begin == "nothing")
        inside += [recipe["checkpoint_every"], recipe["stability"]["noise_scale_every"] or 1]
        assert all(0 < step < last for step in inside), (case.name, inside)
        assert all(one["sequences"] < batch["sequences"] for one in batch["warmup"] or [])
        model, experts = recipe["model"], recipe["model"]["experts"]
        assert not model["nope_every"] or model["nope_every"] <= model["layers"]
        assert model["base_d_model"] != model["d_model"] and model["heads"] % model["kv_heads"] == 0
        assert not experts or experts["per_token"] < experts["count"] and experts["dense_layers"] < model["layers"]
        micro = batch["micro_sequences"]
        assert micro is None or 0 < micro < batch["sequences"] and batch["sequences"] % micro == 0
        assert len({one["share"] for one in schedule["milestones"] or []} - {1.0}) == len(schedule["milestones"] or [])
    removes = [
        case
        for case in CASES
        if case.steps // case.make_recipe()["checkpoint_every"] > case.make_recipe()["keep_checkpoints"]
    ]
    assert removes, "a checkpoint is removed in some run"


def test_the_allowed_rounding_grows_with_lower_precision() -> None:
    for case in CASES:
        recipe = case.make_recipe()
        least = {
            "fp32": MUON_ROUNDING if recipe["optimizer"]["name"] == "muon" else ROUNDING,
            "bf16": BF16_ROUNDING,
            "fp8": 0.5,
        }
        assert least[recipe["precision"]] <= case.rounding <= 0.5 or case.exit_code, case.name
        assert case.rounding in (ROUNDING, 1e-3, MUON_ROUNDING, BF16_ROUNDING, 0.5) and (
            case.totals or case.rounding < 0.5
        ), case.name


def test_a_case_trains_its_recipe(tmp_path: Path) -> None:
    """As an arm, from the common recipe: its own keys, and the name and seed that were drawn."""
    names = {case.name: "00001" for case in CASES}
    steps = {case.name: case.steps for case in CASES}
    plan = MatrixPlan(make_data_plans(tmp_path), {}, names, steps, "c0ffee", 100, "live", tmp_path)
    for case in CASES:
        arm, recipe = plan.make_arm(case), case.make_recipe()
        spec = arm.make_spec()
        assert Recipe.parse(spec["recipe"]).model_dump() == recipe | {"name": "live", "seed": recipe["seed"] + 100}
        anneals = recipe["mixture"]["anneal_weights"] if case.kind == "anneal" else None
        assert spec["data_plan"]["weights"] == (anneals or recipe["mixture"]["weights"])
        assert len(spec["data_plan"]["token_shards"]) == case.generations
        assert spec["data_plan"].get("phases", []) == (recipe["mixture"]["phases"] or []), case.name
        assert (spec["rewarm"], spec["restart_data"], arm.ranks) == (case.rewarm, case.restart_data, case.ranks)
        assert (spec["kind"], spec["initial_checkpoint"], spec["code_commit"], arm.name) == (
            case.kind,
            None,
            "c0ffee",
            case.name,
        )
        assert (arm.first_step, arm.last_step - arm.first_step) == (case.first_step or 0, case.steps)
        check_arms([arm])
    whole = plan.make_combined_arm(CASES[2:], "decaf", "candidate")
    assert (whole.first_step, whole.last_step, whole.code) == (0, sum(case.steps for case in CASES[2:]), "decaf")
    assert whole.name == f"candidate, {len(CASES) - 2} tiny runs" and whole.base["initial_checkpoint"] is None
