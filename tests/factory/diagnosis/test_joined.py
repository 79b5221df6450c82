"""Facts that the diagnosis reads: wrong labels or masks of new documents in real token shards, onsets of anomalies, earlier changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from factory.diagnosis.diagnosing import (
    RecordedAnomaly,
    find_changed_recipe_keys,
    find_episodes,
    find_previous_domain_weights,
)
from factory.diagnosis.new_documents import compare_new_documents
from tests.support.trainer.segments import plan_of, recipe_with
from trainer.contract.data.data_order import DataOrder
from trainer.contract.data.token_shard import TokenizedDocument, TokenShard, write_token_shard

RECIPE = recipe_with()
MARK = 2


def documents(name: str, domain: str, low: int, masked: str = "answer") -> list[TokenizedDocument]:
    """Chats of 24 tokens with ids from ``low`` on, with a marker token before the answer."""
    rng, found = np.random.default_rng(low), []
    for i in range(40):
        tokens = rng.integers(low, low + 100, 24).astype(np.uint32)
        tokens[11] = MARK
        mask = np.arange(24) > 11
        mask = {"answer": mask, "all": np.ones(24, bool), "question": ~mask}[masked]
        found.append(TokenizedDocument(f"{name}-{i}", f"{name}-{i}", domain, "t", "none", tokens, mask))
    return found


def stored(folder: Path, held: list[TokenizedDocument]) -> TokenShard:
    return write_token_shard(folder / "shards", held, vocab_size=512, tokenizer_sha256="test")


@pytest.mark.parametrize(
    ("new", "reads_like", "share", "alike"),
    [
        (documents("new", "chat", 10), "chat", 0.5, 1.0),
        (documents("new", "chat", 300), "docs", 0.5, 1.0),
        (documents("new", "chat", 10, "all"), "chat", 1.0, 0.0),
        (documents("new", "chat", 10, "question"), "chat", 0.5, 0.0),
    ],
    ids=["as before", "labelled wrongly", "mask dropped", "mask on the question"],
)
def test_new_documents_with_wrong_labels_or_masks_are_found(
    tmp_path: Path, new: list[TokenizedDocument], reads_like: str, share: float, alike: float
) -> None:
    before = stored(tmp_path, documents("chat", "chat", 10) + documents("docs", "docs", 300))
    plan = plan_of(before, stored(tmp_path, new), generations=[0, 1], weights={"*": 1.0})
    order = DataOrder(plan, context=RECIPE.model.context, batch=RECIPE.batch, vocab_size=RECIPE.model.vocab_size)
    (found,) = compare_new_documents(order, {"chat/1": ("new-3",), "chat/0": ("chat-1",)})
    assert (found.domain, found.documents, found.reads_like) == ("chat", ("new-3",), reads_like)
    assert (found.supervised, found.supervised_before, found.begins_alike) == (share, 0.5, alike)


def test_a_single_generation_has_nothing_to_compare(tmp_path: Path) -> None:
    order = DataOrder(
        plan_of(stored(tmp_path, documents("chat", "chat", 10)), weights={"*": 1.0}),
        context=RECIPE.model.context, batch=RECIPE.batch, vocab_size=RECIPE.model.vocab_size,
    )  # fmt: skip
    assert compare_new_documents(order, {"chat/0": ("chat-1",)}) == []


def test_reshuffling_gives_other_documents_and_keeps_the_cursor_valid(tmp_path: Path) -> None:
    plan = plan_of(stored(tmp_path, documents("chat", "chat", 10)), weights={"*": 1.0})
    sizes = {"context": RECIPE.model.context, "batch": RECIPE.batch, "vocab_size": RECIPE.model.vocab_size}
    order = DataOrder(plan, **sizes)
    order.draw_next_rows()
    state = order.state_dict()
    other = plan.model_copy(update={"reshuffled": 1})
    assert other.id != plan.id and "reshuffled" not in plan.to_json()
    same, next_ones = (DataOrder(p, **sizes, state=state).draw_next_rows() for p in (plan, other))
    assert order.draw_next_rows() == same != next_ones


def test_an_impossible_onset_that_the_trainer_reports_is_ignored() -> None:
    line = lambda step, onset, kind="loss_spike": RecordedAnomaly.from_detail(
        1, step, kind, {"onset": onset, "where": "domain/code"}
    )
    assert line(50, 48).began == 48 and line(50, 51).began is None and line(500, 5).began is None
    assert [(s.onset, s.where) for s in find_episodes([line(50, 48, "domain_drop")], [])] == [(48, "domain/code")]
    assert find_episodes([line(50, 30)], [])[0].onset == 50  # something sudden did not begin so long before
    assert find_episodes([line(100, 30, "divergence")], [], earliest_step=40)[0].onset == 40


def test_changes_before_an_anomaly_are_found() -> None:
    assert find_changed_recipe_keys({"optimizer": {"lr": 1.0}, "schedule": {}, "stability": {"grad_clip": 2.0}},
                         {"optimizer": {"lr": 1.0}, "schedule": {}, "stability": {"grad_clip": 1.0}}) == {"stability.grad_clip": 1.0}  # fmt: skip
    plan = {"token_shards": [{"id": "a", "path": "a", "generation": 0}], "weights": {"x": 1.0}}
    assert find_previous_domain_weights(plan, plan, 10, 12) is None
