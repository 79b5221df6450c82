"""Micro-batches computed through CUDA graphs, with a stand-in whose replay calls the function again. Only the recording itself is not tested."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.trainer.segment_runs import assert_same_run
from tests.support.trainer.segments import MakeShard, plan_of, recipe_with, train_here, write_spec
from tests.support.trainer.small_models import run_of
from trainer.batch import make_batch
from trainer.contract.plan.spec import SegmentSpec
from trainer.cuda_graphs import MOST, WARM_UPS, GraphReplayer, decide_use_of_graphs
from trainer.parallel.ranks import Ranks
from trainer.run import SegmentRun

CHANGES: dict[str, Any] = {
    "batch__warmup": [{"until_step": 9, "sequences": 4}],
    "stability__noise_scale_every": 3,
    "stability__window": 8,
}


class Called:
    """Records nothing: a replay calls the function again."""

    def warm_up(self, function: Callable[[], Any]) -> Any:
        return function()

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        return function


@pytest.mark.parametrize("changes", [{}, {"batch__micro_sequences": 2}, {"optimizer__name": "muon"}])
@pytest.mark.slow("trains the same run five ways")
def test_replayed_micro_batches_give_the_same_run(
    tmp_path: Path, make_shard: MakeShard, changes: dict[str, Any]
) -> None:
    """To the bit: in a warm-up's batches, whole and halved, in micro-batches, and where a layer is looked at."""
    plain, replayed = (run_of(tmp_path / name, make_shard, **CHANGES, **changes) for name in ("plain", "replayed"))
    replayed.use_graphs(Called())
    assert replayed.graphs is not None
    places = {name: gradient.data_ptr() for name, gradient in replayed.optimizer.gradients().items()}
    looked = set()
    for _ in range(40):
        records = []
        for run in (plain, replayed):
            chance = torch.get_rng_state()
            records.append(run.train_step(make_batch(run.order)))
            assert torch.equal(chance, torch.get_rng_state())  # nothing is drawn, which a replay would draw otherwise
        for record in records:
            record.pop("memory")
        assert records[0] == records[1]
        looked |= {key for key in records[1] if "_max/" in key}
    assert all(torch.equal(p, q) for p, q in zip(plain.model.parameters(), replayed.model.parameters(), strict=True))
    assert looked == {f"{what}/blocks.{n}" for what in ("activation_max", "attention_logit_max") for n in range(2)}
    assert places == {name: gradient.data_ptr() for name, gradient in replayed.optimizer.gradients().items()}
    shapes = {found.inputs["tokens_BT"].shape[0] for found in replayed.graphs.recorded.values() if found.replay}
    assert shapes == (
        {2} if "batch__micro_sequences" in changes else {2, 4, 8}
    )  # 4 is a small batch, and half of a large one
    assert replayed.graphs.replays > 20 and not replayed.graphs.why_not


