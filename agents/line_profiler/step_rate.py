"""``python -m agents.line_profiler.step_rate --recipe FILE --kernels FILE``: times a recipe's start and its steps.

It runs the trainer's own step on random documents, and prints one JSON object: {"first_step_s", "step_s", "steps", "tokens_per_s",
"whole_s"}. The first step compiles all that no cache has. No number includes the time to import Python packages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from agents.line_profiler.workload import make_segment_run
from kernels.contract.host_memory import keep_freed_memory
from kernels.contract.message import format_error_with_code
from kernels.contract.op import KernelError
from kernels.contract.precision import allow_bf16_matmul
from trainer.batch import make_batch
from trainer.contract.errors import TrainerError
from trainer.contract.plan.precision import DTYPES, choose_training_device, replace_auto_precision
from trainer.contract.recipe import Recipe

STEPS, SECONDS = 8, 6.0


def measure_step_rate(recipe: Recipe, kernels: Path, steps: int = STEPS) -> dict[str, float]:
    """Measure seconds to the end of the first step, and of a later step: the median of ``steps``, or of as many as fit into ``SECONDS``.

    Raises: TrainerError, KernelError.
    """
    began = time.perf_counter()
    recipe = replace_auto_precision(recipe, choose_training_device())
    with allow_bf16_matmul(DTYPES[recipe.precision]), tempfile.TemporaryDirectory(prefix="rate-") as folder:
        run = make_segment_run(recipe, kernels, Path(folder), steps=steps + 2, compile=recipe.compile)
        run.train_step(make_batch(run.order).to(run.ranks.device))
        started = time.perf_counter()
        times: list[float] = []
        while len(times) < steps and (not times or time.perf_counter() - started < SECONDS):
            before = time.perf_counter()
            run.train_step(make_batch(run.order).to(run.ranks.device))
            times.append(time.perf_counter() - before)
    step = statistics.median(times)
    return {
        "first_step_s": started - began,
        "step_s": step,
        "steps": len(times),
        "tokens_per_s": recipe.tokens_per_step / step,
        "whole_s": time.perf_counter() - began,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m agents.line_profiler.step_rate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--kernels", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    chosen = parser.parse_args(arguments)
    keep_freed_memory()  # as the trainer does
    try:
        print(json.dumps(measure_step_rate(Recipe.load(chosen.recipe), chosen.kernels, chosen.steps)))
    except (TrainerError, KernelError, OSError) as error:
        print(format_error_with_code(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
