"""The speed that a segment reports. The answers of torch.cuda are replaced."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainer.segment_runs import result
from tests.support.trainer.segments import MakeShard, plan_of, recipe_with, train_here, write_spec
from trainer.contract.json_lines import read_json_lines
from trainer.contract.plan import rates
from trainer.monitor import speed as speeds
from trainer.parallel.ranks import Ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture()
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine with a GPU of some name, whose products reach 600 TFLOP/s."""

    def call_it(name: str) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
        monkeypatch.setattr(speeds, "measure_matmul_rate", lambda device, dtype: 600e12)

    return call_it


def speed(device: torch.device, size: int = 1, **recipe: Any) -> speeds.SpeedMeter:
    return speeds.SpeedMeter(recipe_with(**recipe), Ranks(0, size, device))


def test_on_a_cpu_only_the_models_flops_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "measure_matmul_rate", None)  # to call it would fail
    found = speed(CPU)
    flops = recipe_with().model.count_flops_per_token()
    assert found.compute_step_fields(1000, 0.5) == {
        "tokens_per_s": 2000.0,
        "flops_per_s": 2000.0 * flops,
        "first_step_s": 0.5,
    }
    assert found.compute_step_fields(1000, 0.25) == {"tokens_per_s": 4000.0, "flops_per_s": 4000.0 * flops}


def test_mfu_is_the_share_of_the_sheets_peak_of_all_ranks(gpu: Callable[..., None]) -> None:
    gpu(H100)
    found = speed(GPU, 4, precision="bf16")
    found.compute_step_fields(1, 1.0)
    step = found.compute_step_fields(1 << 20, 2.0)
    assert step["mfu"] == step["flops_per_s"] / (4 * 989.4e12)
    whole = found.compute_segment_fields(
        [{"tokens_per_s": 1.0, "first_step_s": 30.0}, step, step | {"tokens_per_s": 1e9}, step]
    )
    assert whole == {"first_step_s": 30.0, **step, "matmul_flops_per_s": 4 * 600e12,
                     "matmul_share": step["flops_per_s"] / (4 * 600e12)}  # fmt: skip


def test_for_an_unknown_gpu_only_the_measured_share_is_reported(gpu: Callable[..., None]) -> None:
    gpu(H100 + " MIG 1g.10gb")
    found = speed(GPU, precision="bf16")
    found.compute_step_fields(1, 1.0)
    assert found.compute_step_fields(10, 1.0).keys() == {"tokens_per_s", "flops_per_s"}
    assert found.compute_segment_fields([found.compute_step_fields(10, 1.0)]).keys() == {
        "tokens_per_s", "flops_per_s", "matmul_flops_per_s", "matmul_share"
    }  # fmt: skip


def test_a_segment_reports_the_first_step_of_its_last_start() -> None:
    lines = [{"tokens_per_s": rate} for rate in (100.0, 300.0, 200.0)]
    lines[1:1] = [{"tokens_per_s": 1.0, "first_step_s": 60.0}, {"tokens_per_s": 1.0, "first_step_s": 4.0}]
    found = speed(CPU).compute_segment_fields([*lines, {"step": 9}])
    assert (found["first_step_s"], found["tokens_per_s"]) == (4.0, 200.0)
    assert speed(CPU).compute_segment_fields([]) == {}


def test_a_segment_on_a_cpu_leaves_its_speed_and_the_first_step_of_each_start(
    tmp_path: Path, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "_cpu_seconds", None)  # a product that is timed would fail
    recipe = recipe_with(checkpoint_every=4)
    folder = write_spec(tmp_path / "run", plan_of(make_shard()), recipe, last_step=6)
    assert train_here(folder) == (0, "")
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    assert train_here(folder) == (0, "")
    lines = read_json_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines if "first_step_s" in line] == [0, 4]
    for line in lines:
        assert line["flops_per_s"] == line["tokens_per_s"] * recipe.model.count_flops_per_token() and "mfu" not in line
    speed = result(folder)["speed"]
    assert speed.keys() == {"first_step_s", "tokens_per_s", "flops_per_s"}
    assert speed["first_step_s"] == lines[4]["first_step_s"] and speed["tokens_per_s"] == statistics.median(
        line["tokens_per_s"] for line in lines if "first_step_s" not in line
    )
