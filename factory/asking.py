"""What a person asks of a daemon that runs: one of its actions, which it does in its next pass, once. An event of the ledger each way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from factory.actions import Action
from factory.ledger.ledger import Ledger, record
from factory.ledger.rows import Reads

ASKED, ANSWERED = "action_asked", "action_answered"


def ask(ledger: Ledger, actions: Iterable[Action], by: str, **how: Any) -> None:
    """``how``: what the actions are done with, as ``asked`` gives it."""
    with ledger.begin() as tx:
        for action in actions:
            record(tx, ASKED, "daemon", {"action": str(action), "by": by, **how})


def asked(db: Reads) -> dict[Action, dict[str, Any]]:
    """What was asked for and not done since, the oldest first, with ``event``, the number of the newest that asks for it."""
    sql = "SELECT id, kind, detail FROM events WHERE kind IN (:asked, :answered) ORDER BY id"
    found: dict[Action, dict[str, Any]] = {}
    for row in db.read(sql, asked=ASKED, answered=ANSWERED):
        detail = row["detail"]
        kind, _, number = detail["action"].partition(" ")
        action = Action(kind, int(number))
        if row["kind"] == ASKED:
            found[action] = detail | {"event": row["id"]}
        elif action in found and found[action]["event"] == detail["event"]:  # it was asked for again while it was done
            del found[action]
    return found


def answer(ledger: Ledger, action: Action, event: int) -> None:
    with ledger.begin() as tx:
        record(tx, ANSWERED, "daemon", {"action": str(action), "event": event})
