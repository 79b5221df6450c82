"""Trains paired runs of the current and the proposed recipe in the sandbox, from one checkpoint, and scores them on held-out documents.

Each run makes N trunk steps and an anneal to rate zero. Each pair has its own random seed.

Why the anneal. Weights in mid-trunk carry the noise of their learning rate. After a few steps a lower rate looks better, and so does a larger batch.
This lead disappears when the rate falls (arXiv 2410.05192 §3: only the decay shows the progress of a high rate). So every run ends, like every
release, in an anneal of the recipe's shape to zero, and the weights are scored after the anneal. An anneal that is too short leaves some of the lead
(docs/LOG.md), so runs for a lower rate or a larger batch are longer on both sides. A run of N steps cannot show effects of later steps: a rate that
is too low in the long run may win a short run.

Both sides have the same code (the base's, which is approved; recipes are data), checkpoint, kernels, data seed and number of tokens. If the batch
size differs, the numbers of steps differ, so that the candidate gets no more tokens. If the length of the anneal differs, its share of the run
differs.

All runs share one trainer process, which waits while a run is scored, so at most two runs are on disk. The first pair begins with the
baseline, so that the process's peak memory after that run is the baseline's. In later pairs, the side that begins alternates.
"""

from __future__ import annotations

import json
import math
import secrets
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from factory.core import devices
from factory.core.path_removal import remove_path
from factory.gates.patch.held_out_scores import measure_bits_per_byte, read_held_out_texts
from factory.gates.recipe.policy import RecipePolicy, RunsPolicy
from factory.gates.stage_interface import (
    NO_START,
    NOTHING_HELD_OUT,
    PatchCase,
    StageResult,
    make_failed_evidence,
    make_missing_evidence,
    make_passed_evidence,
)
from factory.gates.time_limits import make_out_of_time_evidence
from factory.gates.training_start import TrainingStart
from factory.runs.arm import Arm, make_recipe_for_one_rank
from factory.runs.arm_runner import ArmRunner
from factory.runs.compile_cache import copy_cache
from factory.runs.sandboxed_training import ArmRunEnd
from factory.runs.trace import read_live_checkpoint, read_step_lines_in_open_folder
from factory.runs.untrusted_files import UntrustedFileError
from kernels.contract.message import Message
from trainer.contract.checkpoint import format as checkpoint_files
from trainer.contract.checkpoint.format import Tensors
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import TokenShard
from trainer.contract.errors import RecipeError, TrainerError
from trainer.contract.recipe import Recipe, copy_with_changed_keys

# Changes of these keys do not change the time or memory of a step, so the measured cost is ignored.
FREE = ("optimizer.", "mixture.", "schedule.", "stability.")
NEVER = 1 << 30  # as checkpoint_every: a run writes only its last checkpoint
UNSTEADY_STEPS = 2  # compilation and caches determine the speed of the first steps
SIDES = ("baseline", "candidate")

Score = Callable[[Tensors], dict[str, float]]


@dataclass(frozen=True)
class RunLengths:
    """The steps of each run of one side: trunk steps, then anneal steps (``tail``)."""

    trunk: int
    tail: int


@dataclass
class MeasuredRuns:
    """The measurements: side → a list with an entry for each seed, or one number. ``failed``: the error; '': no error."""

    bits: dict[str, list[dict[str, float]]] = field(default_factory=lambda: {side: [] for side in SIDES})
    tokens_per_s: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    memory: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    failed_side: str = ""  # the side whose run failed; '': none
    out_of_time: bool = False  # the time limit ended the runs

    def to_json(self) -> dict[str, Any]:
        """Return the evidence for the judge."""
        evidence: dict[str, Any] = dict(self.bits)
        for side, speeds in self.tokens_per_s.items():
            evidence |= {f"{side}_tokens_per_s": speeds, f"{side}_memory": self.memory.get(side)}
        return evidence


