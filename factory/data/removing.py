"""Removes documents for a person, or puts them back. Rows, the event and marks of releases change in one transaction, as for a quarantine.

A removed document stays in its token shard and keeps its place in the data order, but carries no loss in later segments. A token shard that the trunk
has not seen is left out if all its documents are removed. Evaluations no longer measure a removed held-out document. The hashes that identify copies
stay, so ingest refuses copies. The text stays too, unless a person asks to erase it (``factory.erasing.erasing``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from factory.core.errors import InputError
from factory.data.exposure import DocumentExposure
from factory.data.retraining_cost import RetrainingCost, estimate_retraining_cost, find_releases_trained_on
from factory.data.selecting import COLUMN_NOUNS, DocumentSelection, list_removable_fates
from factory.ingest.document import SYNTHETIC_PREFIX
from factory.ledger.anomalies import RELEASE_MARKED
from factory.ledger.ledger import Ledger, documents, events, record_event
from factory.ledger.removals import (
    REMOVABLE_FATES,
    REMOVED,
    REMOVED_FATE,
    RETURNED,
    Removal,
    list_removals,
    make_removal_rule,
)
from factory.ledger.rows import ReleaseRow, SegmentRow, Subject
from kernels.contract.message import Message

SHOWN = 100  # keys in a release's mark
c = documents.c


@dataclass(frozen=True)
class PlannedRemoval:
    """The documents that a removal would remove, and the consequences."""

    selection: DocumentSelection
    fates: dict[str, int]  # by present fate, the number of documents that would be removed
    domains: dict[str, int]  # by domain, supervised tokens of the training documents
    releases: dict[int, tuple[list[str], bool]]  # the result of ``find_releases_trained_on``
    open_segment: int | None  # a segment that is planned already and trains on the documents
    cost: RetrainingCost

    def format_lines(self) -> list[Message]:
        """Return lines for a person about the removal."""
        said = [
            Message(
                "data.removes",
                "the removal affects {documents:,|document|documents}: {fates}",
                documents=sum(self.fates.values()),
                fates=[f"{count:,} {FATES[fate]}" for fate, count in self.fates.items()],
            )
        ]
        if self.domains:
            said.append(
                Message(
                    "data.tokens_by_domain",
                    "supervised tokens of these documents by domain: {domains}",
                    domains=[f"{domain} {count:,}" for domain, count in sorted(self.domains.items())],
                )
            )
        for number, (keys, exact) in self.releases.items():
            said.append(
                Message(
                    "data.release_saw",
                    "release {release} was trained on {documents:,} of the documents",
                    release=number,
                    documents=len(keys),
                )
                if exact
                else Message(
                    "data.release_may_have_seen",
                    "release {release} may have been trained on {documents:,} of the documents",
                    release=number,
                    documents=len(keys),
                )
            )
        if not self.releases:
            said.append(Message("data.no_release_saw", "no release was trained on the documents"))
        if self.open_segment is not None:
            said.append(
                Message(
                    "data.planned_segment_sees",
                    "segment {segment} is planned already and will still train on the documents. To plan the segment again: 'factory rewind "
                    "{segment}'",
                    segment=self.open_segment,
                )
            )
        if self.fates.get("held_out"):
            said.append(
                Message(
                    "data.measured_without",
                    "later candidates are not measured on these held-out documents. The factory measures the champion again before it "
                    "compares the next candidate",
                )
            )
        return [*said, self.cost.message]

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
    REMOVED_FATE: "removed before",
    "dropped": "dropped before",
}


def plan_removal(ledger: Ledger, selection: DocumentSelection, erase: bool = False) -> PlannedRemoval:
    """Find what a removal would remove, without changing anything.

    Raises: InputError if there is nothing to remove, or if one of the named documents cannot be removed.
    """
    wanted = list_removable_fates(erase)
    fates: Counter[str] = Counter()
    domains: Counter[str] = Counter()
    trained: dict[str, str] = {}
    others: dict[str, str] = {}
    for part in selection.build_batched_sql_conditions():
        for row in ledger.select_rows(
            sa.select(c.key, c.fate, c.domain, c.token_shard, c.supervised_tokens).where(part)
        ):
            if row["fate"] not in wanted:
                others[row["key"]] = row["fate"]
                continue
            fates[row["fate"]] += 1
            if row["token_shard"]:
                trained[row["key"]] = row["token_shard"]
                if row["fate"] != REMOVED_FATE:
                    domains[row["domain"]] += row["supervised_tokens"]
    if not fates or (selection.column == "key" and others):
        raise InputError(_nothing(selection, others))
    exposure = DocumentExposure(ledger, trained)
    planned = SegmentRow.find_first(ledger, "WHERE state = 'planned' ORDER BY id")
    segments = {row.number: row.segment for row in ReleaseRow.select(ledger)} if trained else {}
    return PlannedRemoval(
        selection,
        dict(fates),
        dict(domains),
        find_releases_trained_on(ledger, exposure, segments),
        planned.id if planned and exposure.list_documents_in_plan(planned) else None,
        estimate_retraining_cost(ledger, exposure),
    )


def apply_removal(ledger: Ledger, planned: PlannedRemoval, by: str, why: str = "", erase: bool = False) -> Removal:
    """Remove the documents that ``plan_removal`` found."""
    selection, changed = planned.selection, 0
    with ledger.begin() as tx:
        number = int(tx.execute(sa.select(sa.func.count()).where(events.c.kind == REMOVED)).scalar() or 0) + 1
        shards: set[str] = set()
        tokens = 0
        for part in selection.build_batched_sql_conditions():
            held = sa.select(c.token_shard, sa.func.sum(c.supervised_tokens)).group_by(c.token_shard)
            fates = (*REMOVABLE_FATES, REMOVED_FATE) if erase else REMOVABLE_FATES
            for shard, count in tx.execute(held.where(part, c.fate.in_(fates), c.token_shard.is_not(None))):
                shards.add(shard)
                tokens += count
            for fate in REMOVABLE_FATES:
                if erase:  # documents of an earlier removal become documents of this one
                    old = documents.update().where(part, c.fate == REMOVED_FATE, c.rule.like(f"removal % of {fate}"))
                    changed += tx.execute(old.values(rule=make_removal_rule(number, fate))).rowcount
                update = documents.update().where(part, c.fate == fate)
                changed += tx.execute(update.values(fate=REMOVED_FATE, rule=make_removal_rule(number, fate))).rowcount
        detail: dict[str, Any] = {
            "by": by, "why": why, "column": selection.column, "names": list(selection.names), "documents": changed,
            "supervised_tokens": tokens, "token_shards": sorted(shards), "erase": erase,
        }  # fmt: skip
        record_event(tx, REMOVED, Subject("removal", number), detail)
        for release, (keys, exact) in planned.releases.items():
            _mark(tx, release, number, keys, exact)
    return next(one for one in list_removals(ledger) if one.number == number)


def undo_removal(ledger: Ledger, number: int, by: str) -> str:
    """Put back the documents of a removal. Returns a line for a person. Raises: InputError if the documents cannot be put back."""
    known = {one.number: one for one in list_removals(ledger)}
    if number not in known:
        raise InputError(
            "data.no_removal",
            "removal {number} does not exist. The existing removals: {known}",
            number=number,
            known=[*known] or ["none yet"],
        )
    removal = known[number]
    if removal.erase:
        raise InputError(
            "data.erased",
            "removal {number} erases the text of its documents, so the documents cannot be put back",
            number=number,
        )
    if removal.state != "removed":
        raise InputError("data.put_back_already", "removal {number} was undone already", number=number)
    changed = 0
    with ledger.begin() as tx:
        for fate in REMOVABLE_FATES:
            update = documents.update().where(c.fate == REMOVED_FATE, c.rule == make_removal_rule(number, fate))
            if fate == "quarantined":
                doctor = update.where(
                    sa.or_(c.detail.like("anomaly %"), c.detail.like(f"{SYNTHETIC_PREFIX}%; anomaly %"))
                )
                changed += tx.execute(doctor.values(fate=fate, rule="loss_doctor")).rowcount
            changed += tx.execute(update.values(fate=fate, rule="person" if fate == "quarantined" else None)).rowcount
        record_event(tx, RETURNED, Subject("removal", number), {"by": by, "documents": changed})
    return Message(
        "data.put_back",
        "{documents:,|document is|documents are} put back. The next segment and the next evaluation use the documents again",
        documents=changed,
    )


def mark_releases_trained_on_removed_documents(ledger: Ledger) -> list[str]:
    """Mark the releases that were made after a removal from segments that were planned before it. Returns lines for a person."""
    taken = [one for one in list_removals(ledger) if one.state != "returned" and one.token_shards]
    if not taken:
        return []
    known = ledger.read("SELECT subject, detail FROM events WHERE kind = :kind", kind=RELEASE_MARKED)
    marked = {(row["subject"], row["detail"].get("removal")) for row in known}
    said: list[str] = []
    for removal in taken:
        for release in ReleaseRow.select(ledger):
            if release.created_at <= removal.at or (str(Subject("release", release.number)), removal.number) in marked:
                continue
            if all(row.created_at > removal.at for row in SegmentRow.read_lineage(ledger, release.segment)):
                continue
            exposure = DocumentExposure(ledger, _documents(ledger, removal))
            saw = find_releases_trained_on(ledger, exposure, {release.number: release.segment}).get(
                release.number, ([], True)
            )
            with ledger.begin() as tx:  # also a release that saw none, so that it is not checked again
                _mark(tx, release.number, removal.number, *saw)
            if saw[0]:
                said.append(
                    Message(
                        "data.release_saw_removed",
                        "release {release} was trained on {documents:,|document|documents} that a person removed: {removal}",
                        release=release.number,
                        documents=len(saw[0]),
                        removal=str(removal),
                    )
                )
    return said


def _documents(ledger: Ledger, removal: Removal) -> dict[str, str]:
    rules = [removal.make_removal_rule_name(fate) for fate in REMOVABLE_FATES]
    rows = ledger.select_rows(sa.select(c.key, c.token_shard).where(c.rule.in_(rules), c.token_shard.is_not(None)))
    return {row["key"]: row["token_shard"] for row in rows}


def _mark(tx: sa.Connection, release: int, removal: int, keys: Sequence[str], exact: bool) -> None:
    detail = {"anomaly": None, "removal": removal, "documents": keys[:SHOWN], "count": len(keys), "exact": exact}
    record_event(tx, RELEASE_MARKED, Subject("release", release), detail)


def _nothing(selection: DocumentSelection, others: dict[str, str]) -> Message:
    if selection.column == "key":
        key, fate = next(iter(others.items()), (selection.names[0], "none"))
        return Message(
            "data.document_not_used",
            "the document {key!r} is neither training data nor held out (its state is {fate}). Nothing was changed",
            key=key,
            fate=fate,
        )
    return Message(
        "data.nothing_used",
        "the documents of the {noun} {names} are neither training data nor held out ({fates}). Nothing was changed",
        noun=COLUMN_NOUNS[selection.column],
        names=selection.names,
        fates=[f"{count:,} {fate}" for fate, count in Counter(others.values()).items()],
    )
