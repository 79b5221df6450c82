"""Chats that carry loss only at their start or end. After they are cut into rows, some rows hold no target."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.trainer.segments import one_sided_chats, plan_of
from trainer.batch import make_batch
from trainer.contract.data.data_order import DataOrder, list_document_keys_at_step
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.document_stream import READ_AT_ONCE, open_streams
from trainer.contract.data.packing import STRATEGIES
from trainer.contract.data.token_shard import TokenizedDocument, write_token_shard
from trainer.contract.errors import DataPlanError
from trainer.contract.recipe import BatchRecipe

CONTEXT = 32


@pytest.fixture
def plan(tmp_path: Path) -> DataPlan:
    shard = write_token_shard(tmp_path, one_sided_chats(300), vocab_size=512, tokenizer_sha256="test")
    return plan_of(shard, weights={"chat": 1.0}, max_epochs=1)


def order_of(plan: DataPlan, packing: str, state: dict | None = None) -> DataOrder:
    batch = BatchRecipe.model_validate({"sequences": 1, "packing": packing})
    return DataOrder(plan, context=CONTEXT, batch=batch, vocab_size=512, state=state)


def targets(order: DataOrder) -> list[int]:
    """The targets of every batch until the data ends. No weight may be NaN, and the weights of a batch with targets must sum to one."""
    found = []
    while True:
        try:
            batch = make_batch(order)
        except DataPlanError:
            return found
        assert float(batch.weights_BT.sum()) == pytest.approx(1.0 if batch.supervised else 0.0)
        found.append(batch.supervised)


@pytest.mark.parametrize("packing", STRATEGIES)
def test_every_batch_of_a_new_plan_has_targets_and_no_target_is_lost(plan: DataPlan, packing: str) -> None:
    old, new = (
        targets(order_of(plan.model_copy(update={"targets_in_every_batch": each}), packing)) for each in (False, True)
    )
    assert 0 not in new and sum(new) >= sum(old) - max(old)  # the last batch may lack the pieces to fill it
    if packing == "truncate-and-concatenate":
        assert old.count(0) >= 20 and new == [count for count in old if count]


def test_the_order_of_an_older_plan_is_unchanged(plan: DataPlan) -> None:
    """The expected SHA-256 is that of 200 batches from code older than ``targets_in_every_batch``."""
    assert "targets_in_every_batch" not in json.loads(plan.to_json())
    order, digest = order_of(plan, "truncate-and-concatenate"), hashlib.sha256()
    for _ in range(200):
        batch = make_batch(order)
        digest.update(batch.tokens_BT.numpy().tobytes() + batch.targets_BT.numpy().tobytes())
    assert digest.hexdigest() == "b2645b9a1b3406af940d626cd178e72092b47a2951c7dc0a92ed637c5024e722"


def test_skipped_documents_are_the_same_after_a_resume(plan: DataPlan) -> None:
    plan = plan.model_copy(update={"targets_in_every_batch": True})
    order, seen = order_of(plan, "truncate-and-concatenate"), []
    for _ in range(60):
        state = json.loads(json.dumps(order.state_dict()))
        rows = order.draw_next_rows()
        seen.append((state, rows))
    assert order.passed_over > 0
    for step, (state, rows) in enumerate(seen):
        assert order_of(plan, "truncate-and-concatenate", state).draw_next_rows() == rows
        resumed = order_of(plan, "truncate-and-concatenate", seen[0][0])
        if step % 20 == 19:
            keys = {resumed.streams[p.stream].look_up_document_key(p.document) for row in rows for p in row}
            assert list_document_keys_at_step(resumed, step) == sorted(keys)


@pytest.mark.parametrize("packing", STRATEGIES)
def test_the_positions_left_are_those_that_can_be_trained_on(plan: DataPlan, packing: str) -> None:
    """A plan of as many steps as they allow does not run out of data; two of three positions of these chats carry no loss and are skipped."""
    plan = plan.model_copy(update={"targets_in_every_batch": True})
    order = order_of(plan, packing)
    (stream,) = order.streams.values()
    left, used = order.estimate_positions_left(), 0
    lengths = [stream.find_document(document).length for document in range(stream.documents)]
    assert stream.positions_per_epoch < 0.4 * (sum(lengths) - len(lengths))
    while True:
        try:
            used += sum(piece.positions for row in order.draw_next_rows() for piece in row)
        except DataPlanError:
            break
    waiting = sum(piece.positions for piece in order.pending)
    assert 0.9 * (used + waiting) < left <= used + waiting


def test_positions_with_loss_are_counted_the_same_when_masks_are_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few tokens are read at once, the sum equals that of the single pieces."""
    from trainer.contract.data import document_stream

    documents = one_sided_chats(80) + [
        TokenizedDocument("text", "t", "chat", "test", "MIT", np.arange(3, 80, dtype=np.uint32), np.ones(77, bool))
    ]
    shard = write_token_shard(tmp_path, documents, vocab_size=512, tokenizer_sha256="test")
    wanted = 0
    for document in documents:
        for start in range(0, len(document.tokens) - 1, CONTEXT):
            held = document.loss_mask[start + 1 : start + 1 + CONTEXT]
            wanted += len(held) * bool(held.any())
    for size in (1, 300, READ_AT_ONCE):
        monkeypatch.setattr(document_stream, "READ_AT_ONCE", size)
        document_stream.count_positions_with_loss.cache_clear()
        assert document_stream.count_positions_with_loss(str(shard.path), "chat", CONTEXT) == wanted


def test_documents_that_a_plan_moves_are_counted_in_their_new_domain(tmp_path: Path) -> None:
    """Also where that domain was there before: of 4 texts of 'code' and 2 of 'docs', two of 'code' move, or all to one that is new."""
    text = lambda n, domain: TokenizedDocument(
        f"k{n}", f"{n}", domain, "test", "MIT", np.arange(3, 20 + n, dtype=np.uint32), np.ones(17 + n, bool)
    )
    documents = [text(n, "code" if n < 4 else "docs") for n in range(6)]
    shard = write_token_shard(tmp_path, documents, vocab_size=512, tokenizer_sha256="test")
    positions = [len(document.tokens) - 1 for document in documents]
    for moved, wanted in (
        ({"docs": "0-1"}, {"code": positions[2:4], "docs": positions[:2] + positions[4:]}),
        ({"law": "0-5"}, {"law": positions}),
    ):
        weights = dict.fromkeys(wanted, 1.0)
        planned = {"id": shard.id, "path": str(shard.path), "generation": 1, "moved": moved}
        plan = DataPlan.model_validate({"token_shards": [planned], "weights": weights, "seed": 1})
        streams = open_streams(plan, CONTEXT, 512)
        assert {stream.domain: stream.positions_per_epoch for stream in streams.values()} == {
            k: sum(v) for k, v in wanted.items()
        }
