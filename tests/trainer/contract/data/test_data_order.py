from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.messages import refused
from tests.support.trainer.segments import TINY, MakeShard, make_documents, plan_of
from trainer.batch import PADDING, Batch, make_batch, prefetch_batches
from trainer.contract.data.data_order import DataOrder, list_document_keys_at_step
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.document_stream import DocumentPiece, DocumentStream
from trainer.contract.data.packing import STRATEGIES
from trainer.contract.data.permutation import BLOCK
from trainer.contract.data.token_shard import TokenizedDocument, write_token_shard
from trainer.contract.data.waiting_pieces import decode_pending_pieces, encode_pending_pieces
from trainer.contract.errors import DataPlanError
from trainer.contract.recipe import BatchRecipe, Recipe

WARMUP = [{"until_step": 3, "sequences": 4}, {"until_step": 9, "sequences": 8}]
every_packing = pytest.mark.parametrize("packing", STRATEGIES)


def open_order(
    plan: DataPlan, state: dict | None = None, context: int = 32, rows: int = 8, **batch: object
) -> DataOrder:
    recipe = BatchRecipe.model_validate({"sequences": rows} | batch)
    return DataOrder(plan, context=context, batch=recipe, vocab_size=512, state=state)


def lengths_of(stream: DocumentStream) -> list[int]:
    """Tokens of each document."""
    return [stream.find_document(document).length for document in range(stream.documents)]


def drain(order: DataOrder) -> list[list[tuple]]:
    """The pieces of every step, until the data ends."""
    steps = []
    while True:
        try:
            rows = order.draw_next_rows()
        except DataPlanError:
            return steps
        steps.append([(p.stream, p.document, p.start) for row in rows for p in row])


def changing_plan(make_shard: MakeShard) -> DataPlan:
    """A plan of two generations, whose weights change at step 6."""
    shards = make_shard(1), make_shard(2, {"code": 60, "docs": 30, "chat": 90})
    phases = [{"from_step": 6, "weights": {"chat": 0.7, "docs": 0.3}}]
    return plan_of(*shards, generations=[0, 1], phases=phases, replay=0.3)


@every_packing
@pytest.mark.parametrize("reshuffled", [0, 2])
def test_a_resumed_order_gives_the_same_batches(make_shard: MakeShard, packing: str, reshuffled: int) -> None:
    """The batches are equal to the bit from every step, through the warm-up of the batch and the start of a phase."""
    plan = changing_plan(make_shard).model_copy(update={"reshuffled": reshuffled})
    order = open_order(plan, rows=16, warmup=WARMUP, packing=packing)
    whole = [(json.loads(json.dumps(order.state_dict())), make_batch(order)) for _ in range(16)]
    assert [len(batch.rows) for _, batch in whole] == [4] * 3 + [8] * 6 + [16] * 7
    for first, (state, _) in enumerate(whole):
        resumed = open_order(plan, state, rows=16, warmup=WARMUP, packing=packing)
        assert resumed.state_dict() == state
        for _, batch in whole[first : first + 4]:
            again = make_batch(resumed)
            assert again.rows == batch.rows and again.state_after == batch.state_after
            assert all(torch.equal(value, getattr(again, name)) for name, value in tensors_of(batch).items())


@every_packing
def test_a_reshuffled_order_continues_from_the_same_state_with_whole_pieces(
    make_shard: MakeShard, packing: str
) -> None:
    """In the places of pieces that wait and were begun, it has other pieces, none of which was begun."""
    plan = changing_plan(make_shard)
    order = open_order(plan, context=16, packing=packing)
    for _ in range(5):
        order.draw_next_rows()
    state = order.state_dict()
    other = open_order(plan.model_copy(update={"reshuffled": 1}), state, context=16, packing=packing)
    again = open_order(plan, other.state_dict(), context=16, packing=packing)
    assert [p.place for p in order.pending] == [p.place for p in other.pending] == [p.place for p in again.pending]
    for changed in (other, again):
        assert all(p == changed.streams[p.stream].find_piece_at(p.place) for p in changed.pending)
    cut = [p for p in order.pending if p.start % 16]
    assert bool(cut) == bool(state["begun"]) and "reshuffled" not in state, "older code reads it"
    if packing == "truncate-and-concatenate":
        assert cut


