"""What the recipes of the tiny runs hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from factory.gates.patch.matrix.cases import CASES, MatrixCase
from factory.gates.patch.matrix.runs import MatrixPlan
from factory.gates.patch.matrix.starts import make_data
from factory.runs.arm import refuse_impossible
from trainer.contract.recipe import Recipe

# What no trainer reads, or what is drawn for each verdict.
NOT_VARIED = {
    "name": "the live recipe's",
    "seed": "drawn",
    "export_dtype": "read where a release is exported",
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
    """The keys that have one value in all of these runs: code that put it in place of the key would leave what the key leaves."""
    values = defaultdict(set)
    for case in cases:
        for key, value in keys(case.recipe()) if not case.exit_code else ():
            values[key].add(value)
    return {key for key, found in values.items() if len(found) < 2 and not within(key, NOT_VARIED)}


def within(key: str, outer: Any) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in outer)


def test_every_key_that_the_trainer_reads_has_several_values() -> None:
    assert one_valued(CASES) == set()


@pytest.mark.parametrize(
    "without", ["Muon without Nesterov, a wider base", "truncated rows, another AdamW, a narrower base"]
)
def test_a_key_with_one_value_is_found(without: str) -> None:
    assert one_valued(tuple(case for case in CASES if case.name != without))


def test_a_case_trains_what_it_says(tmp_path: Path) -> None:
    """As an arm, from the common recipe: its own keys, and the name and seed that were drawn."""
    names = {case.name: "00001" for case in CASES}
    steps = {case.name: case.steps for case in CASES}
    plan = MatrixPlan(make_data(tmp_path), {}, names, steps, "c0ffee", 100, "live", tmp_path)
    for case in CASES:
        arm, recipe = plan.arm(case), case.recipe()
        spec = arm.spec()
        assert Recipe.parse(spec["recipe"]).model_dump() == recipe | {"name": "live", "seed": recipe["seed"] + 100}
        anneals = recipe["mixture"]["anneal_weights"] if case.kind == "anneal" else None
        assert spec["data_plan"]["weights"] == (anneals or recipe["mixture"]["weights"])
        assert len(spec["data_plan"]["token_shards"]) == case.generations
        refuse_impossible([arm])
    assert plan.together(CASES, "c0ffee", "candidate").last == sum(steps.values())
