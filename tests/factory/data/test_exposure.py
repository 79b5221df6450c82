"""The steps that trained on a document, compared with a replay of the whole data order."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from factory.core.workspace import Workspace
from factory.data.exposure import DocumentExposure, UnknownExposureError
from factory.ledger.ledger import Ledger
from factory.ledger.rows import SegmentRow
from factory.training.planning import read_data_plan
from tests.support.messages import refused
from trainer.contract.data.data_order import DataOrder, list_document_keys
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.errors import TokenShardError
from trainer.contract.recipe import Recipe

Copy = Callable[[], tuple[Workspace, Ledger]]


def walked(ledger: Ledger) -> dict[int, dict[str, list[int]]]:
    """By segment, the steps of each document: from a replay of the anneal's whole lineage, without checkpoints."""
    found: dict[int, dict[str, list[int]]] = {}
    state = None
    for row in SegmentRow.read_lineage(ledger, 3):
        recipe = Recipe.parse(row.recipe_json)
        plan = DataPlan.from_json(read_data_plan(ledger, row))
        model = recipe.model
        order = DataOrder(plan, batch=recipe.batch, context=model.context, vocab_size=model.vocab_size, state=state)
        while order.step < row.last_step:
            step = order.step
            for key in list_document_keys(order, order.draw_next_rows()):
                found.setdefault(row.id, {}).setdefault(key, []).append(step)
        state = order.state_dict()
    return found


def every_document(ledger: Ledger) -> dict[str, str]:
    rows = ledger.read("SELECT key, token_shard FROM documents WHERE token_shard IS NOT NULL")
    return {row["key"]: row["token_shard"] for row in rows}


def steps(ledger: Ledger, documents: dict[str, str]) -> dict[int, dict[str, list[int]]]:
    exposure = DocumentExposure(ledger, documents)
    found = {row.id: exposure.list_steps_by_document(row) for row in SegmentRow.select(ledger)}
    return {
        number: {key: sorted({one.step for one in seen}) for key, seen in by_key.items()}
        for number, by_key in found.items()
        if by_key
    }


def test_the_steps_of_all_documents_equal_those_of_a_full_replay(copied: Copy) -> None:
    _, ledger = copied()
    expected = walked(ledger)
    assert sorted(expected) == [1, 2, 3] and steps(ledger, every_document(ledger)) == expected


def test_only_steps_between_checkpoints_that_drew_the_document_are_replayed(
    copied: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ledger = copied()
    expected, every = walked(ledger), every_document(ledger)
    rare = min(expected[2], key=lambda key: (sum(len(by.get(key, ())) for by in expected.values()), key))
    made = []
    real = DataOrder.draw_next_rows
    monkeypatch.setattr(DataOrder, "draw_next_rows", lambda self: made.append(self.step) or real(self))
    mine = {number: {rare: by[rare]} for number, by in expected.items() if rare in by}
    assert steps(ledger, {rare: every[rare]}) == mine
    whole = SegmentRow.get(ledger, 3).last_step
    assert 0 < len(made) < whole / 2, "it was walked where nothing of it was drawn"


def test_the_same_steps_are_found_without_checkpoints(copied: Copy) -> None:
    workspace, ledger = copied()
    for path in workspace.segments.glob("*/checkpoints"):
        shutil.rmtree(path)
    assert steps(ledger, every_document(ledger)) == walked(ledger)


def test_a_checkpoint_with_an_impossible_state_is_refused(copied: Copy) -> None:
    workspace, ledger = copied()
    every = every_document(ledger)
    row = SegmentRow.get(ledger, 1)
    for path in Path(row.folder).glob("checkpoints/*/state.json"):
        state = json.loads(path.read_text())
        for cursor in state["sampler"]["streams"].values():
            cursor[2] = 10**300
        path.write_text(json.dumps(state))
    with refused("data.order_unknown", UnknownExposureError, segment=1):
        DocumentExposure(ledger, every).list_steps_by_document(row)


def test_a_missing_token_shard_is_an_error(copied: Copy) -> None:
    workspace, ledger = copied()
    every = every_document(ledger)
    shutil.rmtree(workspace.shards / next(iter(every.values())))
    with refused("data.order_unknown", UnknownExposureError, segment=2) as caught:
        DocumentExposure(ledger, every).list_steps_by_document(SegmentRow.get(ledger, 2))
    assert isinstance(caught.value.data["error"], TokenShardError)