@every_packing
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(
    make_shard: MakeShard, ranks: int, packing: str
) -> None:
    plan = changing_plan(make_shard)
    whole, *parts = (open_order(plan, rows=16, warmup=WARMUP, packing=packing) for _ in range(1 + ranks))
    for _ in range(12):
        batch = make_batch(whole)
        shared = [make_batch(part, rank, ranks) for rank, part in enumerate(parts)]
        for rank, part in enumerate(shared):
            assert part.rows == batch.rows and part.state_after == batch.state_after
            assert all(
                torch.equal(getattr(part, name), value[rank::ranks]) for name, value in tensors_of(batch).items()
            )
        assert sum(float(part.weights_BT.sum()) for part in shared) == pytest.approx(1.0, abs=1e-5)


def tensors_of(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}


@every_packing
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), context=st.integers(8, 60), rows=st.integers(1, 6), cuts=st.sets(st.integers(0, 60)))
def test_an_order_uses_every_position_once_an_epoch_wherever_it_is_stopped(
    tmp_path_factory: pytest.TempPathFactory, packing: str, seed: int, context: int, rows: int, cuts: set[int]
) -> None:
    """An order that is stopped at any steps holds each position once by its end, except the pieces that are left waiting."""
    parent = tmp_path_factory.mktemp("shards")
    shard = write_token_shard(
        parent, make_documents(seed, {"code": 60, "docs": 20}), vocab_size=512, tokenizer_sha256="t"
    )
    plan = plan_of(shard, weights={"code": 0.5, "docs": 0.5}, max_epochs=1)
    order = open_order(plan, context=context, rows=rows, packing=packing)
    seen: Counter[tuple] = Counter()
    while True:
        if order.step in cuts:
            order = open_order(
                plan, json.loads(json.dumps(order.state_dict())), context=context, rows=rows, packing=packing
            )
        try:
            batch = order.draw_next_rows()
        except DataPlanError:
            break
        assert all(0 < sum(piece.positions for piece in row) <= context for row in batch)
        seen.update(position for row in batch for piece in row for position in positions_of(piece))
    waiting = Counter(position for piece in order.pending for position in positions_of(piece))
    every = {
        (name, document, position)
        for name, stream in order.streams.items()
        for document, length in enumerate(lengths_of(stream))
        for position in range(length - 1)
    }
    assert set((seen + waiting).values()) == {1} and set(seen + waiting) == every


def positions_of(piece: DocumentPiece) -> list[tuple[str, int, int]]:
    return [(piece.stream, piece.document, piece.start + i) for i in range(piece.positions)]


@every_packing
def test_batches_hold_neighbouring_tokens_of_one_document_and_its_mask(make_shard: MakeShard, packing: str) -> None:
    shard = make_shard()
    order = open_order(plan_of(shard), packing=packing)
    held = {row["key"]: row for row in shard.documents.to_pylist()}
    for _ in range(5):
        batch = make_batch(order)
        for b, row in enumerate(batch.rows):
            at = 0
            for number, piece in enumerate(row):
                document = held[order.streams[piece.stream].look_up_document_key(piece.document)]
                first = document["start"] + piece.start
                place = np.s_[b, at : at + piece.positions]
                inputs = np.asarray(shard.tokens[first : first + piece.positions], np.int64)
                targets = np.asarray(shard.tokens[first + 1 : first + 1 + piece.positions], np.int64)
                assert batch.tokens_BT[place].tolist() == inputs.tolist()
                assert batch.targets_BT[place].tolist() == targets.tolist()
                mask = shard.read_loss_mask(first + 1, first + 1 + piece.positions)
                assert (batch.weights_BT[place] > 0).tolist() == mask.tolist()
                assert batch.positions_BT[place].tolist() == list(range(piece.positions))
                assert set(batch.documents_BT[place].tolist()) == {number}
                assert {order.domains[i] for i in batch.domains_BT[place].tolist()} == {document["domain"]}
                assert piece.supervised == mask.sum()
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
    while pieces := order._draw():
        for piece in pieces:
            drawn[piece.stream.split("/")[0]].append((piece.stream, piece.document, piece.start))
    for domain, pieces in drawn.items():
        whole = sum(s.pieces for name, s in order.streams.items() if name.startswith(domain))
        assert len(pieces) == whole * max_epochs  # every pair of every document, max_epochs times
        for epoch in range(max_epochs):
            part = pieces[epoch * whole : (epoch + 1) * whole]
            assert len(set(part)) == whole


