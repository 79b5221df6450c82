from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.messages import refused
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.errors import DataPlanError
from trainer.contract.recipe import MixtureRecipe


def plan(weights: dict[str, float], *phases: tuple[int, dict[str, float]]) -> DataPlan:
    raw: Any = {
        "token_shards": [{"id": "a", "path": "a", "generation": 0}],
        "weights": weights,
        "phases": [{"from_step": step, "weights": w} for step, w in phases],
    }
    return DataPlan.from_json(raw)


MATHS_LATER = plan({"code": 0.6, "chat": 0.4}, (100, {"code": 0.5, "maths": 0.5}), (200, {"maths": 1.0}))


@pytest.mark.parametrize(
    ("held", "first", "last", "weights", "phases", "left_out"),
    [
        ({"code", "chat", "maths"}, 0, 300, {"code": 0.6, "chat": 0.4}, [100, 200], []),
        ({"code", "chat"}, 0, 150, {"code": 0.6, "chat": 0.4}, [100], ["maths"]),
        ({"code"}, 0, 100, {"code": 0.6}, [100], ["chat", "maths"]),
        ({"maths"}, 120, 300, {"maths": 0.5}, [100, 200], ["chat", "code"]),  # the first weights no longer apply
    ],
)
def test_domains_without_documents_are_left_out(
    held: set[str], first: int, last: int, weights: dict[str, float], phases: list[int], left_out: list[str]
) -> None:
    kept, names = MATHS_LATER.copy_without_missing_domains(held, first, last)
    assert kept.weights == weights and [p.from_step for p in kept.phases] == phases and names == left_out
    kept.refuse_missing_domains(held)
    for step in range(first, last, 10):
        asked = {d: w for d, w in MATHS_LATER.find_weights_at_step(step).items() if d in held}
        assert kept.find_weights_at_step(step) == asked


@pytest.mark.parametrize(
    ("held", "first", "last", "key"),
    [
        ({"maths"}, 0, 300, "weights"),
        ({"code", "chat"}, 0, 201, r"phases.1.weights"),
        ({"chat"}, 0, 101, r"phases.0.weights"),
        (set(), 0, 10, "weights"),
    ],
)
def test_a_mixture_without_documents_is_refused(held: set[str], first: int, last: int, key: str) -> None:
    with refused("data_plan.nothing_to_train_on", DataPlanError, key=key, held=sorted(held) or ["nothing"]):
        MATHS_LATER.copy_without_missing_domains(held, first, last)


def test_a_star_stands_for_every_domain_that_is_not_named() -> None:
    open_plan = plan({"code": 0.9, "*": 0.1})
    assert open_plan.copy_without_missing_domains({"wiki"}, 0, 10) == (plan({"*": 0.1}), ["code"])
    assert open_plan.copy_without_missing_domains({"code"}, 0, 10) == (open_plan, [])
    with refused("data_plan.nothing_to_train_on", DataPlanError, key="weights"):
        plan({"code": 0.0, "*": 0.1}).copy_without_missing_domains({"code"}, 0, 10)


def test_a_domain_without_weight_may_be_missing() -> None:
    plan({"code": 1.0, "chat": 0.0}).refuse_missing_domains({"code"})
    with refused("data_plan.absent_domain", DataPlanError, key="weights.cod", near="; did you mean 'code'?"):
        plan({"cod": 1.0}).refuse_missing_domains({"code", "chat"})


def test_a_plan_copies_every_key_of_a_recipes_mixture() -> None:
    raw = {
        "weights": {"code": 1.0},
        "phases": [{"from_step": 4, "weights": {"docs": 1.0}}],
        "replay": 0.25,
        "max_epochs": 3,
    }
    for annealed in ({"docs": 1.0}, None):
        mixture = MixtureRecipe.model_validate(raw | {"anneal_weights": annealed})
        for kind in ("trunk", "anneal"):
            own = kind == "anneal" and annealed is not None
            made = DataPlan.make_for_segment(
                mixture, kind, [("a", "p/a", 2), ("b", "p/b", 0, "c", {"docs": "0-3"})], seed=5
            )
            assert json.loads(made.to_json()) == {
                "token_shards": [
                    {"id": "a", "path": "p/a", "generation": 2},
                    {"id": "b", "path": "p/b", "generation": 0, "content": "c", "moved": {"docs": "0-3"}},
                ],
                "weights": annealed if own else {"code": 1.0},
                "phases": [] if own else raw["phases"],
                "replay": 0.25,
                "max_epochs": 3,
                "seed": 5,
            }, (kind, annealed)
