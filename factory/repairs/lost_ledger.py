"""Restores a lost or damaged ledger from the newest good backup, its journal and the workspace's folders.

    backup ─► journal: all later rows ─► raw shards without a row ─► segments by their owner.json ─► other folders are set aside

All steps work on a copy below ``backups/``. The last step renames the copy to the ledger's place. The damaged ledger is kept.
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
    POSTGRESQL_ADVICE,
    find_backup,
    find_database_damage,
    make_backup,
    make_backup_timestamp,
    read_backup_info,
    restore_document_hashes,
)
from factory.backups.signing_keys import restore_signing_key
from factory.core.errors import FactoryError, InputError, WorkspaceError
from factory.core.path_removal import remove_path
from factory.core.progress import Progress
from factory.core.workspace import FOLDERS, Workspace, list_factory_files
from factory.ingest.chain import ingest_shard
from factory.ingest.tokenizer import Tokenizer
from factory.ledger import journal
from factory.ledger.engine import get_sqlite_file
from factory.ledger.journal import (
    BACKUPS_FOLDER,
    NAME,
    describe_journal_damage,
    get_primary_key_name,
    list_backup_folders,
    list_backups,
    make_backup_sort_key,
    read_batches,
)
from factory.ledger.ledger import Ledger, data_plans, meta, metadata, record_event, segments, tokenizers
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.ledger.version import SCHEMA_VERSION
from factory.ledger.writing import insert_row
from factory.repairs.checkpoints import find_checkpoint_damage
from factory.training.planning import read_last_checkpoint
from factory.training.segment_folder import PLANNED, hash_segment_plan, move_to_set_aside_folder, read_folder_owner
from kernels.contract.files import rename_into_place
from kernels.contract.message import Message

LOCKS = ("model-loop", "code-loop", "release")


def restore_ledger(root: Path, name: str, progress: Progress) -> list[str]:
    """Restore the ledger of the workspace ``root`` from the backup ``name``, or from the newest good backup if ``name`` is ''.

    Returns lines for a person. Without a backup, the ledger is made from the workspace's folders. The former ledger is moved to ``backups/``.
    After a kill at any moment, the ledger is unchanged, restored or missing. If it is missing, a second call restores it.

    Raises: InputError for an unknown backup; WorkspaceError for a ledger in PostgreSQL, or a workspace that is in use.
    """
    root = root.expanduser().resolve()
    said = _restore_config(root, name)
    workspace = Workspace.open(root)
    named = [root / BACKUPS_FOLDER / name, Path(name).expanduser().resolve()] if name else []
    said += restore_signing_key(root, [*named, *list_backups(root)[::-1]])
    file = get_sqlite_file(workspace.ledger_url)
    if file is None:
        raise WorkspaceError(POSTGRESQL_ADVICE)
    with ExitStack() as held:
        for lock in LOCKS:
            held.enter_context(workspace.hold_lock(lock))
        base = find_backup(workspace, name) if name else _newest_good(root, said)
        if base is None and not list_factory_files(root):
            raise WorkspaceError(
                "lost_ledger.empty_workspace",
                "{folder} has no files from which a ledger could be made: run 'factory init'",
                folder=root,
            )
        if base is None and not find_database_damage(file):
            raise InputError(
                "lost_ledger.whole",
                "{ledger} is undamaged and the workspace has no backup, so nothing is restored. Make a backup with "
                "'factory backup'. The workspace's folders have less information than the ledger. To make a ledger "
                "from these folders anyway, move {name} away first",
                ledger=file,
                name=file.name,
            )
        if file.exists() and not find_database_damage(file) and list_backups(root):
            with suppress(OSError, ValueError, sqlite3.Error), journal.hold_journal_lock(root):
                journal.append_changes(file, list_backups(root)[-1])
        if base and (count := restore_document_hashes(root, base)):
            said.append(
                Message(
                    "lost_ledger.hashes",
                    "The factory restored {files:,|file|files} with hashes of documents from {backup}",
                    files=count,
                    backup=base,
                )
            )
        aside = root / BACKUPS_FOLDER / ".restoring"
        for left in (aside, *workspace.shards.glob(".*")):  # left by an ingest or a restore that was killed
            remove_path(left)
        aside.mkdir(parents=True)
        try:
            again = _again(workspace, base, aside / LEDGER, progress, said)
            backup, lines = make_backup(Plant(workspace, again))
            said += lines
            _replace(root, file, backup / LEDGER, said)
        finally:
            remove_path(aside)
    return said


def _restore_config(root: Path, name: str) -> list[str]:
    """Restore ``factory.yaml``, folders and policies that are missing. Existing policies stay unchanged. Returns lines for a person."""
    backups = [root / BACKUPS_FOLDER / name, Path(name).expanduser().resolve()] if name else list_backups(root)[::-1]
    # On a new disk everything comes from the named backup.
    fresh = not list_factory_files(root) and not (root.is_dir() and any(root.iterdir()))
    if (root / "factory.yaml").exists() or not (
        list_factory_files(root) or (fresh and any(map(journal.read_backup_info, backups)))
    ):
        for folder in FOLDERS if list_factory_files(root) else ():
            (root / folder).mkdir(exist_ok=True)
        return []
    kept = next((path for path in backups if (path / "factory.yaml").is_file()), None)
    if kept is None:
        raise WorkspaceError(
            "lost_ledger.no_config",
            "{file} is missing, and no backup in {folder} has a copy. Write the file again, at least the line 'recipe: NAME'. "
            "Then run 'factory restore' again",
            file=root / "factory.yaml",
            folder=root / BACKUPS_FOLDER,
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
    return [Message("lost_ledger.config", "factory.yaml is restored from {backup}", backup=kept)]


def _newest_good(root: Path, said: list[str]) -> Path | None:
    """Return the newest undamaged backup of this schema, or None. Adds a line to ``said`` for each newer backup that is skipped."""
    for path in reversed(list_backups(root)):
        fault = find_database_damage(path / LEDGER)
        if not fault and read_backup_info(path)["schema"] == SCHEMA_VERSION:
            return path
        why = fault or Message("lost_ledger.other_schema", "this factory cannot read the schema of the backup")
        said.append(
            Message("lost_ledger.skipped_backup", "backup {backup} is skipped: {why}", backup=path.name, why=why)
        )
    return None


def _again(workspace: Workspace, base: Path | None, file: Path, progress: Progress, said: list[str]) -> Ledger:
    if base is None:
        said.append(
            Message(
                "lost_ledger.no_backup",
                "The workspace has no backup, so the factory makes the ledger from the workspace's folders",
            )
        )
        ledger = Ledger.create(f"sqlite:///{file}", workspace.root)
        ledger.journaled = False
        _from_nothing(Plant(workspace, ledger))
    else:
        if read_backup_info(base)["schema"] != SCHEMA_VERSION:
            raise InputError(
                "lost_ledger.wrong_schema",
                "{backup} has schema {schema}, but this factory reads schema {known}. Give another backup",
                backup=base,
                schema=read_backup_info(base)["schema"],
                known=SCHEMA_VERSION,
            )
        shutil.copyfile(base / LEDGER, file)
        ledger = Ledger.open(f"sqlite:///{file}", workspace.root)
        ledger.journaled = False
        said.append(Message("lost_ledger.from_backup", "The ledger is restored from backup {backup}", backup=base.name))
        transactions = _replay(Plant(workspace, ledger, progress), base, said)
        said.append(
            Message(
                "lost_ledger.from_journal",
                "  The restored ledger includes {transactions:,|later transaction|later transactions} from the "
                "backup's journal",
                transactions=transactions,
            )
        )
    said += _unknown_shards(Plant(workspace, ledger, progress))
    said += _take_up(Plant(workspace, ledger))
    return ledger


def describe_next_training_start(root: Path) -> Message:
    """Return a line: the step from which 'factory run' continues in a restored workspace, and how many files were set aside."""
    workspace = Workspace.open(root)
    ledger = Ledger.open(workspace.ledger_url, workspace.root)
    trunk = SegmentRow.find_first(ledger, "WHERE kind = 'trunk' AND state = 'done' ORDER BY id DESC")
    if trunk is None:
        where = Message(
            "lost_ledger.starts_anew",
            "'factory run' starts to train at step 0, because the ledger has no trained segment",
        )
    elif fault := find_checkpoint_damage(read_last_checkpoint(ledger, trunk.id), deep=False):
        where = Message(
            "lost_ledger.needs_checkpoint",
            "'factory run' can continue from step {step} only after the checkpoint of this step is restored or "
            "made again: {fault}",
            step=trunk.last_step,
            fault=fault,
        )
    else:
        where = Message("lost_ledger.continues", "'factory run' continues from step {step}", step=trunk.last_step)
    if aside := len(list((workspace.root / "set-aside").glob("*"))):
        return Message(
            "lost_ledger.continues_with_rest",
            "{start}. {count:,|file or folder is|files or folders are} set aside in {folder}",
            start=where,
            count=aside,
            folder=workspace.root / "set-aside",
        )
    return where


# -- the journal -------------------------------------------------------------------------------------------------------
def _replay(plant: Plant, base: Path, said: list[str]) -> int:
    """Apply the batches that the journals recorded since a backup. Returns their number. A batch that the backup contains changes nothing."""
    own = list_backup_folders(plant.workspace.root)
    journals = [path / NAME for path in own if make_backup_sort_key(path) >= make_backup_sort_key(base)]
    # A backup in another folder: start with the journal that was in use when the backup was made.
    if base.parent != plant.workspace.root / BACKUPS_FOLDER:
        earlier = [
            path for path in own if journal.read_backup_info(path).get("seq", math.inf) <= read_backup_info(base)["seq"]
        ]
        journals = [path / NAME for path in own[max(0, len(earlier) - 1) :]]
    batches = 0
    for path in journals:
        if damage := describe_journal_damage(path):
            said.append(Message("lost_ledger.damaged_journal", "  {damage}", damage=damage))
        for batch in read_batches(path):
            batches += 1
            _put(plant.ledger, batch)
    return batches


def _put(ledger: Ledger, batch: dict[str, Any]) -> None:
    """Write the rows of a batch unchanged, keys included, and delete the rows that the batch deleted."""
    assert ledger.file
    with closing(sqlite3.connect(ledger.file)) as file:
        file.execute("PRAGMA foreign_keys=OFF")
        with file:
            for table, key, value in [(t, get_primary_key_name(metadata.tables[t]), v) for t, v in batch["gone"]]:
                file.execute(f'DELETE FROM "{table}" WHERE "{key}" = ?', [value])
            for table, row in batch["rows"]:
                columns = [name for name in row if name != "rowid" or not get_primary_key_name(metadata.tables[table])]
                names, marks = ", ".join(f'"{name}"' for name in columns), ", ".join("?" for _ in columns)
                file.execute(
                    f'INSERT OR REPLACE INTO "{table}" ({names}) VALUES ({marks})', [row[name] for name in columns]
                )


def reingest_raw_shard(plant: Plant, path: Path, name: str) -> str:
    """Ingest a raw shard under its original name, which determines the reader. Returns its SHA-256."""
    folder = plant.workspace.shards / f".again-{os.getpid()}"
    for left in (folder, *plant.workspace.shards.glob(".again-*")):  # left by a process that was killed
        remove_path(left)
    folder.mkdir()
    try:
        (folder / name).symlink_to(path.resolve())
        return ingest_shard(plant, folder / name).sha256
    finally:
        remove_path(folder)


# -- the folders -------------------------------------------------------------------------------------------------------
def _raw(workspace: Workspace) -> tuple[Path, Path]:
    return workspace.shards / "raw", workspace.quarantine


def _from_nothing(plant: Plant) -> None:
    """Write the ledger's identity (from the segments' folders) and the tokenizer to the ledger. Ingest needs both."""
    owners = [read_folder_owner(folder) for folder in sorted(plant.workspace.segments.iterdir()) if folder.is_dir()]
    with plant.ledger.begin() as tx:
        for owner in owners[-1:]:
            if isinstance(identity := owner.get("ledger"), str):
                tx.execute(meta.update().where(meta.c.key == "identity").values(value=identity))
        if (plant.workspace.tokenizer / "tokenizer.json").exists():
            found = Tokenizer.load(plant.workspace.tokenizer)
            values = {
                "sha256": found.sha256,
                "path": plant.ledger.to_stored_path(found.folder),
                "vocab_size": found.vocab_size,
            }
            tx.execute(tokenizers.insert().values(**values, created_at=time.time()))


def _unknown_shards(plant: Plant) -> list[str]:
    """Ingest the raw shards that have no row in the ledger, in the order in which they arrived. Returns lines for a person."""
    known = {row["sha256"][:16] for row in plant.ledger.read("SELECT sha256 FROM shards")}
    filed = [path for folder in _raw(plant.workspace) if folder.is_dir() for path in folder.iterdir() if path.is_file()]
    said: list[str] = []
    for path in sorted(filed, key=lambda one: (one.stat().st_ctime_ns, one.name)):
        prefix, _, name = path.name.partition("-")
        if len(prefix) == 16 and name and prefix not in known and not path.name.startswith("."):
            try:
                reingest_raw_shard(plant, path, name)
                said.append(
                    Message(
                        "lost_ledger.shard",
                        "  shard {shard} was not in the ledger. The factory ingested the shard again",
                        shard=name,
                    )
                )
            except FactoryError as error:
                said.append(
                    Message(
                        "lost_ledger.lost_shard",
                        "  shard {shard} cannot be ingested again: {why}",
                        shard=name,
                        why=error.message,
                    )
                )
    return said


def _take_up(plant: Plant) -> list[str]:
    """Add a planned segment for each folder that records its plan: the next pass uses its results. Set all other folders aside.

    Returns lines for a person.
    """
    said: list[str] = []
    known = {Path(row.folder).name for row in SegmentRow.select(plant.ledger)}
    for folder in sorted(
        path for path in plant.workspace.segments.iterdir() if path.is_dir() and path.name not in known
    ):
        if why := _plan_again(plant.ledger, folder):
            said.append(_set_aside(plant, folder, why))
        else:
            said.append(
                Message(
                    "lost_ledger.segment",
                    "  segment {segment} was not in the ledger. The factory added the segment to the ledger from its folder",
                    segment=folder.name,
                )
            )
    numbers = {f"segment-{row.id:05d}" for row in SegmentRow.select(plant.ledger)}
    token_shards = {row["id"] for row in plant.ledger.read("SELECT id FROM token_shards")}
    orphans = [path for path in plant.workspace.exports.glob("segment-*") if path.name not in numbers]
    whole = (path for path in plant.workspace.shards.glob("*/manifest.json") if not path.parent.name.startswith("."))
    orphans += [path for path in whole if path.parent.name not in token_shards]
    for path in orphans:
        path = path.parent if path.name == "manifest.json" else path
        said.append(_set_aside(plant, path, Message("lost_ledger.orphan", "the ledger has no entry for this folder")))
    return said


def _set_aside(plant: Plant, path: Path, why: str) -> Message:
    return Message(
        "lost_ledger.set_aside",
        "  {path} is set aside in {place}: {why}",
        path=path,
        place=move_to_set_aside_folder(plant.workspace.root, path),
        why=why,
    )


def _plan_again(ledger: Ledger, folder: Path) -> str:
    """Add the row that a segment's folder records to the ledger, in the state 'planned'. Returns why this is impossible, or ''."""
    owner = read_folder_owner(folder)
    row, plan = owner.get("row"), owner.get("data_plan")
    if not isinstance(row, dict) or not isinstance(plan, dict) or set(PLANNED.split()) - row.keys():
        return Message("lost_ledger.no_plan", "the folder does not record the segment's plan")
    if owner.get("ledger") != ledger.identity:
        return Message("lost_ledger.other_ledger", "the folder belongs to another ledger")
    planned = SegmentRow(**{**row, "state": "planned", "attempts": 0, "result": None, "finished_at": None})
    if hash_segment_plan(planned) != owner.get("plan_sha256"):
        return Message(
            "lost_ledger.other_hash", "the hash of the segment's plan differs from the hash that the folder records"
        )
    if ledger.read("SELECT id FROM segments WHERE id = :id", id=planned.id):
        return Message(
            "lost_ledger.other_segment", "the ledger already has another segment {segment}", segment=planned.id
        )
    if planned.parent is not None and not ledger.read("SELECT id FROM segments WHERE id = :id", id=planned.parent):
        return Message(
            "lost_ledger.no_parent",
            "the segment's parent, segment {parent}, is not in the ledger",
            parent=planned.parent,
        )
    held = {one["id"] for one in ledger.read("SELECT id FROM token_shards")}
    if missing := [one["id"] for one in plan.get("token_shards", []) if one["id"] not in held]:
        return Message(
            "lost_ledger.no_token_shard",
            "the segment was trained on token shard {token_shard}, which is not in the ledger",
            token_shard=missing[0],
        )
    with ledger.begin() as tx:
        if tx.execute(sa.select(data_plans.c.id).where(data_plans.c.id == planned.data_plan)).first() is None:
            tx.execute(data_plans.insert().values(id=planned.data_plan, plan=plan, created_at=planned.created_at))
        values = {key: value for key, value in vars(planned).items() if key not in ("result", "finished_at")}
        insert_row(tx, segments, **values)
        record_event(tx, "segment_taken_up", f"segment:{planned.id}", {"folder": row["folder"]})
    return ""


