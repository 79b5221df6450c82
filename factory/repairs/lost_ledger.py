"""A lost or damaged ledger is made again: the newest good backup, then its journal, then what lies in the workspace's folders.

    backup ─► journal: every row since ─► raw shards that no row names ─► segments by their owner.json ─► the rest is set aside

Everything happens in a copy below ``backups/``; the last step, a rename, puts it in the damaged one's place, which is kept.
"""

from __future__ import annotations

import math
import os
import shutil
import sqlite3
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from factory.backups.backups import (
    LEDGER,
    MLFLOW,
    MLFLOW_TABLE,
    PG_DUMP,
    about,
    database_damage,
    find_backup,
    make_backup,
    put_back_hashes,
    stamp,
)
from factory.backups.keys import put_back
from factory.core.errors import FactoryError, InputError, WorkspaceError
from factory.core.progress import Progress
from factory.core.removal import remove
from factory.core.workspace import FOLDERS, Workspace, work_in
from factory.ingest.chain import ingest_shard
from factory.ingest.tokenizer import Tokenizer
from factory.ledger import journal
from factory.ledger.engine import sqlite_file
from factory.ledger.journal import BACKUPS, NAME, backups_of, damage_of, folders_of, key_of, order_of, replayed
from factory.ledger.ledger import Ledger, data_plans, meta, metadata, record, segments, tokenizers
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.ledger.version import SCHEMA
from factory.ledger.writing import insert
from factory.repairs.checkpoints import checkpoint_fault
from factory.training.planning import last_checkpoint
from factory.training.segment_folder import PLANNED, plan_sha256, read_owner, set_aside
from kernels.contract.files import put_in_place

LOCKS = ("model-loop", "code-loop", "release")


def restore(root: Path, name: str, progress: Progress) -> list[str]:
    """Make the ledger of the workspace ``root`` again, from the backup ``name``, by default the newest good one; returns what was done.

    Without any backup it is made from the workspace's folders alone. What was there is moved to ``backups/``. Killed at any moment, the
    ledger is as before, restored, or not there: then a restore makes it.

    Raises: InputError for an unknown backup; WorkspaceError for a ledger in PostgreSQL, or a workspace that is in use.
    """
    root = root.expanduser().resolve()
    said = _restore_config(root, name)
    workspace = Workspace.open(root)
    named = [root / BACKUPS / name, Path(name).expanduser().resolve()] if name else []
    said += put_back(root, [*named, *backups_of(root)[::-1]])
    file = sqlite_file(workspace.ledger_url)
    if file is None:
        raise WorkspaceError(PG_DUMP)
    with ExitStack() as held:
        for lock in LOCKS:
            held.enter_context(workspace.lock(lock))
        base = find_backup(workspace, name) if name else _newest_good(root, said)
        if base is None and not work_in(root):
            raise WorkspaceError(f"{root} holds nothing to make a ledger of: run 'factory init'")
        if base is None and not database_damage(file):
            raise InputError(
                f"{file} is whole, and there is no backup: nothing is restored ('factory backup' makes one). To have the ledger made again from "
                f"the workspace's folders, which know less, move {file.name} away first"
            )
        if file.exists() and not database_damage(file) and backups_of(root):
            with suppress(OSError, ValueError, sqlite3.Error), journal.journal_lock(root):
                journal.append(file, backups_of(root)[-1])
        if base and (count := put_back_hashes(root, base)):
            said.append(f"{count} files that later documents are compared with are back, from {base}")
        aside = root / BACKUPS / ".restoring"
        for left in (aside, *workspace.shards.glob(".*")):  # of an ingest or a restore that was killed
            remove(left)
        aside.mkdir(parents=True)
        try:
            again = _again(workspace, base, aside / LEDGER, progress, said)
            backup, lines = make_backup(Plant(workspace, again))
            said += lines
            _replace(root, file, backup / LEDGER, said)
        finally:
            remove(aside)
    return said


