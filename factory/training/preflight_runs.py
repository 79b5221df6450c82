"""The runs behind a preflight, in the new commit's own worktree, below the segment's folder; ``preflight`` says what they are.

Three trainers one after the other: the straight run; what goes on from its checkpoint in one process; two ranks, over gloo where
there is no GPU, on however few cores. A killed factory goes on where it was. Nothing here judges.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from factory.computing import computing
from factory.core.errors import SegmentError
from factory.core.faults import is_of_no_file
from factory.core.left_files import parse_object, read_object, read_text
from factory.git.repository import CheckoutError, RepositoryError
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.runs.folders import result_of
from factory.runs.live_code import LiveCode
from factory.training.certificate import PreflightPolicy
from factory.training.certificate_runs import Spec, train_all
from factory.training.planning import plan_of
from factory.training.preflight import (
    LEAD,
    NUDGED,
    ROUNDING,
    WAYS,
    Apart,
    PreflightEvidence,
    Way,
    small_recipe,
)
from trainer.contract.recipe import Recipe, with_keys

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.contract.checkpoint.format import Checkpoint

SERIES = ("loss", "grad_norm")  # of metrics.jsonl
RANKS = 2
BORN = "first weights of "  # a run of one step, which is too small to move a weight
STILL = {"optimizer.lr": 1e-30, "checkpoint_every": 1}


def fly(plant: Plant, row: SegmentRow, policy: PreflightPolicy) -> PreflightEvidence:
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
        flight.code = LiveCode.of(plant, row.code_commit)
    except RepositoryError as error:
        if isinstance(error, CheckoutError) or is_of_no_file(error):
            raise
        return replace(found, failed={"straight": str(error)})
    for name, runs, count in flight.trainers():
        if line := flight.train(runs, f"preflight, {name}", count):
            return replace(found, failed=line)
    found = compare(found, flight)
    return replace(found, seconds=time.monotonic() - began)


class Flight:
    """The folders, specs and trainers of one preflight."""

    code: LiveCode

    def __init__(self, plant: Plant, row: SegmentRow, policy: PreflightPolicy) -> None:

        self.workspace, self.row, self.progress, self.last = plant.workspace, row, plant.progress, LEAD + policy.steps
        self.scratch = Path(row.folder) / "preflight"
        self.recipe = Recipe.parse(small_recipe(Recipe.parse(row.recipe_json).model_dump(), policy.steps)).model_dump()
        self.device = row.computing["machine"]["device"] if row.computing else "cpu"
        asked = [way for way in WAYS if way.part in policy.parts]
        self.left_out = {way.name: why for way in asked if (why := self._impossible(way))}
        self.ways = [way for way in asked if way.name not in self.left_out]
        self.plan = plan_of(plant.ledger, row) | {"max_epochs": 1000}

    @property
    def steps(self) -> int:
        """Of all runs."""
        return LEAD + (1 + len(NUDGED) + len(self.ways)) * (self.last - LEAD)

    def _impossible(self, way: Way) -> str:
        """Why a way cannot be run here; empty: it can."""
        from trainer.contract.errors import TrainerError

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

    def trainers(self) -> list[tuple[str, list[str], int]]:
        """(what, its runs, ranks) of each trainer, in order."""
        alone = [way.name for way in self.ways if way.ranks == 1]
        ranks = [way.name for way in self.ways if way.ranks > 1]
        found = [("straight", ["straight"], 1)]
        found.append(("one rank", [*alone, *NUDGED, *([BORN + "1 rank"] if ranks else [])], 1))
        if ranks:
            found.append((f"{RANKS} ranks", [name for way in ranks for name in (BORN + way, way)], RANKS))
        return found

    def folder(self, run: str) -> Path:
        return self.scratch / run.replace(" ", "-")

    def end(self, run: str) -> int:
        return 1 if run.startswith(BORN) else self.last

    def train(self, runs: Sequence[str], title: str, count: int) -> dict[str, str]:
        """Run them; returns why the first that failed did."""
        specs = {self.folder(run): self._spec(run) for run in runs}
        starts = {self.folder(run): self.start(run) for run in runs if run != "straight" and not run.startswith(BORN)}
        status, line = train_all(
            self.workspace, self.code, self.scratch, specs, title, self.progress, starts=starts, count=count
        )
        unfinished = [run for run in runs if not (self.folder(run) / "result.json").exists()]
        return {(unfinished or runs)[0]: line} if status else {}

    def _spec(self, run: str) -> Spec:
        way = next((way for way in WAYS if way.name == run.removeprefix(BORN)), None)
        recipe = with_keys(self.recipe, way.recipe if way else {})
        if run.startswith(BORN):
            recipe = with_keys(recipe, STILL)
        kernels, name = self.row.computing, "kernels.yaml"
        if way and way.reference_kernels and kernels:
            kernels, name = kernels | {"kernels": dict.fromkeys(kernels["kernels"], "reference")}, "reference.yaml"
        self.scratch.mkdir(parents=True, exist_ok=True)
        return {
            "kind": "trunk",
            "recipe": recipe,
            "data_plan": self.plan,
            "first_step": 0,
            "last_step": self.end(run),
            "initial_checkpoint": None,
            "code_commit": self.row.code_commit,
            "kernels": computing.write_kernels(self.scratch, kernels, name),
        }

    def start(self, run: str) -> Path:
        """The straight run's checkpoint where the runs part, or a nudged copy of it."""
        from trainer.contract.checkpoint.format import name_of

        parted = self.folder("straight") / "checkpoints" / name_of(LEAD)
        if run not in NUDGED:
            return parted
        target = self.scratch / "nudged" / run.replace(" ", "-")
        if not (target / parted.name).exists():
            nudge(parted, target, ROUNDING[self.recipe["precision"]], NUDGED.index(run))
        return target / parted.name


