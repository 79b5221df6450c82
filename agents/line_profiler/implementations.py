"""Times the registered implementations of the slowest ops at the recipe's shapes.

A separate file, because it runs what ``kernels.contract.bench`` times, and the rest of the profiler runs whole steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from agents.line_profiler.profile_schema import ProfiledOp
from kernels.contract.bench import BenchSetting, compare_implementations
from kernels.contract.op import KernelError
from trainer.contract.recipe import Recipe

LEAST_SHARE = 0.02  # of the step: a faster implementation of a smaller op could not be measured
PAIRS = 5


def time_registered_implementations(
    ops: Sequence[ProfiledOp], recipe: Recipe, device: torch.device, budget_s: float
) -> list[ProfiledOp]:
    """The ops, each with the seconds of its implementations that were timed. The slowest op comes first: its present implementation against each
    other one, until ``budget_s`` seconds are over. An implementation that cannot be run here has no time."""
    setting = BenchSetting.from_recipe_mapping(recipe.model_dump())
    ends = time.monotonic() + budget_s
    times: dict[str, dict[str, float]] = {}
    for op in sorted(ops, key=lambda op: -op.share):
        if op.share < LEAST_SHARE:
            break
        same = {
            op.implementation,
            "compiled" if recipe.compile and op.in_block else "",
        }  # the block compiles the op already
        others = [name for name in op.implementations if name not in same] or [op.implementation]
        for name in others:
            left = ends - time.monotonic()
            if left <= 0:
                break
            try:
                found = compare_implementations(
                    op.op, name, op.implementation, setting, device=device.type, pairs=PAIRS, warmup=2, seconds=left
                )
            except (KernelError, RuntimeError, ValueError, TypeError):
                continue  # an implementation that does not take these sizes is no error of the profile
            known = times.setdefault(op.op, {})
            known[op.implementation] = min(found.against_seconds, known.get(op.implementation, found.against_seconds))
            known[name] = found.seconds
    return [replace(op, implementation_s=times.get(op.op, {})) for op in ops]
