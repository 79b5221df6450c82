"""What metrics, monitor and detectors add to a step of the demo recipe: less than 1 %.

``python -m pytest benchmarks/training/test_step_overhead.py -s``. Two views of the same steps, in one process: the time spent in
those parts, clocked one by one within real steps, as a share of the step; and whole steps with and without them, which
alternate, as a ratio of medians; on a shared machine its noise is often larger than the difference.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer.run
from agents.line_profiler.workload import make_segment_run
from benchmarks.support.best_here import demo_recipe, tuned_kernels
from kernels.contract.host_memory import keep_freed_memory
from trainer.batch import Batch, prefetch_batches
from trainer.contract.recipe import Recipe
from trainer.monitor.metrics import MetricsFile
from trainer.monitor.stability import StabilityDetector, decide_clip_and_skip
from trainer.optim.optimizer import compute_sums_of_squares
from trainer.run import SegmentRun

CUDA = torch.cuda.is_available()
AIM = 0.01
PAIRS, WARM_UP, SPLITS = 32, 4, 12
MONITOR = ("after_half_batch", "before_update", "after_update", "record")
SIGNALS = ("begin_step", "after_update", "record")


class Clock:
    """Sums what the parts take, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*values: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*values, **named)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

        return timed


def full_step(run: SegmentRun, metrics: MetricsFile, clock: Clock) -> Callable[[Batch], None]:
    """As ``segment.train`` does it."""
    write = clock.around("write", metrics.write)
    after_step = [clock.around(hook.key, hook.after_step) for hook in run.hooks]

    def step(batch: Batch) -> None:
        start = time.perf_counter()
        record = run.train_step(batch.to(run.ranks.device))
        rate = len(batch.rows) * run.recipe.model.context / (time.perf_counter() - start)
        record |= {"tokens_per_s": rate, "time": time.time()}
        write(record)
        for look in after_step:
            look(record)

    return step


def bare_step(run: SegmentRun) -> Callable[[Batch], None]:
    """Forward, backward, clipping, update, and the loss as a number: what training cannot do without."""
    recipe = run.recipe
    limit = float("inf")

    def step(batch: Batch) -> None:
        run.signals.begin_step(None)
        total = torch.zeros((), device=run.ranks.device)
        for part in batch.to(run.ranks.device).split_into_micro_batches(recipe.batch.micro_sequences):
            part.pop("domains_BT")
            loss, _, _ = run.model.loss(**part, z_loss=recipe.stability.z_loss)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        norm = compute_sums_of_squares(run.optimizer.gradients()).sum().sqrt()
        run.optimizer.step(1e-3, *decide_clip_and_skip(total, norm, recipe.stability.grad_clip, limit))
        run.optimizer.zero_grad()
        total.item()

    return step


@pytest.mark.parametrize("micro_sequences", [None, 8])
def test_metrics_monitor_and_detectors_cost_less_than_one_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_sequences: int | None
) -> None:
    keep_freed_memory()
    recipe = demo_recipe()
    every = recipe.stability.noise_scale_every
    recipe = Recipe.parse(recipe.model_dump() | {"batch": {"sequences": 16, "micro_sequences": micro_sequences}})
    recipe = measured_every(recipe, 0)  # its share is measured apart
    steps = 2 * (PAIRS + WARM_UP) + 2 * (SPLITS + WARM_UP)
    run = make_segment_run(recipe, tuned_kernels(), tmp_path / "run", steps=steps, compile=True)
    fill(run.detector)
    clock = Clock()
    for hook, names in ((run.monitor, MONITOR), (run.signals, SIGNALS)):
        for name in names:
            monkeypatch.setattr(hook, name, clock.around(f"{hook.key}.{name}", getattr(hook, name)))
    looks = [block._forward_pre_hooks for block in run.model.blocks]
    for held in looks:
        held.update({number: clock.around("signals.look", look) for number, look in held.items()})
    monkeypatch.setattr(
        trainer.run, "measure_peak_memory_bytes", clock.around("memory", trainer.run.measure_peak_memory_bytes)
    )
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 0)
    kinds = {"full": full_step(run, metrics, clock), "bare": bare_step(run)}
    batches = prefetch_batches(run.order, steps)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for pair in range(PAIRS + WARM_UP):
        if pair == WARM_UP:
            clock.seconds.clear()
        # what drifts meets both, and one of four full steps is a layer's turn, as in training
        for name in sorted(kinds, reverse=bool(pair // 2 % 2)):
            batch = next(batches)
            start = time.perf_counter()
            kinds[name](batch)
            if pair >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    whole = sum(seconds["full"])
    ratio, low, high = ratio_of_medians(seconds["full"], seconds["bare"])
    shares = "   ".join(f"{name} {taken / whole:.3%}" for name, taken in sorted(clock.seconds.items()))
    share = sum(clock.seconds.values()) / whole
    splitting = split_cost(run, kinds["full"], batches) / every if micro_sequences is None else 0.0
    share += splitting
    metrics.close()
    print(
        f"\n{recipe.name}, micro_sequences {micro_sequences}: {statistics.median(seconds['full']) * 1e3:.0f} ms a step; "
        f"{share:.2%} in {shares}   halves for the noise scale, every {every} steps {splitting:.3%}\n"
        f"with / without, alternating: {ratio:.4f} (95 % of resamplings {low:.4f} to {high:.4f})"
    )
    if not CUDA:  # there the host's clock sees launches only
        assert share < AIM
    assert low < 1 + AIM


def measured_every(recipe: Recipe, steps: int) -> Recipe:
    """With the noise scale of a lone micro-batch measured every ``steps`` steps."""
    return recipe.model_copy(update={"stability": recipe.stability.model_copy(update={"noise_scale_every": steps})})


def split_cost(run: SegmentRun, step: Callable[[Batch], None], batches: Iterator[Batch]) -> float:
    """How much longer a step takes whose only micro-batch is split in two, as a share of the step."""
    run.recipe = measured_every(run.recipe, 2)
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(SPLITS + WARM_UP):
        for _ in range(2):
            batch = next(batches)
            start = time.perf_counter()
            step(batch)
            if pair >= WARM_UP:
                seconds[batch.step % 2].append(time.perf_counter() - start)
    whole, split = map(statistics.median, seconds)
    return split / whole - 1


def fill(detector: StabilityDetector) -> None:
    """As in the middle of a run: full windows, and a course."""
    noise = random.Random(0)
    for step in range(1000):
        detector.observe(step, 8 + noise.gauss(0, 0.1), 1 + noise.gauss(0, 0.1), False)


def ratio_of_medians(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """(ratio, 2.5 % and 97.5 % of it over resampled pairs)."""
    chance, pairs = random.Random(0), list(zip(ours, theirs))
    ratio = lambda drawn: statistics.median(a for a, _ in drawn) / statistics.median(b for _, b in drawn)
    found = sorted(ratio(chance.choices(pairs, k=len(pairs))) for _ in range(1000))
    return ratio(pairs), found[25], found[974]
