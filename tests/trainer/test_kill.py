"""kill -9 in runs that use everything at once: the end is that of a run that nothing disturbed, to the bit."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import MakeShard, plan_of, recipe_with, run_trainer, start_trainer, train_here, write_spec
from tests.trainer.test_segment import assert_same_run, records, wait_for_step
from trainer import checkpoint as checkpoints
from trainer.data_plan import DataPlan
from trainer.recipe import Recipe

EVERYTHING = {
    "model__experts": {"count": 4, "per_token": 2, "d_ff": 16},
    "model__base_d_model": 16,
    "optimizer__name": "muon",
    "batch__warmup": [{"until_step": 8, "sequences": 2}, {"until_step": 16, "sequences": 4}],
    "batch__micro_sequences": 1,
    "stability__window": 8,
    "stability__plateau_windows": 2,
    "checkpoint_every": 3,
}
PHASES = [{"from_step": 13, "weights": {"docs": 0.5, "chat": 0.5}}]


def plan_with_phases(make_shard: MakeShard) -> DataPlan:
    return plan_of(make_shard(counts={"code": 500, "docs": 200, "chat": 200}), phases=PHASES)


def everything(folder: Path, plan: DataPlan) -> tuple[Path, Recipe]:
    recipe = recipe_with(**EVERYTHING)
    return write_spec(folder, plan, recipe, last_step=32), recipe


def tokens_by_step(lines: list[dict[str, Any]]) -> list[int]:
    counted = [0, *(line["tokens"] for line in lines)]
    return [after - before for before, after in zip(counted, counted[1:])]


@pytest.mark.slow
def test_batch_warm_up_phases_muon_and_experts_go_on_to_the_bit(tmp_path: Path, make_shard: MakeShard) -> None:
    """Killed in each size of batch, and on both sides of the phases' border."""
    plan = plan_with_phases(make_shard)
    straight, recipe = everything(tmp_path / "straight", plan)
    assert run_trainer(straight) == (0, "")
    for step, tokens in enumerate(tokens_by_step(records(straight))):
        positions = recipe.batch.sequences_at(step) * recipe.model.context
        assert 0.9 * positions < tokens <= positions, step
    assert any("loss/code" in line for line in records(straight)[:13])
    assert not any("loss/code" in line for line in records(straight)[-4:])  # what was drawn before waits a while
    assert "noise_scale" in records(straight)[-1]
    killed, _ = everything(tmp_path / "killed", plan)
    chance, codes = random.Random(3), []
    for least in (3, 9, 15, 21):
        process = start_trainer(killed)
        wait_for_step(killed, least)
        time.sleep(chance.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        codes.append(process.returncode)
    assert codes[:2] == [-9, -9]
    assert run_trainer(killed)[0] == 0
    assert_same_run(straight, killed)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["monitor", "detector"])
def test_a_checkpoint_without_some_state_would_be_noticed(tmp_path: Path, make_shard: MakeShard, lost: str) -> None:
    """What the test above compares does depend on what the monitor and the detectors remember."""
    plan = plan_with_phases(make_shard)
    straight, _ = everything(tmp_path / "straight", plan)
    assert train_here(straight) == (0, "")
    kept = [path for step, path in checkpoints.steps_in(straight / "checkpoints") if step < 32][-1]
    whole = checkpoints.load(kept)
    forgetful, _ = everything(tmp_path / "forgetful", plan)
    empty: dict[str, Any] = {"monitor": {}, "detector": whole.state["detector"] | {"loss": [], "grad_norm": []}}
    checkpoints.save(
        forgetful / "checkpoints",
        checkpoints.Checkpoint(whole.model, whole.optimizer, whole.state | {lost: empty[lost]}),
    )
    (forgetful / "metrics.jsonl").write_bytes((straight / "metrics.jsonl").read_bytes())
    assert train_here(forgetful) == (0, "")
    with pytest.raises(AssertionError, match=lost):
        assert_same_run(straight, forgetful)
    if lost == "monitor":
        assert records(straight)[-1].keys() - records(forgetful)[-1].keys() == {"noise_scale"}
