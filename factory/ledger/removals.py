"""Reads removals from the ledger. A removal is a set of documents that a person removed from the training data.

The ledger has a removal as an event ``data_removed`` about ``removal:N``. Its documents have the fate 'removed' and the rule 'removal N of FATE',
where FATE is their former fate. An event ``data_returned`` undoes a removal. An event ``data_erased`` records that the text was erased.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from factory.ledger.anomalies import RELEASE_MARKED
from factory.ledger.rows import SqlReader, Subject
from kernels.contract.message import Message

REMOVED, RETURNED, SHARD_ERASED, ERASED = "data_removed", "data_returned", "shard_erased", "data_erased"
REMOVED_FATE = "removed"
REMOVABLE_FATES = ("train", "held_out", "quarantined")  # the fates of documents that can be removed
NO_LICENCE = "none"  # the name by which a person refers to documents without a licence


@dataclass(frozen=True)
class Removal:
    """One removal of documents. It concerns the documents whose ``column`` ('key', 'source' or 'license') has one of the values ``names``."""

    number: int
    at: float
    by: str
    why: str
    column: str
    names: Sequence[str]
    documents: int
    supervised_tokens: int
    token_shards: Sequence[str]  # the token shards that have its training documents
    erase: bool
    state: str  # 'removed' | 'returned' | 'erased'

    def make_removal_rule_name(self, fate: str) -> str:
        """Return the value of ``documents.rule`` for documents of this removal that had this fate."""
        return make_removal_rule(self.number, fate)

    def __str__(self) -> str:
        shown = f"{len(self.names)} named" if self.column == "key" else f"{self.column} {', '.join(self.names)}"
        reason = f": {self.why}" if self.why else ""
        return f"removal {self.number} ({self.documents:,} documents, {shown}) by {self.by}{reason}"


def make_removal_rule(number: int, fate: str) -> str:
    """Return the value of ``documents.rule`` for documents that a removal removed and that had this fate.

    >>> make_removal_rule(3, "train")
    'removal 3 of train'
    """
    return f"removal {number} of {fate}"


def parse_removal_number(rule: str) -> int:
    """Return the number of the removal in a document's rule.

    >>> parse_removal_number("removal 3 of train")
    3
    """
    return int(rule.split()[1])


def list_removals(db: SqlReader) -> list[Removal]:
    """Return all removals, oldest first."""
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


def list_removed_labels(db: SqlReader) -> dict[str, dict[str | None, int]]:
    """Return the sources and licences that new documents may not have: {'source': {name: number of the removal}, 'license': {…}}.

    The name None stands for documents without a licence.
    """
    found: dict[str, dict[str | None, int]] = {"source": {}, "license": {}}
    for removal in list_removals(db):
        if removal.state != "returned" and removal.column in found:
            for name in removal.names:
                none = removal.column == "license" and name == NO_LICENCE
                found[removal.column][None if none else name] = removal.number
    return found


def read_erased_shards(db: SqlReader) -> dict[str, Mapping[str, Any]]:
    """Return the detail of the newest ``shard_erased`` event of each shard with erased text, by the shard's SHA-256."""
    rows = db.read("SELECT detail FROM events WHERE kind = :kind ORDER BY id", kind=SHARD_ERASED)
    return {row["detail"]["sha256"]: row["detail"] for row in rows}


def list_former_file_hashes(db: SqlReader, sha256: str) -> set[str]:
    """Return the SHA-256 of each file that replaced a shard when text was erased. After a kill the newest of these files may not
    exist yet."""
    return {detail["raw"] for detail in _erasings(db, sha256) if detail["raw"]}


def list_former_token_shard_names(db: SqlReader, sha256: str) -> set[str]:
    """Return the names of all token shards that replaced a shard's own when text was erased."""
    return {one["content"] for detail in _erasings(db, sha256) for one in detail["token_shards"].values()}


def _erasings(db: SqlReader, sha256: str) -> list[Mapping[str, Any]]:
    rows = db.read("SELECT detail FROM events WHERE kind = :kind ORDER BY id", kind=SHARD_ERASED)
    return [row["detail"] for row in rows if row["detail"]["sha256"] == sha256]


def replace_erased_token_shards(db: SqlReader, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a data plan that reads the current token shards. Where text was erased (``factory.erasing.erasing``), these are the
    replacements.

    Use the copy only for new training, because the token shards of earlier segments no longer exist.
    """
    shards = read_erased_shards(db).values()
    erased = {number: one["content"] for shard in shards for number, one in shard["token_shards"].items()}
    if not erased:
        return dict(plan)
    paths = {row["id"]: row["path"] for row in db.read("SELECT id, path FROM token_shards") if row["id"] in erased}
    now = lambda number: {"path": paths[number], "content": erased[number]} if number in erased else {}
    return {**plan, "token_shards": [{**shard, **now(shard["id"])} for shard in plan["token_shards"]]}


def list_releases_with_removed_data(db: SqlReader) -> list[dict[str, Any]]:
    """Return the releases trained on documents that were quarantined or removed later. Removals that were undone do not count.

    Each has ``release``, ``documents`` (their number), ``removal`` (None if they were quarantined) and ``exact``. ``exact`` is false if the data
    plans show only that the release may have been trained on the documents.
    """
    returned = {removal.number for removal in list_removals(db) if removal.state == "returned"}
    found = []
    for row in db.read("SELECT subject, detail FROM events WHERE kind = :kind ORDER BY id", kind=RELEASE_MARKED):
        detail = row["detail"]
        count = detail.get("count", len(detail["documents"]))
        if count and detail.get("removal") not in returned:
            about = {"removal": detail.get("removal"), "exact": detail.get("exact", False)}
            found.append({"release": Subject.parse(row["subject"]).number, "documents": count, **about})
    return found


def describe_removed_training_data(affected_release: Mapping[str, Any]) -> Message:
    """Describe one item of ``list_releases_with_removed_data``.

    >>> print(describe_removed_training_data({"release": 1, "documents": 2, "removal": 3, "exact": True}))
    release 1 was trained on 2 documents that the factory removed later (removal 3)
    >>> print(describe_removed_training_data({"release": 1, "documents": 2, "removal": None, "exact": False}))
    release 1 may have been trained on 2 documents that the factory quarantined later
    """
    known = {
        "release": affected_release["release"],
        "documents": affected_release["documents"],
        "how": "was" if affected_release["exact"] else "may have been",
    }
    if affected_release["removal"] is None:
        return Message(
            "removals.trained_on_quarantined",
            "release {release} {how} trained on {documents:,|document|documents} that the factory quarantined later",
            **known,
        )
    return Message(
        "removals.trained_on_removed",
        "release {release} {how} trained on {documents:,|document|documents} that the factory removed later "
        "(removal {removal})",
        removal=affected_release["removal"],
        **known,
    )
