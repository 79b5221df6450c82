"""Finds texts for which shards claim different licences. Reads the ledger only.

A text that arrives again is dropped as a copy (exact or near) of the kept document, or by the rule 'licence' if its licence does not allow
training. The dropped row keeps its licence and the key of the document that it ``matched``. Every row therefore keeps its own claim, whatever the
order of arrival. If several claims concern one document, the strictest counts, by the present policy. A person can settle which claim is right:
then an event ``licence_settled`` sets the claims of other rows aside. A claim that arrives later is a new claim.

Names that differ only in case or blanks are one licence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from factory.ingest.rules.licence_names import normalise_licence_name
from factory.ledger.rows import SqlReader

if TYPE_CHECKING:
    from factory.ingest.rules.policy import LicenceRules

SETTLED = "licence_settled"
CONFLICT_EVENT = "licence_conflict"  # event about a shard: some of its texts came earlier under another licence
# Rules that drop a row because it matches a document. For 'removed', a person removed that document, and may undo the removal.
COPY_RULES = ("exact_duplicate", "near_duplicate", "licence", "removed")


@dataclass(frozen=True)
class LicenceClaim:
    """The licence that one row names, or '' if it names none. ``is_set_aside`` means that a person called this claim wrong."""

    key: str
    shard: str  # the name of the row's shard
    license: str
    is_set_aside: bool = False


@dataclass(frozen=True)
class LicenceConflict:
    """A document with claims of at least two licences. The first of ``licence_claims`` is the claim of the document's own row."""

    key: str
    id: str
    fate: str
    token_shard: str | None
    supervised_tokens: int
    claims: tuple[LicenceClaim, ...]

    @property
    def licences_that_count(self) -> list[str]:
        """Return the claimed licences that are not set aside. If all are set aside (one row can match two settled texts), all count."""
        return [claim.license for claim in self.claims if not claim.is_set_aside] or [
            claim.license for claim in self.claims
        ]

    @property
    def is_settled(self) -> bool:
        return len({normalise_licence_name(name) for name in self.licences_that_count}) == 1

    def find_effective_licence(self, policy: LicenceRules) -> str:
        """Return the licence by which the document is judged: the strictest standing licence, or the document's own if it is equally strict."""
        return find_strictest_licence(self.licences_that_count, policy)


def find_strictest_licence(licences: Collection[str], policy: LicenceRules) -> str:
    """Return the strictest licence. If several are equally strict, return the first of ``licences`` if it is among them, else the first by name, so
    that the order of arrival does not matter."""
    allows = {name: (policy.find_licence(name).train, policy.find_licence(name).release) for name in licences}
    least = min(allows.values())
    first = next(iter(licences))
    return first if allows[first] == least else min(name for name in licences if allows[name] == least)


def find_licence_conflicts(db: SqlReader, key: str | None = None) -> list[LicenceConflict]:
    """Return every document whose claims differ, or only the document with this key."""
    rules = ", ".join(f"'{rule}'" for rule in COPY_RULES)
    named = [f"d.{name}" for name in ("key", "id", "fate", "token_shard", "supervised_tokens", "license", "shard")]
    columns = ", ".join([*named, "c.key AS copy", "c.license AS other", "c.shard AS from_shard"])
    other = "AND COALESCE(c.license, '') <> COALESCE(d.license, '')" + (" AND d.key = :key" if key else "")
    # A barred text may be accepted later, by a person's decision or another policy. The new row is not a copy of the barred row.
    sql = f"""SELECT {columns} FROM documents c JOIN documents d ON d.key = c.matched WHERE c.rule IN ({rules}) {other}
        UNION SELECT {columns} FROM documents c JOIN documents d ON d.content_sha256 = c.content_sha256
        WHERE c.rule = 'licence' AND d.fate <> 'dropped' {other} ORDER BY 1, 8"""
    rows = db.read(sql, **({"key": key} if key else {}))
    if not rows:
        return []
    names = {row["sha256"]: row["name"] for row in db.read("SELECT sha256, name FROM shards")}
    aside = list_rows_with_rejected_claims(db)
    found: dict[str, tuple[dict[str, Any], list[LicenceClaim]]] = {}
    for row in rows:
        own = LicenceClaim(row["key"], names[row["shard"]], row["license"] or "", row["key"] in aside)
        claims = found.setdefault(row["key"], (row, [own]))[1]
        claims.append(LicenceClaim(row["copy"], names[row["from_shard"]], row["other"] or "", row["copy"] in aside))
    values = ("key", "id", "fate", "token_shard", "supervised_tokens")
    return [
        LicenceConflict(**{name: row[name] for name in values}, claims=tuple(claims))
        for row, claims in found.values()
        if len({normalise_licence_name(claim.license) for claim in claims}) > 1
    ]


def list_rows_with_rejected_claims(db: SqlReader) -> set[str]:
    """Return the keys of the rows whose claims a person set aside. The newest settlement of each document counts."""
    newest: dict[str, list[str]] = {}
    for row in db.read("SELECT detail FROM events WHERE kind = :kind ORDER BY id", kind=SETTLED):
        newest |= row["detail"]["aside"]
    return {key for keys in newest.values() for key in keys}


def find_relicensed_documents(db: SqlReader, policy: LicenceRules) -> Mapping[str, LicenceConflict]:
    """Return, by key, the conflicts of the documents that are judged by another licence than the one in their own row."""
    return {
        one.key: one
        for one in find_licence_conflicts(db)
        if one.find_effective_licence(policy) != one.claims[0].license
    }
