"""Writes a segment's folder and its ledger row: the specification, the owner, and how the segment ended."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from factory.core.errors import SegmentError
from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.core.launching import EXIT_DISK_FULL, LOG_BYTES, find_failure_line
from factory.core.untrusted_trainer_files import (
    LinesMemory,
    iterate_lines,
    make_unreadable_error,
    open_regular_file,
    parse_json_object_of_file,
    read_json_object,
    read_tail,
    read_text,
)
from factory.ledger.anomalies import REPLICAS_DIFFER
from factory.ledger.ledger import Ledger, anomalies, checkpoints, record_event, segments
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject
from factory.ledger.snapshot import Snapshot
from factory.ledger.stored_paths import to_stored_paths
from factory.retrying.daemon_requests import refuse_rewound_segment
from factory.retrying.policy import RetryPolicy
from factory.retrying.trainer_deaths import (
    TrainerDiedError,
    TrainerFailure,
    classify_trainer_ending,
    find_newest_checkpoint_step,
    format_segment_start,
    record_trainer_death,
)
from factory.runs.trainer_folder import check_disk_space
from factory.training.planning import read_data_plan, read_last_checkpoint
from kernels.contract.files import rename_into_place, sync_folder, write_atomically
from kernels.contract.message import Message

OWNER_FILE = "owner.json"
PLANNED = " ".join(
    ("id", "kind", "parent", "generation", "recipe", "recipe_json", "recipe_sha256", "data_plan", "code_commit", "first_step", "last_step",
     "computing", "created_at")
)  # fmt: skip
PLAN_COLUMNS = " ".join(
    ("id", "kind", "parent", "recipe_sha256", "data_plan", "code_commit", "first_step", "last_step")
)
KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")  # of an anomaly: people read it in a terminal


def make_segment_spec(ledger: Ledger, row: SegmentRow) -> dict[str, Any]:
    """The content of segment.json. ``kernels`` is None here; ``compute_settings.write_kernels_file`` returns its value."""
    parent = SegmentRow.get(ledger, row.parent) if row.parent else None
    spec = {
        "kind": row.kind, "recipe": row.recipe_json, "data_plan": read_data_plan(ledger, row), "first_step": row.first_step,
        "last_step": row.last_step, "initial_checkpoint": parent and read_last_checkpoint(ledger, parent.id)["path"],
        "code_commit": row.code_commit, "kernels": None,
    }  # fmt: skip
    if row.kind == "trunk" and parent and parent.kind == "anneal":
        spec["rewarm"] = True  # left out when false, so that code older than the key can read the spec
    return spec


def claim_segment_folder(plant: Plant, row: SegmentRow) -> Path:
    """The segment's folder, marked with the segment's plan and the ledger's identity.

    A folder with the mark of another plan or ledger is moved to ``set-aside/`` and never used.
    """
    folder = Path(row.folder)
    if (
        folder.is_dir()
        and any(folder.iterdir())
        and not is_owner_of_segment_folder(read_folder_owner(folder), plant.ledger, row)
    ):
        away = move_to_set_aside_folder(plant.workspace.root, folder)
        plant.progress.line(
            Message(
                "training.folder_set_aside",
                "  {folder} had files of another plan or ledger, although it is the folder of segment {segment}. The "
                "factory moved the files to {target}.",
                folder=folder,
                segment=row.id,
                target=away,
            )  # fmt: skip
        )
        with plant.ledger.begin() as tx:
            record_event(tx, "set_aside", Subject("segment", row.id), {"where": plant.ledger.to_stored_path(away)})
    write_folder_owner(plant.ledger, row)
    sync_folder(folder.parent)
    return folder


def write_folder_owner(ledger: Ledger, row: SegmentRow) -> None:
    """Write the owner of a segment into its folder, and make the folder if it is missing."""
    path = Path(row.folder) / OWNER_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        planned = row.select_fields(PLANNED) | {"folder": ledger.to_stored_path(row.folder)}
        plan = to_stored_paths(ledger.root, read_data_plan(ledger, row))
        mark = {"ledger": ledger.identity, "plan_sha256": hash_segment_plan(row), "row": planned, "data_plan": plan}
        write_atomically(path, json.dumps(mark))


def read_folder_owner(folder: Path) -> dict[str, Any]:
    """The owner that a segment's folder names; empty if the folder names none."""
    try:
        return read_json_object(folder / OWNER_FILE)
    except SegmentError:
        return {}


def is_owner_of_segment_folder(owner: Mapping[str, Any], ledger: Ledger, row: SegmentRow) -> bool:
    return (owner.get("ledger"), owner.get("plan_sha256")) == (ledger.identity, hash_segment_plan(row))


def hash_segment_plan(row: SegmentRow) -> str:
    """The SHA-256 of all columns that determine what a segment computes, and of the segment from which it starts."""
    plan = row.select_fields(PLAN_COLUMNS)
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def move_to_set_aside_folder(root: Path, path: Path) -> Path:
    """Move a file or folder without a known owner to ``set-aside/``; returns its new path. Nothing is deleted."""
    away = root / "set-aside" / f"{time.time_ns()}-{path.name}"
    away.parent.mkdir(exist_ok=True)
    rename_into_place(path, away)
    return away


