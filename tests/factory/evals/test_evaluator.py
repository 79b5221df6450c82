"""A fault of the machine during an evaluation is no evidence about the candidate. The evaluation is made again."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from factory.core.faults import NO_FILE_HANDLES, find_fault_in
from factory.evals import evaluator
from factory.evals.evaluator import evaluate_candidate
from factory.ledger.ledger import evaluations
from tests.support.factory.exports import FilledPlant, save_export, tiny_model
from tests.support.failing.limits import few_handles
from trainer.contract.data.token_shard import TokenShard, TokenShardError


@pytest.mark.parametrize("part", ["measure_baselines", "check_parity"])
def test_a_token_shard_that_cannot_be_opened_now_is_not_held_against_the_candidate(
    plant: FilledPlant, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    export = save_export(tiny_model(), plant.workspace.exports / part, plant.tokenizer)
    candidate = plant.add_candidate(export)

    def with_no_handle(*_: object) -> object:
        with few_handles():
            return TokenShard(plant.shard.path).manifest

    monkeypatch.setattr(evaluator, part, with_no_handle)
    with pytest.raises(TokenShardError, match="Too many open files") as raised:
        evaluate_candidate(plant, candidate)
    assert find_fault_in(raised.value) == NO_FILE_HANDLES
    assert not plant.ledger.select_rows(sa.select(evaluations).where(evaluations.c.candidate == candidate))
