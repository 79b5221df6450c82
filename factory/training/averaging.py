"""Candidates that are averages: the newest kept checkpoints of one run, each with the same weight.

An average is a segment of kind 'average': it trains nothing, hangs below the newest checkpoint's segment, and leaves a
checkpoint in its folder. So lineage, provenance, tracking, export and the gate treat its candidate like any other. What is
averaged stands in the event that planned it; a killed factory finds the segment open and makes it again.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from factory.core.errors import InputError
from factory.ledger.ledger import Ledger
from factory.ledger.places import located
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject
from factory.runs.folders import clear
from factory.runs.live_code import LiveCode
from factory.training.planning import last_segment, plan_segment
from factory.training.segment_folder import claim, failed, record_done
from kernels.contract.files import write_atomically

KIND = "average"
AT_MOST = 5  # checkpoints, by default


@dataclass(frozen=True)
class Source:
    """A checkpoint on disk."""

    id: str  # SHA-256 of its manifest
    segment: int
    step: int
    path: str


# -- choosing and planning ---------------------------------------------------------------------------------------------
def kept(ledger: Ledger, segment: SegmentRow) -> list[Source]:
    """The checkpoints on disk that may be averaged with a segment's newest one, oldest first.

    Of an anneal: its own. Of a trunk: also those of the trunk before it, back to where the recipe was another.
    """
    from trainer.contract.checkpoint.format import manifest_sha256, steps_in

    found: dict[Path, Source] = {}
    row = segment
    while row.recipe_sha256 == segment.recipe_sha256:
        if row.kind == segment.kind:
            listed = ledger.read("SELECT path FROM checkpoints WHERE segment = :segment", segment=row.id)
            own = {path.resolve(): step for step, path in steps_in(Path(row.folder) / "checkpoints")}
            own |= {Path(r["path"]).resolve(): int(Path(r["path"]).name.rpartition("-")[2]) for r in listed}
            for path, step in own.items():
                if path not in found and (path / "manifest.json").is_file():
                    found[path] = Source(manifest_sha256(path), row.id, step, str(path))
        if segment.kind == "anneal" or row.parent is None:
            break
        row = SegmentRow.get(ledger, row.parent)
    return sorted(found.values(), key=lambda source: source.step)


def choose(ledger: Ledger, segment: int | None, last: int | None) -> list[Source]:
    """What to average, oldest first: the newest ``last`` checkpoints of a segment, or as many as there are up to ``AT_MOST``.

    Raises: InputError that lists the checkpoints, when there are too few.
    """
    if segment is None:
        row = last_segment(ledger, "trunk")
        if row is None:
            raise InputError("there is no finished trunk segment to average in: run 'factory train' first")
    else:
        trained = SegmentRow.select(ledger, "WHERE kind <> 'average' AND state = 'done' ORDER BY id")
        row = next((one for one in trained if one.id == segment), None)
        if row is None:
            known = ", ".join(str(one.id) for one in trained)
            raise InputError(f"no finished segment {segment}; there are: {known or 'none'}")
    there = kept(ledger, row)
    wanted = last if last is not None else min(AT_MOST, len(there))
    if wanted < 2 or len(there) < wanted:
        steps = ", ".join(str(source.step) for source in there) or "none"
        raise InputError(
            f"an average needs {wanted if last is not None else 'two'} checkpoints; segment {row.id} and the trunk before it, "
            f"with the same recipe, have those of steps: {steps}. Take fewer (--last), at least 2, or raise the recipe's "
            "keep_checkpoints"
        )
    return there[-wanted:]


def plan_average(plant: Plant, segment: int | None = None, last: int | None = None) -> int:
    """Record the average as a segment to be run; returns its id. The same checkpoints give the same segment."""
    from factory.git.repository import live_commit

    sources = choose(plant.ledger, segment, last)
    listed = [asdict(source) | {"path": plant.ledger.inside(source.path)} for source in sources]
    plan = {"rule": "uniform", "sources": listed}
    for row in SegmentRow.select(
        plant.ledger, f"WHERE kind = '{KIND}' AND state NOT IN ('failed', 'abandoned') ORDER BY id"
    ):
        if _identity(planned(plant.ledger, row.id)) == _identity(plan):
            return row.id
    commit = live_commit(plant.workspace.repository)
    parent = SegmentRow.get(plant.ledger, sources[-1].segment)
    steps = (sources[-1].step, sources[-1].step)
    same = parent.only("generation recipe recipe_json recipe_sha256 data_plan")
    with plant.ledger.begin() as tx:
        detail = {"average": plan}
        return plan_segment(tx, plant.workspace, KIND, steps, detail, parent=parent.id, code_commit=commit, **same)


def planned(ledger: Ledger, number: int) -> dict[str, Any]:
    """What an average segment is made of, as it was planned."""
    sql = "SELECT detail FROM events WHERE kind = 'segment_planned' AND subject = :subject"
    plan = dict(ledger.read(sql, subject=str(Subject("segment", number)))[0]["detail"]["average"])
    return plan | {"sources": [located(dict(source), ledger.root) for source in plan["sources"]]}


def _identity(plan: dict[str, Any]) -> tuple[str, list[str]]:
    return plan["rule"], [source["id"] for source in plan["sources"]]


# -- making ------------------------------------------------------------------------------------------------------------
def run_average(plant: Plant, row: SegmentRow) -> dict[str, Any]:
    """Make the averaged checkpoint and record it; returns the segment's result. Safe to repeat.

    Raises: SegmentError when a checkpoint is damaged or does not fit (its log is named).
    """
    from trainer.contract.checkpoint.format import manifest_sha256, name_of

    plan = planned(plant.ledger, row.id)
    folder = claim(plant, row)
    code = LiveCode.of(plant, row.code_commit)
    paths = [source["path"] for source in plan["sources"]]
    with plant.progress.task(f"averaging {len(paths)} checkpoints", None):
        words = ["trainer.tools.average", str(folder / "checkpoints"), *paths]
        made = code.run("-m", *words, writable=[folder], readonly=list(map(Path, paths)))
        clear(folder, plant.progress)
        _succeeded(plant, row, made)
    path = folder / "checkpoints" / name_of(row.last_step)
    result = {
        "state": "done",
        "last_step": row.last_step,
        "checkpoint": str(path),
        "manifest_sha256": manifest_sha256(path),
        "averaged": plan,
    }
    write_atomically(folder / "result.json", json.dumps(result, indent=1))
    record_done(plant.ledger, row, folder, result)
    return result


def _succeeded(plant: Plant, row: SegmentRow, done: subprocess.CompletedProcess[str]) -> None:
    """Raises: SegmentError when the program failed; its words are in the segment's log."""
    if done.returncode:
        with open(plant.workspace.logs / f"segment-{row.id:05d}.log", "a") as log:
            log.write(done.stderr)
        failed(plant, row, done.returncode, None)
