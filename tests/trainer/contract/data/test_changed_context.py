"""``model.context`` changes between segments: the data order continues after what was read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.messages import refused
from tests.support.trainer.segments import MakeShard, make_documents, one_sided_chats, plan_of
from trainer.batch import make_batch
from trainer.contract.data.data_order import DataOrder
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.document_stream import DocumentPiece
from trainer.contract.data.packing import STRATEGIES
from trainer.contract.data.token_shard import TokenShard, write_token_shard
from trainer.contract.data.waiting_pieces import encode_pieces
from trainer.contract.errors import DataPlanError
from trainer.contract.recipe import BatchRecipe

CONTEXTS = (256, 512, 128)
every_packing = pytest.mark.parametrize("packing", STRATEGIES)


def open_order(
    plan: DataPlan, context: int, state: dict | None = None, rows: int = 2, packing: str = "best-fit"
) -> DataOrder:
    """With a state that went through JSON."""
    state = None if state is None else json.loads(json.dumps(state))
    batch = BatchRecipe.model_validate({"sequences": rows, "packing": packing})
    return DataOrder(plan, context=context, batch=batch, vocab_size=512, state=state)


def long_shard(folder: Path, seed: int = 0, longest: int = 1500, count: int = 40) -> TokenShard:
    documents = make_documents(seed, {"code": count, "docs": count // 2}, longest=longest)
    return write_token_shard(folder, documents, vocab_size=512, tokenizer_sha256="t")


def long_plan(*shards: TokenShard, max_epochs: int = 1, **keywords: object) -> DataPlan:
    return plan_of(*shards, weights={"code": 0.6, "docs": 0.4}, max_epochs=max_epochs, **keywords)


Position = tuple[int, str, int, int]  # epoch, stream, document, position


class Reader:
    """Walks an order and counts every position that was read."""

    def __init__(self, plan: DataPlan, packing: str) -> None:
        self.plan, self.packing = plan, packing
        self.read: Counter[Position] = Counter()
        self.order: DataOrder | None = None

    def open(self, context: int, rows: int = 2) -> DataOrder:
        state = None if self.order is None else self.order.state_dict()
        self.order = open_order(self.plan, context, state, rows, self.packing)
        return self.order

    def draw(self, steps: int) -> int:
        """The number of steps that were drawn before the data ended."""
        assert self.order is not None
        for step in range(steps):
            try:
                rows = self.order.draw_next_rows()
            except DataPlanError as error:
                assert error.code == "data_order.data_ends"
                return step
            for row in rows:
                assert 0 < sum(piece.positions for piece in row) <= self.order.context
                for piece in row:
                    self.read.update(self._positions(piece))
        return steps

    def _positions(self, piece: DocumentPiece) -> list[Position]:
        assert self.order is not None
        epoch = self.order.streams[piece.stream].find_epoch(piece)
        return [(epoch, piece.stream, piece.document, piece.start + i) for i in range(piece.positions)]

    def waiting(self) -> Counter[Position]:
        assert self.order is not None
        return Counter(position for piece in self.order.pending for position in self._positions(piece))

    def every(self, epochs: int = 1) -> set[Position]:
        assert self.order is not None
        return {
            (epoch, name, document, position)
            for epoch in range(epochs)
            for name, stream in self.order.streams.items()
            for document in range(stream.documents)
            for position in range(stream.find_document(document).length - 1)
        }


@every_packing
def test_each_position_is_read_once_an_epoch_while_the_context_changes(tmp_path: Path, packing: str) -> None:
    """Rows of 256, then of 512, then of 128 positions, to the end of two epochs."""
    reader = Reader(long_plan(long_shard(tmp_path), max_epochs=2), packing)
    for context, steps in zip(CONTEXTS, (20, 12, 10**6)):
        reader.open(context)
        reader.draw(steps)
        together = reader.read + reader.waiting()
        assert set(together.values()) == {1}, f"a position was read twice with {context}"
    assert set(together) == reader.every(epochs=2)


@every_packing
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    changes=st.lists(st.tuples(st.integers(5, 90), st.integers(0, 12)), min_size=1, max_size=5),
    rows=st.integers(1, 5),
    cuts=st.sets(st.integers(0, 40)),
    max_epochs=st.integers(1, 2),
)
def test_any_changes_of_the_context_lose_no_position_and_repeat_none(
    tmp_path_factory: pytest.TempPathFactory, packing: str, seed: int, changes: list[tuple[int, int]], rows: int,
    cuts: set[int], max_epochs: int,
) -> None:  # fmt: skip
    """``changes``: (context, steps). The order is also stopped and resumed at the steps ``cuts``."""
    shard = long_shard(tmp_path_factory.mktemp("shards"), seed, longest=150, count=25)
    reader = Reader(long_plan(shard, max_epochs=max_epochs), packing)
    for context, steps in [*changes, (changes[0][0], 10**6)]:
        reader.open(context, rows)
        for _ in range(steps):
            if reader.order is not None and reader.order.step in cuts:
                before = reader.order.state_dict()
                assert reader.open(context, rows).state_dict() == json.loads(json.dumps(before))
            if not reader.draw(1):
                break
    together = reader.read + reader.waiting()
    assert set(together.values()) == {1} and set(together) == reader.every(max_epochs)


@every_packing
@pytest.mark.parametrize("ranks", [1, 3])
def test_an_order_with_another_context_resumes_to_the_same_bits_on_any_ranks(
    tmp_path: Path, packing: str, ranks: int
) -> None:
    plan = long_plan(long_shard(tmp_path), max_epochs=3)
    state = None
    for context, steps in zip(CONTEXTS, (7, 7, 60)):
        whole = open_order(plan, context, state, rows=3, packing=packing)
        parts = [open_order(plan, context, state, rows=3, packing=packing) for _ in range(ranks)]
        for step in range(steps):
            if step % 3 == 1:
                parts = [open_order(plan, context, whole.state_dict(), rows=3, packing=packing) for _ in range(ranks)]
            batch = make_batch(whole)
            for rank, part in enumerate(parts):
                mine = make_batch(part, rank, ranks)
                assert mine.rows == batch.rows and mine.state_after == batch.state_after
                assert torch.equal(mine.tokens_BT, batch.tokens_BT[rank::ranks])
                assert torch.equal(mine.weights_BT, batch.weights_BT[rank::ranks])
        state = whole.state_dict()


def test_documents_that_were_not_begun_are_cut_for_the_new_rows(tmp_path: Path) -> None:
    """A longer context is used at once. A document that was begun keeps the old borders where its read pieces end."""
    reader = Reader(long_plan(long_shard(tmp_path, longest=3000)), "document")
    reader.open(256)
    reader.draw(20)
    begun = {position[1:3] for position in reader.read + reader.waiting()}
    order = reader.open(512)
    fresh, partly = [], []
    while rows := draw_or_none(order):
        for piece in (piece for row in rows for piece in row):
            (partly if (piece.stream, piece.document) in begun else fresh).append(piece)
    whole = [piece for piece in fresh if piece.document_positions >= 512]
    assert whole and all(piece.start % 512 == 0 for piece in fresh)
    assert all(piece.positions == min(512, piece.document_positions - piece.start) for piece in fresh)
    assert partly and all(piece.start % 256 == 0 for piece in partly)


def draw_or_none(order: DataOrder) -> list | None:
    try:
        return order.draw_next_rows()
    except DataPlanError:
        return None


def test_waiting_pieces_come_first_and_are_cut_if_they_are_longer_than_a_row(tmp_path: Path) -> None:
    plan = long_plan(long_shard(tmp_path))
    order = open_order(plan, 512, packing="truncate-and-concatenate")
    for _ in range(3):
        order.draw_next_rows()
    waited = [(p.stream, p.document, p.start + i) for p in order.pending for i in range(p.positions)]
    assert any(p.start % 512 for p in order.pending), "one was begun"
    other = open_order(plan, 128, order.state_dict(), packing="truncate-and-concatenate")
    assert [(p.stream, p.document, p.start + i) for p in other.pending for i in range(p.positions)] == waited
    assert max(p.positions for p in other.pending) == 128


def test_the_state_has_its_short_form_again_after_the_epoch(tmp_path: Path) -> None:
    """The longer form grows with the waiting pieces alone, some 12 bytes each."""
    plan = long_plan(long_shard(tmp_path), max_epochs=9)
    order = open_order(plan, 256)
    for _ in range(5):
        order.draw_next_rows()
    assert order.state_dict()["format"] == 2
    order, formats = open_order(plan, 128, order.state_dict()), []
    for _ in range(order.estimate_positions_left() // (2 * 128) // 2):  # into a later epoch
        order.draw_next_rows()
        state = order.state_dict()
        formats.append(state["format"])
        assert len(json.dumps(state)) < 900 + 20 * len(order.pending)
    assert formats == sorted(formats, reverse=True) and set(formats) == {3, 2}


def test_a_chat_is_read_once_although_pieces_without_loss_are_left_out(tmp_path: Path) -> None:
    """Which positions lie in pieces without loss depends on the context. No position is read twice, and each target is read."""
    shard = write_token_shard(tmp_path, one_sided_chats(60), vocab_size=512, tokenizer_sha256="t")
    reader = Reader(plan_of(shard, weights={"chat": 1.0}, max_epochs=1), "document")
    for context, steps in ((32, 20), (64, 15), (16, 10**6)):
        reader.open(context)
        reader.draw(steps)
    together = reader.read + reader.waiting()
    assert set(together.values()) == {1}
    (stream,) = reader.order.streams.values()
    targets = set()
    for document in range(stream.documents):
        stored = stream.find_document(document)
        mask = stored.shard.read_loss_mask(stored.start + 1, stored.start + stored.length)
        targets |= {(0, stream.name, document, int(position)) for position in np.flatnonzero(mask)}
    assert targets <= set(together)


def test_shards_that_join_while_the_context_changes_begin_their_own_epoch(tmp_path: Path) -> None:
    old, new = long_shard(tmp_path, 1), long_shard(tmp_path, 2)
    reader = Reader(long_plan(old, max_epochs=1), "best-fit")
    reader.open(256)
    reader.draw(12)
    reader.plan = long_plan(old, new, generations=[0, 1], replay=0.4)
    reader.open(128)
    reader.draw(10**6)
    together = reader.read + reader.waiting()
    assert set(together.values()) == {1} and set(together) == reader.every()


def test_the_positions_left_are_counted_after_a_change(tmp_path: Path) -> None:
    reader = Reader(long_plan(long_shard(tmp_path, count=200), max_epochs=2), "document")
    for context in (256, 512):
        reader.open(context)
        reader.draw(30)
    order = reader.open(128)
    left = len(reader.every(epochs=2)) - sum(reader.read.values())
    assert order.estimate_positions_left() == pytest.approx(left, rel=0.03)


def test_a_state_that_names_tokens_which_no_shard_has_is_refused(make_shard: MakeShard) -> None:
    plan = plan_of(make_shard())
    order = open_order(plan, 32)
    order.draw_next_rows()
    state = open_order(plan, 16, order.state_dict()).state_dict()
    for piece in ((0, 1, 10**6, 0, 4), (0, 1, 0, 89, 400)):
        with refused("document_stream.no_position", DataPlanError, document=piece[2]):
            open_order(plan, 16, state | {"pending": encode(piece)})


def encode(numbers: tuple[int, ...]) -> str:
    stream, place, document, start, positions = numbers
    names = ["chat/0", "code/0", "docs/0"]
    return encode_pieces([DocumentPiece(names[stream], place, document, start, positions, 0, 0, 0, 0)], names)
