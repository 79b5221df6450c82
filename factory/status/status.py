"""The facts of ``factory status``, from the ledger (``factory.ledger.status``) and this machine, and their lines. Imports nothing slow."""

from __future__ import annotations

import time
from shutil import disk_usage
from typing import Any

from factory.code_loop import held_proposals, improvements
from factory.core.errors import ConfigError
from factory.core.time_formats import format_duration, format_local_time
from factory.core.workspace import Workspace, load_yaml
from factory.ledger import status as recorded
from factory.ledger.anomalies import list_anomalies
from factory.ledger.file_events import find_low_disk
from factory.ledger.imported_model import RATE_FOUND, RATE_NOT_SEARCHED
from factory.ledger.reader import LedgerReader
from factory.ledger.rows import SqlReader
from factory.releasable.recorded_report import read_newest_report
from factory.retention.disk import FLOOR_BYTES, estimate_hours_until_floor, read_free_space_samples
from factory.status.daemon_state import read_current_segment_facts, read_daemon_facts
from factory.status.waiting import (
    ACTION_FAILED,
    PASS_FAILED,
    format_waiting_lines,
    list_items_waiting_for_person,
    list_open_verdicts,
    read_waiting_facts,
)
from kernels.contract.message import Message

AHEAD = "trunk_ahead"  # event when the possible training changes: {steps, new_shards, wanted, missing_tokens}
DAY = 86_400


def read_status_facts(workspace: Workspace) -> dict[str, Any]:
    """All facts as JSON-ready data. Moments are seconds since 1970. Raises: WorkspaceError."""
    db, now = LedgerReader(workspace), time.time()
    return (
        recorded.read_status(workspace)
        | read_waiting_facts(db)
        | {
            "at": now,
            "daemon": read_daemon_facts(workspace),
            "last_error": read_last_error(db),
            "training": read_current_segment_facts(db, now),
            "waiting_for_a_person": list_items_waiting_for_person(workspace, db),
            "open_verdicts": list_open_verdicts(db),
            "open_anomalies": sum(row["state"] in ("open", "diagnosed") for row in list_anomalies(db)),
            "data_ahead": read_newest_trunk_forecast(db),
            "rate": read_rate_facts(db),
            "releasable": read_newest_report(workspace, db),
            "disk": read_disk_facts(workspace, db, now),
            "spend": read_spending_facts(db, now),
            "improve": improvements.read_improvement_facts(
                db, improvements.read_unchecked_improve_policy(workspace), now
            ),
            "judge_again": held_proposals.read_judging_again_facts(db, workspace),
        }
    )


def read_last_error(db: SqlReader) -> dict[str, Any] | None:
    """``at``, ``what`` and ``error`` of the newest failure that the daemon recorded, even if the action succeeded since."""
    sql = "SELECT at, detail FROM events WHERE kind IN (:one, :other) ORDER BY id DESC LIMIT 1"
    for row in db.read(sql, one=PASS_FAILED, other=ACTION_FAILED):
        return {"at": row["at"], "what": row["detail"].get("what", "a pass"), "error": row["detail"]["error"]}
    return None


def read_newest_trunk_forecast(db: SqlReader) -> dict[str, Any] | None:
    """The training that the data allowed when the daemon last looked: ``steps``, ``wanted``, ``new_shards``, ``missing_tokens``, ``at``."""
    for row in db.read("SELECT at, detail FROM events WHERE kind = :kind ORDER BY id DESC LIMIT 1", kind=AHEAD):
        return dict(row["detail"] | {"at": row["at"]})
    return None


def read_rate_facts(db: SqlReader) -> dict[str, Any] | None:
    """How the rate of an imported model's first training was chosen: ``at``, and ``found`` or ``reason``. None: there was no choice."""
    sql = "SELECT at, kind, detail FROM events WHERE kind IN (:found, :other) ORDER BY id DESC LIMIT 1"
    for row in db.read(sql, found=RATE_FOUND, other=RATE_NOT_SEARCHED):
        known = {"found": row["detail"]} if row["kind"] == RATE_FOUND else {"reason": row["detail"]["reason"]}
        return {"at": row["at"], **known}
    return None


