"""Checks checkpoints and exports, and makes damaged ones again.

A segment whose last checkpoint is damaged is replayed from its newest good checkpoint, or else from its start. The replay reads the data in the
same order, so on a CPU its weights are bit-identical. An undamaged manifest of the damaged checkpoint proves that.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from factory.audit.kept_checkpoints import copy_checkpoint, get_audit_folder, get_kept_checkpoints_folder
from factory.core.errors import FactoryError, InputError
from factory.core.exports import hash_export_folder
from factory.core.faults import is_temporary_read_failure
from factory.core.path_removal import remove_path
from factory.core.workspace import Workspace
from factory.evals.export_parity import read_recorded_export
from factory.ledger.ledger import Ledger, candidates, checkpoints, record_event, segments
from factory.ledger.plant import Plant
from factory.ledger.rows import IMPORT, CandidateRow, SegmentRow, Subject
from factory.ledger.stored_paths import to_stored_paths
from factory.runs.trainer_folder import read_result
from factory.training.exporting import write_export
from factory.training.import_source import ImportRefusedError
from factory.training.importing import write_imported_checkpoint_again
from factory.training.planning import read_last_checkpoint
from factory.training.segment_folder import move_to_set_aside_folder
from factory.training.training import run_trainer
from kernels.contract.files import rename_into_place
from kernels.contract.message import Message
from trainer.contract.checkpoint.format import (
    find_checkpoint_fault,
    format_checkpoint_name,
    hash_manifest,
    list_checkpoints,
    mark_checkpoint_as_bad,
    read_manifest,
)
from trainer.contract.errors import CheckpointError


def find_checkpoint_damage(row: dict[str, Any], deep: bool) -> str:
    """Describe the damage of the checkpoint of a ledger row; '' without damage. Its files are hashed only with ``deep``.

    Raises: OSError when a fault of the machine prevents reading.
    """
    path = Path(row["path"])
    try:
        if not path.is_dir():
            return Message("checkpoints.missing", "{path} is missing", path=path)
        if hash_manifest(path) != row["id"]:
            return Message(
                "checkpoints.other_manifest",
                "{path}: the SHA-256 of manifest.json differs from the recorded one",
                path=path,
            )
        for name, expected in read_manifest(path)["files"].items():
            if not (path / name).is_file() or (path / name).stat().st_size != expected["bytes"]:
                return Message(
                    "checkpoints.wrong_size",
                    "{path} is missing, or does not have {size:,} bytes",
                    path=path / name,
                    size=expected["bytes"],
                )
    except (OSError, CheckpointError) as error:
        if is_temporary_read_failure(error):
            raise
        return str(error)
    return find_checkpoint_fault(path) if deep else ""


def replay_checkpoint(plant: Plant, segment: int) -> str:
    """Make the last checkpoint of a segment again. If the parent's checkpoint is damaged too, that is made first.

    Returns why this is impossible, or ''. The damaged checkpoint stays beside the new one as 'bad-step-…'.
    Raises: FactoryError when the trainer fails.
    """
    row, recorded = SegmentRow.get(plant.ledger, segment), read_last_checkpoint(plant.ledger, segment)
    if row.kind == "average":
        return Message(
            "checkpoints.average",
            "segment {segment} is an average of checkpoints, so it has no training to replay. Stop 'factory run', "
            "then run 'factory average'",
            segment=segment,
        )
    if row.kind == IMPORT:
        try:
            write_imported_checkpoint_again(plant, row)
        except ImportRefusedError as error:
            return error.message
        return ""
    if row.parent and (fault := find_checkpoint_damage(read_last_checkpoint(plant.ledger, row.parent), deep=True)):
        plant.progress.line(
            Message(
                "checkpoints.parent_damaged",
                "  segment {segment} starts from segment {parent}, whose checkpoint is damaged too: {fault}",
                segment=segment,
                parent=row.parent,
                fault=fault,
            )
        )
        if why := replay_checkpoint(plant, row.parent):
            return Message(
                "checkpoints.parent_lost",
                "the segment starts from the checkpoint of segment {parent}, which cannot be made again: {why}",
                parent=row.parent,
                why=why,
            )
    place = Path(recorded["path"])
    folder = plant.workspace.root / "replays" / Path(row.folder).name
    remove_path(folder)
    (folder / "checkpoints").mkdir(parents=True)
    try:
        start = _older(plant.workspace, row, folder / "checkpoints", recorded)
        if start == row.last_step:  # a copy of the damaged checkpoint
            made = folder / "checkpoints" / format_checkpoint_name(start)
            _put_back(place, made)
            plant.progress.line(
                Message(
                    "checkpoints.copied",
                    "  the checkpoint of segment {segment}, step {step}, is restored from another copy",
                    segment=segment,
                    step=start,
                )
            )
            with plant.ledger.begin() as tx:
                record_event(tx, "checkpoint_put_back", Subject("segment", segment), {"checkpoint": recorded["id"]})
            return ""
        plant.progress.line(
            Message(
                "checkpoints.replay",
                "  the factory replays segment {segment} from step {first} to step {last} to replace its damaged checkpoint",
                segment=segment,
                first=start,
                last=row.last_step,
            )
        )
        code, hung = run_trainer(plant, row, folder, None)
        if hung or code or not (folder / "result.json").exists():
            raise FactoryError(
                "checkpoints.replay_failed",
                "the replay of segment {segment} {how} (log: {log})",
                segment=segment,
                how=hung.says if hung else f"ended with exit {code}",
                log=plant.workspace.logs / f"segment-{segment:05d}.log",
            )
        result = read_result(folder, row.last_step)
        exact = _same(place, Path(result["checkpoint"]), recorded["id"])
        _put_back(place, Path(result["checkpoint"]))
    finally:
        remove_path(folder)
    _record(plant.ledger, row, recorded, exact)
    if exact is None:
        said = Message(
            "checkpoints.not_comparable",
            "The new weights cannot be compared with the former weights, because the former manifest is damaged",
        )
    elif exact:
        said = Message("checkpoints.same_weights", "The new weights equal the former weights bit for bit")
    else:
        said = Message("checkpoints.other_weights", "The new weights do NOT equal the former weights bit for bit")
    plant.progress.line(
        Message(
            "checkpoints.replayed",
            "  the factory made the checkpoint of segment {segment} again. {comparison}",
            segment=segment,
            comparison=said,
        )
    )
    return ""


def _older(workspace: Workspace, row: SegmentRow, target: Path, recorded: dict[str, Any]) -> int:
    """Copy the newest good checkpoint of a segment to ``target``. Returns its step; without one, the segment's first step."""
    sources = (
        Path(row.folder) / "checkpoints",
        get_kept_checkpoints_folder(workspace, row.id),
        get_audit_folder(workspace, row.id) / "live",
    )
    found = [one for source in sources for one in list_checkpoints(source)]
    for step, path in sorted(found, reverse=True):
        if step > row.last_step or step <= row.first_step or find_checkpoint_fault(path):
            continue
        if step == row.last_step and hash_manifest(path) != recorded["id"]:
            continue
        try:
            copy_checkpoint(path, target / path.name)
        except (OSError, ValueError):
            continue
        return step
    return row.first_step


