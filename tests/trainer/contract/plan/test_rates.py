"""How rates are measured, and which rate a data sheet has. No test asserts a measured time."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainer.contract.plan import rates
from trainer.contract.plan.precision import DTYPES

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_fp32_has_the_peak_outside_of_tensor_cores_unless_tf32_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert rates.look_up_data_sheet_flops(GPU, torch.bfloat16) == 989.4e12
    assert rates.look_up_data_sheet_flops(GPU, torch.float32) == pytest.approx(66.9e12), (
        "torch's default computes fp32 products in fp32"
    )
    torch.set_float32_matmul_precision("high")
    try:
        assert rates.look_up_data_sheet_flops(GPU, torch.float32) is None
    finally:
        torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    assert rates.look_up_data_sheet_flops(GPU, torch.float32) is None, "the sheets differ"
    assert all(rates.look_up_data_sheet_flops(CPU, dtype) is None for dtype in DTYPES.values())


# -- measuring ---------------------------------------------------------------------------------------------------------
def test_a_gpu_measurement_doubles_the_calls_until_they_take_long_enough() -> None:
    asked = []

    def seconds_of(count: int) -> float:
        asked.append(count)
        return 0.002 * count + (0.2 if len(asked) == 1 else 0.0)  # the first loads the kernel

    assert rates.measure_seconds_per_call(seconds_of) == 0.002
    assert asked == [2, 4, 8, 16, 32, 64, 128, 256] and 0.002 * asked[-2] < rates.GPU_SECONDS <= 0.002 * asked[-1]


def test_a_copy_moves_as_many_bytes_as_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    ones = torch.ones

    def noted(*size: int, **more: Any) -> torch.Tensor:
        made.append(ones(*size, **more))
        return made[-1]

    monkeypatch.setattr(torch, "ones", noted)  # real tensors, and a list of them
    assert rates.measure_memory_rate.__wrapped__(CPU) > 0
    assert [source.nbytes for source in made] == [rates.CPU_BYTES]


def test_the_matrices_of_a_timed_product_fit_into_free_memory() -> None:
    for free in (1 << 26, 1 << 28, 1 << 30, 1 << 33):
        size = rates.choose_matrix_size(free, 4)
        assert size == rates.LEAST_GPU_SIZE or 12 * size**2 <= free / 2 < 12 * (2 * size) ** 2 or size == 8192


def test_a_cpu_measurement_times_all_sizes_equally_and_skips_long_products(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[int] = Counter()
    now, rate = [0], 1e11

    def seconds(product: Callable[[], object]) -> float:
        product()
        disturbed = 5.0 if calls[now[0]] % 3 else 1.0
        return disturbed * 2 * now[0] ** 3 / rate

    def product(size: int) -> None:
        now[0] = size
        calls[size] += 1

    monkeypatch.setattr(rates, "_cpu_seconds", seconds)
    made = [(size, functools.partial(product, size)) for size in (128, 256, 512, 1024, 2048)]
    assert rates.measure_best_matmul_rate(made) == pytest.approx(rate), (
        "the best of tries, most of which something disturbed"
    )
    assert calls.keys() == {128, 256, 512}, "a product of 1024 rows would take 21 ms"
    spent = {size: count * size**3 for size, count in calls.items()}
    assert max(spent.values()) < 1.2 * min(spent.values())


def test_measuring_a_cpus_rates_keeps_the_thread_count_and_the_random_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rates, "CPU_SECONDS", 0.01)
    monkeypatch.setattr(rates, "CPU_BYTES", 1 << 16)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    for rate in (rates.measure_matmul_rate.__wrapped__(CPU, torch.float32), rates.measure_memory_rate.__wrapped__(CPU)):
        assert 0 < rate < math.inf
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)
