"""What a person does without a diagnosis: rewind a segment, quarantine documents. As ``acting`` does it, all in one transaction: also while
the daemon runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import sqlalchemy as sa

from factory.core.errors import InputError
from factory.data.selecting import keys_of_one
from factory.diagnosis.acting import (
    change_documents,
    mark_releases,
    mark_rewound,
    releases_that_were_trained_on,
    saw_in_words,
    spoiled_by,
)
from factory.ledger.anomalies import FREED, QUARANTINED
from factory.ledger.ledger import Ledger, documents, record
from factory.ledger.rows import ReleaseRow, SegmentRow
from factory.ledger.snapshot import Snapshot
from factory.training.planning import last_checkpoint

RULE = "person"  # as ``documents.rule`` names it


def rewind(ledger: Ledger, number: int, by: str, why: str = "") -> str:
    """Training is gone on with from before a segment, and from nothing that goes on from it; returns a line for a person.

    Raises: InputError for a segment that is rewound already, or whose predecessor's checkpoint is gone.
    """
    with ledger.begin() as tx:
        db = Snapshot(tx, ledger.root)
        row = SegmentRow.get(db, number)
        if row.state in ("rewound", "abandoned"):
            raise InputError(f"segment {number} is {row.state} already: nothing goes on from it")
        if row.parent is not None:
            before = Path(last_checkpoint(db, row.parent)["path"])
            if not (before / "manifest.json").is_file():
                raise InputError(
                    f"segment {number} is not rewound: {before}, which training would go on from, is gone; "
                    f"keep more with trunk_segments in policies/retention.yaml"
                )
        spoiled = [one for one in spoiled_by(db, number) if one.state != "rewound"]
        mark_rewound(tx, spoiled, {"by": by, "why": why})
    listed = ", ".join(str(one.id) for one in spoiled)
    goes_on = f"from the end of segment {row.parent}" if row.parent is not None else "anew, at step 0"
    ids = {one.id for one in spoiled}
    made = ", ".join(str(one.number) for one in ReleaseRow.select(ledger) if one.segment in ids)
    stays = f"; release {made} is made of it and stays ('factory release --rollback N' takes another)" if made else ""
    return f"rewound: segment {listed}; training goes on {goes_on}, over the same shards{stays}"


def quarantine(ledger: Ledger, names: Sequence[str], by: str, why: str = "") -> str:
    """Documents carry no loss in any segment that is planned later; returns a line for a person.

    ``names``: ids or keys. Raises: InputError for one that is not trained on; nothing is changed then.
    """
    keys = _keys(ledger, names, "train", None, "is not trained on")
    saw = releases_that_were_trained_on(ledger, keys)
    detail = f"by {by}" + (f": {why}" if why else "")
    with ledger.begin() as tx:
        change_documents(tx, keys, "quarantined", RULE, detail)
        record(tx, QUARANTINED, "documents", {"documents": keys, "reason": why, "by": by})
        mark_releases(tx, saw)
    return f"{len(keys)} documents quarantined: they carry no loss from the next segment on{saw_in_words(saw)}"


def free(ledger: Ledger, names: Sequence[str], by: str) -> str:
    """Documents that a person quarantined are trained on again. Raises: InputError, as ``quarantine``."""
    keys = _keys(ledger, names, "quarantined", RULE, "was not quarantined by a person")
    with ledger.begin() as tx:
        change_documents(tx, keys, "train", None, None)
        record(tx, FREED, "documents", {"documents": keys, "by": by})
    return f"{len(keys)} documents are trained on again from the next segment on"


def _keys(ledger: Ledger, names: Sequence[str], fate: str, rule: str | None, otherwise: str) -> list[str]:
    """Of the documents of these ids or keys, which all have that fate."""
    c = documents.c
    fits = sa.and_(c.fate == fate, c.rule == rule) if rule else c.fate == fate
    found: list[str] = []
    for name in names:
        try:
            keys = keys_of_one(ledger, name, fits)
        except InputError as error:
            said = str(error)
            raise InputError(said if "nothing was changed" in said else f"{said}; nothing was changed") from error
        rows = ledger.rows(sa.select(c.key, c.fate).where(c.key.in_(keys)).order_by(c.key))
        fitting = [row["key"] for row in ledger.rows(sa.select(c.key).where(c.key.in_(keys), fits).order_by(c.key))]
        if not fitting:
            raise InputError(f"document {name!r} {otherwise} (its fate: {rows[0]['fate']}); nothing was changed")
        found += fitting
    return list(dict.fromkeys(found))
