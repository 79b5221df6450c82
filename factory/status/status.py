"""The facts of ``factory status``: the ledger's (``factory.ledger.status``), and what the machine says now. Nothing heavy is imported."""

from __future__ import annotations

import time
from shutil import disk_usage
from typing import Any

from factory.code_loop import improvements
from factory.core.errors import ConfigError
from factory.core.moments import local, span
from factory.core.workspace import Workspace, load_yaml
from factory.ledger import status as recorded
from factory.ledger.anomalies import every_anomaly
from factory.ledger.files import low_disk
from factory.ledger.reader import Reader
from factory.ledger.rows import Reads
from factory.releasable.recorded import newest
from factory.retention.disk import FLOOR_BYTES, hours_left, samples
from factory.status.running import daemon, segment_now
from factory.status.waiting import ACTION_FAILED, PASS_FAILED, lines_of, open_verdicts, waiting, what_waits

AHEAD = "trunk_ahead"  # {steps, new_shards, wanted, missing_tokens}: what the data allows, whenever that changes
DAY = 86_400


def facts(workspace: Workspace) -> dict[str, Any]:
    """Everything, as JSON-ready data; moments are seconds since 1970. Raises: WorkspaceError."""
    db, now = Reader(workspace), time.time()
    return (
        recorded.snapshot(workspace)
        | what_waits(db)
        | {
            "at": now,
            "daemon": daemon(workspace),
            "last_error": last_error(db),
            "training": segment_now(db, now),
            "waiting_for_a_person": waiting(workspace, db),
            "open_verdicts": open_verdicts(db),
            "open_anomalies": sum(row["state"] in ("open", "diagnosed") for row in every_anomaly(db)),
            "data_ahead": data_ahead(db),
            "releasable": newest(workspace, db),
            "disk": disk(workspace, db, now),
            "spend": spend(db, now),
            "improve": improvements.facts(db, improvements.as_written(workspace), now),
        }
    )


def last_error(db: Reads) -> dict[str, Any] | None:
    """``at``, ``what`` and ``error`` of the newest failure that the daemon recorded, whether or not it works again."""
    sql = "SELECT at, detail FROM events WHERE kind IN (:one, :other) ORDER BY id DESC LIMIT 1"
    for row in db.read(sql, one=PASS_FAILED, other=ACTION_FAILED):
        return {"at": row["at"], "what": row["detail"].get("what", "a pass"), "error": row["detail"]["error"]}
    return None


def data_ahead(db: Reads) -> dict[str, Any] | None:
    """What the data allowed when it was last looked at: ``steps``, ``wanted``, ``new_shards``, ``missing_tokens``, ``at``."""
    for row in db.read("SELECT at, detail FROM events WHERE kind = :kind ORDER BY id DESC LIMIT 1", kind=AHEAD):
        return dict(row["detail"] | {"at": row["at"]})
    return None


def disk(workspace: Workspace, db: Reads, now: float) -> dict[str, Any]:
    """Bytes; ``hours_left`` until the floor, at the rate of the last hours; None: it does not shrink, or too little was measured."""
    room = disk_usage(workspace.root)
    policy = load_yaml(workspace.policy("retention.yaml"))
    keys = policy if isinstance(policy, dict) else {}
    try:
        floor = max(int(keys.get("floor_bytes", FLOOR_BYTES)), int(keys.get("floor_share", 0.0) * room.total))
    except (TypeError, ValueError):
        raise ConfigError(
            f"{workspace.policy('retention.yaml')}: floor_bytes and floor_share: expected numbers"
        ) from None
    left = hours_left(samples(workspace), room.free, floor, now)
    return {"free": room.free, "total": room.total, "floor": floor, "hours_left": left, "low": low_disk(db) is not None}


def spend(db: Reads, now: float) -> dict[str, Any]:
    """Of agents' language models: money (USD), tokens and requests, today (UTC) and in all."""
    sql = "SELECT COUNT(*) AS requests, COALESCE(SUM(tokens), 0) AS tokens, COALESCE(SUM(usd), 0.0) AS usd FROM exchanges WHERE at >= :since"
    return {"today": db.read(sql, since=now - now % DAY)[0], "in_all": db.read(sql, since=0.0)[0]}