def _restore_config(root: Path, name: str) -> list[str]:
    """``factory.yaml`` and the folders, where they are gone; a policy that is there is left alone."""
    backups = [root / BACKUPS / name, Path(name).expanduser().resolve()] if name else backups_of(root)[::-1]
    # A new disk: all comes from the backup that is named.
    fresh = not work_in(root) and not (root.is_dir() and any(root.iterdir()))
    if (root / "factory.yaml").exists() or not (work_in(root) or (fresh and any(map(journal.about, backups)))):
        for folder in FOLDERS if work_in(root) else ():
            (root / folder).mkdir(exist_ok=True)
        return []
    kept = next((path for path in backups if (path / "factory.yaml").is_file()), None)
    if kept is None:
        raise WorkspaceError(
            f"{root / 'factory.yaml'} is gone, and no backup in {root / BACKUPS} has it: write it again ('recipe: NAME' at least), then "
            "run 'factory restore' again"
        )
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
    shutil.copyfile(kept / "factory.yaml", root / "factory.yaml")
    if (kept / "tokenizer").is_dir() and not (root / "tokenizer" / "tokenizer.json").exists():
        shutil.copytree(kept / "tokenizer", root / "tokenizer", dirs_exist_ok=True)
    for path in (kept / "policies").rglob("*") if (kept / "policies").is_dir() else ():
        place = root / "policies" / path.relative_to(kept / "policies")
        if path.is_file() and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    return [f"factory.yaml is back, from {kept}"]


def _newest_good(root: Path, said: list[str]) -> Path | None:
    for path in reversed(backups_of(root)):
        fault = database_damage(path / LEDGER)
        if not fault and about(path)["schema"] == SCHEMA:
            return path
        said.append(f"backup {path.name} is passed over: {fault or 'it is of another schema'}")
    return None


def _again(workspace: Workspace, base: Path | None, file: Path, progress: Progress, said: list[str]) -> Ledger:
    if base is None:
        said.append("there is no backup: the ledger is made from the workspace's folders alone")
        ledger = Ledger.create(f"sqlite:///{file}", workspace.root)
        ledger.journaled = False
        _from_nothing(Plant(workspace, ledger))
    else:
        if about(base)["schema"] != SCHEMA:
            raise InputError(
                f"{base} is of schema {about(base)['schema']}, this factory's is {SCHEMA}: name another backup"
            )
        shutil.copyfile(base / LEDGER, file)
        ledger = Ledger.open(f"sqlite:///{file}", workspace.root)
        ledger.journaled = False
        said.append(f"the ledger is the one of backup {base.name}, and what its journal holds:")
        said.append(f"  {_replay(Plant(workspace, ledger, progress), base, said)} transactions since")
    said += _unknown_shards(Plant(workspace, ledger, progress))
    said += _take_up(Plant(workspace, ledger))
    return ledger


def starts_at(root: Path) -> str:
    """Where 'factory run' goes on in a restored workspace, and what was set aside."""
    workspace = Workspace.open(root)
    ledger = Ledger.open(workspace.ledger_url, workspace.root)
    trunk = SegmentRow.first(ledger, "WHERE kind = 'trunk' AND state = 'done' ORDER BY id DESC")
    where = (
        f"goes on from step {trunk.last_step}" if trunk else "begins to train at step 0: no trained segment is known"
    )
    if trunk and (fault := checkpoint_fault(last_checkpoint(ledger, trunk.id), deep=False)):
        where += f", once its checkpoint is back or made again: {fault}"
    aside = len(list((workspace.root / "set-aside").glob("*")))
    return f"'factory run' {where}" + (
        f"; {aside} files or folders lie in {workspace.root / 'set-aside'}" if aside else ""
    )


# -- the journal -------------------------------------------------------------------------------------------------------
def _replay(plant: Plant, base: Path, said: list[str]) -> int:
    """How many batches. A batch that was in the backup already changes nothing."""
    own = folders_of(plant.workspace.root)
    journals = [path / NAME for path in own if order_of(path) >= order_of(base)]
    # From elsewhere: begin with the journal that ran when it was made.
    if base.parent != plant.workspace.root / BACKUPS:
        earlier = [path for path in own if journal.about(path).get("seq", math.inf) <= about(base)["seq"]]
        journals = [path / NAME for path in own[max(0, len(earlier) - 1) :]]
    batches = 0
    for path in journals:
        if damage := damage_of(path):
            said.append(f"  {damage}")
        for batch in replayed(path):
            batches += 1
            _put(plant.ledger, batch)
    return batches