def read_disk_facts(workspace: Workspace, db: SqlReader, now: float) -> dict[str, Any]:
    """``free``, ``total`` and ``floor`` in bytes, and ``low``: whether training waits for space.

    ``hours_left``: hours until the free space reaches the floor, at the rate of the last hours. None: the free space does not shrink, or too little
    was measured. Raises: ConfigError.
    """
    room = disk_usage(workspace.root)
    policy = load_yaml(workspace.policy_path("retention.yaml"))
    keys = policy if isinstance(policy, dict) else {}
    try:
        floor = max(int(keys.get("floor_bytes", FLOOR_BYTES)), int(keys.get("floor_share", 0.0) * room.total))
    except (TypeError, ValueError):
        raise ConfigError(
            "status.bad_floor",
            "{file}: floor_bytes and floor_share must be numbers.",
            file=workspace.policy_path("retention.yaml"),
        ) from None
    left = estimate_hours_until_floor(read_free_space_samples(workspace), room.free, floor, now)
    return {
        "free": room.free,
        "total": room.total,
        "floor": floor,
        "hours_left": left,
        "low": find_low_disk(db) is not None,
    }


def read_spending_facts(db: SqlReader, now: float) -> dict[str, Any]:
    """Cost of the agents' language models: USD, tokens and requests, ``today`` (UTC) and ``in_all``."""
    sql = "SELECT COUNT(*) AS requests, COALESCE(SUM(tokens), 0) AS tokens, COALESCE(SUM(usd), 0.0) AS usd FROM exchanges WHERE at >= :since"
    return {"today": db.read(sql, since=now - now % DAY)[0], "in_all": db.read(sql, since=0.0)[0]}


def format_status_lines(found: dict[str, Any]) -> list[str]:
    """``read_status_facts`` as lines for a person."""
    first, *rest = recorded.format_status(found)
    lines = [f"{first}   ({format_local_time(found['at'])})", *_daemon_lines(found), *_training_lines(found)]
    for one in found["waiting_for_a_person"]:
        lines.append(
            Message("status.for_you", "waits     for you: {what} → {command}", what=one["what"], command=one["command"])
        )
    lines += _releasable_lines(found)
    lines += format_waiting_lines(
        found | {"parked": None, "paused": None}
    )  # these two wait for a person, as shown above
    lines += improvements.format_improvement_facts(found["improve"], found["daemon"]["running"])
    again = [
        one for one in found["judge_again"] if one["not_before"] is not None
    ]  # the others: 'factory proposals list'
    lines += [
        f"{'' if number else 'again':<10}{held_proposals.describe_judging_again(one, found['at'])}"
        for number, one in enumerate(again)
    ]
    lines += [_disk_line(found), *_spend_lines(found)]
    return lines + rest


def _daemon_lines(found: dict[str, Any]) -> list[str]:
    runs, now = found["daemon"], found["at"]
    if runs["running"]:
        doing = f"; now {runs['doing']}, for {format_duration(now - runs['doing_since'])}" if "doing" in runs else ""
        lines: list[str] = [
            Message(
                "status.daemon_runs",
                "daemon    is running as process {process} ({command}) since {since}{doing}",
                process=runs["process"],
                command=runs["command"],
                since=format_local_time(runs["since"]),
                doing=doing,
            )
        ]
    else:
        lines = [Message("status.no_daemon", "daemon    does not run; to start it: 'factory run'")]
    if error := found["last_error"]:
        lines.append(
            Message(
                "status.last_error",
                "          last error: {what} failed at {at} ({ago} ago): {error}",
                at=format_local_time(error["at"]),
                ago=format_duration(now - error["at"]),
                what=error["what"],
                error=error["error"],
            )
        )
    return lines


