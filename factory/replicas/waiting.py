"""Which anneal's replicas wait; read without anything heavy, as the daemon looks often."""

from __future__ import annotations

from pathlib import Path

from factory.core.workspace import Workspace
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.replicas import due, may_start
from factory.ledger.rows import Reads, SegmentRow


def waits(workspace: Workspace, db: Reads, policy: ReleasePolicy) -> int | None:
    """The anneal whose replicas are to be trained, measured or cleared away; None: there is none."""
    if wanted := wanted_now(workspace, db, policy):
        return wanted[0].id
    left = sorted(int(path.name) for path in folder_of(workspace).glob("*") if path.name.isdigit())
    return left[0] if left else None


def wanted_now(workspace: Workspace, db: Reads, policy: ReleasePolicy) -> tuple[SegmentRow, int] | None:
    """The anneal that is due, and its release. One whose parent's checkpoint is gone is not: the next release's is; nor is one while replicas
    would take more than their share of all steps, unless some of its are there."""
    wanted = due(db, policy.replicas)
    if wanted is None:
        return None
    begun = (folder_of(workspace) / f"{wanted[0].id:05d}").is_dir()
    if not begun and not may_start(db, policy.replicas, wanted[0]):
        return None
    sql = "SELECT path FROM checkpoints WHERE segment = :segment ORDER BY step DESC LIMIT 1"
    there = db.read(sql, segment=wanted[0].parent)
    return wanted if there and (Path(there[0]["path"]) / "manifest.json").is_file() else None


def folder_of(workspace: Workspace) -> Path:
    return workspace.root / "replicas"
