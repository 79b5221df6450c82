from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.messages import refused as refused_with
from tests.support.trainer.segments import MakeShard, plan_of, recipe_with, train_here, write_spec
from trainer.contract.data.data_order import DataOrder
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.errors import DataPlanError
from trainer.contract.plan.feasibility import refuse_impossible_run, rehearse_packing
from trainer.contract.recipe import Recipe


def order_of(plan: DataPlan, recipe: Recipe) -> DataOrder:
    return DataOrder(plan, context=recipe.model.context, batch=recipe.batch, vocab_size=512)


def test_a_context_longer_than_any_document_is_refused_if_no_padding_is_allowed(make_shard: MakeShard) -> None:
    plan = plan_of(make_shard(longest=60))
    recipe = recipe_with(model__context=128, batch__packing="document", batch__max_padding=0.0)
    with refused_with("plan.padding", DataPlanError, most=0.0, longest=58, context=128):
        refuse_impossible_run(order_of(plan, recipe), recipe, 0, 20)


@pytest.mark.parametrize(
    ("packing", "most", "refused"),
    [
        ("document", 0.2, True),
        ("document", 0.6, False),
        ("token-budget", 0.02, True),
        ("best-fit", 0.01, False),
        ("best-fit", 0.0, False),  # so many documents are longer than a row that every gap is filled
        ("truncate-and-concatenate", 0.0, False),
        ("document", None, False),
    ],
)
def test_a_packing_that_pads_more_than_allowed_is_refused(
    make_shard: MakeShard, packing: str, most: float | None, refused: bool
) -> None:
    plan = plan_of(make_shard(counts={"code": 900, "docs": 400, "chat": 400}))
    recipe = recipe_with(batch__packing=packing, batch__max_padding=most)
    order = order_of(plan, recipe)
    before = order.state_dict()
    if refused:
        with refused_with("plan.padding", DataPlanError, most=most):
            refuse_impossible_run(order, recipe, 0, 80)
    else:
        refuse_impossible_run(order, recipe, 0, 80)
    assert order.state_dict() == before
    refuse_impossible_run(order, recipe, -1, 80)  # a segment that has begun is not refused
    # what was allowed is kept
    rows = [row for _ in range(80) for row in order.draw_next_rows()]
    padding = 1 - sum(piece.positions for row in rows for piece in row) / (len(rows) * 32)
    assert most is None or (padding > most) == refused


def test_a_later_phase_or_batch_size_that_pads_too_much_is_refused(make_shard: MakeShard) -> None:
    long = make_shard(1, {"docs": 500}, longest=90)
    short = make_shard(2, {"chat": 500}, longest=12)
    phases = [{"from_step": 40, "weights": {"chat": 1.0}}]
    plan = plan_of(long, short, weights={"docs": 1.0}, phases=phases)
    recipe = recipe_with(batch__packing="document", batch__max_padding=0.4)
    refuse_impossible_run(order_of(plan, recipe), recipe, 0, 40)
    with refused_with("plan.padding", DataPlanError, step=40, packing="document", longest=88):
        refuse_impossible_run(order_of(plan, recipe), recipe, 0, 41)


def test_the_needed_data_are_counted_with_the_smaller_batches_of_the_warmup(make_shard: MakeShard) -> None:
    plan = plan_of(make_shard(), max_epochs=1)
    recipe = recipe_with(batch__warmup=[{"until_step": 20, "sequences": 1}])
    order = order_of(plan, recipe)
    steps = (order.estimate_positions_left() // 32 - 20) // 8 + 20  # twenty steps of one row, the rest of eight
    refuse_impossible_run(order, recipe, 0, steps)
    with refused_with("plan.too_little_data", DataPlanError, steps=steps + 2, max_epochs=1):
        refuse_impossible_run(order, recipe, 0, steps + 2)


def test_padding_is_not_counted_as_needed_data(make_shard: MakeShard) -> None:
    """Documents of about a third of a row lie alone in their rows, which gives three times the steps of full rows."""
    plan = plan_of(make_shard(counts={"code": 400, "docs": 200, "chat": 200}, longest=22), max_epochs=1)
    recipe = recipe_with(batch__packing="document")
    order = order_of(plan, recipe)
    refuse_impossible_run(order, recipe, 0, 80)
    walked = order.copy_at_step()
    while walked.step < 80:
        walked.draw_next_rows()
    assert order.estimate_positions_left() < 0.7 * recipe.count_tokens_between(0, 80)


def test_a_rehearsal_counts_the_rows_that_come_next(make_shard: MakeShard) -> None:
    recipe = recipe_with(batch__packing="token-budget")
    order = order_of(plan_of(make_shard()), recipe)
    found = rehearse_packing(order, 0, 10)
    assert found is not None
    rows = [order.draw_next_rows() for _ in range(10)][5:]
    assert found.positions == 5 * 8 * 32
    assert found.used == sum(piece.positions for batch in rows for row in batch for piece in row)


def test_the_trainer_refuses_an_impossible_plan_before_its_first_step(tmp_path: Path, make_shard: MakeShard) -> None:
    recipe = recipe_with(batch__packing="document", batch__max_padding=0.0)
    folder = write_spec(tmp_path / "segment", plan_of(make_shard()), recipe)
    code, errors = train_here(folder)
    assert code == 2 and "batch.max_padding" in errors and "model.context" in errors
    assert not (folder / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("first", "then", "feeds"),
    [("docs", "chat", False), ("chat", "docs", True)],  # little of chat: enough for its three steps, not for forty
)
def test_the_needed_data_are_counted_mixture_by_mixture(
    make_shard: MakeShard, first: str, then: str, feeds: bool
) -> None:
    shard = make_shard(counts={"docs": 900, "chat": 40})
    recipe = recipe_with(batch__sequences=8)
    phases = [{"from_step": 3 if feeds else 20, "weights": {then: 1.0}}]
    plan = plan_of(shard, weights={first: 1.0}, phases=phases, max_epochs=1)
    order = DataOrder(plan, context=32, batch=recipe.batch, vocab_size=512)
    if feeds:
        refuse_impossible_run(order, recipe, 0, 60)
        for _ in range(60):
            order.draw_next_rows()
    else:
        with pytest.raises(DataPlanError, match="max_epochs"):
            refuse_impossible_run(order, recipe, 0, 60)
