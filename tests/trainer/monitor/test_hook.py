"""The trainer's extension point: when a hook is called, with which arguments, and how its state is saved and restored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.trainer.segment_runs import result
from tests.support.trainer.segments import MakeShard, plan_of, recipe_with, train_here, write_spec
from trainer.batch import make_batch
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.json_lines import read_json_lines
from trainer.contract.plan.spec import SegmentSpec
from trainer.monitor.hook import Anomaly, StepHook, UpdateOutcome, WeightUpdate, copy_numbers_to_host
from trainer.parallel.ranks import Ranks
from trainer.run import SegmentRun


class Watcher(StepHook):
    """Remembers how far each update moves one weight, and reports every fourth step."""

    key = "watcher"
    required = False

    def __init__(self, run: SegmentRun) -> None:
        self.weight = run.optimizer.parameters["blocks.0.q"]
        self.calls: list[str] = []
        self.moved: list[float] = []

    def before_update(self, update: WeightUpdate) -> None:
        self.calls.append("before")
        assert torch.equal(update.gradients["blocks.0.q"], self.weight.grad)  # type: ignore[arg-type]
        assert len(update.squares_P) == len(update.gradients)
        self.old = self.weight.detach().clone()

    def after_update(self, update: WeightUpdate) -> dict[str, Tensor]:
        self.calls.append("after")
        return {"moved": (self.weight.detach() - self.old).norm(), "pair": torch.tensor([[1.0, 2.0]])}

    def record(self, numbers: dict[str, list[float]], outcome: UpdateOutcome) -> dict[str, Any]:
        assert numbers["pair"] == [1.0, 2.0] and outcome.supervised > 0
        self.moved += numbers["moved"]
        return {"moved": numbers["moved"][0]}

    def after_step(self, record: dict[str, Any]) -> list[Anomaly]:
        assert record["tokens_per_s"] > 0
        return [] if record["step"] % 4 else [Anomaly(record["step"], "watched", record["moved"], 0.0, 0.0, False)]

    def state_dict(self) -> dict[str, Any]:
        return {"moved": self.moved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moved = list(state["moved"])


def with_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do what one line in ``SegmentRun.__init__`` would do, before the checkpoint is read."""
    restore = SegmentRun._restore

    def watched(run: SegmentRun, start: Path) -> dict[str, Any]:
        run.hooks.append(Watcher(run))
        return restore(run, start)

    monkeypatch.setattr(SegmentRun, "_restore", watched)


def test_a_checkpoint_without_a_hooks_state_can_be_continued_with_the_hook_and_vice_versa(
    tmp_path: Path, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three segments: without the hook, with it (twice), without it. It changes no weight and no state but its own."""
    plan = plan_of(make_shard())
    first = write_spec(tmp_path / "0", plan, recipe_with(), last_step=4)
    assert train_here(first) == (0, "")
    ends = {}
    for name, watched in (("watched", True), ("plain", False)):
        start = result(first)["checkpoint"]
        with monkeypatch.context() as patch:
            if watched:
                with_watcher(patch)
            for begin, end in ((4, 10), (10, 14)):
                steps = {"first_step": begin, "last_step": end, "initial_checkpoint": start}
                folder = write_spec(tmp_path / f"{name}-{begin}", plan, recipe_with(), **steps)
                assert train_here(folder) == (0, "")
                start = result(folder)["checkpoint"]
        ends[name] = Path(start)
        lines = read_json_lines(folder / "metrics.jsonl")
        assert all(("moved" in line) == watched for line in lines)
        kinds = [a["kind"] for a in read_json_lines(folder / "anomalies.jsonl")]
        assert kinds.count("watched") == watched  # of steps 10 to 13
    states = {name: checkpoints.read_checkpoint_state(path) for name, path in ends.items()}
    assert len(states["watched"]["watcher"]["moved"]) == 10 and min(states["watched"]["watcher"]["moved"]) > 0
    for key in ("step", "sampler", "detector", "monitor"):
        assert json.dumps(states["watched"][key]) == json.dumps(states["plain"][key]), key
    assert "throughput" in states["watched"] and "watcher" not in states["plain"]
    model = {name: checkpoints.read_tensors(path, "model", {}) for name, path in ends.items()}
    assert all(torch.equal(tensor, model["plain"][name]) for name, tensor in model["watched"].items())
    last = write_spec(
        tmp_path / "last", plan, recipe_with(), first_step=14, last_step=15, initial_checkpoint=str(ends["watched"])
    )
    assert train_here(last) == (0, "")  # the state of a hook that is no more is no obstacle


def test_hooks_are_called_before_and_after_the_update(tmp_path: Path, make_shard: MakeShard) -> None:
    folder = write_spec(tmp_path / "run", plan_of(make_shard()), recipe_with(), last_step=10)
    run = SegmentRun(SegmentSpec.load(folder), Ranks(0, 1, torch.device("cpu")), None)
    watcher = Watcher(run)
    run.hooks.append(watcher)
    records = [run.train_step(make_batch(run.order)) for _ in range(3)]
    assert watcher.calls == ["before", "after"] * 3
    assert [record["moved"] for record in records] == watcher.moved


def test_all_numbers_come_to_the_host_in_one_transfer(
    tmp_path: Path, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each ``tolist``, ``item`` or ``float`` of a tensor would wait for the device."""
    folder = write_spec(tmp_path / "run", plan_of(make_shard()), recipe_with(batch__micro_sequences=2), last_step=10)
    run = SegmentRun(SegmentSpec.load(folder), Ranks(0, 1, torch.device("cpu")), None)
    run.train_step(make_batch(run.order))
    transfers: list[str] = []
    for name in ("tolist", "item", "__bool__", "__float__", "__int__", "numpy"):
        usual = getattr(Tensor, name)

        def counted(tensor: Tensor, *args: Any, name: str = name, usual: Any = usual, **named: Any) -> Any:
            transfers.append(name)
            return usual(tensor, *args, **named)

        monkeypatch.setattr(Tensor, name, counted)
    for _ in range(4):
        batch = make_batch(run.order)
        transfers.clear()
        run.train_step(batch)
        assert transfers == ["tolist"]


def test_copy_to_host_returns_each_tensor_under_its_name() -> None:
    one, two, none = copy_numbers_to_host(
        {"a": torch.tensor(1.0), "b": torch.tensor([[2.0], [3.0]])}, {"a": torch.zeros(0)}, {}
    )
    assert one == {"a": [1.0], "b": [2.0, 3.0]} and two == {"a": []} and none == {}


def test_a_checkpoint_without_the_state_of_a_required_hook_is_refused(
    tmp_path: Path, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(make_shard())
    first = write_spec(tmp_path / "first", plan, recipe_with(), last_step=2)
    assert train_here(first)[0] == 0
    with_watcher(monkeypatch)
    monkeypatch.setattr(Watcher, "required", True)
    after = write_spec(
        tmp_path / "after",
        plan,
        recipe_with(),
        first_step=2,
        last_step=4,
        initial_checkpoint=result(first)["checkpoint"],
    )
    code, said = train_here(after)
    assert code == 2 and "has no key 'watcher'" in said
