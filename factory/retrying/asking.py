"""What a person asks of a daemon that runs: one of its actions, as 'judge 3', which it does in its next pass, once. An event of the ledger each
way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from factory.ledger.rows import Reads

if TYPE_CHECKING:
    from factory.ledger.ledger import Ledger

ASKED, ANSWERED = "action_asked", "action_answered"


def ask(ledger: Ledger, actions: Iterable[str], by: str, **how: Any) -> None:
    """``how``: what the actions are done with, as ``asked`` gives it."""
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