def run(case: PatchCase[RecipePolicy]) -> StageResult:
    """Train and score the paired runs, and return their evidence. Raises: IsolationError."""
    start, (path,), changes = case.start, case.changed_paths, case.handed_on["static"]
    if start is None:
        return StageResult(NO_START)
    recipes = {"baseline": Recipe.load(case.baseline / path), "candidate": Recipe.load(case.candidate / path)}
    policy = lengthen_runs_in_policy(case.policy.runs, start.step, recipes["baseline"], recipes["candidate"])
    trained = Recipe.parse(start.recipe)
    if (trained.model, trained.optimizer.name) != (recipes["baseline"].model, recipes["baseline"].optimizer.name):
        return StageResult(
            make_missing_evidence(
                Message(
                    "recipe.other_model",
                    "The trunk was trained with another model or optimiser than {path} names.",
                    path=path,
                )
            )
        )
    texts, eval_policy = read_held_out_texts(policy.held_out_documents, policy.held_out_bytes, case.plant)
    if not texts:
        return StageResult(NOTHING_HELD_OUT)
    origin = checkpoint_files.read_tensors(start.checkpoint, "model")
    shape = recipes["baseline"].model_dump()
    compiled = devices.get_compiled_code_folder(case.workspace.root, start.commit)  # by approved code during training
    copy_cache(compiled, case.work / "recipe" / "cache")
    runs = ArmRunner(case.plant, case.work, "recipe gate", case.subject)
    with case.progress.task("runs, both recipes", 2 * policy.seeds) as task:
        try:
            sizes = choose_run_lengths(policy, start.step, recipes["baseline"], recipes["candidate"])
            held, kernels = list_trained_domains(start), start.resolve_kernels(case.baseline)
            own_floor = "schedule.final_lr_share" in changes
            sides = {
                name: RecipeSide(
                    name, recipe, make_run_recipe(recipe, own_floor, start.recipe["precision"]), sizes[name], held, case.applied.base, kernels
                )
                for name, recipe in recipes.items()
            }  # fmt: skip
            ours, theirs = sides["candidate"], sides["baseline"]
            if (ours.raw, ours.size) == (theirs.raw, theirs.size):
                return StageResult(
                    make_failed_evidence(
                        Message(
                            "recipe.key_is_set",
                            "The gate's runs set the changed key to a value of their own, so they cannot show the effect of the change.",
                        )
                    )
                )
            score = lambda weights: measure_bits_per_byte(weights, shape, texts, eval_policy)
            advance = lambda words: task.advance(1, words)
            found = train_pairs(runs, policy, start, sides, case.baseline, origin, score, advance)
        except TrainerError as error:
            return StageResult(make_missing_evidence(Message("recipe.cannot_run", "{error}", error=error.message)))
    evidence = found.to_json() | {
        "held_out_documents": len(texts),
        "from_step": start.step,
        "same_cost": all(key.startswith(FREE) for key in changes),
        "steps": {side: [size.trunk, size.tail] for side, size in sizes.items()},
    }
    if found.failed and found.failed_side == "candidate":
        return StageResult(make_failed_evidence(_run_failed("candidate", found.failed), **evidence))
    if found.out_of_time:
        return StageResult(make_out_of_time_evidence(Message.from_json(found.failed), **evidence))
    if found.failed:  # a failure of the baseline is no evidence about the candidate
        return StageResult(make_missing_evidence(_run_failed("baseline", found.failed), **evidence))
    size = sizes["candidate"]
    reason = Message(
        "recipe.trained",
        "Both recipes trained with {seeds} seeds from step {step}: {trunk} steps, then an anneal of {tail} steps.",
        seeds=policy.seeds, step=start.step, trunk=size.trunk, tail=size.tail,
    )  # fmt: skip
    return StageResult(make_passed_evidence(reason, **evidence))


def _run_failed(side: str, problem: str) -> Message:
    return Message("recipe.run_failed", "A run of the {side} failed: {problem}", side=side, problem=problem)


