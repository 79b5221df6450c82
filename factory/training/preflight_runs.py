"""Makes the runs that a preflight compares, with the segment's commit, in a folder of the segment. ``preflight`` describes and judges them.

Three trainers run one after the other. The first makes the straight run. The second makes the runs on one rank, which start from a
checkpoint of the straight run. The third makes the runs on two ranks, over gloo if there is no GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from factory.computing import compute_settings
from factory.core.errors import SegmentError
from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.git.repository import CheckoutError, RepositoryError
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject
from factory.runs.arm import Arm
from factory.runs.arm_runner import ArmRunner
from factory.runs.distance import (
    Tensors,
    compute_relative_differences,
    find_different_weights,
    measure_checkpoint_distance,
    measure_norm_error,
    save_perturbed_checkpoint,
)
from factory.runs.live_code import LiveCode
from factory.runs.trace import RunTrace, Series, read_checkpoint
from factory.runs.untrusted_files import UntrustedFileError
from factory.training.certificate import PreflightPolicy
from factory.training.certificate_runs import make_unreadable_run_message
from factory.training.planning import read_data_plan
from factory.training.preflight import (
    LEAD_STEPS,
    PERTURBED_RUNS,
    ROUNDING,
    WAYS,
    PreflightEvidence,
    TrainingVariant,
    make_small_recipe,
)
from factory.training.preflight_noise import DistanceFromStraightRun, find_tensor_kind
from kernels.contract.message import Message
from trainer.contract.checkpoint.format import format_checkpoint_name
from trainer.contract.errors import TrainerError
from trainer.contract.recipe import Recipe, copy_with_changed_keys

SERIES = ("loss", "grad_norm")  # of metrics.jsonl
FIRST_MOMENTS = ("exp_avg", "momentum")  # kinds of tensors whose elements are of the size of the gradient's
RANKS = 2
INITIAL_WEIGHTS_PREFIX = (
    "first weights of "  # names a run of one step, whose learning rate is too small to move a weight
)
FROZEN_RECIPE = {"optimizer.lr": 1e-30, "checkpoint_every": 1}


def run_preflight(plant: Plant, row: SegmentRow, policy: PreflightPolicy) -> PreflightEvidence:
    """Make all runs that the policy asks for, with the segment's code. Returns their evidence.

    Raises: SegmentError if a trainer was stopped or the disk is full; CheckoutError; any error that a fault of the machine causes.
    After any of these errors the caller may try again.
    """
    began = time.monotonic()
    flight = PreflightRuns(plant, row, policy)
    found = PreflightEvidence(
        row.code_commit, LEAD_STEPS, policy.steps, flight.device == "cpu", left_out=flight.left_out
    )
    plant.progress.line(
        Message(
            "training.preflight_begins",
            "  The preflight of commit {commit:.12} before segment {segment} trains a small model in "
            "{ways:,|way|different ways}; together they take {steps:,|step|steps}.",
            commit=row.code_commit,
            segment=row.id,
            ways=len(flight.ways),
            steps=flight.total_steps,
        )  # fmt: skip
    )
    try:
        code = LiveCode.check_out_commit(plant, row.code_commit)
    except RepositoryError as error:
        if isinstance(error, CheckoutError) or is_machine_fault_unrelated_to_files(error):
            raise
        return replace(found, failed={"straight": str(error)})
    for name, arms in flight.list_arms_by_trainer():
        done = flight.runs.train_with_live_code(code, arms, f"preflight, {name}")
        if done.code:
            unfinished = [arm for arm in arms if not (flight.runs.find_arm_folder(arm) / "result.json").exists()]
            return replace(found, failed={(unfinished or arms)[0].name: done.line})
    found = compare_preflight_runs(
        found, flight.ways, flight.checkpoint_before_branches, flight.make_start_checkpoint, flight.make_trace
    )
    return replace(found, seconds=time.monotonic() - began)


class PreflightRuns:
    """The runs of one preflight. Each run has a name."""

    def __init__(self, plant: Plant, row: SegmentRow, policy: PreflightPolicy) -> None:
        self.row, self.last = row, LEAD_STEPS + policy.steps
        self.runs = ArmRunner(plant, Path(row.folder) / "preflight", "preflight", Subject("segment", row.id))
        self.recipe = Recipe.parse(
            make_small_recipe(Recipe.parse(row.recipe_json).model_dump(), policy.steps)
        ).model_dump()
        self.device = row.computing["machine"]["device"] if row.computing else "cpu"
        asked = [way for way in WAYS if way.part in policy.parts]
        self.left_out = {way.name: why for way in asked if (why := self._impossible(way))}
        self.ways = [way for way in asked if way.name not in self.left_out]
        self.base = {
            "kind": "trunk", "recipe": self.recipe, "data_plan": read_data_plan(plant.ledger, row) | {"max_epochs": 1000}, "first_step": 0,
            "last_step": self.last, "initial_checkpoint": None, "code_commit": row.code_commit,
        }  # fmt: skip

    @property
    def total_steps(self) -> int:
        """The steps of all runs together."""
        return LEAD_STEPS + (1 + len(PERTURBED_RUNS) + len(self.ways)) * (self.last - LEAD_STEPS)

    def _impossible(self, way: TrainingVariant) -> str:
        """The reason why this machine cannot run a way, as a clause; '' if it can."""
        if way.part == "kernels" and not self.row.computing:
            return Message(
                "training.preflight.kernels_unknown",
                "an older version of the factory planned the segment and did not record the segment's kernels",
            )
        if way.part == "kernels" and set((self.row.computing or {})["kernels"].values()) == {"reference"}:
            return Message("training.preflight.all_reference", "every op already runs its reference kernel")
        if way.part == "compile" and not self.row.recipe_json["compile"]:
            return Message("training.preflight.not_compiled", "the recipe has 'compile: false'")
        if way.ranks > 1 and self.device != "cpu":
            import torch

            if torch.cuda.device_count() < way.ranks:
                return Message(
                    "training.preflight.too_few_gpus", "{ranks} ranks need one GPU each, and this machine has {gpus:,|GPU|GPUs}",
                    ranks=way.ranks, gpus=torch.cuda.device_count(),
                )  # fmt: skip
        try:
            recipe = Recipe.parse(copy_with_changed_keys(self.recipe, way.recipe))
            recipe.batch.refuse_uneven_split(recipe.parallel.data_ranks(way.ranks, recipe.model))
        except TrainerError as error:
            return error.message
        return ""

    def list_arms_by_trainer(self) -> Iterator[tuple[str, list[Arm]]]:
        """Yield (name, arms) of each trainer, in order. The arms of later trainers start from a checkpoint of the first."""
        yield "straight", [self.make_arm("straight")]
        ranks = [way.name for way in self.ways if way.ranks > 1]
        alone = [way.name for way in self.ways if way.ranks == 1]
        yield (
            "one rank",
            [
                self.make_arm(name)
                for name in (*alone, *PERTURBED_RUNS, *([INITIAL_WEIGHTS_PREFIX + "1 rank"] if ranks else []))
            ],
        )
        if ranks:
            yield (
                f"{RANKS} ranks",
                [self.make_arm(name) for way in ranks for name in (INITIAL_WEIGHTS_PREFIX + way, way)],
            )

    def make_arm(self, name: str) -> Arm:
        """The arm of a run. ``name``: 'straight', a name in ``WAYS`` or ``PERTURBED_RUNS``, or a name after ``INITIAL_WEIGHTS_PREFIX``."""
        way = next((way for way in WAYS if way.name == name.removeprefix(INITIAL_WEIGHTS_PREFIX)), None)
        born, kernels = name.startswith(INITIAL_WEIGHTS_PREFIX), self.row.computing
        if way and way.reference_kernels and kernels:
            kernels = kernels | {"kernels": dict.fromkeys(kernels["kernels"], "reference")}
        return Arm(
            name, self.base | ({"last_step": 1} if born else {}), self.row.code_commit,
            recipe={**(way.recipe if way else {}), **(FROZEN_RECIPE if born else {})},
            start=None if born or name == "straight" else self.make_start_checkpoint(name),
            kernels=compute_settings.format_kernels_file(kernels), ranks=way.ranks if way else 1,
        )  # fmt: skip

    def make_trace(self, name: str) -> RunTrace:
        """The trace of a run from step ``LEAD_STEPS`` on, where the runs separate."""
        return replace(
            self.runs.open_arm_trace(self.make_arm(name)),
            first=0 if name.startswith(INITIAL_WEIGHTS_PREFIX) else LEAD_STEPS,
        )

    @cached_property
    def checkpoint_before_branches(self) -> Path:
        """The straight run's checkpoint at step ``LEAD_STEPS``, where the runs separate."""
        return self.runs.find_arm_folder(self.make_arm("straight")) / "checkpoints" / format_checkpoint_name(LEAD_STEPS)

    def make_start_checkpoint(self, name: str) -> Path:
        """The checkpoint from which a run starts: the straight run's checkpoint, or a perturbed copy of it."""
        if name not in PERTURBED_RUNS:
            return self.checkpoint_before_branches
        target = self.runs.home / "perturbed" / name.replace(" ", "-")
        return save_perturbed_checkpoint(
            self.checkpoint_before_branches, target, ROUNDING[self.recipe["precision"]], PERTURBED_RUNS.index(name)
        )


