"""Turns an event of the ledger into a notification for people outside. Most events give no notification."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from factory.core.errors import InputError
from factory.core.time_formats import format_iso_time
from factory.core.verdict_lines import format_verdict_lines
from factory.core.workspace import Workspace
from factory.gates.patch.policy import PatchPolicy
from factory.ledger.anomalies import ASKED, DIAGNOSED, GAIN_ON_DEV_ONLY, SEGMENT_REWOUND, AnomalyRow
from factory.ledger.decisions import OVERRIDDEN, REFUSED, REJECTED, list_undecided_verdicts
from factory.ledger.file_events import DISK_LOW, DISK_NORMAL
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject, VerdictRow
from factory.release.approvals import describe_waiting_candidate, is_decision_by_person_needed
from factory.retrying.trainer_deaths import (
    FAILED,
    SEGMENT_STUMBLED,
    describe_parked_segment,
    format_commands_for_parked_segment,
)
from factory.status.waiting import ACTION_FAILED, PASS_FAILED, WORKS_AGAIN
from kernels.contract.message import Message

NotificationParts = tuple[tuple[str, ...], str, str]  # (kinds, title, text)
LONGEST = 4000  # characters of a notification's text


@dataclass(frozen=True)
class Notification:
    """A notification as receivers get it. ``id``: the number of its event. A notification that is sent twice has the same ``id``."""

    id: int
    at: str
    event: str
    subject: str
    kinds: tuple[str, ...]
    title: str
    text: str
    detail: Any

    def to_json(self, workspace: Workspace) -> dict[str, Any]:
        return {"workspace": workspace.root.name} | asdict(self)


def make_notification_of_event(plant: Plant, event: dict[str, Any]) -> Notification | None:
    """Return the notification of an event (a row of the ledger's events), or None if the event has none. Raises: ConfigError."""
    detail = event["detail"] if isinstance(event["detail"], dict) else {}
    said: NotificationParts | None
    try:
        said = _said(plant, event["kind"], event["subject"], detail)
    except (InputError, ValueError, TypeError, LookupError) as error:  # its subject is missing or has another form
        said = (
            ("failure",),
            Message(
                "notifications.unknown", "event {event} of {subject}", event=event["kind"], subject=event["subject"]
            ),
            Message("notifications.unread_event", "The factory cannot read this event: {reason}", reason=error),
        )
    if said is None:
        return None
    kinds, title, text = said
    return Notification(
        event["id"],
        format_iso_time(event["at"]),
        event["kind"],
        event["subject"],
        kinds,
        title[:200],
        text[:LONGEST],
        event["detail"],
    )


def _said(plant: Plant, kind: str, subject: str, detail: dict[str, Any]) -> NotificationParts | None:
    """Kinds, title and text of the notification of an event."""
    name = subject.replace(":", " ")
    if kind == "judged":
        return _verdict(plant, name, detail)
    if kind == "segment_done":
        return _anomalies(plant.ledger, name, subject)
    if kind in (FAILED, SEGMENT_STUMBLED):
        return _stopped_training(plant.ledger, name, kind, detail, Subject.parse(subject).number)
    return _of_release(name, kind, detail) or _of_anomaly(name, kind, detail) or _of_failure(name, kind, detail)


def _reason(detail: dict[str, Any]) -> str:
    return str(detail.get("why") or detail.get("error") or "")


def _stopped_training(ledger: Ledger, name: str, kind: str, detail: dict[str, Any], segment: int) -> NotificationParts:
    row = SegmentRow.get(ledger, segment)
    if kind == FAILED and row.state == "failed":
        title = Message("notifications.parked", "{segment} is parked", segment=name)
        text = Message(
            "notifications.ways_on",
            "{reason}. {ways}",
            reason=describe_parked_segment(ledger, row),
            ways=format_commands_for_parked_segment(row),
        )
        return ("failure",), title, text
    title = Message(
        "notifications.trainer_ended", "the trainer of {segment} {end}", segment=name, end=detail.get("said") or "died"
    )
    text = Message(
        "notifications.tries_again",
        "Attempt {tries} failed. The factory starts the trainer again.",
        tries=detail.get("tries"),
    )
    return ("failure",), title, text


def _of_release(name: str, kind: str, detail: dict[str, Any]) -> NotificationParts | None:
    by, reason = detail.get("by"), _reason(detail)
    if kind == "promoted":
        candidate = detail.get("candidate")
        title = Message(
            "notifications.promoted",
            "candidate {candidate} became champion as {release}",
            release=name,
            candidate=candidate,
        )
        return ("release",), title, ""
    if kind == "rolled_back":
        title = Message("notifications.rolled_back", "{release} is champion again", release=name)
        text = Message(
            "notifications.taken_back", "Release {release} is no longer champion.", release=detail.get("from")
        )
        return ("release",), title, text
    if kind == "withdrawn":
        return ("release",), Message("notifications.withdrawn", "{release} is withdrawn", release=name), reason
    if kind == REJECTED:
        title = Message("notifications.rejected", "{person} rejected {candidate}", person=by, candidate=name)
        return ("release",), title, reason
    if kind == OVERRIDDEN:
        title = Message(
            "notifications.overridden",
            "{person} released {candidate}, which the gate had blocked",
            person=by,
            candidate=name,
        )
        return ("release",), title, reason
    if kind == "proposal_approved":
        title = Message("notifications.merged", "{proposal} is merged", proposal=name)
        return ("verdict",), title, Message("notifications.approved_by", "{person} approved the proposal.", person=by)
    if kind == REFUSED:
        title = Message(
            "notifications.refused",
            "the answer {word!r} about {candidate} was refused",
            word=detail.get("word"),
            candidate=name,
        )
        return ("approval",), title, reason
    return None


def _of_anomaly(name: str, kind: str, detail: dict[str, Any]) -> NotificationParts | None:
    reason = _reason(detail)
    if kind == DIAGNOSED:
        causes = " or ".join(map(str, detail.get("causes") or []))
        title = Message("notifications.diagnosed", "{anomaly}: the cause is {causes}", anomaly=name, causes=causes)
        return ("anomaly",), title, reason
    if kind == GAIN_ON_DEV_ONLY:
        title = Message(
            "notifications.dev_alone",
            "{anomaly}: the candidate is better on the dev half of the held-out documents, but not on the sealed half",
            anomaly=name,
        )
        return ("anomaly",), title, reason
    if kind == ASKED:
        title = Message("notifications.decide", "{anomaly} waits for your decision", anomaly=name)
        return ("anomaly",), title, "factory anomalies list"
    if kind == SEGMENT_REWOUND:
        return ("anomaly",), Message("notifications.rewound", "{segment} is rewound", segment=name), reason
    return None


def _of_failure(name: str, kind: str, detail: dict[str, Any]) -> NotificationParts | None:
    what, reason = str(detail.get("what", "the daemon")), _reason(detail)
    if kind == ACTION_FAILED:
        return ("failure",), Message("notifications.action_failed", "{action} failed", action=what), reason
    if kind == PASS_FAILED:
        return (
            ("failure",),
            Message(
                "notifications.daemon_waits", "a pass of the daemon failed, so the daemon waits before its next pass"
            ),
            reason,
        )
    if kind == WORKS_AGAIN:
        return ("failure",), Message("notifications.action_works", "{action} works again", action=what), ""
    if kind == DISK_LOW:
        return (
            ("failure",),
            Message("notifications.disk_low", "free disk space is below the limit, so training waits"),
            "",
        )
    if kind == DISK_NORMAL:
        return ("failure",), Message("notifications.disk_well", "free disk space is above the limit again"), ""
    if kind == "serving_failed":
        return (
            ("failure",),
            Message("notifications.serving_failed", "{release} could not be served", release=name),
            reason,
        )
    if kind == "not_certified":
        title = Message(
            "notifications.not_certified", "the code of {segment} is not certified, so training waits", segment=name
        )
        return ("failure",), title, "factory certify"
    return None


def _verdict(plant: Plant, name: str, detail: dict[str, Any]) -> NotificationParts | None:
    verdict = VerdictRow.find_first(plant.ledger, "WHERE id = :id", id=detail.get("verdict"))
    if verdict is None:
        return None
    facts = {"subject": name, "outcome": verdict.outcome}
    waiting = Message("notifications.waits", "{subject} has the verdict {outcome} and waits for your approval", **facts)
    open_now = [row.id for row in list_undecided_verdicts(plant.ledger)]
    if verdict.gate == "release" and verdict.id in open_now and is_decision_by_person_needed(plant, verdict):
        text = "\n".join([describe_waiting_candidate(verdict.subject_number), *verdict.reasons])
        return ("verdict", "approval"), waiting, text
    reasons: list[str] = verdict.reasons
    if verdict.gate != "release" and name.startswith("proposal "):
        _, *reasons = format_verdict_lines(verdict.outcome, reasons, verdict.subject_number)
        approval = PatchPolicy.load(plant.workspace.policy_path("gates/patch.yaml")).approval
        if verdict.outcome == "promote" and approval == "manual":
            text = "\n".join([f"factory proposals approve {verdict.subject_number}", *reasons])
            return ("verdict", "approval"), waiting, text
    return (
        ("verdict",),
        Message("notifications.verdict", "{subject} has the verdict {outcome}", **facts),
        "\n".join(reasons),
    )


def _anomalies(ledger: Ledger, name: str, subject: str) -> NotificationParts | None:
    """The anomalies of a segment that ended."""
    found = AnomalyRow.select(ledger, "WHERE segment = :segment ORDER BY id", segment=Subject.parse(subject).number)
    if not found:
        return None
    title = Message(
        "notifications.anomalies", "{segment} had {anomalies:,|anomaly|anomalies}", segment=name, anomalies=len(found)
    )
    return ("anomaly",), title, "\n".join(f"anomaly {row.id}: {row.kind} at step {row.step}" for row in found)
