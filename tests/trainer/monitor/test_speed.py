"""What a segment says of its speed; torch.cuda's answers are stood in for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.trainer.segments import recipe_with
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
        monkeypatch.setattr(speeds, "matmul_rate", lambda device, dtype: 600e12)

    return call_it


def speed(device: torch.device, size: int = 1, **recipe: Any) -> speeds.Speed:
    return speeds.Speed(recipe_with(**recipe), Ranks(0, size, device))


def test_on_a_cpu_the_models_flops_are_said_and_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "matmul_rate", None)  # to call it would fail
    found = speed(CPU)
    flops = recipe_with().model.flops_per_token()
    assert found.of(1000, 0.5) == {"tokens_per_s": 2000.0, "flops_per_s": 2000.0 * flops, "first_step_s": 0.5}
    assert found.of(1000, 0.25) == {"tokens_per_s": 4000.0, "flops_per_s": 4000.0 * flops}


def test_mfu_is_the_share_of_the_sheets_peak_of_all_ranks(gpu: Callable[..., None]) -> None:
    gpu(H100)
    found = speed(GPU, 4, precision="bf16")
    found.of(1, 1.0)
    step = found.of(1 << 20, 2.0)
    assert step["mfu"] == step["flops_per_s"] / (4 * 989.4e12)
    whole = found.of_segment([{"tokens_per_s": 1.0, "first_step_s": 30.0}, step, step | {"tokens_per_s": 1e9}, step])
    assert whole == {"first_step_s": 30.0, **step, "matmul_flops_per_s": 4 * 600e12,
                     "matmul_share": step["flops_per_s"] / (4 * 600e12)}  # fmt: skip


def test_of_an_unknown_card_the_measured_share_alone_is_said(gpu: Callable[..., None]) -> None:
    gpu(H100 + " MIG 1g.10gb")
    found = speed(GPU, precision="bf16")
    found.of(1, 1.0)
    assert found.of(10, 1.0).keys() == {"tokens_per_s", "flops_per_s"}
    assert found.of_segment([found.of(10, 1.0)]).keys() == {
        "tokens_per_s", "flops_per_s", "matmul_flops_per_s", "matmul_share"
    }  # fmt: skip


def test_of_several_starts_the_last_ones_first_step_is_said() -> None:
    lines = [{"tokens_per_s": rate} for rate in (100.0, 300.0, 200.0)]
    lines[1:1] = [{"tokens_per_s": 1.0, "first_step_s": 60.0}, {"tokens_per_s": 1.0, "first_step_s": 4.0}]
    found = speed(CPU).of_segment([*lines, {"step": 9}])
    assert (found["first_step_s"], found["tokens_per_s"]) == (4.0, 200.0)
    assert speed(CPU).of_segment([]) == {}
