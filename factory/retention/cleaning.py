"""Removes what the policy no longer keeps. The ledger first, the folder after: killed between, the next call removes the folder. Where the
disk is too full for the ledger, the folders go first and make room for their record.

A folder is renamed before it is emptied, so that nobody finds half a checkpoint.
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
from factory.core.faults import is_full
from factory.core.removal import remove
from factory.core.workspace import Workspace
from factory.git.repository import remove_worktree
from factory.ledger.files import RETIRED
from factory.ledger.ledger import record, tracked_runs
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject
from factory.retention.choosing import Choice, choose
from factory.retention.needs import Needs
from factory.retention.policy import RetentionPolicy
from factory.retention.stored import stored

REMOVED = ".retired-"  # a folder that is being removed
BUSY = "another process works with folders of its kind now"
LOCKS = {"export": "release", "model": "release", "worktree": "code-loop", "compiled": "code-loop"}


@dataclass(frozen=True)
class Cleaned:
    choices: list[Choice]
    bytes: int  # of what went

    def gone(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.goes]


def examine(plant: Plant, *, hard: bool = False) -> list[Choice]:
    """What would go and what would stay. ``hard``: as where room is short. Raises: ConfigError, RepositoryError."""
    policy = RetentionPolicy.load(plant.workspace.policy("retention.yaml"))
    found = stored(plant)  # before the needs: what is made meanwhile is not among it
    needs = Needs.of(plant)
    last = plant.ledger.read("SELECT segment, MAX(step) AS step FROM checkpoints GROUP BY segment")
    ends = {row["segment"]: row["step"] for row in last}
    policy = policy.at_least() if hard else policy
    return choose(policy, needs, SegmentRow.select(plant.ledger), ends, found, time.time())


def clean(plant: Plant, *, hard: bool = False) -> Cleaned:
    """Remove what goes; the caller holds the model loop's lock. What another process may be using stays for the next call.

    Raises: ConfigError, RepositoryError.
    """
    for left in _half_removed(plant.workspace):
        remove(left)
    # Of one that is over: whoever works in such a folder holds the model loop's lock too.
    for left in (path for name in ("diagnosis-*", "audit-*") for path in plant.workspace.worktrees.glob(name)):
        remove_worktree(plant.workspace.repository, left)
    with ExitStack() as held:
        busy = {name for name in set(LOCKS.values()) if not _locked(held, plant.workspace, name)}
        choices = [
            Choice(one.what, False, BUSY) if one.goes and LOCKS.get(one.what.kind) in busy else one
            for one in examine(plant, hard=hard)
        ]
        going = [choice for choice in choices if choice.goes]
        freed = _remove_folders(plant, [choice for choice in going if choice.what.kind != "run"])
        freed += _remove_runs(plant, [choice for choice in going if choice.what.kind == "run"])
    return Cleaned(choices, freed)


def _remove_folders(plant: Plant, choices: list[Choice]) -> int:
    """Returns the bytes of what went."""
    freed, untold = 0, dict[Path, dict[str, Any]]()
    try:
        for choice in choices:
            size = choice.what.bytes()
            detail = {"kind": choice.what.kind, "bytes": size, "why": choice.why}
            freed += size
            try:
                _tell(plant, untold | {choice.what.path: detail})
                untold.clear()
            except sa.exc.DBAPIError as error:
                if not is_full(error):
                    raise
                untold[choice.what.path] = detail
            if choice.what.kind == "worktree":
                remove_worktree(plant.workspace.repository, choice.what.path)
                continue
            aside = choice.what.path.with_name(f"{REMOVED}{choice.what.path.name}")
            remove(aside)
            os.rename(choice.what.path, aside)
            remove(aside)
    finally:
        if untold:
            _tell(plant, untold)
    return freed


def _tell(plant: Plant, gone: dict[Path, dict[str, Any]]) -> None:
    with plant.ledger.begin() as tx:
        for path, detail in gone.items():
            name = path.relative_to(plant.workspace.root).as_posix()
            record(tx, RETIRED, f"{detail['kind']}:{name}", {"path": name} | detail)


def _remove_runs(plant: Plant, choices: list[Choice]) -> int:
    """The ledger forgets them; what it says of that, MLflow is told later (``factory.show``)."""
    if not choices:
        return 0
    size = sum(choice.what.bytes() for choice in choices)
    with plant.ledger.begin() as tx:
        for choice in choices:
            name = choice.what.path.relative_to(plant.workspace.root).as_posix()
            tx.execute(tracked_runs.delete().where(tracked_runs.c.subject == Subject("segment", choice.what.number)))
            said = {"path": name, "kind": "run", "bytes": size, "why": choice.why, "segment": choice.what.number}
            record(tx, RETIRED, f"run:{name}", said)
    for choice in choices:
        remove(choice.what.path)
    return size


def _half_removed(workspace: Workspace) -> Iterator[Path]:
    """Of a process that was killed here."""
    for place in ("segments/*/checkpoints", "segments/*", "ladder", "audits", "diagnoses", "exports", "logs", "cache"):
        yield from workspace.root.glob(f"{place}/{REMOVED}*")
    yield from (workspace.mlflow_artifacts / "candidates").glob(f"*/artifacts/{REMOVED}*")


def _locked(held: ExitStack, workspace: Workspace, name: str) -> bool:
    try:
        held.enter_context(workspace.lock(name))
    except WorkspaceError:
        return False
    return True


def describe(cleaned: Cleaned) -> str:
    """A line for a person.

    >>> describe(Cleaned([], 0))
    'nothing to remove'
    """
    gone = cleaned.gone()
    if not gone:
        return "nothing to remove"
    kinds = {choice.what.kind for choice in gone}
    words = [f"{sum(choice.what.kind == kind for choice in gone)} × {kind}" for kind in sorted(kinds)]
    return f"{cleaned.bytes / 1e6:,.1f} MB freed: {', '.join(words)} removed"


def tidy(plant: Plant) -> None:
    """After a segment: as ``clean``. What goes wrong is a line for a person; training never fails because of it."""
    try:
        cleaned = clean(plant)
        if cleaned.gone():
            plant.progress.line(f"  retention: {describe(cleaned)}")
    except (FactoryError, OSError) as error:
        plant.progress.line(f"  nothing is cleaned up: {error}")
