"""The runs behind a preflight, of the new commit, below the segment's folder; ``preflight`` says what they are.

Three trainers one after the other: the straight run; what goes on from its checkpoint; two ranks, over gloo where there is no GPU, on however
few cores. Nothing here judges.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from factory.computing import computing
from factory.core.errors import SegmentError
from factory.core.faults import is_of_no_file
from factory.git.repository import CheckoutError, RepositoryError
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject
from factory.runs.arm import Arm
from factory.runs.distance import distance, perturbed, shares_of, weights_apart
from factory.runs.live_code import LiveCode
from factory.runs.running import Runs
from factory.runs.trace import Series, Trace, read_checkpoint
from factory.runs.untrusted_files import UntrustedFileError
from factory.training.certificate import PreflightPolicy
from factory.training.planning import plan_of
from factory.training.preflight import (
    LEAD,
    PERTURBED,
    ROUNDING,
    WAYS,
    FromStraight,
    PreflightEvidence,
    Way,
    small_recipe,
)
from trainer.contract.checkpoint.format import name_of
from trainer.contract.errors import TrainerError
from trainer.contract.recipe import Recipe, with_keys

SERIES = ("loss", "grad_norm")  # of metrics.jsonl
RANKS = 2
BORN = "first weights of "  # a run of one step, which is too small to move a weight
STILL = {"optimizer.lr": 1e-30, "checkpoint_every": 1}


def run_preflight(plant: Plant, row: SegmentRow, policy: PreflightPolicy) -> PreflightEvidence:
    """Run all that the policy asks for under a segment's code. Raises: SegmentError when a trainer was stopped or the disk is full, CheckoutError,
    and what a fault of the machine makes of it: begin again then."""
    began = time.monotonic()
    flight = Flight(plant, row, policy)
    found = PreflightEvidence(row.code_commit, LEAD, policy.steps, flight.device == "cpu", left_out=flight.left_out)
    plant.progress.line(
        f"  preflight of {row.code_commit[:12]} before segment {row.id}: {len(flight.ways)} ways to train a small model, "
        f"{flight.steps} steps in all"
    )
    try:
        code = LiveCode.of(plant, row.code_commit)
    except RepositoryError as error:
        if isinstance(error, CheckoutError) or is_of_no_file(error):
            raise
        return replace(found, failed={"straight": str(error)})
    for name, arms in flight.trainers():
        done = flight.runs.live(code, arms, f"preflight, {name}")
        if done.code:
            unfinished = [arm for arm in arms if not (flight.runs.folder(arm) / "result.json").exists()]
            return replace(found, failed={(unfinished or arms)[0].name: done.line})
    found = compare(found, flight.ways, flight.parted, flight.began, flight.trace)
    return replace(found, seconds=time.monotonic() - began)


class Flight:
    """The arms of one preflight, each by its name."""

    def __init__(self, plant: Plant, row: SegmentRow, policy: PreflightPolicy) -> None:
        self.row, self.last = row, LEAD + policy.steps
        self.runs = Runs(plant, Path(row.folder) / "preflight", "preflight", Subject("segment", row.id))
        self.recipe = Recipe.parse(small_recipe(Recipe.parse(row.recipe_json).model_dump(), policy.steps)).model_dump()
        self.device = row.computing["machine"]["device"] if row.computing else "cpu"
        asked = [way for way in WAYS if way.part in policy.parts]
        self.left_out = {way.name: why for way in asked if (why := self._impossible(way))}
        self.ways = [way for way in asked if way.name not in self.left_out]
        self.base = {
            "kind": "trunk", "recipe": self.recipe, "data_plan": plan_of(plant.ledger, row) | {"max_epochs": 1000}, "first_step": 0,
            "last_step": self.last, "initial_checkpoint": None, "code_commit": row.code_commit,
        }  # fmt: skip

    @property
    def steps(self) -> int:
        """Of all runs."""
        return LEAD + (1 + len(PERTURBED) + len(self.ways)) * (self.last - LEAD)

    def _impossible(self, way: Way) -> str:
        """Why a way cannot be run here; empty: it can."""
        if way.part == "kernels" and not self.row.computing:
            return "the segment was planned by a factory that did not write its kernels down"
        if way.part == "kernels" and set((self.row.computing or {})["kernels"].values()) == {"reference"}:
            return "every op runs its reference already"
        if way.part == "compile" and not self.row.recipe_json["compile"]:
            return "the recipe does not compile"
        if way.ranks > 1 and self.device != "cpu":
            import torch

            if torch.cuda.device_count() < way.ranks:
                return f"this machine has {torch.cuda.device_count()} GPU, and each of {way.ranks} ranks needs one"
        try:
            recipe = Recipe.parse(with_keys(self.recipe, way.recipe))
            recipe.batch.check_ranks(recipe.parallel.data_ranks(way.ranks, recipe.model))
        except TrainerError as error:
            return str(error)
        return ""

    def trainers(self) -> Iterator[tuple[str, list[Arm]]]:
        """(what, its arms) of each trainer, in order: later arms start from what the first one left."""
        yield "straight", [self.arm("straight")]
        ranks = [way.name for way in self.ways if way.ranks > 1]
        alone = [way.name for way in self.ways if way.ranks == 1]
        yield "one rank", [self.arm(name) for name in (*alone, *PERTURBED, *([BORN + "1 rank"] if ranks else []))]
        if ranks:
            yield f"{RANKS} ranks", [self.arm(name) for way in ranks for name in (BORN + way, way)]

    def arm(self, name: str) -> Arm:
        way = next((way for way in WAYS if way.name == name.removeprefix(BORN)), None)
        born, kernels = name.startswith(BORN), self.row.computing
        if way and way.reference_kernels and kernels:
            kernels = kernels | {"kernels": dict.fromkeys(kernels["kernels"], "reference")}
        return Arm(
            name, self.base | ({"last_step": 1} if born else {}), self.row.code_commit,
            recipe={**(way.recipe if way else {}), **(STILL if born else {})}, start=None if born or name == "straight" else self.began(name),
            kernels=computing.kernels_text(kernels), ranks=way.ranks if way else 1,
        )  # fmt: skip

    def trace(self, name: str) -> Trace:
        """What an arm left, from where the runs part."""
        return replace(self.runs.trace(self.arm(name)), first=0 if name.startswith(BORN) else LEAD)

    @cached_property
    def parted(self) -> Path:
        """The straight run's checkpoint where the runs part."""
        return self.runs.folder(self.arm("straight")) / "checkpoints" / name_of(LEAD)

    def began(self, name: str) -> Path:
        """What an arm goes on from: that checkpoint, or a perturbed copy of it."""
        if name not in PERTURBED:
            return self.parted
        target = self.runs.home / "perturbed" / name.replace(" ", "-")
        return perturbed(self.parted, target, ROUNDING[self.recipe["precision"]], PERTURBED.index(name))


