"""What waits, and for what: a person's pause, a parked segment, what failed and is tried again, what was asked of the daemon. Read from the
ledger, for ``factory status``.
"""

from __future__ import annotations

from typing import Any

from factory.ledger.rows import Reads
from factory.retrying.asking import asked
from factory.retrying.pausing import Pause, local, pause_of
from factory.retrying.tries import describe_parked, parked

ACTION_FAILED, PASS_FAILED, WORKS_AGAIN = "action_failed", "pass_failed", "works_again"


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
            found[what] = {
                "what": what,
                "error": row["detail"]["error"],
                "failures": row["detail"]["failures"],
                "since": since,
            }
    return list(found.values())
