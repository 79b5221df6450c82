"""Lists what waits for a person, with the command to type. Also lists a pause, a parked segment, failing actions and requests to the daemon.

All of it is read from the ledger and the names in the inbox.
"""

from __future__ import annotations

import os
from typing import Any

from factory.core.time_formats import format_local_time
from factory.core.workspace import Workspace
from factory.ingest.rules.task_folder import list_unreadable_files
from factory.ledger.anomalies import ASKED, CLOSED, read_newest_details_by_anomaly
from factory.ledger.decisions import list_undecided_verdicts
from factory.ledger.file_events import find_low_disk, read_waiting_inbox_files
from factory.ledger.rows import CandidateRow, ProposalRow, ReleaseRow, SegmentRow, SqlReader, Subject, VerdictRow
from factory.retrying.daemon_requests import Pause, find_current_pause, list_open_requests
from factory.retrying.trainer_deaths import (
    describe_parked_segment,
    explain_parked_segment,
    find_parked_segment,
    format_commands_for_parked_segment,
)
from factory.status.delivery_positions import FILE, read_delivery_positions
from kernels.contract.message import Message

ACTION_FAILED, PASS_FAILED, WORKS_AGAIN = "action_failed", "pass_failed", "works_again"


def list_items_waiting_for_person(workspace: Workspace, db: SqlReader) -> list[dict[str, str]]:
    """Each thing that waits for a person: ``what`` it is, and the ``command`` to type (or what to do). The most urgent comes first."""
    found = [
        *_training(db),
        *_verdicts(db),
        *_anomalies(db),
        *_inbox(workspace, db),
        *_tasks(workspace),
        *_notifying(workspace),
    ]
    return [{"what": what, "command": command} for what, command in found]


def _training(db: SqlReader) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if pause := find_current_pause(db):
        paused = Message("waiting.paused", "{person} paused {what}", what=pause.what, person=pause.by)
        found.append((paused, "factory resume"))
    if disk := find_low_disk(db):
        low = Message(
            "waiting.disk_low",
            "training waits for disk space: {free:.2f} GB are free, but the floor is {floor:.2f} GB",
            free=disk["free"] / 1e9,
            floor=disk["floor"] / 1e9,
        )
        found.append((low, Message("waiting.free_space", "free some space, for example with 'factory clean'")))
    if row := find_parked_segment(db):
        found.append((describe_parked_segment(db, row), format_commands_for_parked_segment(row)))
    newest = SegmentRow.find_first(db, "WHERE kind <> 'average' ORDER BY id DESC")
    if newest and newest.state == "uncertified":
        uncertified = Message(
            "waiting.uncertified", "the code of segment {segment} is not certified", segment=newest.id
        )
        found.append((uncertified, f"factory certify --accept {newest.id}"))
    return found


def _verdicts(db: SqlReader) -> list[tuple[str, str]]:
    """Promoted candidates that are not released, and promoted proposals that are not merged."""
    found: list[tuple[str, str]] = []
    for verdict in list_undecided_verdicts(db):
        number = verdict.subject_number
        command = Message(
            "waiting.release_commands",
            "factory releases approve {candidate}, or factory releases reject {candidate} --why …",
            candidate=number,
        )
        found.append(
            (
                Message(
                    "waiting.candidate",
                    "candidate {candidate}: promoted by the gate, waits for your approval",
                    candidate=number,
                ),
                command,
            )
        )
    for row in ProposalRow.select(db, "WHERE state = 'judged' AND outcome = 'promote' ORDER BY number"):
        promoted = Message(
            "waiting.proposal",
            "proposal {proposal}: promoted by the gate, waits for your approval: {title}",
            proposal=row.number,
            title=row.title,
        )
        found.append((promoted, f"factory proposals approve {row.number}"))
    return found


def _anomalies(db: SqlReader) -> list[tuple[str, str]]:
    asked, closed = read_newest_details_by_anomaly(db, ASKED), read_newest_details_by_anomaly(db, CLOSED)
    leads = sorted({detail["lead"] for number, detail in asked.items() if number not in closed})
    return [
        (
            Message("waiting.diagnosis", "anomaly {anomaly}: its diagnosis waits for your decision", anomaly=lead),
            Message(
                "waiting.diagnosis_commands",
                "factory anomalies show {anomaly}, then factory anomalies accept {anomaly} or factory anomalies reject {anomaly}",
                anomaly=lead,
            ),
        )
        for lead in leads
    ]


