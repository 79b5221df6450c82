"""What is there, against what the ledger says: every file that training, judging, releasing or repairing needs.

That a thing is there, and as long as it should be, is looked at for all; its content is hashed for the newest of each kind and a drawn few,
or with ``deep`` for all.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from factory.backups.backups import MLFLOW_TABLE, database_damage
from factory.core.errors import WorkspaceError
from factory.core.workspace import Workspace
from factory.ingest.compared import INDEX, hashes_file, read_hashes, sources
from factory.ledger.engine import sqlite_file
from factory.ledger.files import retired
from factory.ledger.plant import Plant
from factory.ledger.removals import erased_shards
from factory.ledger.rows import CandidateRow, SegmentRow, champion
from factory.release.serving import served
from factory.repairs.checkpoints import checkpoint_fault, export_fault
from factory.repairs.token_shards import raw_shard, token_shard_fault, tokenizer_fault
from factory.training.segment_folder import OWNER, is_owner, read_owner
from trainer.contract.data.token_shard import file_sha256

DRAWN = 3  # of each kind, besides the newest
Row = TypeVar("Row")
REPAIR = "'factory check --repair' (stop 'factory run' first) "


@dataclass(frozen=True)
class Damage:
    """Something that is gone or damaged."""

    kind: str  # of CHECKS
    subject: str  # number or hash, as the ledger has it
    what: str  # a sentence's beginning: what is wrong with which file
    remedy: str  # what to do
    mends: bool = False  # 'factory check --repair' does


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
    mlflows = "puts its backup back and sends again what is missing; training does not wait for it"
    for kind, url, table, remedy in (
        ("ledger", workspace.ledger_url, "meta", "makes it again ('factory restore' does the same)"),
        ("mlflow", workspace.mlflow_uri, MLFLOW_TABLE, mlflows),
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
    plant: Plant, deep: bool, kind: str, rows: Sequence[Row], subject: Callable[[Row], object], fault: Callable[[Row, bool], str], remedy: str
) -> Examined:  # fmt: skip
    """Look at each row; hash all with ``deep``, else the newest, which is the last, and a few. ``fault``: what is wrong with a row, or nothing."""
    every = range(len(rows))
    hashed = set(every) if deep else {*every[-1:], *random.SystemRandom().sample(every, min(DRAWN, len(rows)))}
    faults = []
    with plant.progress.task(f"{kind}: look at {len(rows)}, hash {len(hashed)}", len(rows)) as task:
        for number, row in enumerate(rows):
            if what := fault(row, number in hashed):
                faults.append(Damage(kind, str(subject(row)), what, remedy, remedy.startswith(REPAIR)))
            task.advance()
    return Examined(kind, len(rows), len(hashed), faults)


def _kept(plant: Plant, rows: Sequence[Row], place: Callable[[Row], str]) -> list[Row]:
    """Without those that retention removed."""
    gone = {plant.workspace.root / path for path in retired(plant.ledger)}
    return [row for row in rows if Path(place(row)) not in gone or Path(place(row)).exists()]


def token_shard_faults(plant: Plant, deep: bool) -> Examined:
    rows = plant.ledger.read("SELECT id, path FROM token_shards ORDER BY created_at, id")
    fault = lambda row, hashed: token_shard_fault(Path(row["path"]), hashed)
    remedy = REPAIR + "makes it again from its raw shard, and so does the next pass that needs it"
    return _look(plant, deep, "token shards", rows, lambda row: row["id"], fault, remedy)


def checkpoint_faults(plant: Plant, deep: bool) -> Examined:
    """The last one of each segment that may be gone on from, averaged or exported again."""
    rows = plant.ledger.read(
        "SELECT c.*, s.kind FROM checkpoints c JOIN segments s ON s.id = c.segment "
        "WHERE s.state = 'done' AND c.step = s.last_step ORDER BY c.segment"
    )
    rows = _kept(plant, rows, lambda row: row["path"])
    remedy = REPAIR + "replays its segment, and so does the next pass that needs it"
    found = _look(plant, deep, "checkpoints", rows, lambda row: row["segment"], checkpoint_fault, remedy)
    averages = {str(row["segment"]) for row in rows if row["kind"] == "average"}
    again = lambda one: replace(one, remedy="stop 'factory run', then 'factory average' makes it again", mends=False)
    return replace(found, faults=[again(one) if one.subject in averages else one for one in found.faults])


def _exports(plant: Plant, deep: bool) -> Examined:
    best = champion(plant.ledger)
    fault = lambda row, hashed: export_fault(row, hashed or (best is not None and best.candidate == row.id))
    rows = _kept(plant, CandidateRow.select(plant.ledger), lambda row: row.export_path)
    return _look(plant, deep, "exports", rows, lambda row: row.id, fault, REPAIR + "makes it again from its checkpoint")


def _raw_shards(plant: Plant, deep: bool) -> Examined:
    """What token shards are made again from."""
    erased = {sha256: one["raw"] for sha256, one in erased_shards(plant.ledger).items() if one["raw"]}

    def fault(row: dict[str, Any], hashed: bool) -> str:
        path, name = raw_shard(plant, row["sha256"])
        if path is None:
            return f"{row['path']} is gone (it arrived as {name})"
        wrong = hashed and file_sha256(path) != erased.get(row["sha256"], row["sha256"])
        return f"{path} is not the file that was ingested (it arrived as {name})" if wrong else ""

    rows = plant.ledger.read("SELECT sha256, path FROM shards WHERE state = 'ingested' ORDER BY ingested_at, sha256")
    remedy = (
        f"nothing needs it but a repair of its token shard: put that file into {plant.workspace.shards / 'raw'} again"
    )
    return _look(plant, deep, "raw shards", rows, lambda row: row["sha256"], fault, remedy)


def _hashes(plant: Plant, deep: bool) -> Examined:
    """What later documents are compared with, and the index of it."""

    def fault(source: tuple[int, str], hashed: bool) -> str:
        try:
            if hashed or not hashes_file(plant.workspace.root, source[1]).exists():
                read_hashes(plant.workspace.root, source[1])
        except WorkspaceError as error:
            return str(error).partition(";")[0]
        return ""

    remedy = REPAIR + "makes it again from its raw shard"
    found = _look(plant, deep, "hashes", sources(plant.ledger), lambda source: source[1], fault, remedy)
    index = plant.workspace.root / INDEX
    if index.exists() and (damage := database_damage(index, "sources")):
        what = f"{index} is damaged: {damage}"
        found.faults.append(Damage("hashes", INDEX, what, REPAIR + "makes it again, from shards/hashes", True))
    return found


def tokenizer_faults(plant: Plant, deep: bool) -> Examined:
    fault = tokenizer_fault(plant)
    remedy = REPAIR + "puts it back from a backup or an export"
    return Examined("tokenizer", 1, 1, [Damage("tokenizer", "", fault, remedy, True)] if fault else [])


def _folders(plant: Plant, deep: bool) -> Examined:
    """Each segment's folder bears that segment's plan."""

    def fault(row: SegmentRow, hashed: bool) -> str:
        folder = Path(row.folder)
        if not folder.is_dir():
            return f"{folder} is gone: its metrics and its checkpoints with it"
        mine = is_owner(read_owner(folder), plant.ledger, row)
        return "" if mine else f"{folder / OWNER} is gone, or of another plan or ledger"

    rows = SegmentRow.select(plant.ledger, "WHERE state = 'done' ORDER BY id")
    remedy = "move the folder away if it is not this segment's, and put a backup of it there, if there is one"
    return _look(plant, deep, "segments", rows, lambda row: row.id, fault, remedy)


def _served(plant: Plant, deep: bool) -> Examined:
    best = champion(plant.ledger)
    if best is None:
        return Examined("served", 0, 0, [])
    note = served(plant.workspace)
    if note and (note["release"], note["export_sha256"]) == (best.number, best.export_sha256):
        return Examined("served", 1, 1, [])
    what = f"{plant.workspace.exports / 'champion'} is not release {best.number}, which is champion"
    remedy = REPAIR + "and the daemon's next pass put it back"
    return Examined("served", 1, 1, [Damage("served", str(best.number), what, remedy, True)])


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
