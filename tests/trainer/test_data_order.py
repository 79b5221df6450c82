from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.conftest import MakeShard, make_documents, plan_of
from trainer.batch import PADDING, make_batch, prefetch
from trainer.data_order import DataOrder, documents_of
from trainer.data_plan import DataPlan
from trainer.errors import DataPlanError
from trainer.token_shard import write_token_shard


def open_order(plan: DataPlan, state: dict | None = None, context: int = 32, rows: int = 8) -> DataOrder:
    return DataOrder(plan, context=context, rows=rows, vocab_size=512, state=state)


def drain(order: DataOrder) -> list[list[tuple]]:
    """Pieces of every step until the data ends."""
    steps = []
    while True:
        try:
            rows = order.next_rows()
        except DataPlanError:
            return steps
        steps.append([(p.stream, p.document, p.index) for row in rows for p in row])


def test_the_state_is_all_it_takes_to_go_on(make_shard: MakeShard) -> None:
    plan = plan_of(make_shard())
    order = open_order(plan)
    for _ in range(7):
        order.next_rows()
    state = json.loads(json.dumps(order.state_dict()))
    resumed = open_order(plan, state)
    for _ in range(20):
        ours, theirs = make_batch(order), make_batch(resumed)
        assert ours.rows == theirs.rows and ours.state_after == theirs.state_after
        assert torch.equal(ours.tokens_BT, theirs.tokens_BT)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(make_shard: MakeShard, ranks: int) -> None:
    plan = plan_of(make_shard())
    whole, parts = open_order(plan), [open_order(plan) for _ in range(ranks)]
    for _ in range(10):
        batch = make_batch(whole)
        shared = [make_batch(part, rank, ranks) for rank, part in enumerate(parts)]
        for name in ("tokens_BT", "targets_BT", "weights_BT", "positions_BT", "documents_BT"):
            for rank, part in enumerate(shared):
                assert torch.equal(getattr(part, name), getattr(batch, name)[rank::ranks])
            assert sum(float(part.weights_BT.sum()) for part in shared) == pytest.approx(1.0, abs=1e-5)


def test_tensors_hold_neighbouring_tokens_of_one_document_and_its_mask(make_shard: MakeShard) -> None:
    shard = make_shard()
    order = open_order(plan_of(shard))
    held = {row["key"]: row for row in shard.documents.to_pylist()}
    for _ in range(5):
        batch = make_batch(order)
        for b, row in enumerate(batch.rows):
            at = 0
            for number, piece in enumerate(row):
                document = held[order.streams[piece.stream].key(piece.document)]
                first = document["start"] + piece.start
                place = np.s_[b, at : at + piece.positions]
                inputs = np.asarray(shard.tokens[first : first + piece.positions], np.int64)
                targets = np.asarray(shard.tokens[first + 1 : first + 1 + piece.positions], np.int64)
                assert batch.tokens_BT[place].tolist() == inputs.tolist()
                assert batch.targets_BT[place].tolist() == targets.tolist()
                mask = shard.loss_mask(first + 1, first + 1 + piece.positions)
                assert (batch.weights_BT[place] > 0).tolist() == mask.tolist()
                assert batch.positions_BT[place].tolist() == list(range(piece.positions))
                assert set(batch.documents_BT[place].tolist()) == {number}
                assert first + 1 + piece.positions <= document["start"] + document["length"]
                at += piece.positions
            assert set(batch.documents_BT[b, at:].tolist()) <= {PADDING}
            assert float(batch.weights_BT[b, at:].sum()) == 0


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), max_epochs=st.integers(1, 3), heavy=st.floats(0.05, 0.95))
def test_no_document_repeats_before_its_epoch_ends_and_all_are_seen(
    tmp_path_factory: pytest.TempPathFactory, seed: int, max_epochs: int, heavy: float
) -> None:
    counts = {"code": 40, "docs": 25}
    documents = [make_documents(seed + g, counts) for g in range(2)]
    parent = tmp_path_factory.mktemp("shards")
    shards = [write_token_shard(parent, d, vocab_size=512, tokenizer_sha256="t") for d in documents]
    plan = plan_of(
        *shards, generations=[0, 1], weights={"code": heavy, "docs": 1 - heavy}, max_epochs=max_epochs, replay=0.3
    )
    order = open_order(plan, rows=4)
    drawn: dict[str, list[tuple]] = {"code": [], "docs": []}
    while (piece := order._draw()) is not None:
        drawn[piece.stream.split("/")[0]].append((piece.stream, piece.document, piece.index))
    for domain, pieces in drawn.items():
        whole = sum(s.pieces for name, s in order.streams.items() if name.startswith(domain))
        assert len(pieces) == whole * max_epochs  # every pair of every document, max_epochs times
        for epoch in range(max_epochs):
            part = pieces[epoch * whole : (epoch + 1) * whole]
            assert len(set(part)) == whole


def test_weights_count_supervised_tokens(make_shard: MakeShard) -> None:
    weights = {"code": 0.5, "docs": 0.2, "chat": 0.3}
    order = open_order(plan_of(make_shard(counts={"code": 600, "docs": 600, "chat": 600}), weights=weights), rows=16)
    seen: Counter[str] = Counter()
    for _ in range(60):
        for row in order.next_rows():
            for piece in row:
                seen[piece.stream.split("/")[0]] += piece.supervised
    for domain, weight in weights.items():
        assert seen[domain] / seen.total() == pytest.approx(weight, abs=0.01)


