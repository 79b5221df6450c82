"""What a person asks of a daemon that runs, and what is decided while it is at work: events of the ledger.

``factory pause`` and ``factory resume`` hold it until a person takes the pause back. 'judge 3' is one of its duties on one subject, which it does
in its next pass, once. ``factory rewind``, ``factory anomalies accept`` and their like are one transaction, at any moment: what the daemon has
read before is compared with it in the transaction that records what the daemon did. Work on what was rewound, or decided about data and recipe,
is given up then, and the next pass does what follows from the ledger of now.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from factory.core.errors import InputError, WaitingError
from factory.core.moments import local
from factory.ledger.anomalies import CLOSED, FREED, QUARANTINED, REWOUND
from factory.ledger.removals import REMOVED, RETURNED
from factory.ledger.rows import Reads, SegmentRow

if TYPE_CHECKING:
    from factory.ledger.ledger import Ledger


ASKED, ANSWERED = "action_asked", "action_answered"
PAUSED, RESUMED = "paused", "resumed"
TRAINING, EVERYTHING = "training", "everything"


class PausedError(WaitingError):
    """What was asked for is paused: it did not fail, and goes on after 'factory resume'."""

    exit_code = 6


@dataclass(frozen=True)
class Pause:
    what: str  # TRAINING: whatever starts a trainer; EVERYTHING: the inbox too
    by: str
    at: float  # seconds since 1970
    why: str

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"{self.what} is paused by {self.by} since {local(self.at)}{why}; 'factory resume' goes on"


def pause_of(db: Reads) -> Pause | None:
    """The pause that is in force."""
    found = db.read(
        f"SELECT kind, at, detail FROM events WHERE kind IN ('{PAUSED}', '{RESUMED}') ORDER BY id DESC LIMIT 1"
    )
    if not found or found[0]["kind"] == RESUMED:
        return None
    detail = found[0]["detail"]
    return Pause(detail["what"], detail["by"], found[0]["at"], detail.get("why", ""))


def pause(ledger: Ledger, what: str, by: str, why: str = "") -> Pause:
    """Hold the daemon from now on; replaces a pause that is in force. Raises: InputError."""
    from factory.ledger.ledger import record

    if what not in (TRAINING, EVERYTHING):
        raise InputError(f"cannot pause {what!r}: name {TRAINING!r} or {EVERYTHING!r}")
    with ledger.begin() as tx:
        record(tx, PAUSED, "daemon", {"what": what, "by": by, "why": why})
    found = pause_of(ledger)
    assert found is not None
    return found


def resume(ledger: Ledger, by: str) -> Pause:
    """Take the pause back; returns it. Raises: InputError when nothing is paused."""
    from factory.ledger.ledger import record

    found = pause_of(ledger)
    if found is None:
        raise InputError("nothing is paused")
    with ledger.begin() as tx:
        record(tx, RESUMED, "daemon", {"by": by})
    return found


def refuse_paused(db: Reads) -> None:
    """Raises: PausedError while training is paused."""
    if found := pause_of(db):
        raise PausedError(str(found))


def ask(ledger: Ledger, actions: Iterable[str], by: str, **how: Any) -> None:
    """``how``: what they are done with, as ``asked`` gives it."""
    from factory.ledger.ledger import record

    with ledger.begin() as tx:
        for action in actions:
            record(tx, ASKED, "daemon", {"action": action, "by": by, **how})


def asked(db: Reads) -> dict[str, dict[str, Any]]:
    """What was asked for and not done since, the oldest first: ``action``, ``by``, ``at``, and ``event``, the number of the newest that asks."""
    sql = "SELECT id, kind, at, detail FROM events WHERE kind IN (:asked, :answered) ORDER BY id"
    found: dict[str, dict[str, Any]] = {}
    for row in db.read(sql, asked=ASKED, answered=ANSWERED):
        detail = row["detail"]
        action = detail["action"]
        if row["kind"] == ASKED:
            found[action] = detail | {"event": row["id"], "at": row["at"]}
        elif action in found and found[action]["event"] == detail["event"]:  # it was asked for again while it was done
            del found[action]
    return found


def answer(ledger: Ledger, action: str, event: int) -> None:
    from factory.ledger.ledger import record

    with ledger.begin() as tx:
        record(tx, ANSWERED, "daemon", {"action": action, "event": event})


OVERRIDDEN = "recipe_overridden"  # for the segment that takes a rewound one's place


class RewoundError(WaitingError):
    """What was being done goes on from what a person, or a diagnosis, took back meanwhile: nothing failed, and nothing of it is recorded."""


def refuse_rewound(db: Reads, segment: int) -> None:
    """Raises: RewoundError."""
    if SegmentRow.get(db, segment).state == "rewound":
        raise RewoundError(
            f"segment {segment} was rewound meanwhile: nothing goes on from it. Run the same command again"
        )


def newest_decision(db: Reads) -> int:
    """The number of the newest event that changes what the next segment is: what it goes on from, its documents or its recipe."""
    kinds = ", ".join(f"'{kind}'" for kind in (CLOSED, FREED, QUARANTINED, REWOUND, REMOVED, RETURNED, OVERRIDDEN))
    return int(db.read(f"SELECT MAX(id) AS id FROM events WHERE kind IN ({kinds})")[0]["id"] or 0)


def refuse_decided(db: Reads, before: int) -> None:
    """Raises: RewoundError when there is a newer one than ``before``."""
    if newest_decision(db) != before:
        raise RewoundError(
            "somebody decided about data or segments while the next one was planned: it is to be planned again"
        )
