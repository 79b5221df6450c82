"""Every op × implementation on this device against eager, interleaved in one process: ``make bench``.

A ratio that falls below the committed baseline's (``benchmarks/baselines``), by more than both ranges of noise, fails. It is
measured as the baseline was, in a process of its own: what other benchmarks leave in this one moves ratios by a tenth.
A fall must show again in another process, as one alone may draw what none of the baseline's did.
torch.compile of the plain expression is the implementation ``compiled``. pytest-benchmark times the implementation; the
ratio to eager is printed and kept in ``extra_info``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.ops.kernel_ratios import (
    DEVICE,
    PAIRS,
    SHAPES,
    Ratio,
    baseline_path,
    kernels,
    load_baseline,
)
from benchmarks.ops.kernel_report import in_a_process
from benchmarks.ops.liger import NAME, contest, installed
from benchmarks.support.best_here import PRECISION
from kernels.contract.bench import BenchSetting, compare_implementations
from kernels.contract.host_memory import keep_freed_memory
from kernels.contract.op import OracleCase
from kernels.contract.oracle import compare_with_fp64
from kernels.contract.registry import OPS

BASELINE = load_baseline(baseline_path())


@pytest.fixture(scope="module")
def measured() -> dict[str, Ratio]:
    """Every kernel's ratio to eager, of one process."""
    return in_a_process()


@pytest.fixture(autouse=True, scope="module")
def _memory() -> None:
    keep_freed_memory()  # as the trainer does: page faults would drown what is measured


@pytest.mark.parametrize(("op", "implementation", "shape"), kernels())
def test_no_slower_relative_to_eager_than_its_baseline(
    benchmark: Any, measured: dict[str, Ratio], op: str, implementation: str, shape: str
) -> None:
    case = OracleCase(shape, SHAPES[shape])
    result = compare_with_fp64(contest(op), implementation, case, dtype=torch.bfloat16, device=DEVICE)
    assert result.ok, result.describe_failures()
    name = f"{op}/{implementation}/{shape}"
    found = measured[name]
    benchmark.extra_info.update(ratio=found.ratio, ratio_low=found.low, ratio_high=found.high)
    function = contest(op).implementations[implementation].function
    inputs = OPS[op].inputs(case, device=DEVICE, dtype=torch.bfloat16)
    benchmark.pedantic(function, args=inputs, rounds=3, warmup_rounds=1)
    print(
        f"\n{op}: {implementation} is {found.ratio:.2f} times as fast as eager ({found.low:.2f}–{found.high:.2f}), {shape}"
    )
    before = BASELINE.get(name)
    if before is None:
        pytest.skip(f"no baseline of {name} in {baseline_path().name}: make bench-baseline")
    if found.regressed_from(before):
        again = in_a_process([name])[name]
        print(f"{found} is below the baseline {before}; measured again: {again}")
        assert not again.regressed_from(before), f"{found}, again {again}: below the baseline {before}"


CONTESTED = [name for name in OPS if NAME in contest(name).implementations] if DEVICE == "cuda" else []


@pytest.mark.parametrize("op", CONTESTED)
@pytest.mark.parametrize("shape", SHAPES)
def test_triton_is_no_slower_than_liger(op: str, shape: str) -> None:
    setting = BenchSetting(SHAPES[shape], PRECISION, False)
    found = compare_implementations(contest(op), "triton", NAME, setting, device=DEVICE, pairs=PAIRS)
    print(f"\n{op}: triton is {found.ratio:.2f} times as fast as Liger-Kernel {installed()}, {shape}")
    assert found.ratio >= 0.95


def test_a_regression_is_a_range_below_the_baselines() -> None:
    before = Ratio.over([Ratio(1.5, 1.4, 1.6, 0.1), Ratio(1.3, 1.2, 1.5, 0.2), Ratio(1.45, 1.3, 1.7, 0.3)])
    assert before == Ratio(1.45, 1.2, 1.7, 0.3)
    assert Ratio(1.0, 0.9, 1.19, 0.1).regressed_from(before)
    assert not Ratio(1.0, 0.9, 1.21, 0.1).regressed_from(before)
    assert not Ratio(3.0, 2.9, 3.1, 0.1).regressed_from(before)