def test_a_stream_of_several_blocks_has_each_piece_once_an_epoch(make_shard: MakeShard) -> None:
    order = open_order(plan_of(make_shard(counts={"code": 900}), weights={"code": 1.0}), context=16)
    (stream,) = order.streams.values()
    lengths = lengths_of(stream)
    every = sorted((d, at, min(16, n - 1 - at)) for d, n in enumerate(lengths) for at in range(0, n - 1, 16))
    assert stream.pieces == len(every) > 2 * BLOCK and stream.pieces % BLOCK
    orders = []
    for epoch in (0, 1, 0):
        pieces = [stream.find_piece_at(epoch * stream.pieces + place) for place in range(stream.pieces)]
        assert sorted((p.document, p.start, p.positions) for p in pieces) == every
        orders.append([(p.document, p.start) for p in pieces])
        some = {0, 7, len(lengths) - 1}
        places = sorted(epoch * stream.pieces + i for i, p in enumerate(pieces) if p.document in some)
        assert sorted(stream.find_places_of_documents(some, epoch).tolist()) == places
    assert orders[0] == orders[2] != orders[1] and stream.find_places_of_documents([], 1).tolist() == []


# SHA-256 of the documents of the first three batches, in their order: a change moves every run that goes on, and must be meant.
GOLDEN = {
    "demo": "65471f3d8b82e6f3",
    "eight-gpus": "74230e1a4f885531",
    "laptop": "c6fb8ada025f0801",
    "llama-100m": "693bf6e7f2be2260",
    "one-gpu": "f63023ccb7e20d88",
    "tiny": "8b364ece8a3bc4a3",
}


@pytest.mark.parametrize("name", sorted(path.stem for path in TINY.parent.glob("*.yaml")))
def test_the_first_batches_of_each_shipped_recipe_never_change(tmp_path: Path, name: str) -> None:
    """They depend on no library's random numbers, so they are the same on every machine."""
    recipe = Recipe.load(TINY.with_name(f"{name}.yaml"))
    context, shards = recipe.model.context, []
    for generation, domains in enumerate((("code", "docs", "chat"), ("code", "web"))):
        documents = []
        for number, domain in enumerate(domains * 150):
            length = 2 + (7919 * number + 31 * generation) % (2 * context)
            mask = np.arange(length) % 3 > 0 if domain == "chat" else np.ones(length, bool)
            key = f"{domain}-{generation}-{number}"
            documents.append(TokenizedDocument(key, key, domain, "s", "", np.ones(length, np.uint32), mask))
        shards.append(write_token_shard(tmp_path, documents, vocab_size=512, tokenizer_sha256="t"))
    mixture = recipe.mixture
    plan = plan_of(
        *shards, generations=[0, 1], weights={"*": 0.1} | mixture.weights, replay=mixture.replay, max_epochs=mixture.max_epochs,
        seed=recipe.seed, phases=[phase.model_dump() for phase in mixture.phases], targets_in_every_batch=True,
    )  # fmt: skip
    batch = recipe.batch.model_copy(update={"sequences": min(recipe.batch.sequences, 32)})
    order = DataOrder(plan, context=context, batch=batch, vocab_size=recipe.model.vocab_size)
    drawn = [
        [order.streams[p.stream].look_up_document_key(p.document), p.start, p.positions]
        for _ in range(3) for row in order.draw_next_rows() for p in row
    ]  # fmt: skip
    assert hashlib.sha256(json.dumps(drawn).encode()).hexdigest()[:16] == GOLDEN.get(name), drawn[:3]