def _put(ledger: Ledger, batch: dict[str, Any]) -> None:
    """Write a batch's rows as they were; keys, references and counters included."""
    assert ledger.file
    with closing(sqlite3.connect(ledger.file)) as file:
        file.execute("PRAGMA foreign_keys=OFF")
        with file:
            for table, key, value in [(t, key_of(metadata.tables[t]), v) for t, v in batch["gone"]]:
                file.execute(f'DELETE FROM "{table}" WHERE "{key}" = ?', [value])
            for table, row in batch["rows"]:
                columns = [name for name in row if name != "rowid" or not key_of(metadata.tables[table])]
                names, marks = ", ".join(f'"{name}"' for name in columns), ", ".join("?" for _ in columns)
                file.execute(
                    f'INSERT OR REPLACE INTO "{table}" ({names}) VALUES ({marks})', [row[name] for name in columns]
                )


def ingest_file(plant: Plant, path: Path, name: str) -> str:
    """Ingest a raw shard under the name that it arrived with, which says how it is read; returns its SHA-256."""
    folder = plant.workspace.shards / f".again-{os.getpid()}"
    for left in (folder, *plant.workspace.shards.glob(".again-*")):  # of one that was killed
        remove(left)
    folder.mkdir()
    try:
        (folder / name).symlink_to(path.resolve())
        return ingest_shard(plant, folder / name).sha256
    finally:
        remove(folder)


# -- the folders -------------------------------------------------------------------------------------------------------
def _raw(workspace: Workspace) -> tuple[Path, Path]:
    return workspace.shards / "raw", workspace.quarantine


def _from_nothing(plant: Plant) -> None:
    """What must be there before shards are ingested: the identity that segments bear, and the tokenizer."""
    owners = [read_owner(folder) for folder in sorted(plant.workspace.segments.iterdir()) if folder.is_dir()]
    with plant.ledger.begin() as tx:
        for owner in owners[-1:]:
            if isinstance(identity := owner.get("ledger"), str):
                tx.execute(meta.update().where(meta.c.key == "identity").values(value=identity))
        if (plant.workspace.tokenizer / "tokenizer.json").exists():
            found = Tokenizer.load(plant.workspace.tokenizer)
            values = {"sha256": found.sha256, "path": plant.ledger.inside(found.folder), "vocab_size": found.vocab_size}
            tx.execute(tokenizers.insert().values(**values, created_at=time.time()))


def _unknown_shards(plant: Plant) -> list[str]:
    """Ingest filed shards that no row names, in the order in which they were filed."""
    known = {row["sha256"][:16] for row in plant.ledger.read("SELECT sha256 FROM shards")}
    filed = [path for folder in _raw(plant.workspace) if folder.is_dir() for path in folder.iterdir() if path.is_file()]
    said = []
    for path in sorted(filed, key=lambda one: (one.stat().st_ctime_ns, one.name)):
        prefix, _, name = path.name.partition("-")
        if len(prefix) == 16 and name and prefix not in known and not path.name.startswith("."):
            try:
                ingest_file(plant, path, name)
                said.append(f"  shard {name} was not in the ledger: ingested again")
            except FactoryError as error:
                said.append(f"  shard {name} cannot be ingested again: {error}")
    return said


def _take_up(plant: Plant) -> list[str]:
    """Segments whose folder proves what they are become planned again: the next pass takes their results. The rest is set aside."""
    said = []
    known = {Path(row.folder).name for row in SegmentRow.select(plant.ledger)}
    for folder in sorted(
        path for path in plant.workspace.segments.iterdir() if path.is_dir() and path.name not in known
    ):
        if why := _plan_again(plant.ledger, folder):
            said.append(f"  {folder} is set aside, in {set_aside(plant.workspace.root, folder)}: {why}")
        else:
            said.append(f"  segment {folder.name} was not in the ledger: taken up from its folder")
    numbers = {f"segment-{row.id:05d}" for row in SegmentRow.select(plant.ledger)}
    token_shards = {row["id"] for row in plant.ledger.read("SELECT id FROM token_shards")}
    orphans = [path for path in plant.workspace.exports.glob("segment-*") if path.name not in numbers]
    whole = (path for path in plant.workspace.shards.glob("*/manifest.json") if not path.parent.name.startswith("."))
    orphans += [path for path in whole if path.parent.name not in token_shards]
    for path in orphans:
        path = path.parent if path.name == "manifest.json" else path
        said.append(
            f"  {path} is set aside, in {set_aside(plant.workspace.root, path)}: nothing in the ledger names it"
        )
    return said