def screen(found: dict[str, Any]) -> list[str]:
    """``facts`` as lines for a person."""
    first, *rest = recorded.screen(found)
    lines = [f"{first}   ({local(found['at'])})", *_daemon_lines(found), *_training_lines(found)]
    for one in found["waiting_for_a_person"]:
        lines.append(f"waits     for you: {one['what']} → {one['command']}")
    lines += _releasable_lines(found)
    lines += lines_of(found | {"parked": None, "paused": None})  # these are among what waits
    lines += improvements.lines(found["improve"], found["daemon"]["running"])
    lines += [_disk_line(found), *_spend_lines(found)]
    return lines + rest


def _daemon_lines(found: dict[str, Any]) -> list[str]:
    runs, now = found["daemon"], found["at"]
    if runs["running"]:
        doing = f"; now {runs['doing']}, for {span(now - runs['doing_since'])}" if "doing" in runs else ""
        since = f"process {runs['process']} ({runs['command']}) since {local(runs['since'])}"
        lines = [f"daemon    runs: {since}{doing}"]
    else:
        lines = ["daemon    does not run: 'factory run' starts it"]
    if error := found["last_error"]:
        ago = span(now - error["at"])
        lines.append(f"          last error {local(error['at'])} ({ago} ago), {error['what']}: {error['error']}")
    return lines


def _training_lines(found: dict[str, Any]) -> list[str]:
    lines = []
    if row := found["training"]:
        words = [f"step {row['step']} of {row['last_step']}"]
        words += [f"loss {row['loss']:.3f}"] if row["loss"] is not None else []
        words += [f"{row['tokens_per_s']:,.0f} tokens/s"] if row["tokens_per_s"] else []
        words += [f"MFU {100 * row['mfu']:.1f} %"] if row["mfu"] else []
        words += [f"{span(row['eta_seconds'])} left"] if row["eta_seconds"] is not None else []
        words += [f"newest step {span(row['seconds_since_step'])} ago"] if row["seconds_since_step"] is not None else []
        words += [f"planned {span(row['age_seconds'])} ago"]
        words += [f"{row['attempts']} tries failed since its newest checkpoint"] if row["attempts"] else []
        lines.append(f"training  segment {row['id']} ({row['kind']}): {', '.join(words)}")
    ahead = found["data_ahead"]
    if not row and ahead and ahead["missing_tokens"]:
        lines.append(
            f"training  too little data: at least {ahead['missing_tokens']:,} tokens more are needed; drop shards into the inbox"
        )
    return lines


def _releasable_lines(found: dict[str, Any]) -> list[str]:
    """What holds releases, with what to do; what only tells less than it could is in 'factory data list'."""
    if (report := found["releasable"]) is None:
        return []
    holding = [line for line in report["lines"] if line["ok"] is False]
    lines = [
        f"release   held by {line['name']}: {line['text']} → {line['todo']}".removesuffix(" → ") for line in holding
    ]
    lines = lines or ["release   nothing would hold one: 'factory data list' has the report"]
    changed = "          data, tasks, recipe or policies changed since this report: 'factory data list' looks again"
    return [*lines, changed] if report["stale"] else lines


def _disk_line(found: dict[str, Any]) -> str:
    facts = found["disk"]
    words = f"disk      {facts['free'] / 1e9:,.1f} of {facts['total'] / 1e9:,.1f} GB free"
    if facts["hours_left"] is not None:
        words += f"; {span(3600 * facts['hours_left'])} until the floor of {facts['floor'] / 1e9:,.1f} GB, at the rate of the last hours"
    return words + ("; BELOW THE FLOOR: training waits" if facts["low"] else "")


def _spend_lines(found: dict[str, Any]) -> list[str]:
    today, in_all = found["spend"]["today"], found["spend"]["in_all"]
    if not in_all["requests"]:
        return []
    return [
        f"spend     agents: {today['usd']:.2f} USD and {today['tokens']:,} tokens today (UTC), {in_all['usd']:.2f} USD and "
        f"{in_all['tokens']:,} tokens in all"
    ]