def _rate_lines(rate: dict[str, Any] | None) -> list[Message]:
    if rate is None:
        return []
    if "reason" in rate:
        return [
            Message(
                "status.rate_not_searched",
                "rate      of the imported model's recipe, not searched: {reason}",
                reason=Message.from_json(rate["reason"]),
            )
        ]
    return [
        Message(
            "status.rate_found",
            "rate      {rate:.1e}, found by a range test of {steps} steps in {seconds:.0f} s (before: {before:.1e})",
            **{key: rate["found"][key] for key in ("rate", "steps", "seconds", "before")},
        )
    ]


def _training_lines(found: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    if row := found["training"]:
        words = [f"step {row['step']} of {row['last_step']}"]
        words += [f"loss {row['loss']:.3f}"] if row["loss"] is not None else []
        words += [f"{row['tokens_per_s']:,.0f} tokens/s"] if row["tokens_per_s"] else []
        words += [f"MFU {100 * row['mfu']:.1f} %"] if row["mfu"] else []
        words += [f"{format_duration(row['eta_seconds'])} left"] if row["eta_seconds"] is not None else []
        words += (
            [f"newest step {format_duration(row['seconds_since_step'])} ago"]
            if row["seconds_since_step"] is not None
            else []
        )
        words += [f"planned {format_duration(row['age_seconds'])} ago"]
        tries = Message(
            "status.failed_tries",
            "{tries:,|try|tries} failed since the newest checkpoint",
            tries=row["attempts"],
        )
        words += [tries] if row["attempts"] else []
        lines.append(f"training  segment {row['id']} ({row['kind']}): {', '.join(words)}")
    lines += _rate_lines(found["rate"])
    ahead = found["data_ahead"]
    if not row and ahead and ahead["missing_tokens"]:
        lines.append(
            Message(
                "status.little_data",
                "training  waits for data: at least {tokens:,} more tokens are needed. Put shards into the inbox.",
                tokens=ahead["missing_tokens"],
            )
        )
    return lines


def _releasable_lines(found: dict[str, Any]) -> list[str]:
    """Lines about everything that holds releases, with what to do. Warnings are only in 'factory data list'."""
    if (report := found["releasable"]) is None:
        return []
    holding = [line for line in report["lines"] if line["ok"] is False]
    lines = [
        f"release   held by {line['name']}: {line['text']} → {line['todo']}".removesuffix(" → ") for line in holding
    ]
    free = Message(
        "status.releasable", "release   no known problem blocks a release; for the report: 'factory data list'"
    )
    stale = Message(
        "status.stale_report",
        "          data, tasks, recipe or policies changed since this report; for a new report: 'factory data list'",
    )
    return [*(lines or [free]), *([stale] if report["stale"] else [])]


def _disk_line(found: dict[str, Any]) -> str:
    facts = found["disk"]
    free, total, floor = (facts[key] / 1e9 for key in ("free", "total", "floor"))
    if facts["low"]:
        return Message(
            "status.disk_low",
            "disk      free: {free:,.1f} of {total:,.1f} GB. This is BELOW THE FLOOR of {floor:,.1f} GB, so training waits.",
            free=free,
            total=total,
            floor=floor,
        )
    if facts["hours_left"] is not None:
        return Message(
            "status.disk_shrinks",
            "disk      free: {free:,.1f} of {total:,.1f} GB. At the rate of the last hours, the free space reaches the floor of {floor:,.1f} GB "
            "in {left}",
            free=free,
            total=total,
            left=format_duration(3600 * facts["hours_left"]),
            floor=floor,
        )
    return Message("status.disk", "disk      free: {free:,.1f} of {total:,.1f} GB", free=free, total=total)


def _spend_lines(found: dict[str, Any]) -> list[str]:
    today, in_all = found["spend"]["today"], found["spend"]["in_all"]
    if not in_all["requests"]:
        return []
    return [
        Message(
            "status.spend",
            "spend     by agents today (UTC): {usd_today:.2f} USD, {tokens_today:,} tokens; by agents in total: {usd:.2f} USD, {tokens:,} tokens",
            usd_today=today["usd"],
            tokens_today=today["tokens"],
            usd=in_all["usd"],
            tokens=in_all["tokens"],
        )
    ]
