"""Removes folders that the policy no longer keeps. The removal is recorded in the ledger first. After a kill, the next call finishes the removal.

If the disk is too full for the record, the folders are removed first and recorded afterwards. A folder is renamed before its files are deleted,
so that no process finds half a checkpoint.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from factory.core.errors import FactoryError, WorkspaceError
from factory.core.faults import is_disk_full
from factory.core.path_removal import remove_path
from factory.core.workspace import Workspace
from factory.git.repository import remove_worktree
from factory.ledger.file_events import RETIRED
from factory.ledger.ledger import record_event, tracked_runs
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject
from factory.retention.needs import RetentionNeeds
from factory.retention.policy import RetentionPolicy
from factory.retention.removal_decisions import RetentionDecision, decide_folder_removals
from factory.retention.stored_folders import list_stored_folders
from kernels.contract.message import Message

REMOVED = ".retired-"  # the prefix of a folder while it is being removed
BUSY = Message("cleaning.busy", "another process uses folders of this kind now")
LOCKS = {"export": "release", "model": "release", "worktree": "code-loop", "compiled": "code-loop"}


@dataclass(frozen=True)
class CleaningResult:
    """The result of ``remove_unneeded_folders``: all decisions, and the bytes of the removed folders."""

    choices: list[RetentionDecision]
    bytes: int

    def list_removal_decisions(self) -> list[RetentionDecision]:
        """Return the decisions whose folders were removed."""
        return [choice for choice in self.choices if choice.is_removed]


def list_retention_decisions(plant: Plant, *, hard: bool = False) -> list[RetentionDecision]:
    """Decide about each stored folder. With ``hard``, keep only needed files, as for a full disk. Raises: ConfigError, RepositoryError."""
    policy = RetentionPolicy.load(plant.workspace.policy_path("retention.yaml"))
    found = list_stored_folders(
        plant
    )  # listed before the needs are read, so that a folder that is made meanwhile is not in the list
    needs = RetentionNeeds.find_in_ledger(plant)
    last = plant.ledger.read("SELECT segment, MAX(step) AS step FROM checkpoints GROUP BY segment")
    ends = {row["segment"]: row["step"] for row in last}
    policy = policy.make_low_disk_policy() if hard else policy
    return decide_folder_removals(policy, needs, SegmentRow.select(plant.ledger), ends, found, time.time())


def remove_unneeded_folders(plant: Plant, *, hard: bool = False) -> CleaningResult:
    """Remove the folders that ``list_retention_decisions`` chooses, except folders that another process may use now.

    The caller holds the lock 'model-loop'.

    Raises: ConfigError, RepositoryError.
    """
    for left in _half_removed(plant.workspace):
        remove_path(left)
    # No process uses these worktrees now: such a process would hold the lock 'model-loop'.
    for left in (path for name in ("diagnosis-*", "audit-*") for path in plant.workspace.worktrees.glob(name)):
        remove_worktree(plant.workspace.repository, left)
    with ExitStack() as held:
        busy = {name for name in set(LOCKS.values()) if not _locked(held, plant.workspace, name)}
        choices = [
            RetentionDecision(one.folder, False, BUSY) if one.is_removed and LOCKS.get(one.folder.kind) in busy else one
            for one in list_retention_decisions(plant, hard=hard)
        ]
        going = [choice for choice in choices if choice.is_removed]
        freed = _remove_folders(plant, [choice for choice in going if choice.folder.kind != "run"])
        freed += _remove_runs(plant, [choice for choice in going if choice.folder.kind == "run"])
    return CleaningResult(choices, freed)


def _remove_folders(plant: Plant, choices: list[RetentionDecision]) -> int:
    """Remove folders and record them. Returns the freed bytes."""
    freed, untold = 0, dict[Path, dict[str, Any]]()
    try:
        for choice in choices:
            size = choice.folder.measure_size_on_disk()
            detail = {"kind": choice.folder.kind, "bytes": size, "why": choice.reason}
            freed += size
            try:
                _tell(plant, untold | {choice.folder.path: detail})
                untold.clear()
            except sa.exc.DBAPIError as error:
                if not is_disk_full(error):
                    raise
                untold[choice.folder.path] = detail
            if choice.folder.kind == "worktree":
                remove_worktree(plant.workspace.repository, choice.folder.path)
                continue
            aside = choice.folder.path.with_name(f"{REMOVED}{choice.folder.path.name}")
            remove_path(aside)
            os.rename(choice.folder.path, aside)
            remove_path(aside)
    finally:
        if untold:
            _tell(plant, untold)
    return freed


def _tell(plant: Plant, gone: dict[Path, dict[str, Any]]) -> None:
    with plant.ledger.begin() as tx:
        for path, detail in gone.items():
            name = path.relative_to(plant.workspace.root).as_posix()
            record_event(tx, RETIRED, f"{detail['kind']}:{name}", {"path": name} | detail)


def _remove_runs(plant: Plant, choices: list[RetentionDecision]) -> int:
    """Remove runs from the ledger's table of MLflow runs. ``factory.show`` removes them from MLflow later. Returns the freed bytes."""
    if not choices:
        return 0
    size = sum(choice.folder.measure_size_on_disk() for choice in choices)
    with plant.ledger.begin() as tx:
        for choice in choices:
            name = choice.folder.path.relative_to(plant.workspace.root).as_posix()
            tx.execute(tracked_runs.delete().where(tracked_runs.c.subject == Subject("segment", choice.folder.number)))
            said = {"path": name, "kind": "run", "bytes": size, "why": choice.reason, "segment": choice.folder.number}
            record_event(tx, RETIRED, f"run:{name}", said)
    for choice in choices:
        remove_path(choice.folder.path)
    return size


def _half_removed(workspace: Workspace) -> Iterator[Path]:
    """Yield the folders that a killed process did not remove completely."""
    for place in ("segments/*/checkpoints", "segments/*", "ladder", "audits", "diagnoses", "exports", "logs", "cache"):
        yield from workspace.root.glob(f"{place}/{REMOVED}*")
    yield from (workspace.mlflow_artifacts / "candidates").glob(f"*/artifacts/{REMOVED}*")


def _locked(held: ExitStack, workspace: Workspace, name: str) -> bool:
    try:
        held.enter_context(workspace.hold_lock(name))
    except WorkspaceError:
        return False
    return True


def describe_cleaning(result: CleaningResult) -> Message:
    """Describe a result in a line for a person.

    >>> print(describe_cleaning(CleaningResult([], 0)))
    nothing to remove
    """
    gone = result.list_removal_decisions()
    if not gone:
        return Message("cleaning.nothing", "nothing to remove")
    kinds = {choice.folder.kind for choice in gone}
    return Message(
        "cleaning.freed",
        "the factory removed {removed} and freed {megabytes:,.1f} MB",
        megabytes=result.bytes / 1e6,
        removed=[f"{sum(choice.folder.kind == kind for choice in gone)} × {kind}" for kind in sorted(kinds)],
    )


def clean_after_segment(plant: Plant) -> None:
    """Call ``remove_unneeded_folders`` after a segment. An error is printed and not raised, so retention never stops training."""
    try:
        cleaned = remove_unneeded_folders(plant)
        if cleaned.list_removal_decisions():
            plant.progress.line(Message("cleaning.done", "  retention: {result}", result=describe_cleaning(cleaned)))
    except (FactoryError, OSError) as error:
        why = getattr(error, "message", str(error))
        plant.progress.line(Message("cleaning.failed", "  retention could not remove folders: {why}", why=why))
