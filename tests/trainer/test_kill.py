"""kill -9 in runs that use everything at once: a killed run ends with the same bits as a run that nothing disturbed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer.segment_runs import assert_same_run, die, records
from tests.support.trainer.segments import make_documents, plan_of, recipe_with, train_here, write_spec
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import write_token_shard
from trainer.contract.recipe import Recipe

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
CALLS = 10_000  # some steps of the tiny model
PHASES = [{"from_step": 13, "weights": {"docs": 0.5, "chat": 0.5}}]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> DataPlan:
    documents = make_documents(0, {"code": 500, "docs": 200, "chat": 200})
    folder = tmp_path_factory.mktemp("kill") / "shards"
    return plan_of(write_token_shard(folder, documents, vocab_size=512, tokenizer_sha256="test"), phases=PHASES)


def everything(folder: Path, plan: DataPlan) -> tuple[Path, Recipe]:
    recipe = recipe_with(**EVERYTHING)
    return write_spec(folder, plan, recipe, last_step=32), recipe


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, plan: DataPlan) -> Path:
    """What nothing disturbed."""
    folder, _ = everything(tmp_path_factory.mktemp("kill") / "straight", plan)
    assert train_here(folder) == (0, "")
    return folder


def tokens_by_step(lines: list[dict[str, Any]]) -> list[int]:
    counted = [0, *(line["tokens"] for line in lines)]
    return [after - before for before, after in zip(counted, counted[1:])]


def test_the_run_to_be_killed_has_growing_batches_phases_and_a_noise_scale(straight: Path) -> None:
    recipe = recipe_with(**EVERYTHING)
    for step, tokens in enumerate(tokens_by_step(records(straight))):
        positions = recipe.batch.count_sequences_at(step) * recipe.model.context
        assert 0.9 * positions < tokens <= positions, step
    assert any("loss/code" in line for line in records(straight)[:13])
    assert not any("loss/code" in line for line in records(straight)[-4:])  # what was drawn before waits a while
    assert "noise_scale" in records(straight)[-1]


@pytest.mark.parametrize("steps", [(14,), pytest.param((3, 9, 15, 21), marks=pytest.mark.slow("four trainers killed"))])
def test_a_killed_run_with_batch_warm_up_phases_muon_and_experts_resumes_bit_for_bit(
    tmp_path: Path, plan: DataPlan, straight: Path, steps: tuple[int, ...]
) -> None:
    """The run is killed at each batch size, and before and after the change of the phase."""
    killed, _ = everything(tmp_path / "killed", plan)
    chance = random.Random(3)
    assert [die(killed, step, chance.randrange(CALLS)) for step in steps] == [-9] * len(steps)
    assert train_here(killed)[0] == 0
    assert_same_run(straight, killed)


@pytest.mark.parametrize("lost", ["monitor", "detector"])
def test_a_checkpoint_that_lacks_a_hooks_state_gives_another_run(
    tmp_path: Path, plan: DataPlan, straight: Path, lost: str
) -> None:
    """The comparison of the test above would notice if the state of the monitor or of the detector were lost."""
    kept = [path for step, path in checkpoints.list_checkpoints(straight / "checkpoints") if step < 32][-1]
    whole = checkpoints.load_checkpoint(kept)
    forgetful, _ = everything(tmp_path / "forgetful", plan)
    empty: dict[str, Any] = {"monitor": {}, "detector": whole.state["detector"] | {"loss": [], "grad_norm": []}}
    checkpoints.save_checkpoint(
        forgetful / "checkpoints",
        checkpoints.Checkpoint(whole.model, whole.optimizer, whole.state | {lost: empty[lost]}),
    )
    (forgetful / "metrics.jsonl").write_bytes((straight / "metrics.jsonl").read_bytes())
    assert train_here(forgetful) == (0, "")
    with pytest.raises(AssertionError, match=lost):
        assert_same_run(straight, forgetful)
    if lost == "monitor":
        assert records(straight)[-1].keys() - records(forgetful)[-1].keys() == {"noise_scale"}
