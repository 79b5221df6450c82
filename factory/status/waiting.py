"""What waits, and for what: for a person, each with the command to give; a pause, a parked segment, what failed and is tried again, what was
asked of the daemon. Read from the ledger and the names in the inbox.
"""

from __future__ import annotations

import os
from typing import Any

from factory.core.moments import local
from factory.core.workspace import Workspace
from factory.ingest.rules.task_folder import not_read
from factory.ledger.anomalies import ASKED, CLOSED, newest_about
from factory.ledger.decisions import undecided
from factory.ledger.files import held, low_disk
from factory.ledger.rows import CandidateRow, ProposalRow, Reads, ReleaseRow, SegmentRow, Subject, VerdictRow
from factory.retrying.asking import Pause, asked, pause_of
from factory.retrying.tries import describe_parked, parked, ways_on, why_parked
from factory.status.notified import FILE, read_positions

ACTION_FAILED, PASS_FAILED, WORKS_AGAIN = "action_failed", "pass_failed", "works_again"


def waiting(workspace: Workspace, db: Reads) -> list[dict[str, str]]:
    """``what`` waits, and ``command`` (or what to do), the most urgent first."""
    found = [
        *_training(db),
        *_verdicts(db),
        *_anomalies(db),
        *_inbox(workspace, db),
        *_tasks(workspace),
        *_notifying(workspace),
    ]
    return [{"what": what, "command": command} for what, command in found]


def _training(db: Reads) -> list[tuple[str, str]]:
    found = []
    if pause := pause_of(db):
        found.append((f"{pause.what}, paused by {pause.by}", "factory resume"))
    if disk := low_disk(db):
        free = f"{disk['free'] / 1e9:.2f} of {disk['floor'] / 1e9:.2f} GB"
        found.append((f"training: the disk is below its floor ({free})", "free some space; factory clean --dry-run"))
    if row := parked(db):
        found.append((why_parked(db, row), ways_on(row)))
    newest = SegmentRow.first(db, "WHERE kind <> 'average' ORDER BY id DESC")
    if newest and newest.state == "uncertified":
        found.append((f"segment {newest.id}, whose code is not certified", f"factory certify --accept {newest.id}"))
    return found


def _verdicts(db: Reads) -> list[tuple[str, str]]:
    """Promoted candidates that are not released, and promoted proposals."""
    found = []
    for verdict in undecided(db):
        number = verdict.number
        command = f"factory releases approve {number}, or factory releases reject {number} --why …"
        found.append((f"candidate {number}, promoted, to be released", command))
    for row in ProposalRow.select(db, "WHERE state = 'judged' AND outcome = 'promote' ORDER BY number"):
        found.append((f"proposal {row.number}, promoted: {row.title}", f"factory proposals approve {row.number}"))
    return found


def _anomalies(db: Reads) -> list[tuple[str, str]]:
    asked, closed = newest_about(db, ASKED), newest_about(db, CLOSED)
    leads = sorted({detail["lead"] for number, detail in asked.items() if number not in closed})
    return [
        (f"anomaly {lead}, whose diagnosis a person decides about", f"factory anomalies show {lead}, then accept or reject {lead}")
        for lead in leads
    ]  # fmt: skip


def _inbox(workspace: Workspace, db: Reads) -> list[tuple[str, str]]:
    try:
        names = {os.fsencode(name).decode("utf-8", "backslashreplace") for name in os.listdir(workspace.inbox)}
    except OSError:
        return []
    return [(f"{name} in the inbox", one["why"]) for name, one in sorted(held(db).items()) if name in names]


def _tasks(workspace: Workspace) -> list[tuple[str, str]]:
    what = "in policies/tasks, which is not read nor kept out of training data"
    found = not_read(workspace.root / "policies" / "tasks")
    return [(f"{path.name} {what}", "unpack it to .jsonl, or take it away") for path in found]


def _notifying(workspace: Workspace) -> list[tuple[str, str]]:
    positions = read_positions(workspace)
    if positions is None:
        return [(f"{FILE}, which cannot be read, so nobody is notified", f"remove {workspace.root / FILE}")]
    failing = {name: one["failing"] for name, one in sorted(positions.items()) if one.get("failing")}
    mend = "mend it, or policies/notifications.yaml; nothing is lost"
    return [(f"notifying by {name}, which fails: {why}", mend) for name, why in failing.items()]


def open_verdicts(db: Reads) -> list[str]:
    """Candidates and proposals that are not judged yet, or held: 'candidate 3: hold'."""
    outcomes = {row.subject: row.outcome for row in VerdictRow.select(db, "WHERE gate = 'release' ORDER BY id")}
    newest = max((row.candidate for row in ReleaseRow.select(db)), default=0)
    found = []
    for row in CandidateRow.select(db, "WHERE id > :newest ORDER BY id", newest=newest):
        outcome = outcomes.get(str(Subject("candidate", row.id)), "not judged yet")
        if outcome != "reject":
            found.append(f"candidate {row.id}: {outcome}")
    for one in ProposalRow.select(db, "WHERE state IN ('drafted', 'written', 'judged') ORDER BY number"):
        if one.outcome != "reject":
            found.append(f"proposal {one.number}: {one.outcome or 'not judged yet'}")
    return found


def what_waits(db: Reads) -> dict[str, Any]:
    """The facts, for programs."""
    pause, row = pause_of(db), parked(db)
    return {
        "paused": vars(pause) if pause else None,
        "parked": {"segment": row.id, "says": describe_parked(db, row)} if row else None,
        "failing": failing(db),
        "asked": [{key: one[key] for key in ("action", "by", "at")} for one in asked(db).values()],
    }


def lines_of(facts: dict[str, Any]) -> list[str]:
    """The facts, for people; none when nothing waits."""
    lines = [f"paused    {Pause(**facts['paused'])}"] if facts["paused"] else []
    lines += [f"parked    {facts['parked']['says']}"] if facts["parked"] else []
    for one in facts["failing"]:
        lines.append(f"failing   {one['what']} since {local(one['since'])}: {one['error']}")
    for one in facts["asked"]:
        lines.append(
            f"asked     {one['action']}, by {one['by']} {local(one['at'])}: 'factory run' does it in its next pass"
        )
    return lines


def failing(db: Reads) -> list[dict[str, Any]]:
    """What failed and has not worked since, oldest first: ``what``, ``error``, ``failures`` when it was recorded, ``since``."""
    found: dict[str, dict[str, Any]] = {}
    kinds = ", ".join(f"'{kind}'" for kind in (ACTION_FAILED, PASS_FAILED, WORKS_AGAIN))
    for row in db.read(f"SELECT kind, at, detail FROM events WHERE kind IN ({kinds}) ORDER BY id"):
        what = row["detail"].get("what")
        if row["kind"] == WORKS_AGAIN:
            found.pop(what, None)
        elif what is not None:  # an older factory's says only the error
            since = found[what]["since"] if what in found else row["at"]
            found[what] = {key: row["detail"][key] for key in ("what", "error", "failures")} | {"since": since}
    return list(found.values())
