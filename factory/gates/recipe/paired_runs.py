"""Paired runs of two recipes from one checkpoint: N steps of trunk and an anneal to rate zero, a random seed a pair, in the sandbox.

Why the tail. Weights in mid-trunk carry the noise of their learning rate: after a few steps a lower rate looks better, and so does a larger
batch, though the lead disappears once the rate falls (arXiv 2410.05192 §3: a high rate makes progress that only the decay shows). So every
run ends in an anneal of the recipe's shape to zero, as every release does, and weights are scored after it. A tail that is too short leaves
some of that lead (docs/LOG.md), so runs for a lower rate or a larger batch are longer, on both sides. A run of N steps cannot show
what only later steps do: a rate that is too low in the long run may win a short one.

Both sides have the same code (the base's, approved; recipes are data), checkpoint, kernels, seed of the data and tokens a run. Where the batch
differs, the steps differ, so that the candidate gets no token more; where the length of the anneal differs, its share of the run differs.

All runs share one trainer process, which waits while a run is scored, so that at most two runs are on disk. The first pair begins with the
baseline, so that the process's peak memory after it is the baseline's; later pairs alternate.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from factory.core.removal import remove
from factory.gates.patch.session import Weights, read_weights
from factory.gates.patch.training import for_one_rank
from factory.gates.recipe.policy import RunsPolicy
from factory.gates.training_start import Start
from factory.gates.untrusted_files import read_bytes
from factory.runs.folders import reveal
from factory.sandbox import sandbox
from factory.sandbox.sandbox import Limits
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import TokenShard
from trainer.contract.errors import RecipeError
from trainer.contract.recipe import Recipe

POLL_SECONDS = 0.01
NEVER = 1 << 30  # checkpoint_every: a run writes its last step only
METRICS_BYTES = 1 << 26  # most that is read of one run's metrics
UNSTEADY_STEPS = 2  # first steps of a run whose speed is that of compilation and caches
SIDES = ("baseline", "candidate")

Score = Callable[[Weights], dict[str, float]]


@dataclass(frozen=True)
class Lengths:
    """Steps of one side's runs."""

    trunk: int
    tail: int


@dataclass
class MeasuredRuns:
    """What was measured, lists by side with an entry for each seed. ``failed``: what went wrong; '': nothing."""

    bits: dict[str, list[dict[str, float]]] = field(default_factory=lambda: {side: [] for side in SIDES})
    tokens_per_s: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    memory: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    failed_side: str = ""  # whose run failed; '': neither's
    out_of_time: bool = False  # the time limit ended the runs


def lengthened(policy: RunsPolicy, step: int, baseline: Recipe, candidate: Recipe) -> RunsPolicy:
    """``policy`` with longer runs where the candidate's rate (by peak or by schedule) is lower or its batch larger, from ``step``."""
    old, new = baseline.schedule, candidate.schedule
    warms = new.warmup_steps > max(old.warmup_steps, step)
    falls = new.kind == "cosine" and new.final_lr_share < old.final_lr_share
    lower = candidate.optimizer.lr < baseline.optimizer.lr or warms or falls
    calmer = lower or candidate.batch.sequences > baseline.batch.sequences
    times = policy.calmer_longer if calmer else 1
    return policy.model_copy(update={"steps": times * policy.steps, "tail_steps": times * policy.tail_steps})


def lengths(policy: RunsPolicy, step: int, baseline: Recipe, candidate: Recipe) -> dict[str, Lengths]:
    """Steps by side. The candidate gets at most the baseline's tokens; its tail gets the share of them that its recipe gives it.

    Raises: RecipeError when its batch is so large that no two steps fit, or its anneal so long that no trunk is left before it.
    """
    total = policy.steps + policy.tail_steps
    tokens = baseline.tokens_between(step, step + total)
    steps = 0
    while candidate.tokens_between(step, step + steps + 1) <= tokens:
        steps += 1
    if steps < 2:
        raise RecipeError(
            f"batch.sequences: {total} steps of the baseline have fewer tokens than two of the candidate: raise runs.steps"
        )
    ratio = candidate.schedule.anneal_steps / baseline.schedule.anneal_steps
    tail = max(1, round(policy.tail_steps * steps / total * ratio))
    if tail >= steps:
        raise RecipeError(
            f"schedule.anneal_steps: an anneal {ratio:.3g} times as long leaves no trunk in runs of {total} steps: raise runs.steps"
        )
    return {"baseline": Lengths(policy.steps, policy.tail_steps), "candidate": Lengths(steps - tail, tail)}