# -- the end -----------------------------------------------------------------------------------------------------------
def _replace(root: Path, file: Path, made: Path, said: list[str]) -> None:
    """Move the new ledger into its place. The files of the old ledger are kept in ``backups/``.

    The old database file is moved before its logs: without its log it would look undamaged but lack the last commits. The new file is moved last:
    SQLite would otherwise apply the old logs to it.
    """
    new = file.with_name(f".{file.name}.restored")
    shutil.copyfile(made, new)
    there = [
        path for ending in ("", "-wal", "-shm", "-journal") if (path := file.with_name(file.name + ending)).exists()
    ]
    if there:
        kept = _replaced(root)
        for path in there:
            rename_into_place(path, kept / path.name)
        said.append(Message("lost_ledger.kept", "The former ledger is kept in {folder}", folder=kept))
    rename_into_place(new, file)


def _replaced(root: Path) -> Path:
    """Make a new folder for replaced files. A second folder in the same second gets a number."""
    name, number = f"replaced-{make_backup_timestamp()}", 0
    while (folder := root / BACKUPS_FOLDER / (f"{name}-{number}" if number else name)).exists():
        number += 1
    folder.mkdir(parents=True)
    return folder


def restore_mlflow(workspace: Workspace) -> Message:
    """Restore MLflow's database from the newest good backup. Without a backup, MLflow makes an empty one when it is needed.

    Returns a line for a person.
    """
    file = get_sqlite_file(workspace.mlflow_uri)
    assert file is not None
    kept = _replaced(workspace.root)
    for path in (file.with_name(file.name + ending) for ending in ("-wal", "-shm", "-journal", "")):
        if path.exists():
            rename_into_place(path, kept / path.name)
    for backup in reversed(list_backups(workspace.root)):
        if (backup / MLFLOW).is_file() and not find_database_damage(backup / MLFLOW, MLFLOW_TABLE):
            new = file.with_name(f".{file.name}.restored")
            shutil.copyfile(backup / MLFLOW, new)
            rename_into_place(new, file)
            return Message(
                "lost_ledger.mlflow_restored",
                "MLflow's database is restored from backup {backup}. The damaged database is kept in {folder}",
                backup=backup.name,
                folder=kept,
            )
    return Message(
        "lost_ledger.mlflow_remade",
        "MLflow's database will be made again from the ledger. The damaged database is kept in {folder}",
        folder=kept,
    )
