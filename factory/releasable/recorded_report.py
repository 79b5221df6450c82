"""Keeps the newest releasability report in the ledger, and makes a new report when its input has changed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from factory.core.errors import FactoryError
from factory.core.workspace import Workspace
from factory.ledger.plant import Plant
from factory.ledger.rows import SqlReader
from kernels.contract.message import Message

RELEASABLE = "releasable"  # event: {"key", "lines"}
POLICIES = ("data.yaml", "evals.yaml", "tasks.yaml", "gates/release.yaml")


def read_newest_report(workspace: Workspace, db: SqlReader) -> dict[str, Any] | None:
    """Return the newest report: its ``lines``, its time ``at``, and ``stale`` (whether its input has changed since). None: no report yet."""
    for row in db.read("SELECT at, detail FROM events WHERE kind = :kind ORDER BY id DESC LIMIT 1", kind=RELEASABLE):
        stale = row["detail"]["key"] != _key(workspace, db)
        lines = [{name: _read(value) for name, value in line.items()} for line in row["detail"]["lines"]]
        return {"at": row["at"], "lines": lines, "stale": stale}
    return None


def update_report_if_stale(plant: Plant) -> None:
    """Make a new report if its input has changed, and print the lines that are new. Does nothing if the report cannot be made."""
    from factory.ledger.writing import record_event_once
    from factory.releasable.report import format_report, format_summary, make_report

    before = read_newest_report(plant.workspace, plant.ledger)
    if before and not before["stale"]:
        return
    key = _key(plant.workspace, plant.ledger)
    try:
        lines = make_report(plant)
    except FactoryError:
        return
    if not lines:
        return
    known = {tuple(str(value) for value in line.values()) for line in before["lines"]} if before else set()
    fresh = [line for line in lines if tuple(map(str, vars(line).values())) not in known and line.ok is not True]
    record_event_once(plant.ledger, RELEASABLE, "data", {"key": key, "lines": [line.to_json() for line in lines]})
    if fresh:
        plant.progress.line(f"  {format_summary(lines)}")
    for words in format_report(fresh):
        plant.progress.line(f"  {words}")


def _read(value: Any) -> Any:
    """Return a recorded message as a ``Message``. Older versions recorded plain text, which is returned unchanged."""
    return Message.from_json(value) if isinstance(value, dict) else value


def _key(workspace: Workspace, db: SqlReader) -> str:
    """Return a hash that changes when the report's input does. It covers counts in the ledger, and sizes and times of policies, recipe and tasks."""
    counts = db.read(
        "SELECT (SELECT COUNT(*) FROM shards) AS shards, (SELECT MAX(ingested_at) FROM shards) AS at, (SELECT COUNT(*) FROM verdicts) AS verdicts, "
        "(SELECT COUNT(*) FROM releases) AS releases, (SELECT COUNT(*) FROM relabels) AS relabels, "
        "(SELECT MAX(id) FROM segments) AS segments, (SELECT MAX(id) FROM events WHERE subject LIKE 'removal:%' OR kind LIKE 'licence_%') AS changed"
    )
    files = [workspace.policy_path(name) for name in POLICIES] + [workspace.recipe_path()]
    tasks = workspace.root / "policies" / "tasks"
    files += sorted(tasks.iterdir()) if tasks.is_dir() else []
    return hashlib.sha256(json.dumps([counts, [_stamp(path) for path in files]], default=str).encode()).hexdigest()


def _stamp(path: Path) -> list[Any]:
    try:
        facts = path.stat()
    except OSError:
        return [str(path)]
    return [str(path), facts.st_size, facts.st_mtime_ns]
