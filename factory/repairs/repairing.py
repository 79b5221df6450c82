"""Repairs the damage that ``workspace_examination`` finds. The daemon and ``factory check --repair`` use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from factory.core.errors import DamagedExportError, FactoryError, WorkspaceError
from factory.core.faults import is_temporary_read_failure
from factory.core.progress import SILENT, Progress
from factory.core.workspace import Workspace
from factory.ingest.hash_index import INDEX, HashIndex
from factory.ledger.file_events import MLFLOW_REMADE
from factory.ledger.ledger import Ledger, record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.release.releases import finish_interrupted_releases
from factory.repairs.checkpoints import find_checkpoint_damage, remake_export, replay_checkpoint
from factory.repairs.lost_ledger import restore_ledger, restore_mlflow
from factory.repairs.token_shards import (
    VerifiedShardRecord,
    find_token_shard_damage,
    rebuild_document_hashes,
    rebuild_token_shard,
    remake_wrong_columns,
    restore_tokenizer,
)
from factory.repairs.workspace_examination import (
    Damage,
    examine_checkpoints,
    examine_token_shards,
    examine_tokenizer,
    examine_workspace_files,
    find_damaged_databases,
)
from factory.training.planning import read_data_plan, read_last_checkpoint
from kernels.contract.message import Message
from trainer.contract.errors import TrainerError

T = TypeVar("T")


def repair_all_damage(workspace: Workspace, deep: bool, progress: Progress) -> list[str]:
    """Examine the workspace and repair all damage that can be repaired. Returns a line for each repair that succeeded or failed.

    A damaged ledger is restored first. The other files are then compared with the restored ledger.
    """
    databases = list(find_damaged_databases(workspace))
    lines = restore_ledger(workspace.root, "", progress) if any(fault.kind == "ledger" for fault in databases) else []
    ledger = Ledger.open(workspace.ledger_url, workspace.root)
    with workspace.hold_lock("model-loop"):
        faults = [fault for fault in databases if fault.kind == "mlflow"]
        faults += [
            fault for one in examine_workspace_files(Plant(workspace, ledger, progress), deep) for fault in one.faults
        ]
        for fault in faults:
            if fault.is_repairable:
                try:
                    why = REPAIRS[fault.kind](Plant(workspace, ledger, progress), fault.subject)
                except (FactoryError, TrainerError) as error:
                    why = Message.from_json(getattr(error, "message", str(error)))
                name = f"{fault.kind} {fault.subject}".strip()
                if why:
                    lines.append(Message("repairing.not_repaired", "{name}: NOT repaired: {why}", name=name, why=why))
                else:
                    lines.append(
                        Message(
                            "repairing.repaired",
                            "{name}: repaired. The damage was: {what}",
                            name=name,
                            what=fault.problem,
                        )
                    )
    return lines


def _mend_mlflow(plant: Plant, _: str) -> str:
    plant.print_line(Message("repairing.mlflow", "  {done}", done=restore_mlflow(plant.workspace)))
    with plant.ledger.begin() as tx:
        record_event(tx, MLFLOW_REMADE, "mlflow")
    return ""


def _mend_checkpoint(plant: Plant, subject: str) -> str:
    whole = not find_checkpoint_damage(read_last_checkpoint(plant.ledger, int(subject)), deep=True)
    return (
        "" if whole else replay_checkpoint(plant, int(subject))
    )  # whole: the repair of a later segment has already repaired it


def _mend_hashes(plant: Plant, subject: str) -> str:
    if subject != INDEX:
        return rebuild_document_hashes(plant, subject)
    HashIndex(plant.ledger).delete_index_files()  # the next ingest makes it again
    return ""


def _serve(plant: Plant, _: str) -> str:
    finish_interrupted_releases(plant)
    return ""


# The repair of each kind of ``Damage``, called with its subject. It returns why it failed, or ''.
REPAIRS: dict[str, Callable[[Plant, str], str]] = {
    "mlflow": _mend_mlflow,
    "tokenizer": lambda plant, _: restore_tokenizer(plant),
    "token shards": rebuild_token_shard,
    "hashes": _mend_hashes,
    "checkpoints": _mend_checkpoint,
    "exports": lambda plant, subject: remake_export(plant, int(subject)),
    "served": _serve,
}


def repair_segment_inputs(plant: Plant, segment: int, hash_all: bool = True) -> bool:
    """Hash all files that a segment reads, and repair those that are damaged. Returns whether any was damaged.

    Without ``hash_all``, only token shards that changed since they were last hashed are hashed. The trainer itself hashes its other inputs.
    Raises: FactoryError with the remedy if a repair fails.
    """
    row, known = SegmentRow.get(plant.ledger, segment), VerifiedShardRecord(plant.workspace)
    shards = {shard["id"]: Path(shard["path"]) for shard in read_data_plan(plant.ledger, row)["token_shards"]}
    looked = {name: path for name, path in shards.items() if hash_all or not known.is_unchanged(path)}
    damaged = []
    with plant.progress.task("hash token shards", len(looked)) as task:
        for name, path in looked.items():
            if fault := find_token_shard_damage(path, deep=True):
                damaged.append(Damage("token shards", name, fault, "", True))
            task.advance()
    if (
        hash_all
        and row.parent
        and (fault := find_checkpoint_damage(read_last_checkpoint(plant.ledger, row.parent), deep=True))
    ):
        damaged.append(Damage("checkpoints", str(row.parent), fault, "", True))
    mended = _mended(plant, damaged)
    known.record_verified_shards(looked.values())
    compared = [path for path in shards.values() if hash_all or not known.has_unchanged_columns(path)]
    wrong = remake_wrong_columns(compared)
    for number in wrong:
        plant.progress.line(
            Message(
                "repairing.columns_made",
                "  token shard {number}: columns.arrow is damaged. The factory made it again from documents.parquet",
                number=number,
            )
        )
    known.record_columns(compared)
    return mended or bool(wrong)


def call_and_repair_on_failure(plant: Plant, action: Callable[[], T]) -> T:
    """Call ``action``. If it fails, repair a damaged tokenizer, token shard, checkpoint or export, and call ``action`` again. Returns its result.

    Raises: the error of ``action`` if no such file is damaged, or if the same damage occurs again.
    """
    seen: set[Damage] = set()
    while True:
        try:
            return action()
        except (FactoryError, TrainerError, OSError, ValueError) as error:
            if isinstance(error, WorkspaceError) or is_temporary_read_failure(error):
                raise  # the workspace is in use, the ledger is damaged, or a fault of the machine prevents reading
            if isinstance(error, DamagedExportError):
                found = [Damage("exports", str(error.candidate), error.why, "", True)]
            else:
                found = examine_tokenizer(plant.with_progress(SILENT), False).faults
                found += examine_token_shards(plant.with_progress(SILENT), False).faults
                found += [
                    one for one in examine_checkpoints(plant.with_progress(SILENT), False).faults if one.is_repairable
                ]
            damaged = [fault for fault in found if fault not in seen]
            if not damaged or not _mended(plant, damaged):
                raise
            seen.update(damaged)


def _mended(plant: Plant, damaged: Sequence[Damage]) -> bool:
    for fault in damaged:
        plant.progress.line(Message("repairing.begins", "  {what}. The factory repairs this now", what=fault.problem))
        if why := REPAIRS[fault.kind](plant, fault.subject):
            raise FactoryError(
                "repairing.failed",
                "{what}, and the repair failed: {why}",
                what=fault.problem,
                why=why,
                subject=fault.subject,
            )
        name = f"{fault.kind.removesuffix('s')} {fault.subject}".strip()
        plant.progress.line(Message("repairing.done", "  {name} is repaired", name=name))
    return bool(damaged)
