"""Candidates that are averages of checkpoints: of the newest ones of one run, with equal weights or weights from the held-out loss, or of a trained
model and a release from which it descends (``factory.training.release_average``).

An average is a segment of kind 'average' that trains nothing. Its parent is the segment of the newest checkpoint, and it leaves a
checkpoint in its folder. Lineage, provenance, tracking, export and the gate therefore treat its candidate like any other.
The event 'segment_planned' names the checkpoints. After a kill, the factory finds the segment open and makes the average again.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from factory.core.errors import ConfigError, InputError
from factory.core.path_removal import remove_path
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import WITHOUT_STEPS, CandidateRow, ReleaseRow, SegmentRow, Subject
from factory.ledger.stored_paths import make_paths_absolute
from factory.runs.live_code import LiveCode
from factory.runs.trainer_folder import remove_links_and_pipes
from factory.training.held_out_loss import ProgressCallback, load_held_out_loss_meter
from factory.training.planning import find_last_finished_segment, insert_planned_segment, read_last_checkpoint
from factory.training.release_average import RELEASE_WEIGHTS, choose_release_weight, measure_release_averages
from factory.training.segment_folder import (
    claim_segment_folder,
    mark_segment_failed,
    raise_trainer_failure,
    record_segment_done,
)
from kernels.contract.files import write_atomically
from kernels.contract.message import Message

KIND = "average"
PARENT_COLUMNS = " ".join(
    ("generation", "recipe", "recipe_json", "recipe_sha256", "data_plan")
)  # columns copied from the parent's row
MOST_CHECKPOINTS = 5  # checkpoints, by default
WeightingRule = Literal["uniform", "held-out-loss", "release"]


@dataclass(frozen=True)
class SourceCheckpoint:
    """A checkpoint on disk that is part of an average."""

    id: str  # SHA-256 of its manifest
    segment: int
    step: int
    path: str


def compute_averaging_weights(losses: Sequence[float], noise: float) -> list[float]:
    """Weights that sum to one and fall with the loss: softmax(−loss / τ), τ = max(standard deviation of the losses, noise).

    These are Boltzmann weights at the losses' own scale; Akaike weights have a fixed scale (Burnham and Anderson 2002, §2.9).
    The unit of the loss does not matter. No checkpoint gets weight zero: the losses of K checkpoints span at most √(2K)
    standard deviations, so the least weight is at least e^−√(2K) of the largest. Losses that differ by less than the
    measurement's ``noise`` get almost equal weights.
    """
    mean = math.fsum(losses) / len(losses)
    temperature = max(math.sqrt(math.fsum((loss - mean) ** 2 for loss in losses) / len(losses)), noise)
    if temperature <= 0:
        return [1 / len(losses)] * len(losses)
    raised = [math.exp((min(losses) - loss) / temperature) for loss in losses]
    return [part / math.fsum(raised) for part in raised]


# -- choosing and planning ---------------------------------------------------------------------------------------------
def list_averageable_checkpoints(ledger: Ledger, segment: SegmentRow) -> list[SourceCheckpoint]:
    """The checkpoints on disk that may be averaged with a segment's newest checkpoint, oldest first.

    An anneal has its own checkpoints only. A trunk segment also has those of earlier trunk segments with the same recipe.
    """
    from trainer.contract.checkpoint.format import hash_manifest, list_checkpoints

    found: dict[Path, SourceCheckpoint] = {}
    row = segment
    while row.recipe_sha256 == segment.recipe_sha256:
        if row.kind == segment.kind:
            listed = ledger.read("SELECT path FROM checkpoints WHERE segment = :segment", segment=row.id)
            own = {path.resolve(): step for step, path in list_checkpoints(Path(row.folder) / "checkpoints")}
            own |= {Path(r["path"]).resolve(): int(Path(r["path"]).name.rpartition("-")[2]) for r in listed}
            for path, step in own.items():
                if path not in found and (path / "manifest.json").is_file():
                    found[path] = SourceCheckpoint(hash_manifest(path), row.id, step, str(path))
        if segment.kind == "anneal" or row.parent is None:
            break
        row = SegmentRow.get(ledger, row.parent)
    return sorted(found.values(), key=lambda source: source.step)


def choose_checkpoints_to_average(ledger: Ledger, segment: int | None, last: int | None) -> list[SourceCheckpoint]:
    """The checkpoints to average, oldest first: the newest ``last`` of a segment. The default is all of them, at most ``MOST_CHECKPOINTS``.

    ``segment``: None for the newest finished trunk segment. Raises: InputError with the known checkpoints, when there are too few.
    """
    if segment is None:
        row = find_last_finished_segment(ledger, "trunk")
        if row is None:
            raise InputError(
                "training.no_trunk_to_average",
                "No trunk segment is finished, so there are no checkpoints to average. Run 'factory train' first.",
            )
    else:
        trained = SegmentRow.select(ledger, "WHERE kind NOT IN ('average', 'import') AND state = 'done' ORDER BY id")
        row = next((one for one in trained if one.id == segment), None)
        if row is None:
            raise InputError(
                "training.segment_not_finished", "Segment {segment} is not finished or does not exist. Finished segments: {finished}.",
                segment=segment, finished=[one.id for one in trained] or "none",
            )  # fmt: skip
    available = list_averageable_checkpoints(ledger, row)
    count = last if last is not None else min(MOST_CHECKPOINTS, len(available))
    if count < 2 or len(available) < count:
        raise InputError(
            "training.too_few_checkpoints",
            "An average needs {needed} checkpoints. Segment {segment}, with the earlier trunk segments of the same recipe, has "
            "checkpoints of these steps: {steps}. Average fewer checkpoints (--last, at least 2), or raise keep_checkpoints in the recipe.",
            needed=max(count, 2), segment=row.id, steps=[source.step for source in available] or "none",
        )  # fmt: skip
    return available[-count:]


def choose_release_and_segment(ledger: Ledger, release: int, segment: int | None) -> list[SourceCheckpoint]:
    """The last checkpoints of a release and of a segment that was trained later. ``segment``: None for that of the newest trained candidate.

    Raises: InputError if one of them does not exist, or the release is no older relative of the segment, or their models compute other functions.
    """
    from trainer.contract.checkpoint.model_function_changes import find_model_function_changes

    released = SegmentRow.get(ledger, ReleaseRow.get(ledger, release).segment)
    if segment is None:
        trained = [SegmentRow.get(ledger, row.segment) for row in CandidateRow.select(ledger, "ORDER BY id DESC")]
        row = next((one for one in trained if one.kind not in WITHOUT_STEPS), None)
        if row is None:
            raise InputError(
                "training.no_trained_candidate",
                "--with-release: no candidate was trained yet. Run 'factory run' or 'factory anneal' first.",
            )
    else:
        row = SegmentRow.get(ledger, segment)
    if row.kind in WITHOUT_STEPS or row.state != "done":
        raise InputError(
            "training.not_trained",
            "--segment: segment {segment} ({kind}, {state}) is no finished segment that was trained.",
            segment=row.id, kind=row.kind, state=row.state,
        )  # fmt: skip
    first = [SegmentRow.read_lineage(ledger, one.id)[0].id for one in (released, row)]
    if first[0] != first[1] or released.id >= row.id:
        raise InputError(
            "training.no_relative",
            "--with-release: release {release} is from segment {released}, and segment {segment} was not trained further from the same first model "
            "later. Their average would be noise.", release=release, released=released.id, segment=row.id,
        )  # fmt: skip
    changes = find_model_function_changes(released.recipe_json["model"], row.recipe_json["model"])
    if changes:
        raise InputError(
            "training.other_function",
            "--with-release: the models of release {release} and segment {segment} compute other functions: {changes}. "
            "Their average would compute neither. Choose a release and a segment whose recipes have equal values of these keys.",
            release=release,
            segment=row.id,
            changes=[f"model.{key} {old} → {new}" for key, (old, new) in changes.items()],
        )
    found = []
    for one in (released, row):
        last = read_last_checkpoint(ledger, one.id)
        if not (Path(last["path"]) / "manifest.json").is_file():
            raise InputError(
                "training.checkpoint_gone",
                "The last checkpoint of segment {segment}, {path}, does not exist. If 'factory clean' removed it, choose another segment. "
                "Else run 'factory check --repair'.", segment=one.id, path=last["path"],
            )  # fmt: skip
        found.append(SourceCheckpoint(last["id"], one.id, last["step"], last["path"]))
    if found[0].step >= found[1].step:  # the average would continue from the release
        raise InputError(
            "training.release_not_older",
            "--with-release: release {release} has {steps:,} steps, and segment {segment} has only {fewer:,}. Choose a segment with more steps.",
            release=release, steps=found[0].step, segment=row.id, fewer=found[1].step,
        )  # fmt: skip
    return found


def plan_average(
    plant: Plant,
    rule: WeightingRule,
    segment: int | None = None,
    last: int | None = None,
    release: int | None = None,
) -> int:
    """Record an average as a planned segment; returns its id. The same rule and checkpoints give the same segment. ``release``: of the rule
    'release', which averages two checkpoints. The others average the ``last`` of a run."""
    from factory.git.repository import get_live_commit

    if rule == "release":
        assert release is not None and last is None
        sources = choose_release_and_segment(plant.ledger, release, segment)
    else:
        sources = choose_checkpoints_to_average(plant.ledger, segment, last)
    listed = [asdict(source) | {"path": plant.ledger.to_stored_path(source.path)} for source in sources]
    plan = {"rule": rule, "sources": listed} | ({"release": release} if release is not None else {})
    for row in SegmentRow.select(
        plant.ledger, f"WHERE kind = '{KIND}' AND state NOT IN ('failed', 'abandoned') ORDER BY id"
    ):
        if _identity(read_average_plan(plant.ledger, row.id)) == _identity(plan):
            return row.id
    commit = get_live_commit(plant.workspace.repository)
    parent = SegmentRow.get(plant.ledger, sources[-1].segment)
    steps = (sources[-1].step, sources[-1].step)
    with plant.ledger.begin() as tx:
        detail = {"average": plan}
        return insert_planned_segment(
            tx,
            plant.workspace,
            KIND,
            steps,
            detail,
            parent=parent.id,
            code_commit=commit,
            **_columns_of_average(parent),
        )


def _columns_of_average(parent: SegmentRow) -> dict[str, Any]:
    """The columns that an average has from its parent. LoRA's matrices are merged, so its recipe has no ``adapt``."""
    from trainer.contract.recipe import Recipe

    same = parent.select_fields(PARENT_COLUMNS)
    if parent.recipe_json.get("adapt"):
        merged = Recipe.parse({key: value for key, value in parent.recipe_json.items() if key != "adapt"})
        same |= {"recipe_json": merged.model_dump(mode="json"), "recipe_sha256": merged.sha256}
    return same