def _inbox(workspace: Workspace, db: SqlReader) -> list[tuple[str, str]]:
    try:
        names = {os.fsencode(name).decode("utf-8", "backslashreplace") for name in os.listdir(workspace.inbox)}
    except OSError:
        return []
    return [
        (f"{name} in the inbox", one["why"])
        for name, one in sorted(read_waiting_inbox_files(db).items())
        if name in names
    ]


def _tasks(workspace: Workspace) -> list[tuple[str, str]]:
    unread = lambda file: Message(
        "waiting.unread_task",
        "{file} in policies/tasks: the factory cannot read it, so its items may be in training data",
        file=file,
    )
    repair = Message("waiting.unpack_task", "unpack the file to .jsonl, or remove it")
    return [(unread(path.name), repair) for path in list_unreadable_files(workspace.root / "policies" / "tasks")]


def _notifying(workspace: Workspace) -> list[tuple[str, str]]:
    positions = read_delivery_positions(workspace)
    if positions is None:
        unread = Message("waiting.unread_positions", "{file} cannot be read, so nobody is notified", file=FILE)
        return [(unread, f"remove {workspace.root / FILE}")]
    failing = {name: one["failing"] for name, one in sorted(positions.items()) if one.get("failing")}
    unsent = lambda name, why: Message(
        "waiting.notifications", "notifications to {receiver} fail: {reason}", receiver=name, reason=why
    )
    repair = Message(
        "waiting.repair_receiver",
        "repair the receiver, or change policies/notifications.yaml; no notification is lost",
    )
    return [(unsent(name, why), repair) for name, why in failing.items()]


def list_open_verdicts(db: SqlReader) -> list[str]:
    """Candidates and proposals that are not judged yet or are held, such as 'candidate 3: hold'."""
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


def read_waiting_facts(db: SqlReader) -> dict[str, Any]:
    """The pause, the parked segment, the failing actions and the requests to the daemon, as JSON-ready facts."""
    pause, row = find_current_pause(db), find_parked_segment(db)
    return {
        "paused": vars(pause) if pause else None,
        "parked": {"segment": row.id, "says": explain_parked_segment(db, row)} if row else None,
        "failing": list_failing_actions(db),
        "asked": [{key: one[key] for key in ("action", "by", "at")} for one in list_open_requests(db).values()],
    }


def format_waiting_lines(facts: dict[str, Any]) -> list[str]:
    """The facts of ``read_waiting_facts`` as lines for people."""
    lines: list[str] = [f"paused    {Pause(**facts['paused'])}"] if facts["paused"] else []
    lines += [f"parked    {facts['parked']['says']}"] if facts["parked"] else []
    for one in facts["failing"]:
        lines.append(
            Message(
                "waiting.failing",
                "failing   {what} since {since}, with the error: {error}",
                what=one["what"],
                since=format_local_time(one["since"]),
                error=one["error"],
            )
        )
    for one in facts["asked"]:
        lines.append(
            Message(
                "waiting.asked",
                "request   '{action}' by {person} at {at}; 'factory run' carries it out in its next pass",
                person=one["by"],
                action=one["action"],
                at=format_local_time(one["at"]),
            )
        )
    return lines


def list_failing_actions(db: SqlReader) -> list[dict[str, Any]]:
    """Actions that failed and have not succeeded since, oldest first: ``what``, ``error``, ``failures`` (at the last record), ``since``."""
    found: dict[str, dict[str, Any]] = {}
    kinds = ", ".join(f"'{kind}'" for kind in (ACTION_FAILED, PASS_FAILED, WORKS_AGAIN))
    for row in db.read(f"SELECT kind, at, detail FROM events WHERE kind IN ({kinds}) ORDER BY id"):
        what = row["detail"].get("what")
        if row["kind"] == WORKS_AGAIN:
            found.pop(what, None)
        elif what is not None:  # an older factory recorded only the error
            since = found[what]["since"] if what in found else row["at"]
            found[what] = {key: row["detail"][key] for key in ("what", "error", "failures")} | {"since": since}
    return list(found.values())