def test_a_segment_with_graphs_leaves_the_same_files(
    tmp_path: Path, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers are read every third step, and the run is resumed in between."""
    plan, recipe = plan_of(make_shard()), recipe_with(**CHANGES, stability__read_every=3, batch__micro_sequences=2)
    plain, replayed = (write_spec(tmp_path / name, plan, recipe, last_step=20) for name in ("plain", "replayed"))
    assert train_here(plain) == (0, "")
    runs: list[SegmentRun] = []
    monkeypatch.setattr("trainer.run.decide_use_of_graphs", lambda *_: True)
    monkeypatch.setattr("trainer.run.CudaGraphCapture", Called)
    save = SegmentRun.save

    def stopping(run: SegmentRun, is_last: bool = False) -> None:
        runs.append(run)
        if len(runs) == 2:
            raise KeyboardInterrupt
        save(run, is_last)

    with monkeypatch.context() as once:
        once.setattr(SegmentRun, "save", stopping)
        with pytest.raises(KeyboardInterrupt):
            train_here(replayed)
    assert train_here(replayed) == (0, "")
    assert_same_run(plain, replayed)
    assert runs[0].graphs is not None and runs[0].graphs.replays


class Squares:
    """A function of x [N], y [M] and a number that adds to two tensors, and returns what it read."""

    def __init__(self) -> None:
        self.sums = [torch.zeros(3), torch.zeros(())]
        self.calls = 0

    def __call__(self, part: dict[str, Any]) -> Tensor:
        self.calls += 1
        x = part.pop("x")  # as the trainer's does
        self.sums[0].add_(x.square().sum() * torch.arange(1, 4) * part["scale"])
        self.sums[1].add_(part["y"].sum())
        return x + 0


def inputs(number: int, size: int = 4, scale: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {"x": torch.randn(size, generator=generator), "y": torch.randn(2, generator=generator), "scale": scale}


def graphs_of(function: Squares, form: Any) -> GraphReplayer[Tensor]:
    return GraphReplayer(function, function.sums, form)


def test_each_shape_and_number_has_its_own_recording_up_to_a_limit() -> None:
    ours, theirs = Squares(), Squares()
    graphs = graphs_of(ours, Called())
    for number in range(200):
        part = inputs(number, size=1 + number % 7, scale=number % 2)
        assert torch.equal(graphs(part), theirs(copy.copy(part)))
        assert "x" in part  # what was given is left as it was
        assert all(torch.equal(mine, other) for mine, other in zip(ours.sums, theirs.sums))
    assert len(graphs.recorded) == MOST < 14
    assert ours.calls == 200 + MOST  # each once more, to compare
    held = [found.inputs["x"].data_ptr() for found in graphs.recorded.values()]
    graphs(inputs(200, size=1, scale=0))
    assert held == [found.inputs["x"].data_ptr() for found in graphs.recorded.values()]


class Failing(Called):
    """As a function that waits for the device, or an allocation that fails: it ends in the midst, and nothing was executed."""

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        raise RuntimeError("CUDA error: operation not permitted\nwhen stream is capturing")


class Frozen(Called):
    """Replays what the function would have done with the inputs that it was recorded with: a number that Python read from a tensor."""

    def __init__(self, function: Squares) -> None:
        self.function = function

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        sums = self.function.sums
        before = [tensor.clone() for tensor in sums]
        left = function()
        added = [tensor - old for tensor, old in zip(sums, before)]
        torch._foreach_copy_(sums, before)

        def replay() -> Any:
            torch._foreach_add_(sums, added)
            return left

        return replay


@pytest.mark.parametrize("fails", [True, False])
def test_a_function_that_cannot_be_replayed_runs_without_a_graph_and_is_reported_once(
    fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = Squares(), Squares()
    graphs = graphs_of(ours, Failing() if fails else Frozen(ours))
    for number in range(3 * WARM_UPS):
        part = inputs(number)
        assert torch.equal(graphs(part), theirs(copy.copy(part))), number
        assert all(torch.allclose(mine, other, rtol=1e-6) for mine, other in zip(ours.sums, theirs.sums)), number
    assert graphs.replays == 0 and not graphs.recorded
    (line,) = capsys.readouterr().err.splitlines()
    assert "continues without CUDA graphs" in line
    assert ("operation not permitted when stream" in line) if fails else ("results of a recorded graph" in line)


def test_a_recording_is_not_judged_by_a_batch_that_is_not_finite() -> None:
    ours = Squares()
    graphs = graphs_of(ours, Called())
    for number in range(WARM_UPS):
        graphs(inputs(number))
    poisoned = inputs(9)
    poisoned["x"][0] = torch.nan
    graphs(poisoned)
    assert bool(ours.sums[0].isnan().all()) and not ours.sums[1].isnan()
    assert not graphs.why_not and all(found.replay is None for found in graphs.recorded.values())
    ours.sums[0].zero_()
    for number in range(2):
        graphs(inputs(number))
    assert graphs.replays == 1 and ours.sums[0].isfinite().all()


@pytest.mark.parametrize(
    ("changes", "device", "ranks", "expected"),
    [
        ({}, "cuda", 1, True),  # 8 rows of 32 positions, 32 wide
        ({}, "cpu", 1, False),
        ({"cuda_graphs": "on"}, "cpu", 1, False),
        ({}, "cuda", 2, False),
        ({"cuda_graphs": "off"}, "cuda", 1, False),
        ({"batch__sequences": 4096}, "cuda", 1, False),
        ({"batch__sequences": 4096, "cuda_graphs": "on"}, "cuda", 1, True),
        ({"batch__sequences": 4096, "batch__micro_sequences": 8}, "cuda", 1, True),
        ({"model__experts": {"count": 4, "per_token": 2, "d_ff": 16}}, "cuda", 1, False),
        ({"parallel__recompute": "block"}, "cuda", 1, False),
    ],
)
def test_graphs_are_used_for_small_models_on_one_gpu(
    changes: dict[str, Any], device: str, ranks: int, expected: bool
) -> None:
    assert decide_use_of_graphs(recipe_with(**changes), Ranks(0, ranks, torch.device(device)), 2) == expected


def test_cuda_graphs_on_with_several_ranks_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert not decide_use_of_graphs(recipe_with(cuda_graphs="on"), Ranks(0, 2, torch.device("cuda")), 2)
    assert "with 2 ranks" in capsys.readouterr().err
    assert not decide_use_of_graphs(recipe_with(cuda_graphs="on"), Ranks(1, 2, torch.device("cuda")), 2)
    assert capsys.readouterr().err == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_graphs_on_a_real_gpu_give_the_same_run(tmp_path: Path, make_shard: MakeShard, precision: str) -> None:
    """The runs are equal except for rounding: a GPU adds the gradients of the embedding in any order."""
    plan, found = plan_of(make_shard(counts={"code": 600, "docs": 200, "chat": 200})), {}
    for graphs in ("off", "on"):
        recipe = recipe_with(**CHANGES, batch__micro_sequences=2, cuda_graphs=graphs, precision=precision, compile=True)
        folder = write_spec(tmp_path / graphs, plan, recipe, last_step=1000)
        run = SegmentRun(SegmentSpec.load(folder), Ranks(0, 1, torch.device("cuda", 0)), None)
        found[graphs] = [run.train_step(make_batch(run.order).to(run.ranks.device)) for _ in range(40)]
    assert run.graphs is not None and run.graphs.why_not == "" and run.graphs.replays > 40
    assert run.graphs.replays < 4 * 40  # the first ones of a shape are not
    close = 1e-4 if precision == "fp32" else 2e-2
    for plain, replayed in zip(found["off"], found["on"], strict=True):
        assert plain.keys() == replayed.keys()
        for key in ("loss", "grad_norm", "z_loss"):
            assert replayed[key] == pytest.approx(plain[key], rel=close, abs=1e-4), (plain["step"], key)
    assert found["on"][-1]["loss"] < found["on"][0]["loss"]
