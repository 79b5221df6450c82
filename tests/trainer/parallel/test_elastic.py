"""When a rank dies, torchrun starts all ranks again, and they continue from the newest checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import psutil
import pytest

from tests.support.messages import refused
from tests.support.patience import PATIENCE_S
from tests.support.trainer.segment_runs import assert_same_run, records, start_dying
from tests.support.trainer.segments import make_documents, plan_of, recipe_with, start_trainer, write_spec
from trainer.contract.data.token_shard import write_token_shard
from trainer.contract.errors import RecipeError
from trainer.parallel.ranks import open_rendezvous_store

LAUNCHER = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1",
            "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")  # fmt: skip


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks make of it when none dies."""
    root = tmp_path_factory.mktemp("elastic")
    documents = make_documents(0, {"code": 300, "docs": 100, "chat": 100})
    plan = plan_of(write_token_shard(root / "shards", documents, vocab_size=512, tokenizer_sha256="test"))
    recipe = recipe_with(checkpoint_every=4, batch__micro_sequences=2)
    folder = write_spec(root / "straight", plan, recipe, last_step=24)
    agent = start_trainer(folder, *LAUNCHER)
    _, errors = agent.communicate(timeout=PATIENCE_S)
    assert agent.returncode == 0, errors
    return folder


@pytest.mark.sample("0")
@pytest.mark.slow("two ranks that start twice, and a run beside them")
@pytest.mark.parametrize("dies", [0, 1])
def test_a_run_in_which_a_rank_dies_ends_as_if_none_had_died(tmp_path: Path, straight: Path, dies: int) -> None:
    killed = tmp_path / "killed"
    killed.mkdir()
    shutil.copy(straight / "segment.json", killed)
    agent = start_dying(killed, 10, 1000, *LAUNCHER, rank=dies)
    _, errors = agent.communicate(timeout=PATIENCE_S)
    assert agent.returncode == 0, errors
    assert f"(exitcode: -9) local_rank: {dies}" in errors
    lives = {path.stem: json.loads(path.read_text()) for path in killed.glob("life-*.json")}
    assert set(lives) == {f"life-{life}-{rank}" for life in (0, 1) for rank in (0, 1)}
    for rank in (0, 1):
        assert lives[f"life-0-{rank}"]["found"] == [] and lives[f"life-1-{rank}"]["found"][-1] in (4, 8)
    assert len(records(killed)) == 24
    assert_same_run(straight, killed)
    assert not list((killed / "checkpoints").glob(".writing-*"))
    assert not any(psutil.pid_exists(life["pid"]) for life in lives.values())


def test_restarts_over_several_nodes_on_torchruns_own_store_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    started = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "1", "GROUP_WORLD_SIZE": "2"}
    for key, value in started.items():
        monkeypatch.setenv(key, value)
    with refused("trainer.restarts_on_nodes", RecipeError):
        open_rendezvous_store()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert open_rendezvous_store() is None
