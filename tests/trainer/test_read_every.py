"""Numbers that stay on the device and are read every few steps: the run, its lines and its end after a kill are the same as with every step read."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.trainer.segment_runs import assert_same_run, die, records, result, start_dying
from tests.support.trainer.segments import (
    MakeShard,
    make_documents,
    one_sided_chats,
    plan_of,
    recipe_with,
    run_trainer,
    train_here,
    write_spec,
)
from tests.support.trainer.small_models import run_of
from trainer.batch import make_batch
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import write_token_shard
from trainer.contract.json_lines import read_json_lines

TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2")
EVERYTHING: dict[str, Any] = {
    "model__experts": {"count": 4, "per_token": 2, "d_ff": 16},
    "optimizer__name": "muon",
    "batch__warmup": [{"until_step": 7, "sequences": 4}],
    "batch__micro_sequences": 2,
    "stability__window": 8,
    "stability__plateau_windows": 2,
    "checkpoint_every": 6,
}
UNLIMITED = {"stability__skip_deviations": 1e9}
LIMITED = {
    "stability__skip_deviations": 1e-3,
    "optimizer__lr": 1e-4,
}  # so that norms stay, many updates are skipped, and each limit decides


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> DataPlan:
    documents = make_documents(0, {"code": 500, "docs": 200, "chat": 200})
    folder = tmp_path_factory.mktemp("reading") / "shards"
    return plan_of(write_token_shard(folder, documents, vocab_size=512, tokenizer_sha256="test"))


def spec_of(folder: Path, plan: DataPlan, every: int, steps: int = 23, **changes: Any) -> Path:
    return write_spec(folder, plan, recipe_with(**(changes | {"stability__read_every": every})), last_step=steps)


def anomalies(folder: Path) -> list[dict[str, Any]]:
    """But for slow steps, which a busy machine has."""
    return [line for line in read_json_lines(folder / "anomalies.jsonl") if line["kind"] != "throughput_drop"]


def assert_alike(ours: Path, theirs: Path) -> None:
    """To the bit, but for what says how often it was read."""
    a, b = (checkpoints.load_checkpoint(Path(result(folder)["checkpoint"])) for folder in (ours, theirs))
    for mine, other in ((a.model, b.model), (a.optimizer, b.optimizer)):
        assert mine.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in mine.items())
    for key in ("step", "sampler", "monitor", "signals"):
        assert a.state[key] == b.state[key], key
    assert {**a.state["detector"], "limit": 0} == {**b.state["detector"], "limit": 0}
    counted = lambda state: {key: value for key, value in state["counters"].items() if key != "seconds"}
    assert counted(a.state) == counted(b.state)
    assert records(ours) == records(theirs) and anomalies(ours) == anomalies(theirs)


def test_a_run_with_read_every_four_trains_the_same_as_with_one(tmp_path: Path, plan: DataPlan) -> None:
    """Checkpoints, changes of the batch size and the end of the run are at steps that are not multiples of four."""
    often = spec_of(tmp_path / "often", plan, 1, **EVERYTHING, **UNLIMITED)
    seldom = spec_of(tmp_path / "seldom", plan, 4, **EVERYTHING, **UNLIMITED)
    assert train_here(often) == train_here(seldom) == (0, "")
    assert_alike(often, seldom)
    lines = read_json_lines(seldom / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(23)) and any("noise_scale" in line for line in lines)
    assert all(
        set(line) == set(other) for line, other in zip(lines, read_json_lines(often / "metrics.jsonl"), strict=True)
    )
    state = lambda folder: checkpoints.read_checkpoint_state(Path(result(folder)["checkpoint"]))["detector"]
    assert "limit" in state(seldom) and "limit" not in state(often)


def test_the_time_between_two_readings_is_shared_by_their_steps(tmp_path: Path, plan: DataPlan) -> None:
    folder = spec_of(tmp_path / "run", plan, 4, checkpoint_every=6)
    assert train_here(folder) == (0, "")
    lines, positions = read_json_lines(folder / "metrics.jsonl"), 8 * 32
    edges = [0, 4, 6, 8, 12, 16, 18, 20, 23]  # multiples of four, checkpoints, the end
    spent = 0.0
    for first, after in zip(edges, edges[1:]):
        group = lines[first:after]
        for key in ("tokens_per_s", "data_wait_s"):
            assert len({line[key] for line in group}) == 1, (first, key)
        assert 0 <= group[0]["data_wait_s"] <= positions / group[0]["tokens_per_s"] * 1.001
        spent += sum(positions / line["tokens_per_s"] for line in group)
    assert len({line["tokens_per_s"] for line in lines}) == len(edges) - 1
    assert spent == pytest.approx(result(folder)["seconds"], rel=0.01)


def test_nothing_waits_for_the_device_between_two_readings(
    tmp_path: Path, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, make_shard, batch__micro_sequences=2, stability__read_every=5)
    run.train_step(make_batch(run.order))
    transfers: list[str] = []
    for name in ("tolist", "item", "__bool__", "__float__", "__int__", "numpy"):
        usual = getattr(Tensor, name)

        def counted(tensor: Tensor, *args: Any, name: str = name, usual: Any = usual, **named: Any) -> Any:
            transfers.append(name)
            return usual(tensor, *args, **named)

        monkeypatch.setattr(Tensor, name, counted)
    for _ in range(5):
        batch = make_batch(run.order)
        transfers.clear()
        run.launch_step(batch)
        assert transfers == []
    held = run.launched
    assert not any(isinstance(value, Tensor) for step in held for value in vars(step).values())  # no batch is kept
    assert [record["step"] for _, record in run.read_finished_steps()] == [1, 2, 3, 4, 5]
    assert transfers == ["tolist"] and run.launched == [] and run.step == 6


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory, plan: DataPlan) -> Path:
    """Read every fourth step, with a limit that skips updates, and nothing disturbs it."""
    folder = spec_of(tmp_path_factory.mktemp("reading") / "limited", plan, 4, **EVERYTHING, **LIMITED)
    assert train_here(folder) == (0, "")
    return folder


def test_a_killed_run_continues_bit_for_bit_with_the_same_limit(tmp_path: Path, plan: DataPlan, limited: Path) -> None:
    """The run is killed after the checkpoint of step 6, and gets SIGTERM in step 13. It then ends the next step, reads it and saves step 15."""
    assert 4 < sum(line["skipped"] for line in records(limited)) < 16
    killed = spec_of(tmp_path / "killed", plan, 4, **EVERYTHING, **LIMITED)
    assert die(killed, 10, 300) == -9
    assert die(killed, 13, 50, signal.SIGTERM) == 75
    assert [step for step, _ in checkpoints.list_checkpoints(killed / "checkpoints")] == [12, 15]
    assert train_here(killed) == (0, "")
    assert_same_run(limited, killed)
    assert anomalies(limited) == anomalies(killed)


def test_a_checkpoint_has_the_gradient_norm_limit_in_force(tmp_path: Path, plan: DataPlan, limited: Path) -> None:
    """A run continues from a checkpoint without a limit, of a run that was read at every step. With another limit it skips other updates."""
    kept = next(path for step, path in checkpoints.list_checkpoints(limited / "checkpoints") if step == 18)
    whole = checkpoints.load_checkpoint(kept)
    older = {key: value for key, value in whole.state["detector"].items() if key != "limit"}
    for name, detector, changed in (("older", older, False), ("other", older | {"limit": 0.0}, True)):
        folder = spec_of(tmp_path / name, plan, 4, **EVERYTHING, **LIMITED)
        state = whole.state | {"detector": detector}
        checkpoints.save_checkpoint(folder / "checkpoints", checkpoints.Checkpoint(whole.model, whole.optimizer, state))
        (folder / "metrics.jsonl").write_bytes((limited / "metrics.jsonl").read_bytes())
        assert train_here(folder) == (0, "")
        skipped = [line["skipped"] for line in records(folder)[18:]]
        assert (skipped[:2] == [True, True] and skipped != [x["skipped"] for x in records(limited)[18:]]) == changed


def test_steps_without_targets_are_the_same_for_any_read_every(tmp_path: Path) -> None:
    shard = write_token_shard(tmp_path / "shards", one_sided_chats(150), vocab_size=512, tokenizer_sha256="test")
    plan = plan_of(shard, weights={"chat": 1.0}, max_epochs=1)
    changes: dict[str, Any] = {"batch__packing": "truncate-and-concatenate", "batch__sequences": 1} | UNLIMITED
    often, seldom = (spec_of(tmp_path / str(k), plan, k, 50, **changes, stability__window=8) for k in (1, 7))
    assert train_here(often) == train_here(seldom) == (0, "")
    assert sum("loss" not in line for line in records(seldom)) >= 5
    assert_alike(often, seldom)


def test_anomalies_name_their_own_step_and_documents(tmp_path: Path, plan: DataPlan) -> None:
    """Weights that overflow: no update of any step is made."""
    first = spec_of(tmp_path / "first", plan, 1, 4)
    assert train_here(first) == (0, "")
    good = checkpoints.load_checkpoint(Path(result(first)["checkpoint"]))
    good.model["final_norm"][0] = float("nan")
    start = {
        "first_step": 4,
        "last_step": 10,
        "initial_checkpoint": str(checkpoints.save_checkpoint(tmp_path / "bad", good)),
    }
    found = {}
    for every in (1, 5):
        folder = write_spec(tmp_path / f"every-{every}", plan, recipe_with(stability__read_every=every), **start)
        assert train_here(folder) == (0, "")
        found[every] = anomalies(folder)
    assert found[1] == found[5] and [line["step"] for line in found[5]] == [4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9]
    assert len({tuple(line["documents"]) for line in found[5]}) == 6 and all(line["skipped"] for line in found[5])


@pytest.mark.slow("three trainers of two ranks")
def test_two_ranks_stop_at_the_next_reading_and_go_on_to_the_bit(tmp_path: Path, plan: DataPlan) -> None:
    """One rank is asked to stop in step 9, and both learn of it after step 12. The run is compared with one that reads every step."""
    changes: dict[str, Any] = {"checkpoint_every": 7} | UNLIMITED
    often, stopped = (spec_of(tmp_path / n, plan, k, 18, **changes) for n, k in (("a", 1), ("b", 4)))
    assert run_trainer(often, *TORCHRUN)[0] == 0
    process = start_dying(stopped, 9, 50, *TORCHRUN, sent=signal.SIGTERM, rank=1)
    process.communicate()
    assert [step for step, _ in checkpoints.list_checkpoints(stopped / "checkpoints")] == [7, 12]
    assert run_trainer(stopped, *TORCHRUN)[0] == 0
    assert_alike(often, stopped)