# -- what the runs left ------------------------------------------------------------------------------------------------
def compare_preflight_runs(
    evidence: PreflightEvidence,
    ways: Sequence[TrainingVariant],
    branch_checkpoint: Path,
    start_checkpoint_of: Callable[[str], Path],
    trace_of: Callable[[str], RunTrace],
) -> PreflightEvidence:
    """Return ``evidence`` with the distance of each run from the straight run. Holds four checkpoints in memory.

    ``checkpoint_before_branches``: the straight run's checkpoint where the runs separate. ``start_checkpoint_of`` and
    ``trace_of``: functions from a run's name to its first checkpoint and to its trace. Raises: any error that a fault of the machine causes,
    because such an error is no evidence about the runs.
    """
    ranks, run = [way.name for way in ways if way.ranks > 1], "straight"
    try:
        branch, straight = read_checkpoint(branch_checkpoint), trace_of(run)
        series, apart = read_metric_series(straight), {}
        sum_error = max(measure_sum_error(checkpoint.optimizer) for checkpoint in (branch, straight.final_checkpoint))
        longest = max((held.numel() for held in branch.optimizer.values() if held.is_floating_point()), default=0)
        for run in (*PERTURBED_RUNS, *(way.name for way in ways)):
            other, left = (
                trace_of(run),
                read_checkpoint(start_checkpoint_of(run)).model if run in PERTURBED_RUNS else None,
            )
            values = read_metric_series(other)
            shares = {name: compute_relative_differences(series[name], values[name]) for name in SERIES}
            apart[run] = DistanceFromStraightRun(
                shares,
                measure_checkpoint_distance(
                    straight.final_checkpoint, other.final_checkpoint, branch.model, left
                ).list_relative_distances_by_tensor(),
            )
        born: dict[str, list[str]] = {}
        if ranks:
            first = trace_of(run := INITIAL_WEIGHTS_PREFIX + "1 rank").final_checkpoint.model
            born = {
                way: find_different_weights(first, trace_of(run := INITIAL_WEIGHTS_PREFIX + way).final_checkpoint.model)
                for way in ranks
            }
        copies = {run: trace_of(run).weights_differing_between_ranks for run in ranks}
    except (UntrustedFileError, SegmentError) as error:
        return replace(evidence, failed={run: make_unreadable_run_message(error)})
    rounding = [apart.pop(run) for run in PERTURBED_RUNS]
    return replace(
        evidence,
        rounding=rounding,
        sum_error=sum_error,
        longest_sum=longest,
        apart=apart,
        born_apart=born,
        replicas_apart=copies,
    )


def measure_sum_error(optimizer: Tensors) -> float:
    """Return the largest error of an fp32 norm among the first moments, whose elements scatter as those of the gradient do."""
    return measure_norm_error(
        {name: held for name, held in optimizer.items() if find_tensor_kind(name) in FIRST_MOMENTS}
    )


def read_metric_series(trace: RunTrace) -> dict[str, Series]:
    """The values of each of ``SERIES`` by step, with None where the trainer wrote nothing."""
    nothing: Series = [None] * (trace.last - trace.first)
    return dict.fromkeys(SERIES, nothing) | trace.collect_metric_series(SERIES)
