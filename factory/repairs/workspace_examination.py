"""Compares the files of a workspace with the ledger: all files that training, judging, releasing or repairs need.

The existence and size of all files are checked. The newest file of each kind and a few random files are hashed; with ``deep`` all files are.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from factory.backups.backups import MLFLOW_TABLE, find_database_damage
from factory.core.errors import WorkspaceError
from factory.core.workspace import Workspace
from factory.ingest.hash_index import INDEX, get_hashes_path, list_shards_and_tasks_with_hashes, read_hashes
from factory.ledger.engine import get_sqlite_file
from factory.ledger.file_events import list_paths_removed_by_retention
from factory.ledger.plant import Plant
from factory.ledger.removals import read_erased_shards
from factory.ledger.rows import IMPORT, CandidateRow, SegmentRow, find_champion
from factory.release.published_link import read_publication_record
from factory.repairs.checkpoints import find_checkpoint_damage, find_export_damage
from factory.repairs.token_shards import find_raw_shard, find_token_shard_damage, find_tokenizer_damage
from factory.training.segment_folder import OWNER_FILE, is_owner_of_segment_folder, read_folder_owner
from kernels.contract.message import Message
from trainer.contract.data.token_shard import hash_file

DRAWN = 3  # files of each kind that are hashed besides the newest
Row = TypeVar("Row")


def _repair(effect: Message) -> Message:
    """Return the advice to run 'factory check --repair', with the effect of the repair."""
    return Message(
        "workspace_examination.repair", "stop 'factory run', then run 'factory check --repair'. {effect}", effect=effect
    )


@dataclass(frozen=True)
class Damage:
    """A file or folder that is missing or damaged."""

    kind: str  # a key of CHECKS
    subject: str  # number or hash, as in the ledger
    problem: str  # the damage, as a sentence without a full stop
    remedy: str  # the advice for a person
    is_repairable: bool = False  # whether 'factory check --repair' repairs it


@dataclass(frozen=True)
class ExaminationResult:
    """The result for one kind of files."""

    kind: str
    count: int
    hashed: int
    faults: list[Damage]


def examine_workspace_files(plant: Plant, deep: bool) -> list[ExaminationResult]:
    """Examine each kind of ``CHECKS``, in that order. Changes nothing."""
    return [check(plant, deep) for check in CHECKS.values()]


def find_damaged_databases(workspace: Workspace) -> Iterator[Damage]:
    """Yield the damage of the ledger and of MLflow's database, if they are SQLite files.

    A missing MLflow database is no damage: it is made when it is needed.

    Raises: sqlite3.OperationalError when the ledger cannot be checked now.
    """
    ledgers = Message(
        "workspace_examination.remake_ledger", "The repair restores the ledger, as 'factory restore' does"
    )
    mlflows = Message(
        "workspace_examination.remake_mlflow",
        "The repair restores MLflow's database from a backup and sends the missing data to MLflow. Training "
        "does not wait for MLflow",
    )
    for kind, url, table, remedy in (
        ("ledger", workspace.ledger_url, "meta", ledgers),
        ("mlflow", workspace.mlflow_uri, MLFLOW_TABLE, mlflows),
    ):
        file = get_sqlite_file(url)
        if not file or not (file.exists() or kind == "ledger"):
            continue
        try:
            fault = find_database_damage(file, table)
        except sqlite3.OperationalError:
            if kind == "ledger":
                raise
            continue  # MLflow's database cannot be checked now; nothing depends on it
        if fault:
            yield Damage(kind, "", _damaged(file, fault) if file.exists() else fault, _repair(remedy), True)


def _damaged(file: Path, why: str) -> Message:
    return Message("workspace_examination.damaged", "{path} is damaged: {why}", path=file, why=why)


def _look(
    plant: Plant, deep: bool, kind: str, rows: Sequence[Row], subject: Callable[[Row], object], fault: Callable[[Row, bool], str],
    remedy: Message,
) -> ExaminationResult:  # fmt: skip
    """Check each row with ``fault(row, hashed)``, which returns the damage or ''. With ``deep``, ``hashed`` is True for all rows, else for a few."""
    every = range(len(rows))
    hashed = set(every) if deep else {*every[-1:], *random.SystemRandom().sample(every, min(DRAWN, len(rows)))}
    faults = []
    with plant.progress.task(f"{kind}: check {len(rows)}, hash {len(hashed)}", len(rows)) as task:
        for number, row in enumerate(rows):
            if what := fault(row, number in hashed):
                faults.append(
                    Damage(kind, str(subject(row)), what, remedy, remedy.code == "workspace_examination.repair")
                )
            task.advance()
    return ExaminationResult(kind, len(rows), len(hashed), faults)


def _kept(plant: Plant, rows: Sequence[Row], place: Callable[[Row], str]) -> list[Row]:
    """Return the rows whose files retention has not removed."""
    gone = {plant.workspace.root / path for path in list_paths_removed_by_retention(plant.ledger)}
    return [row for row in rows if Path(place(row)) not in gone or Path(place(row)).exists()]


def examine_token_shards(plant: Plant, deep: bool) -> ExaminationResult:
    """Examine all token shards."""
    rows = plant.ledger.read("SELECT id, path FROM token_shards ORDER BY created_at, id")
    fault = lambda row, hashed: find_token_shard_damage(Path(row["path"]), hashed)
    effect = Message(
        "workspace_examination.remake_token_shard",
        "The repair makes the token shard again from its raw shard. Without a repair, 'factory run' does so as soon as "
        "it needs the token shard",
    )
    return _look(plant, deep, "token shards", rows, lambda row: row["id"], fault, _repair(effect))


def examine_checkpoints(plant: Plant, deep: bool) -> ExaminationResult:
    """Examine the last checkpoint of each finished segment."""
    rows = plant.ledger.read(
        "SELECT c.*, s.kind FROM checkpoints c JOIN segments s ON s.id = c.segment "
        "WHERE s.state = 'done' AND c.step = s.last_step ORDER BY c.segment"
    )
    rows = _kept(plant, rows, lambda row: row["path"])
    effect = Message(
        "workspace_examination.remake_checkpoint",
        "The repair replays the segment to remake its checkpoint. Without a repair, 'factory run' does so as soon as it needs the checkpoint",
    )
    found = _look(plant, deep, "checkpoints", rows, lambda row: row["segment"], find_checkpoint_damage, _repair(effect))
    averages, imports = ({str(row["segment"]) for row in rows if row["kind"] == kind} for kind in ("average", IMPORT))
    average = Message(
        "workspace_examination.remake_average",
        "stop 'factory run', then run 'factory average' to make the checkpoint again",
    )
    again = Message(
        "workspace_examination.import_again",
        "The repair reads the model's folder again, which must still have the same files. Without a repair, 'factory run' does so as soon as it "
        "needs the checkpoint",
    )
    faults = [
        replace(one, remedy=average, is_repairable=False) if one.subject in averages
        else replace(one, remedy=again) if one.subject in imports else one
        for one in found.faults
    ]  # fmt: skip
    return replace(found, faults=faults)


def _exports(plant: Plant, deep: bool) -> ExaminationResult:
    best = find_champion(plant.ledger)
    fault = lambda row, hashed: find_export_damage(row, hashed or (best is not None and best.candidate == row.id))
    rows = _kept(plant, CandidateRow.select(plant.ledger), lambda row: row.export_path)
    effect = Message("workspace_examination.remake_export", "The repair makes the export again from its checkpoint")
    return _look(plant, deep, "exports", rows, lambda row: row.id, fault, _repair(effect))


def _raw_shards(plant: Plant, deep: bool) -> ExaminationResult:
    """Examine the raw shards, from which repairs make token shards again."""
    erased = {sha256: one["raw"] for sha256, one in read_erased_shards(plant.ledger).items() if one["raw"]}

    def fault(row: dict[str, Any], hashed: bool) -> str:
        path, name = find_raw_shard(plant, row["sha256"])
        if path is None:
            return Message(
                "workspace_examination.no_raw_shard",
                "{path} is missing (original name: {name})",
                path=row["path"],
                name=name,
            )
        if hashed and hash_file(path) != erased.get(row["sha256"], row["sha256"]):
            return Message(
                "workspace_examination.other_raw_shard",
                "{path} is not the file that was ingested (original name: {name})",
                path=path,
                name=name,
            )
        return ""

    rows = plant.ledger.read("SELECT sha256, path FROM shards WHERE state = 'ingested' ORDER BY ingested_at, sha256")
    remedy = Message(
        "workspace_examination.restore_raw_shard",
        "copy the ingested file into {folder} again. The factory needs this file only to repair the token shard that was made from it",
        folder=plant.workspace.shards / "raw",
    )
    return _look(plant, deep, "raw shards", rows, lambda row: row["sha256"], fault, remedy)


def _hashes(plant: Plant, deep: bool) -> ExaminationResult:
    """Examine the files with hashes of documents, and their index."""

    def fault(source: tuple[int, str], hashed: bool) -> str:
        file = get_hashes_path(plant.workspace.root, source[1])
        try:
            if hashed or not file.exists():
                read_hashes(plant.workspace.root, source[1])
        except WorkspaceError:
            if file.exists():
                return Message("workspace_examination.damaged_hashes", "{path} is damaged", path=file)
            return Message("workspace_examination.no_hashes", "{path} is missing", path=file)
        return ""

    effect = Message(
        "workspace_examination.remake_hashes",
        "The repair restores the file from a backup, or makes it again from its raw shard or task",
    )
    found = _look(
        plant,
        deep,
        "hashes",
        list_shards_and_tasks_with_hashes(plant.ledger),
        lambda source: source[1],
        fault,
        _repair(effect),
    )
    index = plant.workspace.root / INDEX
    if index.exists() and (damage := find_database_damage(index, "sources")):
        effect = Message("workspace_examination.remake_index", "The repair makes the index again from shards/hashes")
        found.faults.append(Damage("hashes", INDEX, _damaged(index, damage), _repair(effect), True))
    return found


def examine_tokenizer(plant: Plant, deep: bool) -> ExaminationResult:
    """Examine the tokenizer."""
    fault = find_tokenizer_damage(plant)
    effect = Message(
        "workspace_examination.restore_tokenizer", "The repair restores the tokenizer from a backup or an export"
    )
    return ExaminationResult(
        "tokenizer", 1, 1, [Damage("tokenizer", "", fault, _repair(effect), True)] if fault else []
    )


def _folders(plant: Plant, deep: bool) -> ExaminationResult:
    """Check that each segment's folder exists and belongs to this segment's plan."""

    def fault(row: SegmentRow, hashed: bool) -> str:
        folder = Path(row.folder)
        if not folder.is_dir():
            return Message(
                "workspace_examination.no_segment_folder",
                "{path} is missing, with its metrics and checkpoints",
                path=folder,
            )
        if is_owner_of_segment_folder(read_folder_owner(folder), plant.ledger, row):
            return ""
        return Message(
            "workspace_examination.other_owner",
            "{path} is missing, or belongs to another plan or another ledger",
            path=folder / OWNER_FILE,
        )

    rows = SegmentRow.select(plant.ledger, "WHERE state = 'done' ORDER BY id")
    remedy = Message(
        "workspace_examination.restore_segment_folder",
        "restore the segment's folder from a backup, if you have one. If another segment's folder is in this "
        "place, move that folder away first",
    )
    return _look(plant, deep, "segments", rows, lambda row: row.id, fault, remedy)


def _served(plant: Plant, deep: bool) -> ExaminationResult:
    best = find_champion(plant.ledger)
    if best is None:
        return ExaminationResult("served", 0, 0, [])
    note = read_publication_record(plant.workspace)
    if note and (note["release"], note["export_sha256"]) == (best.number, best.export_sha256):
        return ExaminationResult("served", 1, 1, [])
    what = Message(
        "workspace_examination.other_served",
        "{path} does not point to the export of the champion, release {release}",
        path=plant.workspace.exports / "champion",
        release=best.number,
    )
    effect = Message(
        "workspace_examination.serve_champion",
        "The repair points this link at the champion's export. 'factory run' also does so in its next pass",
    )
    return ExaminationResult("served", 1, 1, [Damage("served", str(best.number), what, _repair(effect), True)])


def _orphans(plant: Plant, deep: bool) -> ExaminationResult:
    """List segments and token shards without a row in the ledger. Unfinished ones do not appear: their folders are hidden, or have a row."""
    segments = {Path(row.folder).name for row in SegmentRow.select(plant.ledger)}
    shards = {Path(row["path"]).name for row in plant.ledger.read("SELECT path FROM token_shards")}
    found = [path for path in plant.workspace.segments.iterdir() if path.is_dir() and path.name not in segments]
    found += [path.parent for path in plant.workspace.shards.glob("*/manifest.json") if path.parent.name not in shards]
    remedy = Message(
        "workspace_examination.restore_orphans",
        "stop 'factory run', then run 'factory restore', which adds a segment to the ledger if the segment's folder "
        "records its plan, and sets the other folders aside",
    )
    faults = [
        Damage(
            "orphans",
            path.name,
            Message("workspace_examination.orphan", "{path} is not in the ledger", path=path),
            remedy,
        )
        for path in sorted(found)
    ]
    return ExaminationResult("orphans", len(found), 0, faults)


CHECKS: dict[str, Callable[[Plant, bool], ExaminationResult]] = {
    "tokenizer": examine_tokenizer,
    "token shards": examine_token_shards,
    "raw shards": _raw_shards,
    "hashes": _hashes,
    "checkpoints": examine_checkpoints,
    "exports": _exports,
    "segments": _folders,
    "served": _served,
    "orphans": _orphans,
}
