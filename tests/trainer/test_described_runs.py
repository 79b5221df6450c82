"""Segments of models of every kind of description: micro-batches change nothing, and a run resumes to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainer.families import DESCRIBED
from tests.support.trainer.segment_runs import assert_same_run
from tests.support.trainer.segments import MakeShard, plan_of, recipe_with, train_here, write_spec
from tests.support.trainer.small_models import run_of
from trainer.batch import make_batch
from trainer.contract.checkpoint import format as checkpoints


@pytest.mark.parametrize("changes", DESCRIBED.values(), ids=DESCRIBED)
def test_micro_batches_give_the_gradients_of_the_whole_batch(
    tmp_path: Path, make_shard: MakeShard, changes: dict[str, Any]
) -> None:
    norms: dict[int | None, list[float]] = {}
    weights: dict[int | None, dict[str, torch.Tensor]] = {}
    for micro in (None, 1, 4):
        more: dict[str, Any] = {"batch__micro_sequences": micro, "stability__noise_scale_every": 0}
        run = run_of(tmp_path / str(micro), make_shard, **changes, **more)
        seen = [run.train_step(make_batch(run.order)) for _ in range(2)]
        norms[micro] = [record["grad_norm"] for record in seen] + [record["loss"] for record in seen]
        norms[micro] += [record["z_loss"] for record in seen]  # all auxiliary losses
        weights[micro] = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    for micro in (1, 4):
        assert norms[micro] == pytest.approx(norms[None], rel=1e-4, abs=2e-6)
        for name, whole in weights[None].items():
            torch.testing.assert_close(weights[micro][name], whole, atol=5e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("changes", DESCRIBED.values(), ids=DESCRIBED)
def test_a_run_resumes_to_the_bit(tmp_path: Path, make_shard: MakeShard, changes: dict[str, Any]) -> None:
    plan, recipe = plan_of(make_shard()), recipe_with(**changes, checkpoint_every=3)
    straight = write_spec(tmp_path / "straight", plan, recipe, last_step=6)
    assert train_here(straight)[0] == 0
    resumed = write_spec(tmp_path / "resumed", plan, recipe, last_step=6)
    (resumed / "checkpoints").mkdir()
    step, middle = checkpoints.list_checkpoints(straight / "checkpoints")[0]
    assert step == 3
    shutil.copytree(middle, resumed / "checkpoints" / middle.name)
    for name in ("metrics.jsonl", "anomalies.jsonl"):
        if (straight / name).exists():
            shutil.copy(straight / name, resumed / name)
    assert train_here(resumed)[0] == 0
    assert_same_run(straight, resumed)
