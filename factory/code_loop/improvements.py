"""Reads from the ledger what the daemon's code loop did, and its cost. This module imports little, because 'factory status' imports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from factory.core.workspace import Workspace, load_yaml
from factory.ledger.rows import SqlReader
from kernels.contract.message import Message

# The two events of a stage. BEGAN: {"stage", "situation"}, and "agent", "proposal" and "parts" where they apply. ENDED: {"began": id of the event
# BEGAN, "seconds", "devices"} and the result: "profile", "proposal", "outcome", "nothing" or "failed". A stage that was killed has only BEGAN.
BEGAN, ENDED = "improving", "improved"
WAITS = "improving_waits"  # event: {"why"}, after a stage that no other stage follows
ALONE = "improving_alone"  # event: {"left_out": the agents that need a language model, if none is configured}
SUBJECT = "code_loop"
DAY = 86_400.0  # seconds
REMEMBERED = 1000  # how many of the newest events are read


@dataclass(frozen=True)
class BudgetUse:
    """The use of the budget in the last 24 hours. A stage that was killed counts no time, and the largest possible use of its language model."""

    device_seconds: float = 0.0
    tokens: int = 0
    usd: float = 0.0

    def find_exceeded_limit(self, limits: Mapping[str, float]) -> str:
        """Return a message about the first limit that is used up; '' if none is. ``limits``: the limits by the names of this class's fields."""
        for name, unit in (("device_seconds", "device-seconds"), ("tokens", "tokens"), ("usd", "USD")):
            used, limit = getattr(self, name), limits[name]
            if used >= limit and used > 0:  # an endpoint that costs nothing may be used without money
                return Message(
                    "code_loop.used_up",
                    "{used:,.6g} of {limit:,.6g} {unit} were used in the last 24 hours",
                    used=used,
                    limit=limit,
                    unit=unit,
                )
        return ""


@dataclass(frozen=True)
class BegunStage:
    """A stage that was begun. ``left``: the record of its end; None while the stage runs, or if it was killed."""

    at: float
    began: dict[str, Any]
    left: dict[str, Any] | None
    until: float  # seconds since 1970: its end, the next one's beginning, or now


def read_newest_stages(db: SqlReader, now: float) -> list[BegunStage]:
    """Return the newest stages in the ledger, oldest first."""
    sql = f"SELECT id, at, kind, detail FROM events WHERE kind IN ('{BEGAN}', '{ENDED}') ORDER BY id DESC LIMIT {REMEMBERED}"
    events = db.read(sql)[::-1]
    ended = {row["detail"]["began"]: row for row in events if row["kind"] == ENDED}
    begun = [row for row in events if row["kind"] == BEGAN]
    found = []
    for row, following in pairwise([*begun, {"at": now}]):
        end = ended.get(row["id"])
        found.append(BegunStage(row["at"], row["detail"], end and end["detail"], end["at"] if end else following["at"]))
    return found


def sum_budget_use(db: SqlReader, stages: list[BegunStage], now: float) -> BudgetUse:
    """Return the use in the 24 hours before ``now``: the time of the stages that ended then, and the cost of their language models."""
    since = now - DAY
    seconds = sum(one.left["seconds"] * one.left["devices"] for one in stages if one.left and one.until >= since)
    tokens, usd = 0, 0.0
    for one in stages:
        if one.began.get("model") and one.until >= since:
            sql = (
                "SELECT COALESCE(SUM(e.tokens), 0) AS tokens, COALESCE(SUM(e.usd), 0.0) AS usd FROM exchanges e "
                "JOIN agent_runs r ON r.id = e.run WHERE r.agent = :agent AND e.at BETWEEN :since AND :until"
            )
            spent = db.read(sql, agent=one.began["agent"], since=max(since, one.at), until=one.until)[0]
            tokens, usd = tokens + spent["tokens"], usd + spent["usd"]
    return BudgetUse(seconds, tokens, usd)


def read_unchecked_improve_policy(workspace: Workspace) -> dict[str, Any]:
    """Return the section ``improve`` of agents.yaml without checking its schema. Raises: ConfigError for a file that is not YAML."""
    policy = load_yaml(workspace.policy_path("agents.yaml"))
    section = policy.get("improve", {}) if isinstance(policy, dict) else {}
    return section if isinstance(section, dict) else {"when": section}


def read_improvement_facts(db: SqlReader, policy: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return the data for 'factory status'. ``policy``: the section ``improve`` of agents.yaml, as ``read_unchecked_improve_policy`` returns it."""
    done = read_newest_stages(db, now)
    sql = f"SELECT at, detail FROM events WHERE kind = '{WAITS}' ORDER BY id DESC LIMIT 1"
    waits = [row["detail"]["why"] for row in db.read(sql) if not done or row["at"] >= done[-1].at]
    begun = next(({"at": one.at, **one.began} for one in done[-1:] if one.left is None), None)
    ended = next(({"at": one.until, **one.began, **one.left} for one in reversed(done) if one.left is not None), None)
    return {
        "when": policy.get("when", "off"),
        "begun": begun,
        "last": ended,
        "waits": "".join(waits),
        "used": asdict(sum_budget_use(db, done, now)),
    }


def format_improvement_facts(found: Mapping[str, Any], running: bool) -> list[str]:
    """Return ``read_improvement_facts`` as lines for a person. ``running``: whether the daemon runs."""
    from factory.core.time_formats import format_local_time

    begun, last, spent = found["begun"], found["last"], found["used"]
    doing = ""
    if begun and running:
        now = Message(
            "code_loop.now",
            "now: {stage} (since {since})",
            stage=format_stage_name(begun),
            since=format_local_time(begun["at"]),
        )
        doing = f"; {now}"
    first = Message("code_loop.improve", "improve   {when}{now}", when=found["when"], now=doing)
    if last is None:
        return [first]
    then = f"; {found['waits']}" if found["waits"] and found["when"] != "off" else ""
    done = Message(
        "code_loop.last",
        "          last stage: {stage} (ended {at}), {outcome}{then}",
        at=format_local_time(last["at"]),
        stage=format_stage_name(last),
        outcome=format_stage_result(last),
        then=then,
    )
    cost = Message(
        "code_loop.cost",
        "          used in the last 24 hours: {device_seconds:,.0f} device-seconds, {tokens:,} tokens and {usd:.2f} "
        "USD",
        device_seconds=spent["device_seconds"],
        tokens=spent["tokens"],
        usd=spent["usd"],
    )
    return [first, done, cost]


def format_stage_name(stage: Mapping[str, Any]) -> str:
    """Return the name of a stage, as text.

    >>> (format_stage_name({"stage": "judge", "proposal": 3}),
    ...  format_stage_name({"stage": "propose", "agent": "search"}),
    ...  format_stage_name({"stage": "profile"}))
    ('judge proposal 3', 'propose by search', 'profile')
    """
    if stage["stage"] == "propose":
        return f"propose by {stage['agent']}"
    if parts := stage.get("parts"):
        return f"{stage['stage']} proposals {' and '.join(map(str, parts))}"
    return f"{stage['stage']} proposal {stage['proposal']}" if "proposal" in stage else str(stage["stage"])


def format_stage_result(record: Mapping[str, Any]) -> str:
    """Return the result of a stage, as text."""
    if "failed" in record:
        return f"failed: {record['failed']}"
    if record.get("nothing"):
        return "nothing found"
    if record["stage"] in ("propose", "combine") and "proposal" in record:
        return f"proposal {record['proposal']}"
    return str(record.get("outcome") or "done")
