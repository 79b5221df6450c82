"""The replay bench on a tiny real run: replays, scores of documents, the budget, and kills."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agents.loss_doctor.arms import AGAIN, OLDER, ReplayArm, ReplayBudgetSpentError
from agents.loss_doctor.curves import read_step_metrics
from agents.loss_doctor.doctor import diagnose_anomaly
from agents.loss_doctor.suspects import find_documents_typical_of_shards, find_suspect_documents
from factory.audit.kept_checkpoints import NEWEST, choose_steps_to_keep, update_kept_checkpoints
from factory.diagnosis.replay_bench import (
    AnomalyEpisode,
    EpisodeReplayBench,
    has_zero_optimizer_moments,
    write_checkpoint_with_older_weights,
)
from factory.runs.arm import Arm
from factory.runs.live_training import prepare_arm_folder
from factory.runs.sandboxed_training import ArmRunEnd
from tests.support.trainer.segment_runs import result
from tests.support.trainer.segments import make_documents, plan_of, recipe_with, train_here, write_spec
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import Checkpoint
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import TokenizedDocument, write_token_shard
from trainer.contract.json_lines import read_json_lines
from trainer.contract.plan.spec import SegmentSpec

RECIPE = recipe_with(optimizer__lr=1e-2, keep_checkpoints=99, stability__window=16, mixture__weights={"*": 1.0})
FIRST, LAST = 40, 52


class Live:
    """A trunk of 40 steps, and a segment in which documents of one repeated token join."""

    def __init__(self, root: Path) -> None:
        self.root, self.runs = root, 0
        good = write_token_shard(root / "good", make_documents(1, {"code": 900}), vocab_size=512, tokenizer_sha256="")
        odd = [
            TokenizedDocument(f"bad-{i}", f"bad-{i}", "code", "t", "none", np.full(60, 7, np.uint32), np.ones(60, bool))
            for i in range(9)
        ]
        new = write_token_shard(
            root / "new", make_documents(2, {"code": 200}) + odd, vocab_size=512, tokenizer_sha256=""
        )
        self.trunk = write_spec(root / "00001", plan_of(good, weights={"*": 1.0}), RECIPE, last_step=FIRST)
        assert train_here(self.trunk) == (0, "")
        self.plan = plan_of(good, new, generations=[0, 1], weights={"*": 1.0}, replay=0.5)
        start = result(self.trunk)["checkpoint"]
        self.segment = write_spec(
            root / "00002", self.plan, RECIPE, first_step=FIRST, last_step=LAST, initial_checkpoint=start
        )
        assert train_here(self.segment) == (0, "")
        self.anomalies = read_json_lines(self.segment / "anomalies.jsonl")

    def episode(self) -> AnomalyEpisode:
        spec = SegmentSpec.load(self.segment).model_dump() | {"data_plan": _json(self.plan)}
        lines = read_step_metrics(
            [line for folder in (self.trunk, self.segment) for line in read_json_lines(folder / "metrics.jsonl")]
        )
        step = next(a["step"] for a in self.anomalies if any(key.startswith("bad-") for key in a["documents"]))
        kind = next(a["kind"] for a in self.anomalies if a["step"] == step)
        folders = (self.trunk, self.segment)
        every = dict(
            rung
            for folder in folders
            for rung in checkpoints.list_checkpoints(folder / "checkpoints")
            if rung[0] <= step
        )
        return AnomalyEpisode(kind, step, step, spec, {}, "cpu", lines, list(every.items()), Path())

    def bench(self, name: str, budget: int = 500) -> EpisodeReplayBench:
        return EpisodeReplayBench(self.episode(), self.root / name, self.replay, budget)

    def replay(self, arm: Arm) -> ArmRunEnd:
        self.runs += 1
        home = self.root / "runs"
        home.mkdir(exist_ok=True)
        folder = home / f"{self.runs:05d}"
        prepare_arm_folder(home, folder, arm)
        code, said = train_here(folder)
        return ArmRunEnd(folder, failed=said if code else "")


def _json(plan: DataPlan) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan.to_json())
    return found


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Live:
    return Live(tmp_path_factory.mktemp("live"))


def test_the_arm_same_again_equals_the_live_run_and_is_not_repeated_after_a_kill(live: Live) -> None:
    episode = live.episode()
    bench = live.bench("again")
    outcome = bench.run(AGAIN[0])
    live_points = {point.step: point for point in episode.lines}
    assert outcome.fires and outcome.curve and all(point == live_points[point.step] for point in outcome.curve)
    assert bench.run(AGAIN[1]).bits == outcome.bits
    runs = live.runs
    later = live.bench("again")
    assert later.run(AGAIN[0]) == outcome and live.runs == runs and later.replayed == outcome.steps


def test_a_replay_killed_after_its_checkpoint_at_the_onset_gives_the_same_outcome(live: Live) -> None:
    episode = live.episode()
    episode = replace(episode, rungs=[rung for rung in episode.rungs if rung[0] < episode.onset])
    bench = EpisodeReplayBench(episode, live.root / "killed", live.replay, 500)
    outcome = bench.run(AGAIN[0])
    assert list((bench.folder / "onset").glob("step-*/manifest.json"))
    for stored in bench.folder.glob("*.json"):
        stored.unlink()
    assert EpisodeReplayBench(episode, bench.folder, live.replay, 500).run(AGAIN[0]) == outcome
    assert sorted(path.name for path in bench.folder.iterdir() if path.is_dir()) == ["onset"]


def test_the_budget_counts_steps_that_were_replayed_before_a_kill(live: Live) -> None:
    steps = live.bench("budget").run(AGAIN[0]).steps
    again = live.bench("budget", budget=2 * steps - 1)
    again.run(AGAIN[0])
    with pytest.raises(ReplayBudgetSpentError) as raised:
        again.run(AGAIN[1])
    message = raised.value.args[0]
    assert message.code == "diagnosis.budget_spent"
    assert message.data == {
        "budget": 2 * steps - 1,
        "replayed": steps,
        "arm": AGAIN[1].name,
        "needed": again.episode.end_step - again.episode.newest_checkpoint[0],
    }


def test_the_documents_that_stand_out_are_the_bad_ones(live: Live) -> None:
    scores = live.bench("scores").score_documents_at("newest")
    episode = live.episode()
    in_batch = next(a["documents"] for a in live.anomalies if a["step"] == episode.onset)
    assert [score.key for score in scores if score.in_window] == in_batch
    samples = [[s for s in scores if not s.in_window and s.joined == new] for new in (True, False)]
    assert all(len(sample) > 100 for sample in samples)  # of the shards that joined, and of those before
    assert {s.joined for s in scores if s.key.startswith("bad-")} == {True} and not find_documents_typical_of_shards(
        scores
    )
    bad = {key for key in in_batch if key.startswith("bad-")}
    assert bad and set(find_suspect_documents(scores)[: len(bad)]) == bad


def test_a_poisoned_document_is_named_exactly(live: Live) -> None:
    found = diagnose_anomaly(live.bench("whole"))
    in_batch = next(a["documents"] for a in live.anomalies if a["step"] == live.episode().onset)
    assert found.causes == ("bad data",), found
    assert set(found.guilty) == {key for key in in_batch if key.startswith("bad-")}


def test_an_arm_with_older_weights_replays_the_same_steps(live: Live, tmp_path: Path) -> None:
    episode = live.episode()
    older = episode.find_older_checkpoint()
    assert older is not None and older[0] < episode.newest_checkpoint[0]
    grafted = write_checkpoint_with_older_weights(older[1], episode.newest_checkpoint[1], tmp_path)
    a, b, c = (checkpoints.load_checkpoint(path) for path in (grafted, older[1], episode.newest_checkpoint[1]))
    assert a.state == c.state and all(torch.equal(a.model[key], b.model[key]) for key in b.model)
    outcome = live.bench("older").run(ReplayArm(OLDER, start="older weights"))
    assert [point.step for point in outcome.curve] == list(
        range(episode.newest_checkpoint[0], episode.end_step)
    ) and not outcome.failed


def test_a_replay_that_fails_says_why(live: Live) -> None:
    bench = replace(
        live.bench("fails"), run_trainer=lambda arm: ArmRunEnd(live.root / "none", 1.0, "over its wall limit")
    )
    outcome = bench.run(AGAIN[0])
    assert outcome.failed == "over its wall limit" and outcome.fires is None


def test_a_checkpoint_whose_moments_are_all_zero_is_recognised(live: Live, tmp_path: Path) -> None:
    path = live.episode().newest_checkpoint[1]
    assert not has_zero_optimizer_moments(path)
    held = checkpoints.load_checkpoint(path)
    zeroed = {key: tensor * 0 if key.startswith("exp_avg") else tensor for key, tensor in held.optimizer.items()}
    assert has_zero_optimizer_moments(checkpoints.save_checkpoint(tmp_path, Checkpoint(held.model, zeroed, held.state)))


def test_kept_checkpoints_remain_after_the_trainer_removes_its_own(live: Live, tmp_path: Path) -> None:
    every = checkpoints.list_checkpoints(live.trunk / "checkpoints")
    source, target = tmp_path / "source", tmp_path / "ladder"
    source.mkdir()
    for step, path in every:
        for _, old in checkpoints.list_checkpoints(source)[:-1]:
            old.unlink()
        (source / checkpoints.format_checkpoint_name(step)).symlink_to(path)  # refused: a rung is no link
        update_kept_checkpoints(source, target, every=5)
    assert not checkpoints.list_checkpoints(target)
    for number, (_, path) in enumerate(every):
        for _, old in checkpoints.list_checkpoints(source):
            old.unlink() if old.is_symlink() else shutil.rmtree(old)
        held = checkpoints.load_checkpoint(path)
        checkpoints.save_checkpoint(source, held)
        update_kept_checkpoints(source, target, every=5)
        steps = [step for step, _ in every[: number + 1]]
        assert [step for step, _ in checkpoints.list_checkpoints(target)] == choose_steps_to_keep(steps, 5)
    assert len(every) > NEWEST and not any(
        checkpoints.find_checkpoint_fault(path) for _, path in checkpoints.list_checkpoints(target)
    )
