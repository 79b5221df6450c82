"""A person takes documents out, or puts them back. Rows, event and marks of releases are one transaction, as of a quarantine.

A removed document stays in its token shard and keeps its place in the data order, but carries no loss in any segment that is planned later;
a shard that the trunk has not seen is left out when nothing else is in it. A held-out one is measured no more. What is known of it for
recognising copies stays, so that ingest refuses them. Its text stays too, unless it is to be erased (``factory.erasing.erasing``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from factory.core.errors import InputError
from factory.data.cost import RetrainingCost, cost_of, releases_that_saw
from factory.data.exposure import Exposure
from factory.data.selecting import NOUNS, Selection, fates_of
from factory.ingest.document import SYNTHETIC
from factory.ledger.anomalies import MARKED
from factory.ledger.ledger import Ledger, documents, events, record
from factory.ledger.removals import FATE, REMOVED, RETURNED, TAKEN_OUT, Removal, removals, rule_of
from factory.ledger.rows import ReleaseRow, SegmentRow, Subject

SHOWN = 100  # keys in a release's mark
c = documents.c


@dataclass(frozen=True)
class Outlook:
    """What a removal would take out, and what follows."""

    selection: Selection
    fates: dict[str, int]  # of what would be removed, as it is now
    domains: dict[str, int]  # supervised tokens of its training documents
    releases: dict[int, tuple[list[str], bool]]  # as ``releases_that_saw``
    open_segment: int | None  # planned already, and trained on them
    cost: RetrainingCost

    def lines(self) -> list[str]:
        """For a person."""
        fates = ", ".join(f"{count:,} {FATES[fate]}" for fate, count in self.fates.items())
        said = [f"{sum(self.fates.values()):,} documents: {fates}"]
        if self.domains:
            tokens = ", ".join(f"{domain} {count:,}" for domain, count in sorted(self.domains.items()))
            said.append(f"supervised tokens, by domain: {tokens}")
        for number, (keys, exact) in self.releases.items():
            said.append(f"release {number} {'was' if exact else 'may have been'} trained on {len(keys):,} of them")
        if not self.releases:
            said.append("no release was trained on them")
        if self.open_segment is not None:
            said.append(
                f"segment {self.open_segment} is planned already and still sees them ('factory rewind {self.open_segment}' takes it back)"
            )
        if self.fates.get("held_out"):
            said.append(
                "candidates are measured without the held-out ones; the champion is measured again before the next is compared"
            )
        return [*said, str(self.cost)]

    def to_json(self) -> dict[str, Any]:
        seen = [
            {"release": number, "documents": len(keys), "exact": exact}
            for number, (keys, exact) in self.releases.items()
        ]
        return {
            "fates": self.fates,
            "domains": self.domains,
            "releases": seen,
            "open_segment": self.open_segment,
            "cost": self.cost.to_json(),
        }


FATES = {
    "train": "to train on",
    "held_out": "held out",
    "quarantined": "quarantined",
    FATE: "removed before",
    "dropped": "dropped before",
}


def look(ledger: Ledger, selection: Selection, erase: bool = False) -> Outlook:
    """Changes nothing. Raises: InputError where there is nothing to take out, or, of documents that were named, one is not."""
    wanted = fates_of(erase)
    fates: Counter[str] = Counter()
    domains: Counter[str] = Counter()
    trained: dict[str, str] = {}
    others: dict[str, str] = {}
    for part in selection.parts():
        for row in ledger.rows(sa.select(c.key, c.fate, c.domain, c.token_shard, c.supervised_tokens).where(part)):
            if row["fate"] not in wanted:
                others[row["key"]] = row["fate"]
                continue
            fates[row["fate"]] += 1
            if row["token_shard"]:
                trained[row["key"]] = row["token_shard"]
                if row["fate"] != FATE:
                    domains[row["domain"]] += row["supervised_tokens"]
    if not fates or (selection.column == "key" and others):
        raise InputError(_nothing(selection, others))
    exposure = Exposure(ledger, trained)
    planned = SegmentRow.first(ledger, "WHERE state = 'planned' ORDER BY id")
    segments = {row.number: row.segment for row in ReleaseRow.select(ledger)} if trained else {}
    return Outlook(
        selection,
        dict(fates),
        dict(domains),
        releases_that_saw(ledger, exposure, segments),
        planned.id if planned and exposure.wanted(planned) else None,
        cost_of(ledger, exposure),
    )


def remove(ledger: Ledger, found: Outlook, by: str, why: str = "", erase: bool = False) -> Removal:
    """Take out what ``look`` found."""
    selection, changed = found.selection, 0
    with ledger.begin() as tx:
        number = int(tx.execute(sa.select(sa.func.count()).where(events.c.kind == REMOVED)).scalar() or 0) + 1
        shards: set[str] = set()
        tokens = 0
        for part in selection.parts():
            held = sa.select(c.token_shard, sa.func.sum(c.supervised_tokens)).group_by(c.token_shard)
            fates = (*TAKEN_OUT, FATE) if erase else TAKEN_OUT
            for shard, count in tx.execute(held.where(part, c.fate.in_(fates), c.token_shard.is_not(None))):
                shards.add(shard)
                tokens += count
            for fate in TAKEN_OUT:
                if erase:  # what was removed before is this one's now
                    old = documents.update().where(part, c.fate == FATE, c.rule.like(f"removal % of {fate}"))
                    changed += tx.execute(old.values(rule=rule_of(number, fate))).rowcount
                update = documents.update().where(part, c.fate == fate)
                changed += tx.execute(update.values(fate=FATE, rule=rule_of(number, fate))).rowcount
        detail: dict[str, Any] = {
            "by": by, "why": why, "column": selection.column, "names": list(selection.names), "documents": changed,
            "supervised_tokens": tokens, "token_shards": sorted(shards), "erase": erase,
        }  # fmt: skip
        record(tx, REMOVED, Subject("removal", number), detail)
        for release, (keys, exact) in found.releases.items():
            _mark(tx, release, number, keys, exact)
    return next(one for one in removals(ledger) if one.number == number)


def undo(ledger: Ledger, number: int, by: str) -> str:
    """Put back what a removal took out; returns a line for a person. Raises: InputError where that cannot be."""
    known = {one.number: one for one in removals(ledger)}
    if number not in known:
        there = ", ".join(map(str, known)) or "none yet"
        raise InputError(f"no removal {number}; there are: {there}")
    removal = known[number]
    if removal.erase:
        raise InputError(f"removal {number} erases its text: it cannot be put back")
    if removal.state != "removed":
        raise InputError(f"removal {number} was put back already")
    changed = 0
    with ledger.begin() as tx:
        for fate in TAKEN_OUT:
            update = documents.update().where(c.fate == FATE, c.rule == rule_of(number, fate))
            if fate == "quarantined":
                doctor = update.where(sa.or_(c.detail.like("anomaly %"), c.detail.like(f"{SYNTHETIC}%; anomaly %")))
                changed += tx.execute(doctor.values(fate=fate, rule="loss_doctor")).rowcount
            changed += tx.execute(update.values(fate=fate, rule="person" if fate == "quarantined" else None)).rowcount
        record(tx, RETURNED, Subject("removal", number), {"by": by, "documents": changed})
    return f"{changed:,} documents are back: they are used again from the next segment and the next evaluation on"


def mark_new_releases(ledger: Ledger) -> list[str]:
    """Mark releases that were made after a removal from segments that were planned before it; returns lines for a person."""
    taken = [one for one in removals(ledger) if one.state != "returned" and one.token_shards]
    if not taken:
        return []
    known = ledger.read("SELECT subject, detail FROM events WHERE kind = :kind", kind=MARKED)
    marked = {(row["subject"], row["detail"].get("removal")) for row in known}
    said = []
    for removal in taken:
        for release in ReleaseRow.select(ledger):
            if release.created_at <= removal.at or (str(Subject("release", release.number)), removal.number) in marked:
                continue
            if all(row.created_at > removal.at for row in SegmentRow.lineage(ledger, release.segment)):
                continue
            exposure = Exposure(ledger, _documents(ledger, removal))
            saw = releases_that_saw(ledger, exposure, {release.number: release.segment}).get(release.number, ([], True))
            with ledger.begin() as tx:  # one that saw none too: it is not looked at again
                _mark(tx, release.number, removal.number, *saw)
            if saw[0]:
                said.append(f"release {release.number} was trained on {len(saw[0]):,} documents of {removal}")
    return said


def _documents(ledger: Ledger, removal: Removal) -> dict[str, str]:
    rules = [removal.rule(fate) for fate in TAKEN_OUT]
    rows = ledger.rows(sa.select(c.key, c.token_shard).where(c.rule.in_(rules), c.token_shard.is_not(None)))
    return {row["key"]: row["token_shard"] for row in rows}


def _mark(tx: sa.Connection, release: int, removal: int, keys: Sequence[str], exact: bool) -> None:
    detail = {"anomaly": None, "removal": removal, "documents": keys[:SHOWN], "count": len(keys), "exact": exact}
    record(tx, MARKED, Subject("release", release), detail)


def _nothing(selection: Selection, others: dict[str, str]) -> str:
    if selection.column == "key":
        key, fate = next(iter(others.items()), (selection.names[0], "none"))
        return f"document {key!r} is neither trained on nor held out (its fate: {fate}); nothing was changed"
    noun = NOUNS[selection.column]
    fates = ", ".join(f"{count:,} {fate}" for fate, count in Counter(others.values()).items())
    return (
        f"no document of {noun} {', '.join(selection.names)} is trained on or held out ({fates}); nothing was changed"
    )