def _same(old: Path, new: Path, recorded: str) -> bool | None:
    """Return whether two checkpoints have the same weights and optimiser state; None if the manifest of the old one is damaged."""
    try:
        if hash_manifest(old) != recorded:
            return None
        before, after = read_manifest(old)["files"], read_manifest(new)["files"]
    except (OSError, CheckpointError):
        return None
    return all(
        after.get(name, {}).get("sha256") == file["sha256"] for name, file in before.items() if name != "state.json"
    )


def _put_back(place: Path, made: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        mark_checkpoint_as_bad(place, "damaged")
    rename_into_place(made, place)


def _record(ledger: Ledger, row: SegmentRow, old: dict[str, Any], exact: bool | None) -> None:
    new = hash_manifest(Path(old["path"]))
    result = to_stored_paths(ledger.root, (row.result or {}) | {"manifest_sha256": new})
    with ledger.begin() as tx:
        tx.execute(checkpoints.update().where(checkpoints.c.id == old["id"]).values(id=new))
        tx.execute(segments.update().where(segments.c.id == row.id).values(result=result))
        if exact:
            tx.execute(candidates.update().where(candidates.c.checkpoint == old["id"]).values(checkpoint=new))
        detail = {"checkpoint": new, "instead_of": old["id"], "exact": exact}
        record_event(tx, "checkpoint_replayed", Subject("segment", row.id), detail)


# -- exports -----------------------------------------------------------------------------------------------------------
def find_export_damage(row: CandidateRow, deep: bool) -> str:
    """Describe the damage of a candidate's export; '' without damage. The export is hashed only with ``deep``.

    Raises: OSError when a fault of the machine prevents reading.
    """
    path = Path(row.export_path)
    if not (path / "config.json").is_file():
        return Message("checkpoints.no_export", "{path} is missing or incomplete", path=path)
    try:
        if deep and hash_export_folder(path) != row.export_sha256:
            return Message(
                "checkpoints.other_export", "{path} is damaged: its SHA-256 differs from the recorded one", path=path
            )
    except (InputError, OSError) as error:
        if is_temporary_read_failure(error):
            raise
        return str(error)
    return ""


def remake_export(plant: Plant, candidate: int) -> str:
    """Make a candidate's export again from its checkpoint. Returns why this is impossible, or ''. The damaged export is set aside."""
    row = CandidateRow.get(plant.ledger, candidate)
    fault = find_checkpoint_damage(read_last_checkpoint(plant.ledger, row.segment), deep=True)
    if fault and (why := replay_checkpoint(plant, row.segment)):
        return Message(
            "checkpoints.no_source", "{fault}, and the checkpoint cannot be made again: {why}", fault=fault, why=why
        )
    place = Path(row.export_path)
    aside = plant.workspace.exports / f".again-{row.segment:05d}"
    remove_path(aside)
    older = read_recorded_export(plant.ledger, candidate) is None
    write_export(plant, SegmentRow.get(plant.ledger, row.segment), aside, original_defaults=older)
    if hash_export_folder(aside) != row.export_sha256:
        shutil.rmtree(aside)
        return Message(
            "checkpoints.export_differs",
            "the new export differs from the recorded export. Evaluate a new candidate, or restore a copy of the "
            "export to {path}",
            path=place,
        )
    if place.exists() or place.is_symlink():
        move_to_set_aside_folder(plant.workspace.root, place)
    rename_into_place(aside, place)
    with plant.ledger.begin() as tx:
        record_event(tx, "exported_again", Subject("candidate", candidate), {"export_sha256": row.export_sha256})
    return ""
