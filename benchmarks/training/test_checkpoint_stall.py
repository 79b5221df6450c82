"""What a checkpoint costs the demo recipe's training: the stall of one step, and of a run that saves every 50 steps.

``python -m pytest benchmarks/training/test_checkpoint_stall.py -s``. A blocking save of the same tensors, fsync and all, beside
what the writer holds the step up for: handing the tensors over, and waiting before the update until they are copied.
Then blocks of steps with and without a save, in turn, in one process: the copying, hashing and writing beside the steps
takes cores and memory bandwidth from them, which the stall does not show.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from agents.line_profiler.workload import make_segment_run
from benchmarks.support.best_here import demo_recipe, tuned_kernels
from kernels.contract.host_memory import keep_freed_memory
from trainer.batch import prefetch_batches
from trainer.checkpoint_writer import CheckpointWriter
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import Checkpoint
from trainer.run import SegmentRun

LESS_STALL = 20
AIM = 0.02
EVERY = 50  # steps between saves
BLOCK, PAIRS, WARM_UP = 8, 14, 4


class Stalls(CheckpointWriter):
    """Clocks what the step waits for."""

    def __init__(self, parent: Path, keep: int, reserve: int) -> None:
        super().__init__(parent, keep, reserve=reserve)
        self.seconds = 0.0

    def wait_until_copied(self) -> None:
        start = time.perf_counter()
        super().wait_until_copied()
        self.seconds += time.perf_counter() - start


def blocking_save(run: SegmentRun, folder: Path) -> float:
    """Seconds."""
    contents, _ = run.collect_checkpoint_contents()
    start = time.perf_counter()
    state = {"step": run.step, "sampler": run.sampler, "recipe": run.recipe.model_dump()}
    checkpoints.save_checkpoint(folder, Checkpoint(contents["model"], contents["optimizer"], state))
    return time.perf_counter() - start


def test_a_checkpoint_hardly_stalls_a_step_nor_slows_a_run(tmp_path: Path) -> None:
    keep_freed_memory()
    recipe = demo_recipe()
    steps = WARM_UP + 2 * BLOCK * (PAIRS + 1)
    run = make_segment_run(recipe, tuned_kernels(), tmp_path / "run", steps=steps, compile=True)
    on_gpu = run.ranks.device.type == "cuda"  # as ``trainer.segment`` does
    writer = run.writer = Stalls(tmp_path / "checkpoints", keep=2, reserve=run.count_checkpoint_bytes() * on_gpu)
    batches = prefetch_batches(run.order, steps, pin=on_gpu)
    each: list[float] = []
    stalls: list[float] = []
    saves: list[float] = []
    blocking: list[float] = []

    def block(save: bool) -> float:
        """Seconds of ``BLOCK`` steps, the first of which begins with a save."""
        began = time.perf_counter()
        for i in range(BLOCK):
            start = time.perf_counter()
            writer.seconds = 0.0
            if save and i == 0:
                run.save()
                handed = time.perf_counter() - start
            run.train_step(next(batches).to(run.ranks.device))
            writer.raise_if_finished_save_failed()
            if save and i == 0:
                stalls.append(handed + writer.seconds)
            if not save:
                each.append(time.perf_counter() - start)
        taken = time.perf_counter() - began
        if save:
            start = time.perf_counter()
            writer.wait_for_last_save()
            saves.append(time.perf_counter() - start)
        return taken

    for _ in range(WARM_UP):
        run.train_step(next(batches).to(run.ranks.device))
    block(True)  # the first copies are to memory that was never touched
    stalls.clear()
    saves.clear()
    block(False)
    each.clear()
    extra = []
    for pair in range(PAIRS):
        blocking.append(blocking_save(run, tmp_path / "blocking"))
        taken = {save: block(save) for save in ((True, False) if pair % 2 else (False, True))}
        extra.append(taken[True] - taken[False])
    writer.close()
    step = statistics.median(each)
    low, high = (statistics.median(extra) + side * spread(extra) for side in (-2, 2))
    overhead = [seconds / (EVERY * step) for seconds in (statistics.median(extra), low, high)]
    stall, blocked = statistics.median(stalls), statistics.median(blocking)
    size = sum(f.stat().st_size for f in (checkpoints.list_checkpoints(tmp_path / "checkpoints")[-1][1]).iterdir())
    print(
        f"\n{recipe.name}: {size / 1e6:.0f} MB, a step takes {step * 1e3:.0f} ms, {torch.get_num_threads()} threads\n"
        f"blocking save {blocked * 1e3:.0f} ms ({min(blocking) * 1e3:.0f} to {max(blocking) * 1e3:.0f}), stall with the "
        f"writer {stall * 1e3:.2f} ms ({min(stalls) * 1e3:.2f} to {max(stalls) * 1e3:.2f}): {blocked / stall:.0f} times less; "
        f"left of a save after {BLOCK} steps: {max(saves) * 1e3:.0f} ms\n"
        f"one save every {EVERY} steps: {overhead[0]:.2%} of the run's time ({overhead[1]:.2%} to {overhead[2]:.2%}); "
        f"blocking it would be {blocked / (EVERY * step):.2%}"
    )
    assert blocked >= LESS_STALL * stall
    assert overhead[0] < AIM


def spread(values: list[float]) -> float:
    """Standard error of the median, from the median absolute deviation."""
    center = statistics.median(values)
    return 1.4826 * 1.2533 * statistics.median(abs(v - center) for v in values) / len(values) ** 0.5
