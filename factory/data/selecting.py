"""Which documents a person means: by id or key, by source, by licence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from factory.core.errors import InputError, nearest
from factory.ingest.rules.claims import COPIES
from factory.ledger.ledger import Ledger, documents, shards
from factory.ledger.removals import FATE, NO_LICENCE, TAKEN_OUT

AT_ONCE = 5000  # values in one IN (…)
LISTED = 20  # documents of one id
COLUMNS = {"source": documents.c.source, "license": documents.c.license}
NOUNS = {"source": "source", "license": "licence"}


@dataclass(frozen=True)
class Selection:
    """Documents whose ``column`` ('key', 'source', 'license') is one of ``names``; of a licence also those that came under it as a copy."""

    column: str
    names: tuple[str, ...]

    def where(self, start: int = 0) -> sa.ColumnElement[bool]:
        """The condition on ``documents``; of keys at most ``AT_ONCE`` from number ``start`` on."""
        if self.column == "key":
            return documents.c.key.in_(self.names[start : start + AT_ONCE])
        if self.column == "license":
            copy = documents.alias()
            came = sa.select(copy.c.matched).where(copy.c.rule.in_(COPIES), copy.c.matched.is_not(None))
            return sa.or_(
                self._licence(documents.c.license), documents.c.key.in_(came.where(self._licence(copy.c.license)))
            )
        return self.own()

    def own(self) -> sa.ColumnElement[bool]:
        """The condition that a document's own row names one, copies aside."""
        column = COLUMNS[self.column]
        return self._licence(column) if self.column == "license" else column.in_(self.names)

    def _licence(self, column: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
        named = column.in_(self.names)
        return sa.or_(named, column.is_(None), column == "") if NO_LICENCE in self.names else named

    def parts(self) -> list[sa.ColumnElement[bool]]:
        """Conditions that together select all, none of them too long for a database."""
        count = len(self.names) if self.column == "key" else 1
        return [self.where(start) for start in range(0, count, AT_ONCE)]


def fates_of(erase: bool) -> tuple[str, ...]:
    """Of documents that a removal is about."""
    return (*TAKEN_OUT, FATE, "dropped") if erase else TAKEN_OUT


def by_name(ledger: Ledger, names: Sequence[str], fates: Sequence[str]) -> Selection:
    """The documents with these keys or ids. Raises: InputError as ``keys_of_one``."""
    keys = [key for name in names for key in keys_of_one(ledger, name, documents.c.fate.in_(fates))]
    return Selection("key", tuple(dict.fromkeys(keys)))


def keys_of_one(ledger: Ledger, name: str, *fitting: sa.ColumnElement[bool]) -> list[str]:
    """The document that a person who changes it means, with the copies of its text that came under the same id: by its key, or by an id that no
    other document has. Of several documents of one id those that ``fitting`` does not fit are left aside; where it fits none, all are given.

    Raises: InputError where several remain, with their keys, or where there is none, with ids near it.
    """
    found = keys_of(ledger, name)
    if name in found:
        return [name]
    c = documents.c
    columns = sa.select(c.key, c.content_sha256, c.source, c.fate, shards.c.name.label("shard"))
    rows = ledger.rows(
        columns.join(shards, shards.c.sha256 == c.shard, isouter=True).where(c.id == name, *fitting).order_by(c.key)
    )
    one_of_each = {row["content_sha256"] or row["key"]: row for row in rows}
    if len(one_of_each) < 2:
        return [row["key"] for row in rows] or found
    listed = [
        f"{row['key']} ({', '.join(filter(None, (row['source'] and 'source ' + row['source'], row['shard'], row['fate'])))})"
        for row in list(one_of_each.values())[:LISTED]
    ]
    more = f"; 'factory provenance --document {name}' lists all" if len(one_of_each) > LISTED else ""
    raise InputError(
        f"{len(one_of_each)} documents have the id {name!r}; nothing was changed: name the key of the one that is meant: {'; '.join(listed)}{more}"
    )


def keys_of(ledger: Ledger, name: str) -> list[str]:
    """Of all documents with that id or key, for those who only look. Raises: InputError that names near ids when there is none."""
    rows = ledger.read("SELECT key FROM documents WHERE id = :name OR key = :name ORDER BY key", name=name)
    if rows:
        return [row["key"] for row in rows]
    part = name.rsplit("/", 1)[-1][:40]
    like: Any = documents.c.id.contains(part, autoescape=True)
    near = [row["id"] for row in ledger.rows(sa.select(documents.c.id).where(like).limit(200))] if part else []
    raise InputError(f"no document {name!r} was ever ingested" + (nearest(name, near[:8]) if near else ""))


def by_value(ledger: Ledger, column: str, names: Sequence[str]) -> Selection:
    """Documents of these sources or licences. Raises: InputError that names near ones for one that no document has."""
    selection = Selection(column, tuple(dict.fromkeys(names)))
    for name in selection.names:
        if not ledger.one(sa.select(documents.c.key).where(Selection(column, (name,)).where()).limit(1)):
            noun, values = NOUNS[column], COLUMNS[column]
            known = ledger.rows(sa.select(values.label("name")).where(values.is_not(None)).distinct().limit(10_000))
            near = nearest(name, [row["name"] for row in known][:10_000]) if known else ""
            raise InputError(f"no document has {noun} {name!r}{near[:300]}")
    return selection
