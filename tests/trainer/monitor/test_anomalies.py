"""Real tiny runs that go wrong: which updates are skipped, which anomalies are reported, and which documents they name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.trainer.segment_runs import result
from tests.support.trainer.segments import MakeShard, plan_of, recipe_with, train_here, write_spec
from tests.support.trainer.small_models import run_of
from trainer.batch import Batch, make_batch
from trainer.contract.data.data_order import DataOrder, list_document_keys
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import TokenizedDocument, write_token_shard
from trainer.contract.json_lines import read_json_lines
from trainer.run import SegmentRun

WATCHFUL = {"window": 16, "spike_deviations": 8.0}


def anomalies(folder: Path) -> list[dict[str, Any]]:
    # how fast this machine is at the moment is not what is tested
    return [a for a in read_json_lines(folder / "anomalies.jsonl") if a["kind"] != "throughput_drop"]


def test_too_high_a_rate_is_reported_as_a_divergence_with_step_and_documents(
    tmp_path: Path, make_shard: MakeShard
) -> None:
    plan = plan_of(make_shard(counts={"code": 600, "docs": 200, "chat": 200}))
    good = write_spec(tmp_path / "good", plan, recipe_with(stability=WATCHFUL), last_step=40)
    assert train_here(good) == (0, "")
    assert anomalies(good) == []
    start = result(good)["checkpoint"]
    absurd = recipe_with(stability=WATCHFUL, optimizer__lr=3.0)
    bad = write_spec(tmp_path / "bad", plan, absurd, first_step=40, last_step=80, initial_checkpoint=start)
    assert train_here(bad) == (0, "")
    found = anomalies(bad)
    assert {"loss_spike", "divergence"} <= {a["kind"] for a in found}
    assert len([a for a in found if a["kind"] == "divergence"]) == 1
    first = found[0]
    assert 40 < first["step"] < 44 and first["documents"] == documents_at(plan, first["step"])


def documents_at(plan: DataPlan, step: int) -> list[str]:
    """Worked out anew from the plan, from the first step on."""
    recipe = recipe_with()
    order = DataOrder(plan, context=recipe.model.context, batch=recipe.batch, vocab_size=recipe.model.vocab_size)
    while order.step < step:
        order.draw_next_rows()
    return list_document_keys(order, order.draw_next_rows())


def test_a_poisoned_shard_is_reported_with_its_documents(tmp_path: Path, make_shard: MakeShard) -> None:
    """A shard of constant tokens joins a trunk that has learned something else."""
    old = make_shard(counts={"code": 900, "docs": 300, "chat": 300})
    recipe = recipe_with(stability=WATCHFUL, optimizer__lr=1e-2)
    trunk = write_spec(tmp_path / "trunk", plan_of(old), recipe, last_step=60)
    assert train_here(trunk) == (0, "")
    assert anomalies(trunk) == []
    poison = [
        TokenizedDocument(
            f"poison-{i}", f"poison-{i}", "code", "test", "none", np.full(60, 7, np.uint32), np.ones(60, bool)
        )
        for i in range(200)
    ]
    new = write_token_shard(tmp_path / "poison", poison, vocab_size=512, tokenizer_sha256="test")
    both = plan_of(old, new, generations=[0, 1])
    start = result(trunk)["checkpoint"]
    on = write_spec(tmp_path / "on", both, recipe, first_step=60, last_step=70, initial_checkpoint=start)
    assert train_here(on) == (0, "")
    first = anomalies(on)[0]
    assert first["step"] <= 63 and first["kind"] in ("loss_spike", "grad_norm_jump", "skipped_outlier")
    assert any(key.startswith("poison-") for key in first["documents"])
    assert not any(key.startswith("poison-") for a in anomalies(trunk) for key in a["documents"])


def watched(run: SegmentRun, batch: Batch) -> tuple[dict[str, Any], list[str]]:
    """The record of a step, and the kinds of its anomalies, as ``segment.train`` finds them."""
    record = run.train_step(batch) | {"tokens_per_s": 1.0}
    return record, [anomaly.kind for hook in run.hooks for anomaly in hook.after_step(record)]


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("poison", "kind"), [(math.nan, "non_finite"), (math.inf, "non_finite"), (1e4, "skipped_outlier")]
)
def test_a_micro_batch_with_a_non_finite_or_huge_gradient_skips_the_update(
    tmp_path: Path, make_shard: MakeShard, name: str, poison: float, kind: str
) -> None:
    changes = {"stability": WATCHFUL, "optimizer__name": name, "batch__micro_sequences": 2}
    run = run_of(tmp_path, make_shard, model__experts={"count": 4, "per_token": 2, "d_ff": 16}, **changes)
    for _ in range(20):
        record, kinds = watched(run, make_batch(run.order))
        assert not record["skipped"] and kinds == []
    weights = {n: t.detach().clone() for n, t in run.model.state_dict().items()}
    state = {n: t.clone() for n, t in run.optimizer.state_tensors().items()}
    updates = run.counters["updates"]
    batch = make_batch(run.order)
    batch.weights_BT[5] *= poison  # in the third of four micro-batches
    record, kinds = watched(run, batch)
    assert record["skipped"] and kind in kinds and run.counters["updates"] == updates
    assert all(torch.equal(t, weights[n]) for n, t in run.model.state_dict().items())
    assert all(torch.equal(t, state[n]) for n, t in run.optimizer.state_tensors().items())
    record, kinds = watched(run, make_batch(run.order))
    assert not record["skipped"] and kinds == [] and math.isfinite(record["loss"])
    assert not any(torch.equal(p, weights[n]) for n, p in run.model.named_parameters())
