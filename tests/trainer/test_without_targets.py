"""Steps whose batch has no token that carries loss, because of an older plan or because all documents are masked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainer.segment_runs import result
from tests.support.trainer.segments import one_sided_chats, plan_of, recipe_with, train_here, write_spec
from trainer.batch import make_batch
from trainer.contract.data.data_order import DataOrder
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import write_token_shard
from trainer.contract.json_lines import read_json_lines
from trainer.contract.plan.spec import SegmentSpec
from trainer.contract.recipe import Recipe
from trainer.parallel.ranks import Ranks
from trainer.run import SegmentRun

STEPS = 60
WATCHFUL = {"window": 16, "noise_scale_every": 4}


@pytest.fixture
def plan(tmp_path: Path) -> DataPlan:
    shard = write_token_shard(tmp_path / "shards", one_sided_chats(150), vocab_size=512, tokenizer_sha256="test")
    return plan_of(shard, weights={"chat": 1.0}, max_epochs=1)


def recipe() -> Recipe:
    packing = {"batch__packing": "truncate-and-concatenate", "batch__sequences": 1}
    return recipe_with(**packing, checkpoint_every=100, schedule__warmup_steps=0)


def without_targets(plan: DataPlan, steps: int) -> list[int]:
    model, batch = recipe().model, recipe().batch
    order = DataOrder(plan, context=model.context, batch=batch, vocab_size=model.vocab_size)
    return [step for step in range(steps) if make_batch(order).supervised == 0]


def anomalies(folder: Path) -> list[dict[str, Any]]:
    """But for slow steps, which a busy machine has."""
    return [line for line in read_json_lines(folder / "anomalies.jsonl") if line["kind"] != "throughput_drop"]


def test_a_step_without_targets_has_no_loss_and_is_no_anomaly(tmp_path: Path, plan: DataPlan) -> None:
    empty = without_targets(plan, STEPS)
    assert len(empty) >= 5
    folder = write_spec(tmp_path / "old", plan, recipe(), last_step=STEPS)
    assert train_here(folder) == (0, "")
    lines = read_json_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" not in line] == empty
    assert all(line["skipped"] == (line["step"] in empty) for line in lines)
    assert all(line["loss"] > 1.0 and line["grad_norm"] > 0 for line in lines if "loss" in line)
    assert all(line["grad_norm"] == 0 for line in lines if "loss" not in line)
    assert anomalies(folder) == []
    done = result(folder)
    assert done["loss"] > 1.0 and done["first_loss"] == next(line["loss"] for line in lines if "loss" in line)


def test_a_new_plan_has_no_step_without_targets(tmp_path: Path, plan: DataPlan) -> None:
    plan = plan.model_copy(update={"targets_in_every_batch": True})
    folder = write_spec(tmp_path / "new", plan, recipe(), last_step=STEPS)
    assert train_here(folder) == (0, "")
    lines = read_json_lines(folder / "metrics.jsonl")
    assert len(lines) == STEPS and not any(line["skipped"] or "loss" not in line for line in lines)
    assert anomalies(folder) == []


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_it_moves_no_weight_and_nothing_that_later_steps_are_judged_by(
    tmp_path: Path, plan: DataPlan, optimizer: str
) -> None:
    """Momentum and decay would move the weights without a gradient too. Also where all documents of the batch are masked by the plan."""
    changed = recipe_with(
        batch__packing="truncate-and-concatenate", batch__sequences=1, optimizer__name=optimizer,
        stability=WATCHFUL,
    )  # fmt: skip
    spec = SegmentSpec.load(write_spec(tmp_path / "run", plan, changed, last_step=STEPS))
    run = SegmentRun(spec, Ranks.join(changed.parallel, changed.model), None)
    seen = set()
    for number in range(30):
        batch = make_batch(run.order)
        if (
            number % 10 == 9
        ):  # as a plan that masks its documents has it: their positions are counted, and weigh nothing
            batch.weights_BT.zero_()
            assert batch.supervised
        weights = {n: t.detach().clone() for n, t in run.model.state_dict().items()}
        moments = {n: t.clone() for n, t in run.optimizer.state_tensors().items()}
        judged = run.detector.state_dict()
        record = run.train_step(batch) | {"tokens_per_s": 1.0}
        assert [a for hook in run.hooks for a in hook.after_step(record)] == []
        still = all(torch.equal(t, weights[n]) for n, t in run.model.state_dict().items())
        empty = not batch.weights_BT.any()
        seen.add((empty, bool(batch.supervised)))
        assert still == empty and ("loss" in record) != empty
        if empty:
            assert all(torch.equal(t, moments[n]) for n, t in run.optimizer.state_tensors().items())
            assert run.detector.state_dict() == judged
    assert seen == {(True, True), (True, False), (False, True)}