def read_average_plan(ledger: Ledger, number: int) -> dict[str, Any]:
    """The rule and the checkpoints of an average segment, as they were planned."""
    sql = "SELECT detail FROM events WHERE kind = 'segment_planned' AND subject = :subject"
    plan = dict(ledger.read(sql, subject=str(Subject("segment", number)))[0]["detail"]["average"])
    return plan | {"sources": [make_paths_absolute(dict(source), ledger.root) for source in plan["sources"]]}


def _identity(plan: dict[str, Any]) -> tuple[str, list[str]]:
    return plan["rule"], [source["id"] for source in plan["sources"]]


# -- making ------------------------------------------------------------------------------------------------------------
def run_average(plant: Plant, row: SegmentRow) -> dict[str, Any]:
    """Make the averaged checkpoint and record it; returns the segment's result. Safe to repeat.

    Raises: SegmentError, naming the log, when a checkpoint is damaged or has other shapes; InputError when the held-out loss
    cannot be measured.
    """
    from trainer.contract.checkpoint.format import format_checkpoint_name, hash_manifest

    plan = read_average_plan(plant.ledger, row.id)
    folder = claim_segment_folder(plant, row)
    code = LiveCode.check_out_commit(plant, row.code_commit)
    parts: list[dict[str, Any]] = [dict(source) for source in plan["sources"]]
    measured: dict[str, Any] = {}
    with plant.progress.task(
        Message("training.averaging", "the weights of {checkpoints} checkpoints are averaged", checkpoints=len(parts)),
        None,
    ) as task:
        if plan["rule"] != "uniform":
            weigh = _weigh_release if plan["rule"] == "release" else _weigh_by_loss
            try:
                advance = lambda n: task.advance(n, "held-out loss")
                measured = weigh(plant, row, code, parts, advance)
            except (InputError, ConfigError) as error:
                mark_segment_failed(plant.ledger, row, str(error))
                raise
        else:
            for part in parts:
                part["weight"] = 1 / len(parts)
        task.advance(0, "averaging")
        weights = ",".join(repr(part["weight"]) for part in parts)
        paths = [part["path"] for part in parts]
        arguments = [str(folder / "checkpoints"), *paths, "--weights", weights]
        made = code.run_python(
            "-m", "trainer.tools.average", *arguments, writable=[folder], readonly=list(map(Path, paths))
        )
        remove_links_and_pipes(folder, plant.progress)
        _succeeded(plant, row, made)
    path = folder / "checkpoints" / format_checkpoint_name(row.last_step)
    result = {
        "state": "done",
        "last_step": row.last_step,
        "checkpoint": str(path),
        "manifest_sha256": hash_manifest(path),
        "averaged": {**plan, "sources": parts, **measured},
    }
    write_atomically(folder / "result.json", json.dumps(result, indent=1))
    record_segment_done(plant.ledger, row, folder, result)
    return result


