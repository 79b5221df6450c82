"""Documents that a person took out, read from the ledger alone.

A removal is an event ``data_removed`` about ``removal:N``, with what was named and why; its documents have the fate 'removed' and the rule
'removal N of FATE', FATE being the one that they had. ``data_returned`` takes it back; ``data_erased`` says that its text is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from factory.ledger.anomalies import MARKED
from factory.ledger.rows import Reads, Subject

REMOVED, RETURNED, SHARD_ERASED, ERASED = "data_removed", "data_returned", "shard_erased", "data_erased"
FATE = "removed"
TAKEN_OUT = ("train", "held_out", "quarantined")  # fates of documents that can be taken out
NO_LICENCE = "none"  # what a person writes for documents that name no licence


@dataclass(frozen=True)
class Removal:
    """One removal. ``column``: 'key', 'source' or 'license', of the documents whose value is among ``names``."""

    number: int
    at: float
    by: str
    why: str
    column: str
    names: Sequence[str]
    documents: int
    supervised_tokens: int
    token_shards: Sequence[str]  # that hold its training documents
    erase: bool
    state: str  # 'removed' | 'returned' | 'erased'

    def rule(self, fate: str) -> str:
        """``documents.rule`` of those that had that fate."""
        return rule_of(self.number, fate)

    def __str__(self) -> str:
        shown = f"{len(self.names)} named" if self.column == "key" else f"{self.column} {', '.join(self.names)}"
        reason = f": {self.why}" if self.why else ""
        return f"removal {self.number} ({self.documents:,} documents, {shown}) by {self.by}{reason}"


def rule_of(number: int, fate: str) -> str:
    """
    >>> rule_of(3, "train")
    'removal 3 of train'
    """
    return f"removal {number} of {fate}"


def number_in(rule: str) -> int:
    """
    >>> number_in("removal 3 of train")
    3
    """
    return int(rule.split()[1])


def removals(db: Reads) -> list[Removal]:
    """All, oldest first."""
    kinds = ", ".join(f"'{kind}'" for kind in (REMOVED, RETURNED, ERASED))
    found: dict[int, Removal] = {}
    for row in db.read(f"SELECT at, kind, subject, detail FROM events WHERE kind IN ({kinds}) ORDER BY id"):
        number = Subject.parse(row["subject"]).number
        if row["kind"] == REMOVED:
            found[number] = Removal(number=number, at=row["at"], state="removed", **row["detail"])
        else:
            state = "returned" if row["kind"] == RETURNED else "erased"
            found[number] = Removal(**{**vars(found[number]), "state": state})
    return list(found.values())


def refused(db: Reads) -> dict[str, dict[str | None, int]]:
    """What new documents may not have: {'source': {name: number of the removal}, 'license': …}. None: no licence named."""
    found: dict[str, dict[str | None, int]] = {"source": {}, "license": {}}
    for removal in removals(db):
        if removal.state != "returned" and removal.column in found:
            for name in removal.names:
                none = removal.column == "license" and name == NO_LICENCE
                found[removal.column][None if none else name] = removal.number
    return found


def erased_shards(db: Reads) -> dict[str, Mapping[str, Any]]:
    """By the SHA-256 of a shard some of whose text was erased: the newest ``shard_erased`` event's detail."""
    rows = db.read("SELECT detail FROM events WHERE kind = :kind ORDER BY id", kind=SHARD_ERASED)
    return {row["detail"]["sha256"]: row["detail"] for row in rows}


def former_files(db: Reads, sha256: str) -> set[str]:
    """SHA-256 of every file that took a shard's place when text of it was erased; the newest may not be there yet, after a kill."""
    return {detail["raw"] for detail in _erasings(db, sha256) if detail["raw"]}


def former_contents(db: Reads, sha256: str) -> set[str]:
    """Names of all token shards that took the places of a shard's own."""
    return {one["content"] for detail in _erasings(db, sha256) for one in detail["token_shards"].values()}


def _erasings(db: Reads, sha256: str) -> list[Mapping[str, Any]]:
    rows = db.read("SELECT detail FROM events WHERE kind = :kind ORDER BY id", kind=SHARD_ERASED)
    return [row["detail"] for row in rows if row["detail"]["sha256"] == sha256]


def with_contents(db: Reads, plan: Mapping[str, Any]) -> dict[str, Any]:
    """A data plan that reads token shards as they are now: where text was erased (``factory.erasing.erasing``), what took their place.

    Only for what is made from now on: what a segment was trained on before is gone.
    """
    shards = erased_shards(db).values()
    erased = {number: one["content"] for shard in shards for number, one in shard["token_shards"].items()}
    if not erased:
        return dict(plan)
    paths = {row["id"]: row["path"] for row in db.read("SELECT id, path FROM token_shards") if row["id"] in erased}
    now = lambda number: {"path": paths[number], "content": erased[number]} if number in erased else {}
    return {**plan, "token_shards": [{**shard, **now(shard["id"])} for shard in plan["token_shards"]]}


def marks(db: Reads) -> list[dict[str, Any]]:
    """Releases trained on documents that were quarantined or removed since: ``release``, ``documents`` (how many), ``removal`` (None: they
    were quarantined), ``exact`` (False: it may have been, by its data plans). Without what was put back."""
    returned = {removal.number for removal in removals(db) if removal.state == "returned"}
    found = []
    for row in db.read("SELECT subject, detail FROM events WHERE kind = :kind ORDER BY id", kind=MARKED):
        detail = row["detail"]
        count = detail.get("count", len(detail["documents"]))
        if count and detail.get("removal") not in returned:
            about = {"removal": detail.get("removal"), "exact": detail.get("exact", False)}
            found.append({"release": Subject.parse(row["subject"]).number, "documents": count, **about})
    return found


def mark_in_words(mark: Mapping[str, Any]) -> str:
    """
    >>> mark_in_words({"release": 1, "documents": 2, "removal": 3, "exact": True})
    'release 1 was trained on 2 documents that were taken out later (removal 3)'
    >>> mark_in_words({"release": 1, "documents": 2, "removal": None, "exact": False})
    'release 1 may have seen 2 documents that were quarantined later'
    """
    if mark["removal"] is None:
        how = "saw" if mark["exact"] else "may have seen"
        return f"release {mark['release']} {how} {mark['documents']:,} documents that were quarantined later"
    how = "was" if mark["exact"] else "may have been"
    return f"release {mark['release']} {how} trained on {mark['documents']:,} documents that were taken out later (removal {mark['removal']})"