def _plan_again(ledger: Ledger, folder: Path) -> str:
    """Add the row that a segment's folder bears, as planned; returns why not."""
    owner = read_owner(folder)
    row, plan = owner.get("row"), owner.get("data_plan")
    if not isinstance(row, dict) or not isinstance(plan, dict) or set(PLANNED.split()) - row.keys():
        return "it does not say which plan it is of"
    if owner.get("ledger") != ledger.identity:
        return "it is of another ledger"
    planned = SegmentRow(**{**row, "state": "planned", "attempts": 0, "result": None, "finished_at": None})
    if plan_sha256(planned) != owner.get("plan_sha256"):
        return "its plan does not have the hash that it bears"
    if ledger.read("SELECT id FROM segments WHERE id = :id", id=planned.id):
        return f"the ledger has another segment {planned.id}"
    if planned.parent is not None and not ledger.read("SELECT id FROM segments WHERE id = :id", id=planned.parent):
        return f"segment {planned.parent}, which it goes on from, is not known"
    held = {one["id"] for one in ledger.read("SELECT id FROM token_shards")}
    if missing := [one["id"] for one in plan.get("token_shards", []) if one["id"] not in held]:
        return f"token shard {missing[0]}, which it was trained on, is not known"
    with ledger.begin() as tx:
        if tx.execute(sa.select(data_plans.c.id).where(data_plans.c.id == planned.data_plan)).first() is None:
            tx.execute(data_plans.insert().values(id=planned.data_plan, plan=plan, created_at=planned.created_at))
        values = {key: value for key, value in vars(planned).items() if key not in ("result", "finished_at")}
        insert(tx, segments, **values)
        record(tx, "segment_taken_up", f"segment:{planned.id}", {"folder": row["folder"]})
    return ""


# -- the end -----------------------------------------------------------------------------------------------------------
def _replace(root: Path, file: Path, made: Path, said: list[str]) -> None:
    """Put the new ledger in its place; the old one's files are kept.

    The old file goes before its logs: without its log it would be a ledger that lacks the last commits and looks whole. The new one comes
    last: SQLite would read the old logs into it.
    """
    new = file.with_name(f".{file.name}.restored")
    shutil.copyfile(made, new)
    there = [
        path for ending in ("", "-wal", "-shm", "-journal") if (path := file.with_name(file.name + ending)).exists()
    ]
    if there:
        kept = _replaced(root)
        for path in there:
            put_in_place(path, kept / path.name)
        said.append(f"the ledger as it was is kept: {kept}")
    put_in_place(new, file)


def _replaced(root: Path) -> Path:
    """A new folder for what is replaced; a second one of the same second gets a number."""
    name, number = f"replaced-{stamp()}", 0
    while (folder := root / BACKUPS / (f"{name}-{number}" if number else name)).exists():
        number += 1
    folder.mkdir(parents=True)
    return folder


def restore_mlflow(workspace: Workspace) -> str:
    """Put MLflow's database back from the newest good backup; without one it is made empty at the next need. Returns what was done."""
    file = sqlite_file(workspace.mlflow_uri)
    assert file is not None
    kept = _replaced(workspace.root)
    for path in (file.with_name(file.name + ending) for ending in ("-wal", "-shm", "-journal", "")):
        if path.exists():
            put_in_place(path, kept / path.name)
    for backup in reversed(backups_of(workspace.root)):
        if (backup / MLFLOW).is_file() and not database_damage(backup / MLFLOW, MLFLOW_TABLE):
            new = file.with_name(f".{file.name}.restored")
            shutil.copyfile(backup / MLFLOW, new)
            put_in_place(new, file)
            return f"MLflow's database is the one of backup {backup.name} again; the damaged one is kept: {kept}"
    return f"MLflow's database is made again, from the ledger; the damaged one is kept: {kept}"
