"""What was rewound, or decided about data and recipe, while the daemon was at work on it: that work is given up, and the next pass does
what follows from the ledger of now.

``factory rewind``, ``factory anomalies accept`` and their like are one transaction, at any moment. What the daemon has read before is
compared with it in the transaction that records what the daemon did.
"""

from __future__ import annotations

from factory.core.errors import WaitingError
from factory.ledger.anomalies import CLOSED, FREED, QUARANTINED, REWOUND
from factory.ledger.removals import REMOVED, RETURNED
from factory.ledger.rows import Reads, SegmentRow

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
