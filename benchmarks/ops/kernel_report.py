"""``make bench-report`` writes benchmarks/RESULTS.md; ``make bench-baseline`` also commits to the ratios measured.

Each round is a process of its own: where a process's memory lies, and what its compiler chose, is part of the noise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.ops.kernel_ratios import ROOT, Ratio, baseline_path, kernels, machine, measure, save_baseline
from kernels.contract.host_memory import keep_freed_memory

RESULTS = ROOT / "benchmarks" / "RESULTS.md"


def one_round(only: Sequence[str] = ()) -> dict[str, Ratio]:
    """By ``op/implementation/shape``, of those named or of all, measured in this process."""
    keep_freed_memory()
    every = {"/".join(key): key for key in kernels()}
    return {name: measure(*key) for name, key in every.items() if name in only or not only}


def in_a_process(only: Sequence[str] = ()) -> dict[str, Ratio]:
    """A round in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.ops.kernel_report", "--one-round", *only]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return {key: Ratio(**value) for key, value in json.loads(done.stdout.splitlines()[-1]).items()}


def rounds(count: int) -> dict[str, Ratio]:
    found = [in_a_process() for _ in range(count)]
    return {key: Ratio.over(ratios[key] for ratios in found) for key in found[0]}


def as_markdown(ratios: dict[str, Ratio], facts: dict[str, str], count: int) -> str:
    lines = [
        "# Kernels compared with eager",
        "",
        f"Made by `make bench-report` on {facts['processor']} ({facts['device_class']}), torch {facts['torch']},",
        f"Liger-Kernel {facts['liger']}, commit `{facts['commit']}`: forward and backward in {facts['precision']},",
        f"pairs alternate, {count} processes.",
        "The ratio is eager's time over the",
        "implementation's, above one is faster; the range spans the 95 % intervals of every process's median. `compiled` is torch.compile.",
        "",
        "| op | implementation | shape | ratio to eager | range | ms |",
        "|---|---|---|--:|--:|--:|",
    ]
    for key, r in sorted(ratios.items()):
        name, implementation, shape = key.split("/")
        lines.append(
            f"| {name} | {implementation} | {shape} | {r.ratio:.2f} | {r.low:.2f}–{r.high:.2f} | {r.seconds * 1e3:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None, results: Path = RESULTS) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops.kernel_report", description=__doc__)
    parser.add_argument("--baseline", action="store_true", help="also write the baseline of this device class")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--one-round",
        nargs="*",
        metavar="OP/IMPLEMENTATION/SHAPE",
        help="print one round's ratios as JSON, of all or of these",
    )
    chosen = parser.parse_args(arguments)
    if chosen.one_round is not None:
        print(json.dumps({key: asdict(ratio) for key, ratio in one_round(chosen.one_round).items()}))
        return 0
    ratios = rounds(chosen.rounds)
    if chosen.baseline:
        save_baseline(baseline_path(), ratios)
    results.write_text(as_markdown(ratios, machine(), chosen.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
