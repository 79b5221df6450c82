"""Finds the documents that a person names: by id or key, by source, by licence."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from factory.core.errors import InputError, suggest_name
from factory.ingest.rules.licence_claims import COPY_RULES
from factory.ledger.ledger import Ledger, documents, shards
from factory.ledger.removals import NO_LICENCE, REMOVABLE_FATES, REMOVED_FATE
from kernels.contract.message import Message

AT_ONCE = 5000  # values in one IN (…)
LISTED = 20  # documents with the same id that an error lists
COLUMNS = {"source": documents.c.source, "license": documents.c.license}
COLUMN_NOUNS = {"source": "source", "license": "licence"}


@dataclass(frozen=True)
class DocumentSelection:
    """Documents whose ``column`` ('key', 'source' or 'license') is one of ``names``.

    A selection by licence also contains documents of which a copy came under the licence.
    """

    column: str
    names: tuple[str, ...]

    def build_sql_condition_of_batch(self, start: int = 0) -> sa.ColumnElement[bool]:
        """Return the SQL condition on ``documents``. For keys, it covers at most ``AT_ONCE`` keys from index ``start`` on."""
        if self.column == "key":
            return documents.c.key.in_(self.names[start : start + AT_ONCE])
        if self.column == "license":
            copy = documents.alias()
            came = sa.select(copy.c.matched).where(copy.c.rule.in_(COPY_RULES), copy.c.matched.is_not(None))
            return sa.or_(
                self._licence(documents.c.license), documents.c.key.in_(came.where(self._licence(copy.c.license)))
            )
        return self.build_sql_condition_without_copies()

    def build_sql_condition_without_copies(self) -> sa.ColumnElement[bool]:
        """Return the condition that a document's own row, and not only a copy, has one of the names."""
        column = COLUMNS[self.column]
        return self._licence(column) if self.column == "license" else column.in_(self.names)

    def _licence(self, column: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
        named = column.in_(self.names)
        return sa.or_(named, column.is_(None), column == "") if NO_LICENCE in self.names else named

    def build_batched_sql_conditions(self) -> list[sa.ColumnElement[bool]]:
        """Return conditions that together select all documents. Each is short enough for a database."""
        count = len(self.names) if self.column == "key" else 1
        return [self.build_sql_condition_of_batch(start) for start in range(0, count, AT_ONCE)]


def list_removable_fates(erase: bool) -> tuple[str, ...]:
    """Return the fates of documents that a removal may remove."""
    return (*REMOVABLE_FATES, REMOVED_FATE, "dropped") if erase else REMOVABLE_FATES


def select_documents_by_name(ledger: Ledger, names: Sequence[str], fates: Sequence[str]) -> DocumentSelection:
    """Return the documents with these keys or ids. Raises: InputError as ``find_keys_of_unique_document``."""
    keys = [key for name in names for key in find_keys_of_unique_document(ledger, name, documents.c.fate.in_(fates))]
    return DocumentSelection("key", tuple(dict.fromkeys(keys)))


def find_keys_of_unique_document(ledger: Ledger, name: str, *fitting: sa.ColumnElement[bool]) -> list[str]:
    """Return the keys of the one document that a person names by its key, or by an id that no other document has.

    Copies of its text with the same id are included. If several documents have the id, only those that meet the conditions ``fitting`` count. If none
    meets the conditions, all count.
    Raises: InputError with the keys if several documents remain, or with similar ids if no document has the id.
    """
    found = find_document_keys(ledger, name)
    if name in found:
        return [name]
    c = documents.c
    columns = sa.select(c.key, c.content_sha256, c.source, c.fate, shards.c.name.label("shard"))
    rows = ledger.select_rows(
        columns.join(shards, shards.c.sha256 == c.shard, isouter=True).where(c.id == name, *fitting).order_by(c.key)
    )
    one_of_each = {row["content_sha256"] or row["key"]: row for row in rows}
    if len(one_of_each) < 2:
        return [row["key"] for row in rows] or found
    listed = [
        f"{row['key']} ({', '.join(filter(None, (row['source'] and 'source ' + row['source'], row['shard'], row['fate'])))})"
        for row in list(one_of_each.values())[:LISTED]
    ]
    if len(one_of_each) > LISTED:
        listed.append(
            Message(
                "data.more_with_id", "to list all of these documents: 'factory provenance --document {id}'", id=name
            )
        )
    raise InputError(
        "data.ambiguous_id",
        "{documents} documents have the id {id!r}. Nothing was changed. Give one of these keys instead: {keys}",
        documents=len(one_of_each),
        id=name,
        keys="; ".join(listed),
    )


def find_document_keys(ledger: Ledger, name: str) -> list[str]:
    """Return the keys of all documents with that id or key. Raises: InputError with similar ids if there is none."""
    rows = ledger.read("SELECT key FROM documents WHERE id = :name OR key = :name ORDER BY key", name=name)
    if rows:
        return [row["key"] for row in rows]
    part = name.rsplit("/", 1)[-1][:40]
    like: Any = documents.c.id.contains(part, autoescape=True)
    near = [row["id"] for row in ledger.select_rows(sa.select(documents.c.id).where(like).limit(200))] if part else []
    raise InputError(
        "data.no_document",
        "no document {id!r} was ever ingested{near}",
        id=name,
        near=suggest_name(name, near[:8]) if near else "",
    )


def select_documents_by_label(ledger: Ledger, column: str, names: Sequence[str]) -> DocumentSelection:
    """Return the documents of these sources or licences. Raises: InputError with a similar name for a name that no document has."""
    selection = DocumentSelection(column, tuple(dict.fromkeys(names)))
    for name in selection.names:
        if not ledger.select_first(
            sa.select(documents.c.key).where(DocumentSelection(column, (name,)).build_sql_condition_of_batch()).limit(1)
        ):
            noun, values = COLUMN_NOUNS[column], COLUMNS[column]
            known = ledger.select_rows(
                sa.select(values.label("name")).where(values.is_not(None)).distinct().limit(10_000)
            )
            raise make_unknown_value_error(noun, name, [row["name"] for row in known])
    return selection


def make_unknown_value_error(noun: str, name: str, known: Collection[str]) -> InputError:
    """Return the error for a domain, source, licence or shard (``noun``) that no document has. ``known``: the names that documents have."""
    near = suggest_name(name, known)[:300] if known else ""
    return InputError(
        "data.no_document_has", "no document has the {noun} {name!r}{near}", noun=noun, name=name, near=near
    )