def run_recipe(recipe: Recipe, own_floor: bool, precision: str) -> dict[str, Any]:
    """The recipe for the sandbox's one rank, in the trunk's precision. The anneal ends at zero, unless the patch changes where it ends."""
    raw = for_one_rank(recipe.model_dump())
    raw |= {"checkpoint_every": NEVER, "keep_checkpoints": 1, "precision": precision}
    raw["stability"] = raw["stability"] | {"noise_scale_every": 0}
    if not own_floor:
        raw["schedule"] = raw["schedule"] | {"final_lr_share": 0.0}
    return raw


def domains_of(start: Start) -> set[str]:
    """The domains that the trunk's token shards hold. Raises: TrainerError for a shard that is damaged."""
    shards = [TokenShard(shard["path"], shard.get("moved")) for shard in start.plan["token_shards"]]
    return {domain for shard in shards for domain in shard.documents.column("domain").unique().to_pylist()}


def segment_specs(
    start: Start,
    recipe: Recipe,
    raw: dict[str, Any],
    size: Lengths,
    seed: int,
    held: set[str],
    folder: Path,
    kernels: Path,
    commit: str,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(trunk, tail) of one run; the tail continues from the trunk's checkpoint below ``folder``, and in its data.

    Raises: DataPlanError when no token shard has a domain of a mixture.
    """
    shards = [
        (shard["id"], shard["path"], shard["generation"], shard.get("content", ""), shard.get("moved", {}))
        for shard in start.plan["token_shards"]
    ]
    middle, last = start.step + size.trunk, start.step + size.trunk + size.tail

    def spec(kind: Literal["trunk", "anneal"], first: int, stop: int, checkpoint: Path) -> dict[str, Any]:
        plan, _ = DataPlan.make(recipe.mixture, kind, shards, seed).of_arrived(held, first, stop)
        return {
            "kind": kind,
            "recipe": raw,
            "data_plan": json.loads(plan.to_json()),
            "first_step": first,
            "last_step": stop,
            "initial_checkpoint": str(checkpoint),
            "restart_data": kind == "trunk",
            "code_commit": commit,
            "kernels": str(kernels),
        }

    between = folder / "trunk" / "checkpoints" / f"step-{middle:08d}"
    return spec("trunk", start.step, middle, start.checkpoint), spec("anneal", middle, last, between)


def paired_runs(
    policy: RunsPolicy,
    start: Start,
    recipes: dict[str, Recipe],
    changed: set[str],
    code: Path,
    commit: str,
    work: Path,
    origin: Weights,
    score: Score,
    advance: Callable[[str], None],
) -> MeasuredRuns:
    """Run and score every pair. ``changed``: the recipe's keys that differ; ``code``: of the base ``commit``.

    Raises: IsolationError; DataPlanError when no token shard has a domain of a mixture.
    """
    held = domains_of(start)
    sizes = lengths(policy, start.step, recipes["baseline"], recipes["candidate"])
    own_floor = "schedule.final_lr_share" in changed
    raw = {side: run_recipe(recipe, own_floor, start.recipe["precision"]) for side, recipe in recipes.items()}
    work.mkdir(parents=True, exist_ok=True)
    kernels = work / "kernels.yaml"
    kernels.write_text(start.kernels_of(code))
    runs: list[_Run] = []
    drawn = secrets.randbelow(90_000)  # the folders are named as live segments are
    for number in range(policy.seeds):
        seed = secrets.randbelow(1 << 31)
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            folder = work / "segments" / f"{drawn + len(runs):05d}"
            specs = segment_specs(start, recipes[side], raw[side], sizes[side], seed, held, folder, kernels, commit)
            runs.append(_Run(side, folder, specs))
    remove(work / "segments")
    for run in runs:
        for part in _Run.parts:
            (run.folder / part).mkdir(parents=True)
            run.opened[part] = os.open(run.folder / part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    feeder = _Feeder(runs, origin, score, advance)
    size = sum(tensor.numel() * tensor.element_size() for tensor in origin.values())
    limits = Limits(
        wall_seconds=policy.wall_seconds,
        file=max(Limits.file, 4 * size),
        output=max(Limits.output, 16 * size),  # two checkpoints of weights and moments, and one being written
    )
    readonly = [code, start.checkpoint, *(Path(shard["path"]) for shard in start.plan["token_shards"])]
    try:
        feeder.start()
        result = sandbox.run(
            [sys.executable, "-m", "trainer", "--wait", *(str(run.folder / p) for run in runs for p in _Run.parts)],
            output=work,
            readonly=readonly,
            cwd=code,
            limits=limits,
        )
    finally:
        feeder.over.set()
        feeder.join()
        for descriptor in (one for run in runs for one in run.opened.values()):
            os.close(descriptor)
    if feeder.error is not None:
        raise feeder.error
    found = feeder.found
    if not found.failed and feeder.done < len(runs):
        found.failed = result.why() if not result.timed_out else _stopped(policy, feeder.done, len(runs))
        found.out_of_time = result.timed_out
        found.failed_side = "" if result.timed_out else runs[feeder.done].side
    return found


def _stopped(policy: RunsPolicy, done: int, runs: int) -> str:
    return (
        f"{done} of {runs} runs were done after {policy.wall_seconds:.0f} s, which says nothing about the recipe: close other "
        "programs and have it judged again, or raise runs.wall_seconds in policies/gates/recipe.yaml"
    )


@dataclass(frozen=True)
class _Run:
    side: str
    folder: Path
    specs: tuple[dict[str, Any], dict[str, Any]]
    opened: dict[str, int] = field(
        default_factory=dict
    )  # part → its folder, opened before any code could change what is there

    parts = ("trunk", "tail")


class _Feeder(threading.Thread):
    """Reveals the runs one by one; reads, scores and deletes what each left before the next begins."""

    def __init__(self, runs: list[_Run], origin: Weights, score: Score, advance: Callable[[str], None]) -> None:
        super().__init__(daemon=True)
        self.runs, self.origin, self.score, self.advance = runs, origin, score, advance
        self.over, self.found, self.done = threading.Event(), MeasuredRuns(), 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            for run in self.runs:
                for part, spec in zip(_Run.parts, run.specs, strict=True):
                    reveal(run.opened[part], spec)
                if not self._wait_for(run.opened["tail"]):
                    return
                if not self._read(run):
                    break
                self.done += 1
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits for this one
            self.error = error
        for run in self.runs[self.done :]:  # an empty spec ends a trainer that waits, else its time limit does
            with contextlib.suppress(OSError):
                reveal(run.opened["trunk"], {})

    def _read(self, run: _Run) -> bool:
        weights, problem = read_weights(run.opened["tail"], run.specs[1]["last_step"], self.origin)
        bits = {} if problem else self.score(weights)
        if not problem and not all(math.isfinite(value) for value in bits.values()):
            problem = "its weights have no finite loss on held-out documents"
        if problem:
            self.found.failed, self.found.failed_side = problem, run.side
            return False
        stored = [read_bytes(run.opened[part], ("metrics.jsonl",), METRICS_BYTES) for part in _Run.parts]
        lines = [json.loads(line) for part in stored for line in part.splitlines()]
        self.found.bits[run.side].append(bits)
        speeds = [line["tokens_per_s"] for line in lines[UNSTEADY_STEPS:] or lines]
        self.found.tokens_per_s[run.side].append(statistics.median(speeds))
        self.found.memory.setdefault(run.side, float(max(line["memory"] for line in lines)))
        remove(run.folder)
        self.advance(f"{run.side}: {statistics.fmean(bits.values()):.4f} bits per byte")
        return True

    def _wait_for(self, folder: int) -> bool:
        """Is the result there?"""
        while not _exists(folder, "result.json"):
            if self.over.is_set():
                return _exists(folder, "result.json")  # it may have ended right after it wrote the file
            time.sleep(POLL_SECONDS)
        return True


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True
