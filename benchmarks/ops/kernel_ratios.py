"""How fast an implementation is, as a ratio to eager measured in one process; and when a ratio has fallen.

A ratio of paired runs says more than seconds on a noisy machine, and still moves from process to process. So a
baseline is measured in several processes and keeps the range they spanned; a regression is a range wholly below it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.ops.liger import contest, installed
from benchmarks.support.best_here import DTYPE, PRECISION, ROOT
from kernels.contract.bench import BenchSetting, compare_implementations
from kernels.contract.machine import describe_this_machine
from kernels.contract.op import Shape
from kernels.contract.precision import allow_bf16_matmul
from kernels.contract.registry import OPS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {"recipe": Shape(batch=8), "long": Shape(batch=2, context=1024)}
if DEVICE == "cuda":  # there those would time launches
    WIDE = Shape(context=4096, d_model=2048, heads=16, kv_heads=8, head_dim=128, d_ff=8192, vocab_size=32768)
    SHAPES = {"recipe": WIDE, "long": replace(WIDE, batch=1, context=16384)}
PAIRS, MOST_PAIRS, SECONDS = 15, 101, 1.0  # at least, at most, and how long a measurement may take between them


@dataclass(frozen=True)
class Ratio:
    """Eager's time over an implementation's, forward and backward: the median of pairs, and where it lies in 95 % of
    measurements (the notch of McGill, Tukey & Larsen 1978, doi 10.2307/2683468: 1.57 · quartile range / sqrt(pairs))."""

    ratio: float
    low: float
    high: float
    seconds: float

    @classmethod
    def over(cls, processes: Iterable[Ratio]) -> Ratio:
        """One range for what several processes measured, with the ratio and seconds of the middle one."""
        ordered = sorted(processes, key=lambda r: r.ratio)
        middle = ordered[len(ordered) // 2]
        return cls(middle.ratio, min(r.low for r in ordered), max(r.high for r in ordered), middle.seconds)

    def regressed_from(self, before: Ratio) -> bool:
        """Is all of this range below all of that one?"""
        return self.high < before.low


def kernels() -> list[tuple[str, str, str]]:
    """Every (op, implementation, shape) that runs on this device, but the references; Liger's where it is installed.

    Liger's run on CUDA: what the interpreter takes is no time of a kernel.
    """
    pairs = [(o.name, i.name) for o in map(contest, OPS) for i in o.implementations.values() if i.can_run_on(DEVICE)]
    return [(name, i, shape) for name, i in pairs if i != "reference" for shape in SHAPES]


def measure(name: str, implementation: str, shape: str) -> Ratio:
    """On a CPU with one thread: a second waits for whatever else runs there, and ratios differ with their number."""
    setting, threads = BenchSetting(SHAPES[shape], PRECISION, False), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with allow_bf16_matmul(DTYPE):  # as the trainer does
            pilot = compare_implementations(
                contest(name), implementation, setting=setting, device=DEVICE, pairs=3, warmup=2
            )
            affordable = int(SECONDS / (pilot.seconds + pilot.against_seconds))
            pairs = max(PAIRS, min(MOST_PAIRS, affordable))
            found = compare_implementations(
                contest(name), implementation, setting=setting, device=DEVICE, pairs=pairs, warmup=2
            )
    finally:
        torch.set_num_threads(threads)
    notch = 1.57 * (found.ratio_high - found.ratio_low) / found.pairs**0.5
    return Ratio(found.ratio, found.ratio - notch, found.ratio + notch, found.seconds)


def baseline_path() -> Path:
    return ROOT / "benchmarks" / "baselines" / f"{describe_this_machine(DEVICE).name}.json"


def load_baseline(path: Path) -> dict[str, Ratio]:
    """By ``op/implementation/shape``; empty where none was committed for this device class."""
    if not path.is_file():
        return {}
    return {key: Ratio(**value) for key, value in json.loads(path.read_text())["ratios"].items()}


def save_baseline(path: Path, ratios: dict[str, Ratio]) -> None:
    path.parent.mkdir(exist_ok=True)
    document: dict[str, Any] = machine() | {"ratios": {key: asdict(ratio) for key, ratio in sorted(ratios.items())}}
    path.write_text(json.dumps(document, indent=1) + "\n")


def machine() -> dict[str, str]:
    """What was measured on: class, processor, versions and commit."""
    found = describe_this_machine(DEVICE)
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {
        "device_class": found.name,
        "processor": found.processor if DEVICE == "cuda" else f"one thread of {found.processor}",
        "torch": found.torch,
        "precision": PRECISION,
        "liger": installed() or "not installed",
        "commit": git.stdout.strip(),
    }
