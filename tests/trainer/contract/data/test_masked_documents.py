"""Documents that a data plan masks: they lose their weight, and nothing else of any batch changes."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.support.messages import refused
from tests.support.trainer.segments import MakeShard, plan_of, recipe_with, train_here, write_spec
from trainer.batch import make_batch
from trainer.contract.data.data_order import DataOrder
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.errors import DataPlanError
from trainer.contract.json_lines import read_json_lines

RECIPE = recipe_with()


def order_of(plan: DataPlan, state: dict[str, object] | None = None) -> DataOrder:
    return DataOrder(
        plan, context=RECIPE.model.context, batch=RECIPE.batch, vocab_size=RECIPE.model.vocab_size, state=state
    )


def test_a_mask_changes_only_the_weights_of_the_masked_documents(make_shard: MakeShard) -> None:
    plan = plan_of(make_shard(counts={"code": 60, "docs": 20, "chat": 20}), weights={"*": 1.0})
    whole, first = order_of(plan), order_of(plan)
    keys = {first.streams[p.stream].look_up_document_key(p.document) for row in first.draw_next_rows() for p in row}
    chat = sorted(key for key in keys if key.startswith("chat"))[:1]
    masked = {*sorted(keys)[:2], *chat}
    half = order_of(plan.copy_with_masked_documents(masked))
    touched = 0
    for _ in range(6):
        a, b = make_batch(whole), make_batch(half)
        assert a.rows == b.rows and a.supervised == b.supervised and a.state_after == b.state_after
        assert torch.equal(a.tokens_BT, b.tokens_BT) and torch.equal(a.documents_BT, b.documents_BT)
        for row, numbers, before, after in zip(a.rows, a.documents_BT, a.weights_BT, b.weights_BT, strict=True):
            for number, piece in enumerate(row):
                at = numbers == number
                if whole.streams[piece.stream].look_up_document_key(piece.document) in masked:
                    touched += int((before[at] > 0).sum())
                    assert not after[at].any()
                else:
                    assert torch.equal(before[at], after[at])
    assert touched > 0


def test_the_json_of_a_plan_without_masked_documents_lacks_the_key_masked(make_shard: MakeShard) -> None:
    plan = plan_of(make_shard())
    assert "masked" not in json.loads(plan.to_json()) and plan.copy_with_masked_documents([]).id == plan.id
    some = plan.copy_with_masked_documents(["code-0-1"])
    assert some.id != plan.id and DataPlan.from_json(some.to_json()) == some


def test_a_document_that_no_shard_holds_is_named(make_shard: MakeShard) -> None:
    with refused("document_stream.masked_document", DataPlanError, document="nobody"):
        order_of(plan_of(make_shard()).copy_with_masked_documents(["nobody"]))


def test_a_run_counts_no_loss_of_masked_documents(tmp_path: Path, make_shard: MakeShard) -> None:
    """The trainer never counts the loss of a domain whose documents are all masked, and trains on the other domains."""
    shard = make_shard(counts={"code": 60, "docs": 30})
    plan = plan_of(shard, weights={"code": 0.5, "docs": 0.5})
    docs = [key for key in shard.documents["key"].to_pylist() if key.startswith("docs")]
    folder = write_spec(tmp_path / "run", plan.copy_with_masked_documents(docs), last_step=4)
    assert train_here(folder) == (0, "")
    lines = read_json_lines(folder / "metrics.jsonl")
    assert all("loss/code" in line and "loss/docs" not in line for line in lines)
