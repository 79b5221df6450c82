"""What is there, against what the ledger says: every file that training, judging, releasing or repairing needs.

That a thing is there, and as long as it should be, is looked at for all; its content is hashed for the newest of each kind and a drawn few,
or with ``deep`` for all.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from factory.backups.backups import MLFLOW_TABLE, database_damage
from factory.core.errors import WorkspaceError
from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.ingest.compared import INDEX, hashes_file, read_hashes, sources
from factory.ledger.engine import sqlite_file
from factory.ledger.files import retired
from factory.ledger.plant import Plant
from factory.ledger.removals import erased_shards
from factory.ledger.rows import CandidateRow, SegmentRow, champion
from factory.release.serving import served
from factory.repairs.checkpoints import checkpoint_fault, export_fault
from factory.repairs.token_shards import raw_shard, token_shard_fault
from factory.repairs.tokenizer_files import tokenizer_fault
from factory.training.segment_folder import OWNER, is_owner, read_owner
from trainer.contract.data.token_shard import file_sha256

DRAWN = 3  # of each kind, besides the newest
Row = TypeVar("Row")
REPAIR = "'factory doctor --repair' (stop 'factory run' first) "


@dataclass(frozen=True)
class Damage:
    """Something that is gone or damaged."""

    kind: str  # of CHECKS
    subject: str  # number or hash, as the ledger has it
    what: str  # a sentence's beginning: what is wrong with which file
    remedy: str  # what to do
    mends: bool = False  # 'factory doctor --repair' does


@dataclass(frozen=True)
class Examined:
    """All of one kind."""

    kind: str
    count: int
    hashed: int
    faults: list[Damage]


def examine_work(plant: Plant, deep: bool) -> list[Examined]:
    """Every kind of ``CHECKS``, in that order. Changes nothing."""
    return [check(plant, deep) for check in CHECKS.values()]


def database_faults(workspace: Workspace) -> Iterator[Damage]:
    """The ledger and MLflow's database, where they are SQLite files. MLflow's may be absent: it is made when it is needed.

    Raises: sqlite3.OperationalError when nothing can be known of the ledger now.
    """
    for kind, url, table, remedy in (
        ("ledger", workspace.ledger_url, "meta", "makes it again ('factory restore' does the same)"),
        (
            "mlflow",
            workspace.mlflow_uri,
            MLFLOW_TABLE,
            "puts its backup back and sends again what is missing; training does not wait for it",
        ),
    ):
        file = sqlite_file(url)
        if not file or not (file.exists() or kind == "ledger"):
            continue
        try:
            fault = database_damage(file, table)
        except sqlite3.OperationalError:
            if kind == "ledger":
                raise
            continue  # MLflow only shows: nothing can be known of it now
        if fault:
            yield Damage(kind, "", f"{file} is damaged: {fault}" if file.exists() else fault, REPAIR + remedy, True)


def _look(
    kind: str, rows: Sequence[Any], look: Callable[[Any, bool], Damage | None], deep: bool, progress: Progress
) -> Examined:
    """Look at each row; hash all with ``deep``, else the newest, which is the last, and a few."""
    every = range(len(rows))
    hashed = set(every) if deep else {*every[-1:], *random.SystemRandom().sample(every, min(DRAWN, len(rows)))}
    faults = []
    with progress.task(f"{kind}: look at {len(rows)}, hash {len(hashed)}", len(rows)) as task:
        for number, row in enumerate(rows):
            if fault := look(row, number in hashed):
                faults.append(fault)
            task.advance()
    return Examined(kind, len(rows), len(hashed), faults)


def _kept(plant: Plant, rows: Sequence[Row], place: Callable[[Row], str]) -> list[Row]:
    """Without those that retention removed."""
    gone = {plant.workspace.root / path for path in retired(plant.ledger)}
    return [row for row in rows if Path(place(row)) not in gone or Path(place(row)).exists()]


def token_shard_faults(plant: Plant, deep: bool) -> Examined:
    def look(row: dict[str, Any], hashed: bool) -> Damage | None:
        fault = token_shard_fault(Path(row["path"]), hashed)
        remedy = REPAIR + "makes it again from its raw shard, and so does the next pass that needs it"
        return Damage("token shards", row["id"], fault, remedy, True) if fault else None

    rows = plant.ledger.read("SELECT id, path FROM token_shards ORDER BY created_at, id")
    return _look("token shards", rows, look, deep, plant.progress)


def checkpoint_faults(plant: Plant, deep: bool) -> Examined:
    """The last one of each segment that may be gone on from, averaged or exported again."""

    def look(row: dict[str, Any], hashed: bool) -> Damage | None:
        fault = checkpoint_fault(row, hashed)
        if row["kind"] == "average":
            return (
                Damage(
                    "checkpoints",
                    str(row["segment"]),
                    fault,
                    "stop 'factory run', then 'factory average' makes it again",
                )
                if fault
                else None
            )
        remedy = REPAIR + "replays its segment, and so does the next pass that needs it"
        return Damage("checkpoints", str(row["segment"]), fault, remedy, True) if fault else None

    rows = plant.ledger.read(
        "SELECT c.*, s.kind FROM checkpoints c JOIN segments s ON s.id = c.segment "
        "WHERE s.state = 'done' AND c.step = s.last_step ORDER BY c.segment"
    )
    return _look("checkpoints", _kept(plant, rows, lambda row: row["path"]), look, deep, plant.progress)


def _exports(plant: Plant, deep: bool) -> Examined:
    best = champion(plant.ledger)

    def look(row: CandidateRow, hashed: bool) -> Damage | None:
        fault = export_fault(row, hashed or (best is not None and best.candidate == row.id))
        remedy = REPAIR + "makes it again from its checkpoint"
        return Damage("exports", str(row.id), fault, remedy, True) if fault else None

    rows = _kept(plant, CandidateRow.select(plant.ledger), lambda row: row.export_path)
    return _look("exports", rows, look, deep, plant.progress)


def _raw_shards(plant: Plant, deep: bool) -> Examined:
    """What token shards are made again from."""

    erased = {sha256: one["raw"] for sha256, one in erased_shards(plant.ledger).items() if one["raw"]}

    def look(row: dict[str, Any], hashed: bool) -> Damage | None:
        path, name = raw_shard(plant, row["sha256"])
        remedy = (
            f"nothing needs it but a repair of its token shard: put {name} into {plant.workspace.shards / 'raw'} again"
        )
        if path is None:
            return Damage("raw shards", row["sha256"], f"{row['path']} is gone", remedy)
        if hashed and file_sha256(path) != erased.get(row["sha256"], row["sha256"]):
            return Damage("raw shards", row["sha256"], f"{path} is not the file that was ingested", remedy)
        return None

    rows = plant.ledger.read("SELECT sha256, path FROM shards WHERE state = 'ingested' ORDER BY ingested_at, sha256")
    return _look("raw shards", rows, look, deep, plant.progress)


def _hashes(plant: Plant, deep: bool) -> Examined:
    """What later documents are compared with, and the index of it."""

    def look(source: tuple[int, str], hashed: bool) -> Damage | None:
        path = hashes_file(plant.workspace.root, source[1])
        try:
            if hashed or not path.exists():
                read_hashes(plant.workspace.root, source[1])
        except WorkspaceError as error:
            what = str(error).partition(";")[0]
            return Damage("hashes", source[1], what, REPAIR + "makes it again from its raw shard", True)
        return None

    found = _look("hashes", sources(plant.ledger), look, deep, plant.progress)
    index = plant.workspace.root / INDEX
    if index.exists() and (fault := database_damage(index, "sources")):
        what = f"{index} is damaged: {fault}"
        found.faults.append(Damage("hashes", INDEX, what, REPAIR + "makes it again, from shards/hashes", True))
    return found


def tokenizer_faults(plant: Plant, deep: bool) -> Examined:
    fault = tokenizer_fault(plant)
    remedy = REPAIR + "puts it back from a backup or an export"
    return Examined("tokenizer", 1, 1, [Damage("tokenizer", "", fault, remedy, True)] if fault else [])


def _folders(plant: Plant, deep: bool) -> Examined:
    """Each segment's folder bears that segment's plan."""

    def look(row: SegmentRow, hashed: bool) -> Damage | None:
        folder = Path(row.folder)
        if not folder.is_dir():
            what = f"{folder} is gone: its metrics and its checkpoints with it"
            return Damage("segments", str(row.id), what, "a backup of the folder, if there is one")
        if is_owner(read_owner(folder), plant.ledger, row):
            return None
        what = f"{folder / OWNER} is gone, or of another plan or ledger"
        return Damage("segments", str(row.id), what, "move the folder away if it is not this segment's")

    return _look(
        "segments", SegmentRow.select(plant.ledger, "WHERE state = 'done' ORDER BY id"), look, deep, plant.progress
    )


def _served(plant: Plant, deep: bool) -> Examined:
    best = champion(plant.ledger)
    if best is None:
        return Examined("served", 0, 0, [])
    note = served(plant.workspace)
    if note and (note["release"], note["export_sha256"]) == (best.number, best.export_sha256):
        return Examined("served", 1, 1, [])
    what = f"{plant.workspace.exports / 'champion'} is not release {best.number}, which is champion"
    return Examined(
        "served",
        1,
        1,
        [Damage("served", str(best.number), what, REPAIR + "and the daemon's next pass put it back", True)],
    )


def _orphans(plant: Plant, deep: bool) -> Examined:
    """What no row of the ledger names. A segment or a token shard that is being made is hidden, or has its row already."""
    segments = {Path(row.folder).name for row in SegmentRow.select(plant.ledger)}
    shards = {Path(row["path"]).name for row in plant.ledger.read("SELECT path FROM token_shards")}
    found = [path for path in plant.workspace.segments.iterdir() if path.is_dir() and path.name not in segments]
    found += [path.parent for path in plant.workspace.shards.glob("*/manifest.json") if path.parent.name not in shards]
    remedy = "'factory restore' (stop 'factory run' first) takes up what proves what it is, and sets the rest aside"
    faults = [Damage("orphans", path.name, f"{path}: nothing in the ledger names it", remedy) for path in sorted(found)]
    return Examined("orphans", len(found), 0, faults)


CHECKS: dict[str, Callable[[Plant, bool], Examined]] = {
    "tokenizer": tokenizer_faults,
    "token shards": token_shard_faults,
    "raw shards": _raw_shards,
    "hashes": _hashes,
    "checkpoints": checkpoint_faults,
    "exports": _exports,
    "segments": _folders,
    "served": _served,
    "orphans": _orphans,
}
