"""What shards claim about the licence of one text, where they do not agree. Read from the ledger alone.

A text that arrives again is dropped as a copy (exact or near) of the document that stayed, or, where its licence does not allow training, by the
rule 'licence'; its row names the licence it came under, and the document that it ``matched``. So every row keeps its own claim, in whatever order
they came. Of the claims about one document the strictest counts, by the policy as it is now, until a person settles which is right: an event
``licence_settled`` that sets the other rows' claims aside. A claim that comes later is a new one.

Names that differ in case or blanks alone are one licence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from factory.ingest.rules.licence_names import folded
from factory.ledger.rows import Reads

if TYPE_CHECKING:
    from factory.ingest.rules.policy import Licences

SETTLED = "licence_settled"
CONFLICT = "licence_conflict"  # of a shard: some of its texts came under another licence before
# Rules by which a row drops that matched a document; 'removed': that was taken out, and may be put back.
COPIES = ("exact_duplicate", "near_duplicate", "licence", "removed")


@dataclass(frozen=True)
class LicenceClaim:
    """One row's. ``license`` '': it names none. ``aside``: a person said that it is wrong."""

    key: str
    shard: str  # its name
    license: str
    aside: bool = False


@dataclass(frozen=True)
class LicenceConflict:
    """A document and what was claimed about it, its own row's first; at least two licences are among them. ``fate`` is the document's."""

    key: str
    id: str
    fate: str
    token_shard: str | None
    supervised_tokens: int
    claims: tuple[LicenceClaim, ...]

    @property
    def standing(self) -> list[str]:
        """The licences that are claimed and not set aside; all, where a row that two texts are near to had both words said about it."""
        return [claim.license for claim in self.claims if not claim.aside] or [claim.license for claim in self.claims]

    @property
    def settled(self) -> bool:
        return len({folded(name) for name in self.standing}) == 1

    def counts_as(self, policy: Licences) -> str:
        """The licence by which it is judged: the strictest of those that stand; its own where that is as strict."""
        return strictest(self.standing, policy)


def strictest(licences: Collection[str], policy: Licences) -> str:
    """The first of the strictest; where it is not the first of all, the first by name, so that no order of arrival counts."""
    allows = {name: (policy.of(name).train, policy.of(name).release) for name in licences}
    least = min(allows.values())
    first = next(iter(licences))
    return first if allows[first] == least else min(name for name in licences if allows[name] == least)


def conflicts(db: Reads, key: str | None = None) -> list[LicenceConflict]:
    """Every document about which claims differ, or the one with that key."""
    rules = ", ".join(f"'{rule}'" for rule in COPIES)
    columns = """d.key, d.id, d.fate, d.token_shard, d.supervised_tokens, d.license, d.shard,
        c.key AS copy, c.license AS other, c.shard AS from_shard"""
    other = "COALESCE(c.license, '') <> COALESCE(d.license, '')" + (" AND d.key = :key" if key else "")
    # A text that was barred, and was brought again after a person's word or another policy let it in, is no row's copy.
    sql = f"""SELECT {columns} FROM documents c JOIN documents d ON d.key = c.matched WHERE c.rule IN ({rules}) AND {other}
        UNION SELECT {columns} FROM documents c JOIN documents d ON d.content_sha256 = c.content_sha256
        WHERE c.rule = 'licence' AND d.fate <> 'dropped' AND {other} ORDER BY 1, 8"""
    rows = db.read(sql, **({"key": key} if key else {}))
    if not rows:
        return []
    names = {row["sha256"]: row["name"] for row in db.read("SELECT sha256, name FROM shards")}
    aside = set_aside(db)
    found: dict[str, tuple[dict[str, Any], list[LicenceClaim]]] = {}
    for row in rows:
        own = LicenceClaim(row["key"], names[row["shard"]], row["license"] or "", row["key"] in aside)
        claims = found.setdefault(row["key"], (row, [own]))[1]
        claims.append(LicenceClaim(row["copy"], names[row["from_shard"]], row["other"] or "", row["copy"] in aside))
    values = ("key", "id", "fate", "token_shard", "supervised_tokens")
    return [
        LicenceConflict(**{name: row[name] for name in values}, claims=tuple(claims))
        for row, claims in found.values()
        if len({folded(claim.license) for claim in claims}) > 1
    ]


def set_aside(db: Reads) -> set[str]:
    """Keys of rows whose claims a person set aside; the newest word about each document counts."""
    newest: dict[str, list[str]] = {}
    for row in db.read("SELECT detail FROM events WHERE kind = :kind ORDER BY id", kind=SETTLED):
        newest |= row["detail"]["aside"]
    return {key for keys in newest.values() for key in keys}


def counted(db: Reads, policy: Licences) -> Mapping[str, LicenceConflict]:
    """By key, the documents that count under another licence than their own row names."""
    return {one.key: one for one in conflicts(db) if one.counts_as(policy) != one.claims[0].license}