def nudge(checkpoint: Path, target: Path, share: float, seed: int) -> Path:
    """Save a copy of a checkpoint in ``target`` whose weights are each ``share`` of themselves larger or smaller, by a coin."""
    import torch

    from trainer.contract.checkpoint import format as checkpoints

    whole = checkpoints.load(checkpoint)
    draw = torch.Generator().manual_seed(seed)
    coin = lambda tensor: torch.randint(0, 2, tensor.shape, generator=draw) * 2 - 1
    model = {
        name: tensor * (1 + share * coin(tensor)) if tensor.is_floating_point() else tensor
        for name, tensor in whole.model.items()
    }
    target.mkdir(parents=True, exist_ok=True)
    return checkpoints.save(target, replace(whole, model=model))


# -- what the runs left ------------------------------------------------------------------------------------------------
def compare(found: PreflightEvidence, flight: Flight) -> PreflightEvidence:
    """Fill in how far each run is from the straight one. Holds four checkpoints at a time.

    Raises: what a fault of the machine makes of it, which says nothing about the runs.
    """
    from trainer.contract.checkpoint.format import load, name_of
    from trainer.contract.errors import TrainerError

    ranks = [way.name for way in flight.ways if way.ranks > 1]
    run = "straight"
    try:
        parted = load(flight.folder(run) / "checkpoints" / name_of(LEAD))
        straight, series = _left_by(flight, run)
        apart: dict[str, Apart] = {}
        for run in (*NUDGED, *(way.name for way in flight.ways)):
            checkpoint, other = _left_by(flight, run)
            began = load(flight.start(run)) if run in NUDGED else parted
            apart[run] = Apart(
                {name: shares(series[name], other.get(name, [])) for name in SERIES},
                distances(parted, straight, began, checkpoint),
            )
        born = {}
        if ranks:
            run = BORN + "1 rank"
            weights = _left_by(flight, run)[0].model
            for run in [BORN + name for name in ranks]:
                others = _left_by(flight, run)[0].model
                differ = [name for name in weights.keys() | others.keys() if not _same(weights, others, name)]
                born[run.removeprefix(BORN)] = sorted(differ)
        copies = {run: _copies(flight.folder(run)) for run in ranks}
    except (SegmentError, TrainerError, OSError, ValueError, KeyError) as error:
        if is_of_no_file(error):
            raise
        return replace(found, failed={run: f"what it left cannot be read: {error}"})
    return replace(
        found,
        rounding=[apart.pop(run) for run in NUDGED],
        apart=apart,
        born_apart=born,
        replicas_apart=copies,
    )


def _left_by(flight: Flight, run: str) -> tuple[Checkpoint, dict[str, list[float | None]]]:
    """(the last checkpoint, the series of metrics.jsonl from where the runs part). Raises: as ``compare`` catches."""
    from trainer.contract.checkpoint.format import load

    folder, last = flight.folder(run), flight.end(run)
    found: dict[str, dict[int, float]] = {name: {} for name in SERIES}
    path = folder / "metrics.jsonl"
    for line in read_text(path).splitlines():
        record = parse_object(line, path)
        for name in SERIES:
            value = record.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                found[name][int(record["step"])] = float(value)
    series = {name: [values.get(step) for step in range(LEAD, last)] for name, values in found.items()}
    return load(Path(result_of(folder, last)["checkpoint"])), series


def shares(values: Sequence[float | None], others: Sequence[float | None]) -> list[float]:
    """How far ``others`` are from ``values``, as shares of them; infinite where one is missing.

    >>> shares([2.0, 4.0, None], [2.0, 3.0, 1.0])
    [0.0, 0.25, inf]
    """
    found = []
    for at, value in enumerate(values):
        other = others[at] if at < len(others) else None
        found.append(math.inf if value is None or other is None else _share(abs(value - other), abs(value)))
    return found


def distances(parted: Checkpoint, straight: Checkpoint, began: Checkpoint, other: Checkpoint) -> dict[str, float]:
    """By tensor, as shares: of a weight ‖(other − began) − (straight − parted)‖ of ‖straight − parted‖, of a moment
    ‖other − straight‖ of ‖straight‖. ``began``: what the other run began with, ``parted`` or a nudged copy of it.
    """
    found = {}
    for kind in ("model", "optimizer"):
        ours: Mapping[str, Tensor] = getattr(straight, kind)
        theirs: Mapping[str, Tensor] = getattr(other, kind)
        for name in sorted((ours.keys() | theirs.keys()) - {"rng"}):
            if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape:
                found[name] = math.inf
                continue
            way, others_way = ours[name].double(), theirs[name].double()
            if kind == "model":
                way, others_way = way - parted.model[name].double(), others_way - began.model[name].double()
            found[name] = _share(float((others_way - way).norm()), float(way.norm()))
    return found


def _share(difference: float, size: float) -> float:
    if difference == 0:
        return 0.0
    return difference / size if size > 0 else math.inf


def _same(weights: Mapping[str, Tensor], others: Mapping[str, Tensor], name: str) -> bool:
    return name in weights and name in others and weights[name].equal(others[name])


def _copies(folder: Path) -> list[str] | None:
    """``replicas_apart`` of a run's result.json; None where the trainer does not say it."""
    names = read_object(folder / "result.json").get("replicas_apart")
    return [str(name)[:200] for name in names] if isinstance(names, list) else None
