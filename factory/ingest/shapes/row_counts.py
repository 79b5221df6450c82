"""Counts how the rows of a shard were read, and describes the result to the person who ingests the shard."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from factory.core.errors import InputError, suggest_name
from factory.ingest.shapes.chats import ReadingNotes
from factory.ingest.shapes.field_mapping import FieldMapping, has_column, list_columns
from kernels.contract.message import Message

_SAMPLED = 20  # the columns of this many rows of a chunk are kept, to suggest one in place of a missing column
_MOST_NAMED = 12  # a line names at most this many fields


@dataclass
class MappedColumns:
    """Counts the rows of one mapping, and collects the mapped columns that were ``found`` and ``others`` that the first rows have."""

    rows: int = 0
    found: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)


@dataclass
class RowCounts:
    """Counts how rows were read. ``messages`` has the number of rows by message, and ``unread_fields`` by field that is not used. ``mapped`` has the
    columns of the rows, by the place of their mapping in ``fields``."""

    messages: Counter[str] = field(default_factory=Counter)
    unread_fields: Counter[str] = field(default_factory=Counter)
    mapped: dict[int, MappedColumns] = field(default_factory=dict)

    def count_columns(self, row: Any, place: int, mapping: FieldMapping) -> None:
        """Count the columns of a decoded row. ``place`` is the place of its mapping in ``fields``."""
        if not isinstance(row, dict):
            return
        seen = self.mapped.setdefault(place, MappedColumns())
        if seen.rows < _SAMPLED:
            seen.others |= list_columns(row)
        seen.rows += 1
        for _, value in mapping.list_mapped_values():
            seen.found.update(path for path in value.columns if path not in seen.found and has_column(row, path))

    def count_notes(self, notes: ReadingNotes) -> None:
        """Count the notes about a row that was read as a document."""
        self.messages.update(notes.messages)
        self.unread_fields.update(notes.unread_fields)

    def add_counts(self, other: RowCounts) -> None:
        """Add the counts of another chunk."""
        self.messages += other.messages
        self.unread_fields += other.unread_fields
        for place, seen in other.mapped.items():
            mine = self.mapped.setdefault(place, MappedColumns())
            mine.rows += seen.rows
            mine.found |= seen.found
            mine.others |= seen.others

    def to_shard_counts(self) -> dict[str, dict[str, int]]:
        """Return the keys that are added to a shard's ``counts`` in the ledger. Empty counts are left out."""
        both = {"read_as": self.messages, "unread": self.unread_fields}
        return {name: dict(sorted(found.items())) for name, found in both.items() if found}


def find_missing_columns(row_counts: RowCounts, mappings: list[FieldMapping]) -> list[tuple[int, str, str]]:
    """Return (place of the mapping, its key, the column) for each mapped column that no row has."""
    return [
        (place, name, path)
        for place, seen in sorted(row_counts.mapped.items())
        for name, value in mappings[place].list_mapped_values()
        for path in value.columns
        if path not in seen.found
    ]


def refuse_missing_columns(row_counts: RowCounts, mappings: list[FieldMapping], file: str) -> None:
    """Raise InputError if a mapping names a column that no row of the file has."""
    for place, name, path in find_missing_columns(row_counts, mappings):
        raise InputError(
            "shapes.no_row_has_column",
            "{file}: no row has the column {column!r}, so nothing was stored. In data.yaml, fields.{place}.{key} asks "
            "for this column (for files {pattern!r}){near}",
            file=file,
            column=path,
            place=place,
            key=name,
            pattern=mappings[place].files,
            near=suggest_name(path, row_counts.mapped[place].others),
        )


def describe_rows(counts: dict[str, Any]) -> list[Message]:
    """Return lines about the rows of a shard, from the shard's counts."""
    found = [
        Message("shapes.read_as", "{how} ({rows:,|row|rows})", how=how, rows=rows)
        for how, rows in counts.get("read_as", {}).items()
    ]
    if unread := counts.get("unread", {}):
        named = sorted(unread, key=lambda name: (-unread[name], name))
        more = [f"and {len(named) - _MOST_NAMED} more"] if len(named) > _MOST_NAMED else []
        found.append(Message("shapes.unread", "these fields are not used: {fields}", fields=named[:_MOST_NAMED] + more))
    dropped = counts.get("dropped", {})
    for rule, example in counts.get("examples", {}).items():
        found.append(
            Message(
                "shapes.dropped",
                "the rule {rule} dropped {rows:,|row|rows}, for example {example}",
                rule=rule,
                rows=dropped.get(rule, 0),
                example=example,
            )
        )
    for name, held in counts.get("not_releasable", {}).items():
        found.append(_held_back(name, held))
    return found


def _held_back(name: str, held: dict[str, Any]) -> Message:
    documents = held["documents"]
    if held["why"] == "missing":
        return Message(
            "shapes.licence_missing",
            "{documents:,|training document has|training documents have} no licence. This blocks releases. To set the "
            "licence of these documents: 'factory data relabel --shard NAME --license none --to-license MIT'. For later "
            "files, write 'license: =MIT' under 'fields' in data.yaml",
            documents=documents,
        )
    if held["why"] == "listed":
        return Message(
            "shapes.licence_not_released",
            "{documents:,|training document is|training documents are} under {licence!r}. This licence blocks releases "
            "('release: false' under licences in data.yaml)",
            documents=documents,
            licence=name,
        )
    return Message(
        "shapes.licence_unlisted",
        "{documents:,|training document is|training documents are} under {licence!r}. data.yaml does not list this licence, "
        "and this blocks releases. To allow releases, add this line under licences.known: {licence!r}: {{train: true, "
        "release: true}}",
        documents=documents,
        licence=name,
    )