def test_phases_change_the_weights_at_their_step(make_shard: MakeShard) -> None:
    shard = make_shard(counts={"code": 900, "docs": 900})
    phases = [{"from_step": 30, "weights": {"docs": 1.0}}]
    order = open_order(plan_of(shard, weights={"code": 1.0}, phases=phases), rows=8)
    domains = [{p.stream.split("/")[0] for row in order.next_rows() for p in row} for _ in range(75)]
    assert all(found == {"code"} for found in domains[:30])
    assert all(found == {"docs"} for found in domains[55:])  # what was drawn before waits its turn


def test_a_star_shares_its_weight_among_domains_not_named(make_shard: MakeShard) -> None:
    order = open_order(plan_of(make_shard(), weights={"code": 0.5, "*": 0.5}))
    shares = order.shares()
    assert shares["code/0"] == pytest.approx(0.5)
    size = {name: stream.supervised_tokens for name, stream in order.streams.items()}
    assert shares["docs/0"] / shares["chat/0"] == pytest.approx(size["docs/0"] / size["chat/0"])


def test_a_new_generation_joins_with_replay_and_the_old_cursor_goes_on(make_shard: MakeShard) -> None:
    old, new = make_shard(1, {"code": 500}), make_shard(2, {"code": 500})
    order = open_order(plan_of(old, weights={"code": 1.0}))
    before = [(p.stream, p.document, p.index) for _ in range(20) for row in order.next_rows() for p in row]
    both = plan_of(old, new, generations=[0, 1], weights={"code": 1.0}, replay=0.25)
    joined = open_order(both, json.loads(json.dumps(order.state_dict())))
    seen: Counter[str] = Counter()
    after = []
    for step in range(40):
        for row in joined.next_rows():
            for piece in row:
                if step >= 10:  # what was drawn before the join comes first
                    seen[piece.stream] += piece.supervised
                after.append((piece.stream, piece.document, piece.index))
    assert seen["code/0"] / seen.total() == pytest.approx(0.25, abs=0.03)
    assert not set(before) & set(after)


def test_a_domain_without_new_data_goes_on_with_the_old(make_shard: MakeShard) -> None:
    old, new = make_shard(1, {"code": 50, "docs": 50}), make_shard(2, {"code": 50})
    order = open_order(plan_of(old, new, generations=[0, 1], weights={"code": 0.5, "docs": 0.5}, replay=0.2))
    assert order.shares() == pytest.approx({"docs/0": 0.5, "code/0": 0.1, "code/1": 0.4})


def test_positions_are_used_to_99_percent(make_shard: MakeShard) -> None:
    for longest in (20, 90, 700):
        order = open_order(
            plan_of(make_shard(counts={"code": 1500, "chat": 1500}, longest=longest)), context=128, rows=16
        )
        batches = [make_batch(order) for _ in range(25)] if longest > 20 else [make_batch(order) for _ in range(8)]
        assert sum(b.used for b in batches) / (len(batches) * 16 * 128) >= 0.99


def test_documents_of_a_past_step(make_shard: MakeShard) -> None:
    plan = plan_of(make_shard())
    order = open_order(plan)
    named = [sorted({order.streams[p.stream].key(p.document) for r in order.next_rows() for p in r}) for _ in range(9)]
    assert documents_of(open_order(plan), 6) == named[6]


def test_state_is_small_and_does_not_grow(make_shard: MakeShard) -> None:
    order = open_order(plan_of(make_shard(counts={"code": 2000, "docs": 500, "chat": 500})))
    sizes = []
    for _ in range(100):
        order.next_rows()
        sizes.append(len(json.dumps(order.state_dict())))
    assert max(sizes) < 6000
    assert max(sizes[50:]) < 1.3 * max(sizes[:50])


def test_it_ends_when_every_epoch_is_used_up(make_shard: MakeShard) -> None:
    order = open_order(plan_of(make_shard(), max_epochs=2))
    capacity = order.positions_left() // (8 * 32)
    assert capacity * 0.9 <= len(drain(order)) <= capacity
    with pytest.raises(DataPlanError, match="max_epochs"):
        order.next_rows()


def test_what_does_not_fit_is_refused_by_name(make_shard: MakeShard) -> None:
    shard, other = make_shard(1), make_shard(2)
    with pytest.raises(DataPlanError, match="weights: none of web names a domain.*chat, code, docs"):
        open_order(plan_of(shard, weights={"web": 1.0}))
    with pytest.raises(DataPlanError, match="model.vocab_size is 256"):
        DataOrder(plan_of(shard), context=32, rows=8, vocab_size=256)
    state = open_order(plan_of(shard)).state_dict()
    with pytest.raises(DataPlanError, match="of generation 0 is not what"):
        open_order(plan_of(shard, other), state)
    with pytest.raises(DataPlanError, match="model.context is 16"):
        open_order(plan_of(shard), state, context=16)
    with pytest.raises(DataPlanError, match="listed twice"):
        plan_of(shard, shard)
    with pytest.raises(DataPlanError, match="unknown key 'repaly'; did you mean 'replay'"):
        plan_of(shard, repaly=0.1)


def test_prefetch_gives_the_same_batches_and_hands_errors_on(make_shard: MakeShard) -> None:
    plan = plan_of(make_shard(), max_epochs=1)
    plain = open_order(plan)
    for last in (1, 5, 6):  # none is lost to the thread's head start
        steps = []
        for batch in prefetch(plain, last):
            steps.append(batch.step)
        assert steps == list(range(steps[0], last))
    plain, ahead = open_order(plan), open_order(plan)
    for batch in prefetch(ahead, 5):
        assert torch.equal(batch.tokens_BT, make_batch(plain).tokens_BT)
    assert ahead.step == plain.step == 5
    with pytest.raises(DataPlanError, match="max_epochs"):
        list(prefetch(open_order(plan), 10_000))