# A state that code from before December 2026 wrote at step 9. The SHA-256 of what it drew in the next 20 steps, with the pieces that waited then.
OLDER_STATE: dict = {
    "format": 2, "step": 9, "context": 32, "documents_begun": 15,
    "streams": {
        "chat/0": ["637d591ad483ee56", 0, 8, 11.830693069306937],
        "code/0": ["593d568d4220213d", 0, 8, -13.572607260726063],
        "docs/0": ["01c6d836c29d4375", 0, 10, 2.2242574257425973],
        "law/0": ["8208fd350819b00c", 0, 14, -0.4823432343234515],
    },
    "pending": "AwA=",
    "begun": [[0, 18]],
}  # fmt: skip
OLDER_DRAWN = "d6ec4cf6786979d9"


def test_an_older_state_continues_to_the_same_bits(tmp_path: Path) -> None:
    """The plan masks a document and moves others to a domain of their own. The first waiting piece was begun."""
    documents = []
    for number in range(90):
        domain, length = ("code", "docs", "chat")[number % 3], 2 + 7919 * number % 150
        mask = np.arange(length) % 3 > 0 if domain == "chat" else np.ones(length, bool)
        tokens = np.ones(length, np.uint32)
        documents.append(TokenizedDocument(f"d{number}", str(number), domain, "s", "", tokens, mask))
    plan = plan_of(
        write_token_shard(tmp_path, documents, vocab_size=512, tokenizer_sha256="t"), weights={"*": 1.0}, masked=["d5"]
    )
    moved = [shard.model_copy(update={"moved": {"law": "3-30,41"}}) for shard in plan.token_shards]
    plan = plan.model_copy(update={"token_shards": moved})
    streams = open_order(plan).streams  # their fingerprints depend on the Parquet library's version
    same = {name: [streams[name].fingerprint, *values[1:]] for name, values in OLDER_STATE["streams"].items()}
    order = open_order(plan, OLDER_STATE | {"streams": same}, rows=4, packing="truncate-and-concatenate")
    assert order.state_dict() == OLDER_STATE | {"streams": same}
    drawn = [list(piece)[:8] for _ in range(20) for row in order.draw_next_rows() for piece in row]
    waiting = [order.state_dict()[key] for key in ("pending", "begun")]
    assert hashlib.sha256(json.dumps([drawn, waiting]).encode()).hexdigest()[:16] == OLDER_DRAWN


def test_mixture_weights_are_shares_of_supervised_tokens(make_shard: MakeShard) -> None:
    weights = {"code": 0.5, "docs": 0.2, "chat": 0.3}
    order = open_order(plan_of(make_shard(counts={"code": 600, "docs": 600, "chat": 600}), weights=weights), rows=16)
    seen: Counter[str] = Counter()
    for _ in range(60):
        for row in order.draw_next_rows():
            for piece in row:
                seen[piece.stream.split("/")[0]] += piece.supervised
    for domain, weight in weights.items():
        assert seen[domain] / seen.total() == pytest.approx(weight, abs=0.01)


def test_a_phase_changes_the_mixture_weights_at_its_step(make_shard: MakeShard) -> None:
    shard = make_shard(counts={"code": 900, "docs": 900})
    phases = [{"from_step": 30, "weights": {"docs": 1.0}}]
    order = open_order(plan_of(shard, weights={"code": 1.0}, phases=phases), rows=8)
    domains = [{p.stream.split("/")[0] for row in order.draw_next_rows() for p in row} for _ in range(75)]
    assert all(found == {"code"} for found in domains[:30])
    assert all(found == {"docs"} for found in domains[55:])  # what was drawn before waits its turn


def test_the_weight_of_a_star_is_shared_among_the_domains_that_are_not_named(make_shard: MakeShard) -> None:
    order = open_order(plan_of(make_shard(), weights={"code": 0.5, "*": 0.5}))
    shares = order.compute_current_stream_shares()
    assert shares["code/0"] == pytest.approx(0.5)
    size = {name: stream.supervised_tokens for name, stream in order.streams.items()}
    assert shares["docs/0"] / shares["chat/0"] == pytest.approx(size["docs/0"] / size["chat/0"])


