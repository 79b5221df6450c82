"""Recipe keys that are otherwise for some steps: how a segment that was rewound is trained again, and no segment after it.

An override belongs to the segment that takes the rewound one's place: of the same kind, off the same parent. It ends with that segment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from factory.ledger.ledger import record
from factory.ledger.rows import Reads, SegmentRow, Subject
from factory.retrying.rewound import OVERRIDDEN


@dataclass(frozen=True)
class RecipeOverride:
    """``keys`` of the recipe, with dots, until step ``until`` (not included)."""

    keys: Mapping[str, Any]
    until: int
    reason: str


def record_override(tx: sa.Connection, spoiled: SegmentRow, override: RecipeOverride) -> None:
    """For the segment that will take the place of ``spoiled``."""
    place = {"kind": spoiled.kind, "parent": spoiled.parent}
    detail = {"keys": dict(override.keys), "until": override.until, "reason": override.reason}
    record(tx, OVERRIDDEN, Subject("segment", spoiled.id), place | detail)


def override_of(db: Reads, kind: str, parent: int | None) -> RecipeOverride | None:
    """The newest for a segment of that kind off that parent; None where that one has no keys, as after a rejected diagnosis."""
    found = _newest(db, kind, parent)
    return RecipeOverride(found["keys"], found["until"], found["reason"]) if found and found["keys"] else None


def was_overridden(db: Reads, kind: str, parent: int | None) -> bool:
    """Was there ever one for such a segment, or a person's word that there shall be none?"""
    return _newest(db, kind, parent) is not None


def _newest(db: Reads, kind: str, parent: int | None) -> dict[str, Any] | None:
    rows = db.read("SELECT detail FROM events WHERE kind = :kind ORDER BY id DESC", kind=OVERRIDDEN)
    found = (row["detail"] for row in rows)
    return next((detail for detail in found if (detail["kind"], detail["parent"]) == (kind, parent)), None)
