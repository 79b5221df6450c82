"""Whether the daemon runs, its current task, and the progress of its segment, read from the lock, the note and the segment's files."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from factory.core.untrusted_trainer_files import parse_json, read_tail
from factory.core.workspace import Workspace
from factory.ledger.rows import SegmentRow, SqlReader

LOCK_FILE = "model-loop.lock"
TASK_NOTE = "doing.json"  # in logs/: {"process", "task", "since"}
TAIL_BYTES = 1 << 16
RATE_STEPS = 32  # the rate is measured from this many newest steps


def read_daemon_facts(workspace: Workspace) -> dict[str, Any]:
    """``running``: whether a process holds the model loop's lock. If so, also ``process``, ``command`` and ``since``; while the process has a
    task, also ``doing`` and ``doing_since``."""
    path = workspace.root / LOCK_FILE
    try:
        process, since = int(path.read_text().strip() or 0), path.stat().st_mtime
    except (OSError, ValueError):
        return {"running": False}
    if not process or not _holds(process, path):
        return {"running": False}
    command = _command(process)
    return {"running": True, "process": process, "command": command, "since": since} | _doing(workspace, process)


def _holds(process: int, lock: Path) -> bool:
    """Whether a process has the lock file open. True for another user's process, which cannot be inspected."""
    try:
        opened = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{process}/fd")]
    except PermissionError:
        return True
    except OSError:
        return False
    return os.path.realpath(lock) in opened


def _command(process: int) -> str:
    """The command line of a process, as a person typed it."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    short = [os.path.basename(words[0]), *words[1:]]
    begins = next((n for n, word in enumerate(short) if os.path.basename(word) == "factory"), 0)
    return " ".join(["factory", *short[begins + 1 :]] if begins else short).strip()


def _doing(workspace: Workspace, process: int) -> dict[str, Any]:
    try:
        found = json.loads((workspace.logs / TASK_NOTE).read_text())
        if found["process"] == process and found["task"]:
            return {"doing": str(found["task"]), "doing_since": float(found["since"])}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return {}


def read_current_segment_facts(db: SqlReader, now: float | None = None) -> dict[str, Any] | None:
    """The planned segment with the numbers of its newest step. None: no segment is planned.

    ``step`` of ``last_step``, and ``loss`` of the newest step; ``tokens_per_s``, ``mfu`` (known GPUs) and ``step_seconds``, medians of the
    newest steps; ``eta_seconds``; ``age_seconds`` since planning; ``seconds_since_step`` since the newest step.
    """
    row = SegmentRow.find_first(db, "WHERE state = 'planned' ORDER BY id")
    if row is None:
        return None
    now = time.time() if now is None else now
    facts: dict[str, Any] = row.select_fields("id kind first_step last_step attempts created_at") | {
        "step": row.first_step, "loss": None, "tokens_per_s": None, "mfu": None, "step_seconds": None, "eta_seconds": None,
        "age_seconds": now - row.created_at, "seconds_since_step": None,
    }  # fmt: skip
    lines = read_newest_metrics(Path(row.folder) / "metrics.jsonl")
    if not lines:
        return facts
    newest = lines[-1]
    facts |= {"step": newest["step"] + 1, "loss": _number(newest, "loss"), "seconds_since_step": now - newest["time"]}
    seconds = [b["time"] - a["time"] for a, b in zip(lines, lines[1:]) if b["step"] == a["step"] + 1]
    for key in ("tokens_per_s", "mfu"):
        if rates := [rate for line in lines[-RATE_STEPS:] if (rate := _number(line, key))]:
            facts[key] = sorted(rates)[len(rates) // 2]
    if seconds:
        facts["step_seconds"] = sorted(seconds[-RATE_STEPS:])[len(seconds[-RATE_STEPS:]) // 2]
        facts["eta_seconds"] = max(0.0, facts["step_seconds"] * (row.last_step - facts["step"]))
    return facts


def read_newest_metrics(path: Path) -> list[dict[str, Any]]:
    """The newest whole lines of a metrics.jsonl that have a step and a time, oldest first. The trainer that writes them is not trusted."""
    found = []
    for line in read_tail(path, TAIL_BYTES).split(b"\n")[:-1]:
        try:
            one = parse_json(line)
        except ValueError:
            continue
        if isinstance(one, dict) and type(one.get("step")) is int and _number(one, "time") is not None:
            found.append(one)
    return found


def _number(line: dict[str, Any], key: str) -> float | None:
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e18:  # NaN too
        return None
    return float(value)