def lengthen_runs_in_policy(policy: RunsPolicy, step: int, baseline: Recipe, candidate: Recipe) -> RunsPolicy:
    """Return ``policy``, with longer runs if the candidate has a lower rate after ``step`` (by peak or by schedule) or a larger batch."""
    old, new = baseline.schedule, candidate.schedule
    warms = new.warmup_steps > max(old.warmup_steps, step)
    falls = new.kind == "cosine" and new.final_lr_share < old.final_lr_share
    lower = candidate.optimizer.lr < baseline.optimizer.lr or warms or falls
    calmer = lower or candidate.batch.sequences > baseline.batch.sequences
    times = policy.calmer_longer if calmer else 1
    return policy.model_copy(update={"steps": times * policy.steps, "tail_steps": times * policy.tail_steps})


def choose_run_lengths(policy: RunsPolicy, step: int, baseline: Recipe, candidate: Recipe) -> dict[str, RunLengths]:
    """Return side → the steps of its runs. The candidate gets at most as many tokens as the baseline. Its recipe decides the anneal's share.

    Raises: RecipeError if the candidate's batch is so large that it has fewer than two steps, or its anneal so long that no trunk step is left.
    """
    total = policy.steps + policy.tail_steps
    tokens = baseline.count_tokens_between(step, step + total)
    steps = 0
    while candidate.count_tokens_between(step, step + steps + 1) <= tokens:
        steps += 1
    if steps < 2:
        raise RecipeError(
            "recipe.batch_too_large",
            "batch.sequences: {steps} steps of the baseline have fewer tokens than two steps of the candidate, so the runs are too short. "
            "Raise runs.steps in policies/gates/recipe.yaml.",
            steps=total,
        )
    ratio = candidate.schedule.anneal_steps / baseline.schedule.anneal_steps
    tail = max(1, round(policy.tail_steps * steps / total * ratio))
    if tail >= steps:
        raise RecipeError(
            "recipe.anneal_too_long",
            "schedule.anneal_steps: the candidate's anneal is {times:.3g} times as long as the baseline's, so runs of {steps} steps have no "
            "steps before the anneal. Raise runs.steps in policies/gates/recipe.yaml.",
            times=ratio,
            steps=total,
        )
    return {"baseline": RunLengths(policy.steps, policy.tail_steps), "candidate": RunLengths(steps - tail, tail)}


def make_run_recipe(recipe: Recipe, keep_final_lr: bool, precision: str) -> dict[str, Any]:
    """Return the recipe for the sandbox's single rank, in the trunk's precision. The anneal ends at rate zero, except with ``keep_final_lr``.

    ``keep_final_lr``: the patch changes ``schedule.final_lr_share``, so the anneal ends at the recipe's own rate.
    """
    keys = {"checkpoint_every": NEVER, "keep_checkpoints": 1, "precision": precision, "stability.noise_scale_every": 0}
    return copy_with_changed_keys(
        make_recipe_for_one_rank(recipe.model_dump()),
        keys | ({} if keep_final_lr else {"schedule.final_lr_share": 0.0}),
    )


def list_trained_domains(start: TrainingStart) -> set[str]:
    """Return the domains in the trunk's token shards. Raises: TrainerError for a damaged shard."""
    shards = [TokenShard(shard["path"], shard.get("moved")) for shard in start.plan["token_shards"]]
    return {domain for shard in shards for domain in shard.domains}


@dataclass(frozen=True)
class RecipeSide:
    """The values that the runs of one recipe share. ``raw``: the result of ``make_run_recipe``. ``held``: the domains in the token shards."""

    name: str
    recipe: Recipe
    raw: Mapping[str, Any]
    size: RunLengths
    held: set[str]
    commit: str
    kernels: str

    def make_arms(self, start: TrainingStart, seed: int, folder: Path) -> dict[Path, Arm]:
        """Return folder → arm for the two parts of one run. The tail continues from the trunk's checkpoint, and at its place in the data.

        Raises: DataPlanError if no token shard has a domain of the mixture.
        """
        shards = [
            (shard["id"], shard["path"], shard["generation"], shard.get("content", ""), shard.get("moved", {}))
            for shard in start.plan["token_shards"]
        ]
        middle = start.step + self.size.trunk

        def arm(kind: Literal["trunk", "anneal"], first: int, stop: int, checkpoint: Path) -> Arm:
            plan, _ = DataPlan.make_for_segment(self.recipe.mixture, kind, shards, seed).copy_without_missing_domains(
                self.held, first, stop
            )
            base = {
                "kind": kind, "recipe": self.raw, "data_plan": json.loads(plan.to_json()), "first_step": first, "last_step": stop,
                "initial_checkpoint": str(checkpoint), "restart_data": kind == "trunk", "code_commit": self.commit,
            }  # fmt: skip
            return Arm(f"{self.name}, run {folder.name}, {kind}", base, self.commit, kernels=self.kernels)

        between = folder / "trunk" / "checkpoints" / checkpoint_files.format_checkpoint_name(middle)
        return {
            folder / "trunk": arm("trunk", start.step, middle, start.checkpoint),
            folder / "tail": arm("anneal", middle, middle + self.size.tail, between),
        }


