"""An event of the ledger as a message for people outside; most events are none."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from factory.core.errors import InputError
from factory.core.moments import iso
from factory.core.workspace import Workspace
from factory.gates.patch.policy import PatchPolicy
from factory.ledger.anomalies import ASKED, DEV_ALONE, DIAGNOSED, REWOUND, AnomalyRow
from factory.ledger.decisions import OVERRIDDEN, REFUSED, REJECTED, undecided
from factory.ledger.files import DISK_LOW, DISK_WELL
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject, VerdictRow
from factory.release.approvals import how_to_answer, waits
from factory.retrying.tries import FAILED, STUMBLED, ways_on, why_parked
from factory.status.waiting import ACTION_FAILED, PASS_FAILED, WORKS_AGAIN

LONGEST = 4000  # characters of a text


@dataclass(frozen=True)
class Message:
    """``id`` is the event's number: a message that comes twice has the same one."""

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


def message_of(plant: Plant, event: dict[str, Any]) -> Message | None:
    """``event``: a row of the table. None: it is nothing to tell. Raises: ConfigError."""
    detail = event["detail"] if isinstance(event["detail"], dict) else {}
    try:
        said = _said(plant, event["kind"], event["subject"], detail)
    except (
        InputError,
        ValueError,
        TypeError,
        LookupError,
    ) as error:  # what it is about is not there, or of another form
        said = ("failure",), f"{event['kind']} about {event['subject']}", f"this event cannot be read: {error}"
    if said is None:
        return None
    kinds, title, text = said
    return Message(
        event["id"],
        iso(event["at"]),
        event["kind"],
        event["subject"],
        kinds,
        title[:200],
        text[:LONGEST],
        event["detail"],
    )


def _said(plant: Plant, kind: str, subject: str, detail: dict[str, Any]) -> tuple[tuple[str, ...], str, str] | None:
    """(kinds, title, text)"""
    name = subject.replace(":", " ")
    why = str(detail.get("why") or detail.get("error") or "")
    if kind == "judged":
        return _verdict(plant, name, detail)
    if kind == "segment_done":
        return _anomalies(plant.ledger, name, subject)
    if kind in (FAILED, STUMBLED):
        row = SegmentRow.get(plant.ledger, Subject.parse(subject).number)
        parked = kind == FAILED and row.state == "failed"
        text = f"{why_parked(plant.ledger, row)}. {ways_on(row)}" if parked else ""
        title = f"{name} is parked" if parked else f"{name}: its trainer {detail.get('said') or 'died'}"
        return ("failure",), title, text or f"try {detail.get('tries')}; it is tried again"
    what = str(detail.get("what", "the daemon"))
    simple: dict[str, tuple[str, str, str]] = {
        "promoted": ("release", f"{name}: candidate {detail.get('candidate')} is champion", ""),
        "rolled_back": ("release", f"{name} is champion again", f"release {detail.get('from')} was taken back"),
        "withdrawn": ("release", f"{name} is withdrawn", why),
        REJECTED: ("release", f"{name} was rejected by {detail.get('by')}", why),
        OVERRIDDEN: ("release", f"{name} is released though it was held, by {detail.get('by')}", why),
        "proposal_approved": ("verdict", f"{name} is merged", f"approved by {detail.get('by')}"),
        REFUSED: ("approval", f"{detail.get('word')!r} for {name} was refused", why),
        DIAGNOSED: ("anomaly", f"{name}: {' or '.join(map(str, detail.get('causes') or []))}", why),
        DEV_ALONE: ("anomaly", f"{name}: better on the dev half alone", why),
        ASKED: ("anomaly", f"{name} waits for a person", "factory anomalies list"),
        REWOUND: ("anomaly", f"{name} is rewound", why),
        ACTION_FAILED: ("failure", f"{what} failed", why),
        PASS_FAILED: ("failure", "the daemon waits", why),
        WORKS_AGAIN: ("failure", f"{what} works again", ""),
        DISK_LOW: ("failure", "the disk is below its floor: training waits", ""),
        DISK_WELL: ("failure", "the disk is above its floor again", ""),
        "serving_failed": ("failure", f"serving {name} failed", why),
        "not_certified": ("failure", f"the code of {name} is not certified: training waits", "factory certify"),
    }
    if kind not in simple:
        return None
    one, title, text = simple[kind]
    return (one,), title, text


def _verdict(plant: Plant, name: str, detail: dict[str, Any]) -> tuple[tuple[str, ...], str, str] | None:
    verdict = VerdictRow.first(plant.ledger, "WHERE id = :id", id=detail.get("verdict"))
    if verdict is None:
        return None
    lines, kinds, title = list(verdict.reasons), ("verdict",), f"{name}: {verdict.outcome}"
    open_now = [row.id for row in undecided(plant.ledger)]
    if verdict.gate == "release" and verdict.id in open_now and waits(plant, verdict):
        return (
            (*kinds, "approval"),
            f"{title}, and waits for approval",
            "\n".join([how_to_answer(verdict.number), *lines]),
        )
    if verdict.gate != "release" and verdict.outcome == "promote" and name.startswith("proposal "):
        approval = PatchPolicy.load(plant.workspace.policy("gates/patch.yaml")).approval
        if approval == "manual":
            text = "\n".join([f"factory proposals approve {verdict.number}", *lines])
            return (*kinds, "approval"), f"{title}, and waits for approval", text
    return kinds, title, "\n".join(lines)


def _anomalies(ledger: Ledger, name: str, subject: str) -> tuple[tuple[str, ...], str, str] | None:
    """Of a segment that ended."""
    found = AnomalyRow.select(ledger, "WHERE segment = :segment ORDER BY id", segment=Subject.parse(subject).number)
    if not found:
        return None
    words = [f"anomaly {row.id}: {row.kind} at step {row.step}" for row in found]
    return ("anomaly",), f"{name} had {len(found)} {'anomaly' if len(found) == 1 else 'anomalies'}", "\n".join(words)