def raise_trainer_failure(
    plant: Plant, row: SegmentRow, code: int, kills_before: int | None, why: TrainerFailure | None = None
) -> NoReturn:
    """Record how a segment's trainer ended, and raise the error. ``why``: the ending, if the caller knows it; otherwise the exit code and
    the log show it. ``kills_before``: the value of ``count_oom_kills`` when the trainer started.

    Raises: TrainerDiedError; instead, DiskFullError if the trainer reports a full disk and the disk is full; WorkInvalidatedError if the segment
    was rewound.
    """
    log = plant.workspace.logs / f"segment-{row.id:05d}.log"
    line = find_failure_line(log)
    if code == EXIT_DISK_FULL and why is None:
        check_disk_space(Path(row.folder), row.recipe_json, f"segment {row.id}", line)
    refuse_rewound_segment(plant.ledger, row.id)
    ending = why or classify_trainer_ending(
        code, line, read_tail(log, LOG_BYTES).decode(errors="replace"), kills_before
    )
    policy = RetryPolicy.load(plant.workspace.policy_path("retries.yaml"))
    row = record_trainer_death(plant.ledger, row, ending, code, policy.tries, park_now=code == 2)
    if row.state == "failed":
        parked = Message(
            "training.trainer_died_parked",
            "The trainer of segment {segment} {ending} (log: {log}).",
            segment=row.id,
            ending=ending.says,
            log=log,
        )
        raise TrainerDiedError(parked, row.attempts, True)
    step = find_newest_checkpoint_step(row)
    died = Message(
        "training.trainer_died",
        "The trainer of segment {segment} {ending} (log: {log}). The next try starts from {start}. So far, "
        "{attempts} of {tries} allowed tries ended without a new checkpoint.", segment=row.id, ending=ending.says, log=log,
        start=format_segment_start(step), step=step, attempts=row.attempts, tries=policy.tries,
    )  # fmt: skip
    raise TrainerDiedError(died, row.attempts, False)


def mark_segment_failed(ledger: Ledger, row: SegmentRow, why: str) -> None:
    """Mark a segment as failed, because another try would not help."""
    with ledger.begin() as tx:
        refuse_rewound_segment(Snapshot(tx, ledger.root), row.id)
        tx.execute(segments.update().where(segments.c.id == row.id).values(state="failed", finished_at=time.time()))
        record_event(tx, "segment_failed", Subject("segment", row.id), {"said": why})


def record_segment_done(ledger: Ledger, row: SegmentRow, folder: Path, result: dict[str, Any]) -> None:
    """Record that a segment is done, with its checkpoint and its anomalies, in one transaction.

    Raises: SegmentError for files that contradict the result; WorkInvalidatedError.
    """
    from trainer.contract.checkpoint.format import read_manifest
    from trainer.contract.errors import CheckpointError

    path = Path(result["checkpoint"])
    manifest = hashlib.sha256(read_text(path / "manifest.json").encode()).hexdigest()
    if manifest != result["manifest_sha256"]:
        raise SegmentError(
            "training.other_checkpoint", "Segment {segment}: {checkpoint} is not the checkpoint in the trainer's result.",
            segment=row.id, checkpoint=path,
        )  # fmt: skip
    try:
        read_manifest(path)
    except CheckpointError as error:
        raise SegmentError(error.message) from None
    found = read_anomalies(folder, row)
    if names := result.get("replicas_apart"):
        weights = [str(name)[:200] for name in names][:20] if isinstance(names, list) else []
        found.append({"step": row.last_step - 1, "kind": REPLICAS_DIFFER, "weights": weights})
    with ledger.begin() as tx:
        refuse_rewound_segment(Snapshot(tx, ledger.root), row.id)
        values = {"id": manifest, "segment": row.id, "step": result["last_step"], "path": ledger.to_stored_path(path)}
        tx.execute(checkpoints.insert().values(**values, created_at=time.time()))
        for anomaly in found:
            of = {"segment": row.id, "step": anomaly["step"], "kind": anomaly["kind"]}
            tx.execute(anomalies.insert().values(**of, detail=anomaly))
        done = {"state": "done", "result": to_stored_paths(ledger.root, result), "finished_at": time.time()}
        tx.execute(segments.update().where(segments.c.id == row.id).values(**done))
        record_event(
            tx, "segment_done", Subject("segment", row.id), {"loss": result.get("loss"), "checkpoint": manifest}
        )


def read_anomalies(folder: Path, row: SegmentRow) -> list[dict[str, Any]]:
    """Return the anomalies that a segment's trainer listed; none without the file. Raises: SegmentError."""
    path = folder / "anomalies.jsonl"
    found, memory = list[dict[str, Any]](), LinesMemory()
    if not path.exists():
        return found
    try:
        with open_regular_file(path) as file:
            for line in iterate_lines(file):
                memory.add(line)
                if line.strip():
                    found.append(_anomaly(line, path, row))
    except (OSError, ValueError) as error:
        if is_machine_fault_unrelated_to_files(error):
            raise
        raise make_unreadable_error(path, str(error)) from None
    return found


def _anomaly(line: bytes, path: Path, row: SegmentRow) -> dict[str, Any]:
    """The anomaly in a line of a file. Raises: SegmentError, also if no diagnosis could find the step, because it is outside the segment."""
    found = parse_json_object_of_file(line, path)
    if type(found.get("step")) is not int or not KIND.fullmatch(str(found.get("kind"))):
        raise SegmentError(
            "training.anomaly_malformed", "{file} lists an anomaly whose step or kind is missing or invalid.", file=path
        )
    if not row.first_step <= found["step"] < row.last_step:
        raise SegmentError(
            "training.anomaly_outside", "{file} has an anomaly at step {step}, which is outside the segment's steps {first} to {last}.",
            file=path, step=found["step"], first=row.first_step, last=row.last_step - 1,
        )  # fmt: skip
    return found