def train_pairs(
    runs: ArmRunner,
    policy: RunsPolicy,
    start: TrainingStart,
    sides: Mapping[str, RecipeSide],
    code: Path,
    origin: Tensors,
    score: Score,
    advance: Callable[[str], None],
) -> MeasuredRuns:
    """Train and score every pair. ``code``: the worktree of the base. ``score``: weights → bits per byte by domain.

    The first failure or the time limit ends the runs. Raises: IsolationError; DataPlanError if no token shard has a domain of the mixture.
    """
    work = runs.home / "recipe"
    drawn = secrets.randbelow(90_000)  # the folders have names like those of live segments
    order: list[RecipeSide] = []
    arms: dict[Path, Arm] = {}
    for number in range(policy.seeds):
        seed = secrets.randbelow(1 << 31)
        for name in SIDES if number % 2 == 0 else reversed(SIDES):
            arms |= sides[name].make_arms(start, seed, work / "segments" / f"{drawn + len(order):05d}")
            order.append(sides[name])
    found = MeasuredRuns()
    with closing(runs.train_sandboxed(work, code, arms, policy.wall_seconds)) as trained:
        for done, side in enumerate(order):
            parts = [next(trained)]
            if not parts[0].failed:
                parts.append(next(trained))
            try:
                if parts[-1].failed:
                    raise UntrustedFileError(parts[-1].failed)
                last = start.step + side.size.trunk + side.size.tail
                bits = _measure(found, side.name, parts, last, origin, score, runs.home)
            except UntrustedFileError as error:
                found.failed, found.failed_side = error.message, side.name
            if parts[-1].out_of_time:
                found.failed_side, found.out_of_time = "", True
                found.failed = Message(
                    "recipe.stopped",
                    "The time limit of {seconds:.0f} s stopped the runs after {done} of {runs}, so the recipe was not judged. Close other "
                    "programs and judge the patch again, or raise runs.wall_seconds in policies/gates/recipe.yaml.",
                    seconds=policy.wall_seconds, done=done, runs=len(order),
                )  # fmt: skip
            if found.failed:
                return found
            remove_path(parts[0].folder.parent)
            advance(f"{side.name}: {bits:.4f} bits per byte")
    return found


def _measure(
    found: MeasuredRuns, side: str, parts: Sequence[ArmRunEnd], last: int, origin: Tensors, score: Score, aside: Path
) -> float:
    """Add the measurements of a run to ``found``. Returns the mean of its bits per byte over the domains. Raises: UntrustedFileError."""
    bits = score(read_live_checkpoint(parts[-1].opened, last, origin, aside).model)
    if not all(math.isfinite(value) for value in bits.values()):
        raise UntrustedFileError("recipe.no_finite_loss", "the run's weights have no finite loss on held-out documents")
    lines = [line for part in parts for line in read_step_lines_in_open_folder(part.opened, "metrics.jsonl")]
    found.bits[side].append(bits)
    found.tokens_per_s[side].append(statistics.median(line["tokens_per_s"] for line in lines[UNSTEADY_STEPS:] or lines))
    found.memory.setdefault(side, float(max(line["memory"] for line in lines)))
    return statistics.fmean(bits.values())