def test_a_new_generation_joins_with_replay_and_the_old_streams_continue(make_shard: MakeShard) -> None:
    old, new = make_shard(1, {"code": 500}), make_shard(2, {"code": 500})
    order = open_order(plan_of(old, weights={"code": 1.0}))
    before = [(p.stream, p.document, p.start) for _ in range(20) for row in order.draw_next_rows() for p in row]
    both = plan_of(old, new, generations=[0, 1], weights={"code": 1.0}, replay=0.25)
    joined = open_order(both, json.loads(json.dumps(order.state_dict())))
    began = joined.state_dict()[
        "streams"
    ]  # as it lies in checkpoints: seed and shards, when it joined, its place, what it is owed
    name = {n: hashlib.sha256(f"3:{shard.id}".encode()).hexdigest()[:16] for n, shard in enumerate((old, new))}
    assert began["code/0"] == order.state_dict()["streams"]["code/0"] and began["code/0"][0] == name[0]
    assert began["code/1"] == [name[1], 0, 0, 0.0]
    seen: Counter[str] = Counter()
    after = []
    for step in range(40):
        for row in joined.draw_next_rows():
            for piece in row:
                if step >= 10:  # what was drawn before the join comes first
                    seen[piece.stream] += piece.supervised
                after.append((piece.stream, piece.document, piece.start))
    assert seen["code/0"] / seen.total() == pytest.approx(0.25, abs=0.03)
    assert not set(before) & set(after)


def test_a_domain_without_new_data_continues_with_the_old_data(make_shard: MakeShard) -> None:
    old, new = make_shard(1, {"code": 50, "docs": 50}), make_shard(2, {"code": 50})
    order = open_order(plan_of(old, new, generations=[0, 1], weights={"code": 0.5, "docs": 0.5}, replay=0.2))
    assert order.compute_current_stream_shares() == pytest.approx({"docs/0": 0.5, "code/0": 0.1, "code/1": 0.4})


@pytest.mark.parametrize("longest", [20, 90, 700])
def test_batches_use_99_percent_of_their_positions(make_shard: MakeShard, longest: int) -> None:
    """This holds from the first batch on, at every step."""
    shard = make_shard(counts={"code": 2500, "chat": 2500}, longest=longest)
    order = open_order(plan_of(shard, weights={"code": 0.6, "chat": 0.4}), context=128, rows=8)
    used = np.cumsum([make_batch(order).used for _ in range(100)])
    assert (used >= 0.99 * 8 * 128 * np.arange(1, 101)).all()


def test_the_documents_of_a_past_step_can_be_found(make_shard: MakeShard) -> None:
    plan = plan_of(make_shard())
    order = open_order(plan)
    named = [
        sorted({order.streams[p.stream].look_up_document_key(p.document) for r in order.draw_next_rows() for p in r})
        for _ in range(9)
    ]
    assert list_document_keys_at_step(open_order(plan), 6) == named[6]


@every_packing
def test_the_state_is_a_few_hundred_bytes_a_stream_and_does_not_grow(tmp_path: Path, packing: str) -> None:
    """The shape is the demo's. The lengths are log-normal, like those of texts."""
    rng = np.random.default_rng(0)
    lengths = {"code": (400, 1.0), "docs": (120, 0.8), "chat": (180, 0.4)}
    documents = [
        TokenizedDocument(f"{domain}-{i}", f"{domain}-{i}", domain, "s", "", np.ones(n, np.uint32), np.ones(n, bool))
        for domain, (median, spread) in lengths.items()
        for i, n in enumerate(np.maximum(2, rng.lognormal(np.log(median), spread, 1500).astype(int)).tolist())
    ]
    shard = write_token_shard(tmp_path, documents, vocab_size=512, tokenizer_sha256="t")
    order = open_order(plan_of(shard, max_epochs=10), context=256, rows=16, packing=packing)
    sizes = []
    for _ in range(400):
        order.draw_next_rows()
        sizes.append(len(json.dumps(order.state_dict())))
    assert max(sizes) <= 600 * len(order.streams)
    assert max(sizes[200:]) <= 1.1 * max(sizes[:200])


names = st.sampled_from(["a/0", "b/0", "b/12"])