def _weigh_by_loss(
    plant: Plant, row: SegmentRow, code: LiveCode, parts: list[dict[str, Any]], advance: ProgressCallback
) -> dict[str, Any]:
    """Add the keys ``loss`` and ``weight`` to each part; returns the noise and the documents of the measurement."""
    ruler = load_held_out_loss_meter(plant)
    noise = 0.0
    for part in parts:
        scratch = _export(plant, row, code, part, "export")
        if part is parts[-1]:
            part["loss"], noise = ruler.measure_loss_and_noise(scratch, advance)
        else:
            part["loss"] = ruler.measure_loss(scratch, advance)
        remove_path(scratch)
    for part, weight in zip(parts, compute_averaging_weights([part["loss"] for part in parts], noise), strict=True):
        part["weight"] = weight
    return {"noise": noise, "documents": ruler.document_counts, "shares": ruler.shares}


def _weigh_release(
    plant: Plant, row: SegmentRow, code: LiveCode, parts: list[dict[str, Any]], advance: ProgressCallback
) -> dict[str, Any]:
    """Add the key ``weight`` to both parts, of the release and of the trained checkpoint; returns the table from which it was chosen."""
    meter = load_held_out_loss_meter(plant, guards=True)
    exports = [_export(plant, row, code, part, f"export-{number}") for number, part in enumerate(parts)]
    measured = measure_release_averages(meter, exports[0], exports[1], advance)
    for export in exports:
        remove_path(export)
    chosen = choose_release_weight([one for one in measured.averages if one.release_weight in RELEASE_WEIGHTS])
    parts[0]["weight"], parts[1]["weight"] = chosen.release_weight, 1 - chosen.release_weight
    found = {"noise": measured.noise, "documents": meter.document_counts, "shares": meter.shares}
    return found | {"table": [asdict(one) for one in measured.averages], "guards_hold": not chosen.lost}


def _export(plant: Plant, row: SegmentRow, code: LiveCode, part: dict[str, Any], name: str) -> Path:
    """Export a checkpoint to a folder ``name`` of the segment's. Raises: SegmentError."""
    scratch = Path(row.folder) / name
    remove_path(scratch)
    scratch.mkdir()
    arguments = ["trainer.contract.checkpoint.export", part["path"], str(scratch)]
    made = code.run_python("-m", *arguments, writable=[scratch], readonly=[Path(part["path"])])
    remove_links_and_pipes(scratch, plant.progress)
    _succeeded(plant, row, made)
    return scratch


def _succeeded(plant: Plant, row: SegmentRow, done: subprocess.CompletedProcess[str]) -> None:
    """Raises: SegmentError when the program failed; its output is in the segment's log."""
    if done.returncode:
        with open(plant.workspace.logs / f"segment-{row.id:05d}.log", "a") as log:
            log.write(done.stderr)
        raise_trainer_failure(plant, row, done.returncode, None)
