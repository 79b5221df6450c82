"""What the shipped kernels must gain on a CPU of two cores: the loss head at a vocabulary of 32k, and the whole step.

``python -m pytest benchmarks/ops/test_kernel_aims.py -s``. The choices are those of ``kernels.contract.tune`` on this machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agents.line_profiler.workload import make_segment_run
from benchmarks.support.best_here import DTYPE, PRECISION, demo_recipe, tuned_kernels
from benchmarks.support.memory import printed_by, resident, restart_peak
from kernels.contract.bench import BenchSetting, compare_implementations
from kernels.contract.host_memory import keep_freed_memory
from kernels.contract.op import OracleCase, Shape
from kernels.contract.precision import allow_bf16_matmul
from kernels.contract.registry import OPS, load_choice
from trainer.batch import prefetch_batches
from trainer.contract.plan.precision import DTYPES

HEAD = "linear_cross_entropy"
AT_32K = Shape(batch=8, vocab_size=32768)
ROUNDS, WARM_UP = 11, 3

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the aims of CPUs")


def test_the_loss_head_at_32k_is_faster_than_eager() -> None:
    keep_freed_memory()
    chosen = load_choice(tuned_kernels())[HEAD]
    with allow_bf16_matmul(DTYPE):
        found = compare_implementations(
            HEAD, chosen, setting=BenchSetting(AT_32K, PRECISION, False), pairs=ROUNDS, warmup=1
        )
    print(f"\n{HEAD}: {chosen} {found.ratio:.2f} times eager at 32k ({found.ratio_low:.2f}–{found.ratio_high:.2f})")
    assert found.ratio >= 1.3


def test_the_loss_head_at_32k_takes_a_quarter_of_eagers_memory() -> None:
    peaks = {name: peak_memory(name) for name in ("reference", load_choice(tuned_kernels())[HEAD])}
    print("\n" + ", ".join(f"{name}: {peak >> 20} MiB" for name, peak in peaks.items()))
    reference, chosen = peaks.values()
    assert chosen <= 0.25 * reference


def peak_memory(implementation: str) -> int:
    """Bytes of a forward and backward beyond its inputs, in a fresh process."""
    script = f"from benchmarks.ops.test_kernel_aims import print_peak; print_peak({implementation!r})"
    return printed_by(script)


def print_peak(implementation: str) -> None:
    function = OPS[HEAD].implementation(implementation).function
    small, inputs = (OPS[HEAD].inputs(OracleCase("", shape), dtype=DTYPE) for shape in (Shape(), AT_32K))
    torch.autograd.grad(function(*small)[0], small[:2])  # what is loaded and compiled once is not the op's
    before = resident("VmRSS")
    restart_peak()
    torch.autograd.grad(function(*inputs)[0], inputs[:2])
    print(resident("VmHWM") - before)


def test_the_whole_step_gains_by_the_choices(tmp_path: Path) -> None:
    """The demo's recipe, compiled as it says, every record written, against the same with references.

    AdamW is torch's fused one on both sides: against the plain expression, the gain would be larger.
    """
    keep_freed_memory()
    plain = tmp_path / "kernels.yaml"
    plain.write_text("cpu: {adamw: fused}\n")
    steps = {name: step_of(path, tmp_path / name) for name, path in (("chosen", tuned_kernels()), ("plain", plain))}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM_UP + ROUNDS):
        for name, step in steps.items():  # alternating, so that what disturbs the machine disturbs both
            began = time.perf_counter()
            step()
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    ratios = sorted(b / a for a, b in zip(seconds["chosen"], seconds["plain"]))
    milliseconds = {name: f"{1e3 * statistics.median(taken):.0f} ms" for name, taken in seconds.items()}
    print(f"\nwhole step {milliseconds}, ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})")
    assert statistics.median(ratios) >= 1.3


def step_of(kernels: Path, folder: Path) -> Callable[[], Any]:
    recipe = demo_recipe()
    run = make_segment_run(recipe, kernels, folder, steps=100, compile=recipe.compile)
    batches = prefetch_batches(run.order, 100)

    def step() -> None:
        with allow_bf16_matmul(DTYPES[recipe.precision]):
            run.train_step(next(batches))

    return step