# -- what the runs left ------------------------------------------------------------------------------------------------
def compare(
    found: PreflightEvidence,
    ways: Sequence[Way],
    parted: Path,
    began: Callable[[str], Path],
    trace: Callable[[str], Trace],
) -> PreflightEvidence:
    """Fill in how far each run is from the straight one. Holds four checkpoints at a time.

    ``began``, ``trace``: by a run's name, the checkpoint that it began with, and what it left. Raises: what a fault of the machine makes of
    it, which says nothing about the runs.
    """
    ranks, run = [way.name for way in ways if way.ranks > 1], "straight"
    try:
        begun, straight = read_checkpoint(parted).model, trace(run)
        series, apart = values_of(straight), {}
        for run in (*PERTURBED, *(way.name for way in ways)):
            other, left = trace(run), read_checkpoint(began(run)).model if run in PERTURBED else None
            values = values_of(other)
            shares = {name: shares_of(series[name], values[name]) for name in SERIES}
            apart[run] = FromStraight(shares, distance(straight.left, other.left, begun, left).shares())
        born: dict[str, list[str]] = {}
        if ranks:
            first = trace(run := BORN + "1 rank").left.model
            born = {way: weights_apart(first, trace(run := BORN + way).left.model) for way in ranks}
        copies = {run: trace(run).replicas_apart for run in ranks}
    except (UntrustedFileError, SegmentError) as error:
        return replace(found, failed={run: f"what it left cannot be read: {error}"})
    rounding = [apart.pop(run) for run in PERTURBED]
    return replace(found, rounding=rounding, apart=apart, born_apart=born, replicas_apart=copies)


def values_of(trace: Trace) -> dict[str, Series]:
    """Every series, also one that was not written."""
    nothing: Series = [None] * (trace.last - trace.first)
    return dict.fromkeys(SERIES, nothing) | trace.series(SERIES)
