from __future__ import annotations

from typing import Any

import pytest

from trainer.contract.data.data_plan import DataPlan
from trainer.contract.errors import DataPlanError


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
        ({"maths"}, 120, 300, {"maths": 0.5}, [100, 200], ["chat", "code"]),  # the first weights rule no more
    ],
)
def test_domains_without_documents_are_left_out(
    held: set[str], first: int, last: int, weights: dict[str, float], phases: list[int], left_out: list[str]
) -> None:
    kept, names = MATHS_LATER.of_arrived(held, first, last)
    assert kept.weights == weights and [p.from_step for p in kept.phases] == phases and names == left_out
    kept.refuse_absent(held)
    for step in range(first, last, 10):
        asked = {d: w for d, w in MATHS_LATER.weights_at(step).items() if d in held}
        assert kept.weights_at(step) == asked


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
    with pytest.raises(DataPlanError, match=f"^{key}: no shard holds a document of .*; the shards hold: "):
        MATHS_LATER.of_arrived(held, first, last)


def test_a_star_stands_for_any_domain_not_named() -> None:
    open_plan = plan({"code": 0.9, "*": 0.1})
    assert open_plan.of_arrived({"wiki"}, 0, 10) == (plan({"*": 0.1}), ["code"])
    assert open_plan.of_arrived({"code"}, 0, 10) == (open_plan, [])
    with pytest.raises(DataPlanError, match="weights"):
        plan({"code": 0.0, "*": 0.1}).of_arrived({"code"}, 0, 10)


def test_a_domain_without_weight_need_not_be_there() -> None:
    plan({"code": 1.0, "chat": 0.0}).refuse_absent({"code"})
    with pytest.raises(DataPlanError, match="^weights.cod: .*did you mean 'code'"):
        plan({"cod": 1.0}).refuse_absent({"code", "chat"})
