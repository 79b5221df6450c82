"""The runs at the recipe's own size have its width and depth, and few weights."""

from __future__ import annotations

import pytest

from factory.gates.patch.matrix.cases import CASES
from factory.gates.patch.matrix.sized_cases import (
    CONTEXT,
    MOST_WEIGHTS,
    fit_model,
    make_sized_runs,
)
from factory.gates.patch.matrix.start_checkpoints import DRAWN, make_data_plans
from tests.support.paths import ROOT
from trainer.contract.recipe import Recipe

RECIPES = sorted((ROOT / "policies" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_each_shipped_recipe_has_runs_of_its_width_and_depth(path) -> None:  # type: ignore[no-untyped-def]
    recipe = Recipe.load(path).model_dump()
    runs = make_sized_runs(recipe)
    assert runs is not None
    assert len({case.name for case in (runs.trunk, *runs.cases, *CASES)}) == len(runs.cases) + 1 + len(CASES)
    for case in (runs.trunk, *runs.cases):
        made = Recipe.parse(case.make_recipe())
        assert (made.model.d_model, made.model.layers) == (recipe["model"]["d_model"], recipe["model"]["layers"])
        assert made.model.parameters <= MOST_WEIGHTS and made.model.context <= CONTEXT
        assert made.optimizer == Recipe.parse(recipe).optimizer and made.stability == Recipe.parse(recipe).stability
        assert made.batch.sequences // (made.batch.micro_sequences or 8) >= 3 and case.drawn_domains
    assert max(case.ranks for case in runs.cases) > 3 and any(case.stop_after for case in runs.cases)
    assert {case.kind for case in runs.cases} == {"trunk", "anneal"}


def test_nothing_is_made_smaller_without_need() -> None:
    demo = Recipe.load(ROOT / "policies" / "recipes" / "demo.yaml").model_dump()["model"]
    assert fit_model(demo) == demo | {"context": CONTEXT}
    wide = demo | {"d_model": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "d_ff": 14336, "layers": 2}
    found = fit_model(wide)
    assert found is not None and (found["d_model"], found["layers"]) == (4096, 2)
    assert found["heads"] == found["kv_heads"] == 1 and found["head_dim"] == 16 and found["d_ff"] < 100
    assert fit_model(wide | {"layers": 128}) is None


def test_the_domains_of_these_runs_have_names_that_nobody_can_know(tmp_path) -> None:  # type: ignore[no-untyped-def]
    one, other = (make_data_plans(tmp_path / name, 512)[DRAWN]["weights"] for name in "ab")
    assert len(one) == len(other) == 4 and not one.keys() & other.keys()
    assert len(set(one.values())) == 4 and sum(one.values()) == pytest.approx(1.0)
