"""Imports a model that was trained elsewhere: its weights become a checkpoint at step 0, from which the first trunk segment starts.

An import is a segment of kind 'import' that trains nothing, as an average does. Its data plan is empty, because nobody knows the model's training
data. Lineage, retention, repair, export and evaluation therefore treat it like any other segment. The event 'segment_planned' names the source: its
place, and the SHA-256 of each of its files. After a kill, the factory finds the segment open and makes the checkpoint again from the same files.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from factory.core.errors import DiskFullError
from factory.core.faults import has_room_for
from factory.core.path_removal import remove_path
from factory.ingest.installing import AddedRow
from factory.ledger.imported_model import ImportedLicence, find_import, read_import_plan
from factory.ledger.ledger import Ledger, data_plans
from factory.ledger.plant import Plant
from factory.ledger.rows import IMPORT, SegmentRow
from factory.training.gguf_source import find_place, is_gguf, open_gguf
from factory.training.import_source import Advance, ImportRefusedError, ImportSource
from factory.training.planning import insert_planned_segment, load_recipe, read_last_checkpoint
from factory.training.segment_folder import claim_segment_folder, record_segment_done
from kernels.contract.files import write_atomically
from kernels.contract.message import Message

EMPTY_PLAN: dict[str, Any] = {
    "token_shards": [],
    "weights": {"*": 1.0},
    "phases": [],
    "replay": 0.0,
    "max_epochs": 1,
    "seed": 0,
    "masked": [],
}
BYTES = 4  # of a weight in a checkpoint


@contextmanager
def open_import_source(place: Path, advance: Advance = lambda share, note: None) -> Iterator[ImportSource]:
    """Read and check the model at ``place``, a folder or a .gguf file. Temporary files exist during the block. Raises: ImportRefusedError."""
    place = find_place(place)
    if is_gguf(place):
        with open_gguf(place, advance) as source:
            yield source
    else:
        yield ImportSource.read(place, advance)


def refuse_other_import(ledger: Ledger, source: ImportSource) -> None:
    """Raises: ImportRefusedError if the workspace has segments of its own, or another imported model."""
    row = find_import(ledger)
    if row is not None:
        there = read_import_plan(ledger, row.id)
        if there["files"] == source.files:
            return
        changed = sorted(
            name for name in there["files"].keys() | source.files if there["files"].get(name) != source.files.get(name)
        )
        raise ImportRefusedError(
            "importing.other_model",
            "--from: this workspace already has the imported model {model}, and its files differ: {files}. Give a new folder for the workspace.",
            model=there["name"], files=changed[:4],
        )  # fmt: skip
    if ledger.read("SELECT id FROM segments LIMIT 1") or ledger.read("SELECT sha256 FROM shards LIMIT 1"):
        raise ImportRefusedError(
            "importing.work_there",
            "--from: this workspace already has data or trained segments. Give a new folder for the workspace.",
        )


def plan_import(plant: Plant, source: ImportSource, place: Path, licence: ImportedLicence) -> int:
    """Record the import of a checked source as a planned segment; returns its id. The same source gives the same segment."""
    from factory.git.repository import get_live_commit

    refuse_other_import(plant.ledger, source)
    if (known := find_import(plant.ledger)) is not None:
        return known.id
    recipe = load_recipe(plant.workspace)
    _refuse_other_recipe(plant, recipe.model.model_dump(), source)
    commit = get_live_commit(plant.workspace.repository)
    plan_id = hashlib.sha256(json.dumps(EMPTY_PLAN, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    detail = {
        "place": str(place.expanduser().resolve()), "name": source.name, "family": source.family.name, "class": source.family.class_name,
        "files": source.files, "licence": asdict(licence), "dtype": source.dtype, "spec": source.spec.model_dump(),
        "new_rows": [asdict(new) for new in source.new_rows],
    }  # fmt: skip
    with plant.ledger.begin() as tx:
        if tx.execute(sa.select(data_plans.c.id).where(data_plans.c.id == plan_id)).first() is None:
            tx.execute(data_plans.insert().values(id=plan_id, plan=EMPTY_PLAN, created_at=time.time()))
        return insert_planned_segment(
            tx, plant.workspace, IMPORT, (0, 0), {"import": detail}, parent=None, recipe=recipe.name, recipe_json=recipe.model_dump(mode="json"),
            recipe_sha256=recipe.sha256, data_plan=plan_id, code_commit=commit, generation=0,
        )  # fmt: skip


def _refuse_other_recipe(plant: Plant, model: Mapping[str, Any], source: ImportSource) -> None:
    """Raises: ImportRefusedError if the workspace's recipe describes another function than the source's weights compute."""
    from trainer.contract.checkpoint.model_function_changes import find_model_function_changes

    changes = find_model_function_changes(model, source.spec)
    if changes:
        raise ImportRefusedError(
            "importing.other_recipe", "--from: {recipe} describes another model than {folder} (recipe → model): {changes}. Remove the file, then "
                                      "import again.",
            recipe=plant.workspace.recipe_path(), folder=source.folder,
            changes=[f"model.{key} {recipe} → {model}" for key, (recipe, model) in changes.items()],
        )  # fmt: skip


def run_import(plant: Plant, row: SegmentRow, source: ImportSource | None = None) -> dict[str, Any]:
    """Make the checkpoint of an imported model and record it; returns the segment's result. Safe to repeat.

    ``source``: the source if it is read and checked already.

    Raises: ImportRefusedError if the source is gone or has changed since the import was planned; OSError, such as that of a full disk. Then no
    checkpoint is left, and a later call begins anew.
    """
    plan = read_import_plan(plant.ledger, row.id)
    folder = claim_segment_folder(plant, row)
    path = _write_checkpoint(plant, row, plan, folder, source)
    return _record(plant, row, plan, folder, path)


def write_imported_checkpoint_again(plant: Plant, row: SegmentRow) -> None:
    """Write a lost or damaged checkpoint of an imported model again. Raises: as ``run_import``."""
    from trainer.contract.checkpoint.format import hash_manifest

    recorded = read_last_checkpoint(plant.ledger, row.id)
    path = _write_checkpoint(plant, row, read_import_plan(plant.ledger, row.id), Path(row.folder))
    assert hash_manifest(path) == recorded["id"], "the same files give the same checkpoint"


def _write_checkpoint(
    plant: Plant, row: SegmentRow, plan: Mapping[str, Any], folder: Path, known: ImportSource | None = None
) -> Path:
    from models.tensors import list_tensor_shapes
    from trainer.contract.checkpoint.format import write_imported_checkpoint

    place, checkpoints = Path(plan["place"]), folder / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    for left in checkpoints.glob(".writing-*"):  # of a killed process
        remove_path(left)
    with plant.progress.task(
        Message("importing.imports", "import {name}", name=plan["name"]), 1 if known else 2
    ) as task:
        if known is None and not place.exists():
            raise ImportRefusedError(
                "importing.source_gone", "The import of {name} is not finished, and {place} does not exist. Restore the folder or file there.",
                name=plan["name"], place=place,
            )  # fmt: skip
        with nullcontext(known) if known else open_import_source(place, task.advance) as source:
            if source.files != plan["files"]:
                raise ImportRefusedError(
                    "importing.source_changed",
                    "{place} has changed since the import was planned, so the import cannot be finished. Restore its files, or begin another "
                    "workspace.", place=place,
                )  # fmt: skip
            source = source.add_new_rows(read_new_rows(plan))
            refuse_full_disk(folder, source)
            # A workspace from before layers for multi-token prediction were imported has none, though its source may.
            older = not row.recipe_json["model"].get("multi_token_layers", 0)
            shapes = list_tensor_shapes(source.spec.without_multi_token if older else source.spec)
            state = {
                "recipe": row.recipe_json,
                "imported": {"name": plan["name"], "files": plan["files"]},
                "code_commit": row.code_commit,
            }

            def tensors() -> Iterator[Any]:
                yield from (one for one in source.iterate_tensors(task.advance) if one[0] in shapes)
                source.refuse_changed_files()

            return write_imported_checkpoint(checkpoints, shapes, tensors(), state)


def read_new_rows(plan: Mapping[str, Any]) -> tuple[AddedRow, ...]:
    """The tokens that got new rows, from the plan of an import. An import of an older factory has none."""
    return tuple(AddedRow(new["token"], new["id"]) for new in plan.get("new_rows", ()))


def refuse_full_disk(folder: Path, source: ImportSource) -> None:
    """Raises: DiskFullError if the checkpoint and an export of it do not fit on the disk of ``folder``."""
    needed = source.spec.parameters * BYTES * 2
    if not has_room_for(folder, needed):
        raise DiskFullError(
            "importing.disk", "The import needs {needed:.1f} GB in {folder}, which has less free space. Free some space, then import again.",
            needed=needed / 1e9, folder=folder,
        )  # fmt: skip


def _record(plant: Plant, row: SegmentRow, plan: Mapping[str, Any], folder: Path, path: Path) -> dict[str, Any]:
    from trainer.contract.checkpoint.format import hash_manifest

    imported = {key: plan[key] for key in ("name", "family", "class", "files", "dtype")} | {
        "licence": plan["licence"]["name"]
    }
    result = {
        "state": "done",
        "last_step": 0,
        "checkpoint": str(path),
        "manifest_sha256": hash_manifest(path),
        "imported": imported,
    }
    write_atomically(folder / "result.json", json.dumps(result, indent=1))
    record_segment_done(plant.ledger, row, folder, result)
    return result