@given(st.lists(names, max_size=300), st.data())
def test_encoded_pending_pieces_are_decoded_to_the_same_places(streams: list[str], data: st.DataObject) -> None:
    at = dict.fromkeys(["a/0", "b/0", "b/12"], 0)
    pieces = []
    for name in streams:
        at[name] += data.draw(st.integers(1, 3) | st.integers(1, 10**9))
        pieces.append(DocumentPiece(name, at[name] - 1, 0, 0, 1, 1, 0, 0, 1))
    encoded = encode_pending_pieces(pieces, at)
    assert decode_pending_pieces(encoded, at) == [(piece.stream, piece.place) for piece in pieces]


def test_a_copy_of_an_order_does_not_move_the_original(make_shard: MakeShard) -> None:
    order = open_order(plan_of(make_shard()))
    order.draw_next_rows()
    before = order.state_dict()
    twin = order.copy_at_step()
    walked = [twin.draw_next_rows() for _ in range(5)]
    assert order.state_dict() == before
    assert [order.draw_next_rows() for _ in range(5)] == walked


def test_an_order_ends_when_every_epoch_is_used_up(make_shard: MakeShard) -> None:
    order = open_order(plan_of(make_shard(), max_epochs=2))
    capacity = order.estimate_positions_left() // (8 * 32)
    assert capacity * 0.9 <= len(drain(order)) <= capacity
    with refused("data_order.data_ends", DataPlanError, epochs=2):
        order.draw_next_rows()


def test_a_plan_or_state_that_does_not_fit_is_refused_by_key(make_shard: MakeShard) -> None:
    shard, other = make_shard(1), make_shard(2)
    with refused("data_plan.absent_domain", DataPlanError, key="weights.web", near="; known: chat, code, docs"):
        open_order(plan_of(shard, weights={"web": 1.0}))
    with refused(
        "data_plan.absent_domain", DataPlanError, key="weights.cod", domain="cod", near="; did you mean 'code'?"
    ):
        open_order(plan_of(shard, weights={"cod": 0.5, "docs": 0.5}))
    phases = [{"from_step": 5, "weights": {"code": 1.0}}, {"from_step": 9, "weights": {"cht": 0.1, "*": 0.9}}]
    with refused("data_plan.absent_domain", DataPlanError, key="phases.1.weights.cht", near="; did you mean 'chat'?"):
        open_order(plan_of(shard, phases=phases))
    with refused("data_order.format", DataPlanError, found=1, expected=2):
        open_order(plan_of(shard), {"step": 3, "context": 32, "streams": {}, "pending": []})
    with refused("document_stream.vocabulary", DataPlanError, vocab_size=256):
        DataOrder(plan_of(shard), context=32, batch=BatchRecipe(sequences=8), vocab_size=256)
    state = open_order(plan_of(shard)).state_dict()
    with refused("data_order.other_shards", DataPlanError, generation=0):
        open_order(plan_of(shard, other), state)
    with refused("strict.wrong_value", DataPlanError) as found:
        plan_of(shard, shard)
    assert found.value.data["problem"].code == "data_plan.shard_twice"
    with refused("strict.unknown_key", DataPlanError, key="repaly", near="; did you mean 'replay'?"):
        plan_of(shard, repaly=0.1)


def test_prefetch_gives_the_same_batches_and_raises_the_threads_errors(make_shard: MakeShard) -> None:
    plan = plan_of(make_shard(), max_epochs=1)
    plain = open_order(plan)
    for last in (1, 5, 6):  # none is lost to the thread's head start
        steps = []
        for batch in prefetch_batches(plain, last):
            steps.append(batch.step)
        assert steps == list(range(steps[0], last))
    plain, ahead = open_order(plan), open_order(plan)
    for batch in prefetch_batches(ahead, 5):
        assert torch.equal(batch.tokens_BT, make_batch(plain).tokens_BT)
    assert ahead.step == plain.step == 5
    with refused("data_order.data_ends", DataPlanError):
        list(prefetch_batches(open_order(plan), 10_000))


def test_prefetch_closed_early_ends_its_thread(make_shard: MakeShard) -> None:
    order = open_order(plan_of(make_shard()))
    batches = prefetch_batches(order, 40, ahead=2)
    assert next(batches).step == 0
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]
    assert order.step <= 4, "two wait, and one is made meanwhile"
