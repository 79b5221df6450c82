"""Records a person's requests and decisions while the daemon runs. All are events of the ledger.

``factory pause`` holds the daemon until ``factory resume``. A request such as 'judge 3' names one duty and its subject. The daemon
does it once, in its next pass. ``factory rewind``, ``factory anomalies accept`` and similar commands write a decision in one transaction, at any
time. Before the daemon records its own work, it checks in the same transaction for such decisions. If one affects the work, the daemon discards
the work, and its next pass starts from the new state of the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from factory.core.errors import InputError, PersonNeededError
from factory.core.time_formats import format_local_time
from factory.ledger.anomalies import CLOSED, DOCUMENTS_FREED, DOCUMENTS_QUARANTINED, SEGMENT_REWOUND
from factory.ledger.removals import REMOVED, RETURNED
from factory.ledger.rows import SegmentRow, SqlReader
from kernels.contract.message import Message

if TYPE_CHECKING:
    from factory.ledger.ledger import Ledger


ASKED, ACTION_DONE = "action_asked", "action_answered"
PAUSED, RESUMED = "paused", "resumed"
TRAINING, EVERYTHING = "training", "everything"


class PausedError(PersonNeededError):
    """The work is paused. It did not fail, and continues after 'factory resume'."""

    exit_code = 6


@dataclass(frozen=True)
class Pause:
    """A pause in force: what is paused, by whom, since when and why."""

    what: str  # TRAINING: all duties that start a trainer; EVERYTHING: these duties and the inbox
    by: str
    at: float  # seconds since 1970
    why: str

    def __str__(self) -> str:
        return self.message

    @property
    def message(self) -> Message:
        return Message(
            "retrying.paused", "{person} paused {what} on {since}{why}. Run 'factory resume' to continue.",
            what=self.what, person=self.by, since=format_local_time(self.at), at=self.at, why=f" ({self.why})" if self.why else "",
        )  # fmt: skip


def find_current_pause(db: SqlReader) -> Pause | None:
    """Return the pause in force, or None."""
    found = db.read(
        f"SELECT kind, at, detail FROM events WHERE kind IN ('{PAUSED}', '{RESUMED}') ORDER BY id DESC LIMIT 1"
    )
    if not found or found[0]["kind"] == RESUMED:
        return None
    detail = found[0]["detail"]
    return Pause(detail["what"], detail["by"], found[0]["at"], detail.get("why", ""))


def pause_daemon(ledger: Ledger, what: str, by: str, why: str = "") -> Pause:
    """Pause the daemon. A pause in force is replaced. Returns the pause. Raises: InputError for an unknown ``what``."""
    from factory.ledger.ledger import record_event

    if what not in (TRAINING, EVERYTHING):
        raise InputError(
            "retrying.cannot_pause", "{what!r} cannot be paused. You can pause {training!r} or {everything!r}.",
            what=what, training=TRAINING, everything=EVERYTHING,
        )  # fmt: skip
    with ledger.begin() as tx:
        record_event(tx, PAUSED, "daemon", {"what": what, "by": by, "why": why})
    found = find_current_pause(ledger)
    assert found is not None
    return found


def resume_daemon(ledger: Ledger, by: str) -> Pause:
    """End the pause in force, and return it. Raises: InputError when nothing is paused."""
    from factory.ledger.ledger import record_event

    found = find_current_pause(ledger)
    if found is None:
        raise InputError("retrying.not_paused", "Nothing is paused.")
    with ledger.begin() as tx:
        record_event(tx, RESUMED, "daemon", {"by": by})
    return found


def refuse_while_paused(db: SqlReader) -> None:
    """Raises: PausedError while training is paused."""
    if found := find_current_pause(db):
        raise PausedError(found.message)


def request_actions(ledger: Ledger, actions: Iterable[str], by: str, **arguments: Any) -> None:
    """Record a request for each action, such as 'judge 3'. ``arguments``: further arguments of the duty, which ``list_open_requests`` returns."""
    from factory.ledger.ledger import record_event

    with ledger.begin() as tx:
        for action in actions:
            record_event(tx, ASKED, "daemon", {"action": action, "by": by, **arguments})


def list_open_requests(db: SqlReader) -> dict[str, dict[str, Any]]:
    """Return the requests that are not done yet, by action, oldest first.

    Each has ``action``, ``by``, ``at`` and ``event`` (the number of its newest event).
    """
    sql = "SELECT id, kind, at, detail FROM events WHERE kind IN (:asked, :answered) ORDER BY id"
    found: dict[str, dict[str, Any]] = {}
    for row in db.read(sql, asked=ASKED, answered=ACTION_DONE):
        detail = row["detail"]
        action = detail["action"]
        if row["kind"] == ASKED:
            found[action] = detail | {"event": row["id"], "at": row["at"]}
        elif (
            action in found and found[action]["event"] == detail["event"]
        ):  # otherwise a newer request arrived during the work
            del found[action]
    return found


def record_finished_request(ledger: Ledger, action: str, event: int) -> None:
    """Record that the request with the event number ``event`` is done."""
    from factory.ledger.ledger import record_event

    with ledger.begin() as tx:
        record_event(tx, ACTION_DONE, "daemon", {"action": action, "event": event})


OVERRIDDEN = "recipe_overridden"  # event: other recipe values for the segment that replaces a rewound segment


class WorkInvalidatedError(PersonNeededError):
    """A person or a diagnosis made a decision that invalidates the work. The work did not fail, and none of it is recorded."""


def refuse_rewound_segment(db: SqlReader, segment: int) -> None:
    """Raises: WorkInvalidatedError when the segment was rewound."""
    if SegmentRow.get(db, segment).state == "rewound":
        raise WorkInvalidatedError(
            "retrying.rewound",
            "Segment {segment} was rewound meanwhile, so no work continues from it. Run the same command again.",
            segment=segment,
        )


def find_newest_decision_event(db: SqlReader) -> int:
    """Return the number of the newest event that changes the start, the documents or the recipe of the next segment; 0 without one."""
    kinds = ", ".join(
        f"'{kind}'"
        for kind in (CLOSED, DOCUMENTS_FREED, DOCUMENTS_QUARANTINED, SEGMENT_REWOUND, REMOVED, RETURNED, OVERRIDDEN)
    )
    return int(db.read(f"SELECT MAX(id) AS id FROM events WHERE kind IN ({kinds})")[0]["id"] or 0)


def refuse_outdated_plan(db: SqlReader, last_event: int) -> None:
    """Raises: WorkInvalidatedError when a decision is newer than ``last_event``, a result of ``find_newest_decision_event``."""
    if find_newest_decision_event(db) != last_event:
        raise WorkInvalidatedError(
            "retrying.plan_out_of_date",
            "A person or a diagnosis changed data or segments while a segment was planned. The factory must plan the segment again.",
        )
