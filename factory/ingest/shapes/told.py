"""What the rows of a shard were read as, counted, and the lines that say so to the person who brought it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from factory.core.errors import InputError, nearest
from factory.ingest.shapes.chats import Notes
from factory.ingest.shapes.mapping import FieldMapping, columns_of, has_column

_SAMPLED = 20  # rows of a chunk whose columns are kept, to name one that is near to a missing one
_MOST_NAMED = 12  # fields that a line names


@dataclass
class Columns:
    """Of the rows of one mapping: how many, which of its columns were ``found``, and columns of some of them."""

    rows: int = 0
    found: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)


@dataclass
class Told:
    """Of the rows that were read: how many each sentence and each unread field is about, and which columns of each mapping, by its place in
    ``fields``, there were."""

    said: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    mapped: dict[int, Columns] = field(default_factory=dict)

    def look(self, row: Any, place: int, mapping: FieldMapping) -> None:
        """At a decoded row, before it is read."""
        if not isinstance(row, dict):
            return
        seen = self.mapped.setdefault(place, Columns())
        if seen.rows < _SAMPLED:
            seen.others |= columns_of(row)
        seen.rows += 1
        for _, value in mapping.values():
            seen.found.update(path for path in value.columns if path not in seen.found and has_column(row, path))

    def note(self, notes: Notes) -> None:
        """What was found in a row that is a document."""
        self.said.update(notes.said)
        self.unread.update(notes.unread)

    def add(self, other: Told) -> None:
        self.said += other.said
        self.unread += other.unread
        for place, seen in other.mapped.items():
            mine = self.mapped.setdefault(place, Columns())
            mine.rows += seen.rows
            mine.found |= seen.found
            mine.others |= seen.others

    def counts(self) -> dict[str, dict[str, int]]:
        """For the counts of a shard in the ledger; nothing where there is nothing to say."""
        both = {"read_as": self.said, "unread": self.unread}
        return {name: dict(sorted(found.items())) for name, found in both.items() if found}


def missing_columns(told: Told, fields: list[FieldMapping]) -> list[tuple[int, str, str]]:
    """(place of the mapping, its key, the column) of all that no row has that was looked at."""
    return [
        (place, name, path)
        for place, seen in sorted(told.mapped.items())
        for name, value in fields[place].values()
        for path in value.columns
        if path not in seen.found
    ]


def refuse_missing_columns(told: Told, fields: list[FieldMapping], file: str) -> None:
    """Raises: InputError where a mapping names a column that no row of the file has."""
    for place, name, path in missing_columns(told, fields):
        raise InputError(
            f"{file}: fields.{place}.{name} in data.yaml (files: {fields[place].files!r}) names the column {path!r}, which no "
            f"row has{nearest(path, told.mapped[place].others)}; nothing was stored"
        )


def row_lines(counts: dict[str, Any]) -> list[str]:
    """What a shard's counts say of its rows, a line each."""
    found = [
        f"{sentence}, {count:,} {'row' if count == 1 else 'rows'}"
        for sentence, count in counts.get("read_as", {}).items()
    ]
    if unread := counts.get("unread", {}):
        named = sorted(unread, key=lambda name: (-unread[name], name))
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        found.append(f"fields that nothing reads: {', '.join(named[:_MOST_NAMED])}{more}")
    dropped = counts.get("dropped", {})
    for rule, example in counts.get("examples", {}).items():
        found.append(f"dropped by {rule}: {dropped.get(rule, 0):,}, such as {example}")
    for name, held in counts.get("not_releasable", {}).items():
        found.append(_held_back(name, held))
    return found


def _held_back(name: str, held: dict[str, Any]) -> str:
    count = f"{held['documents']:,} {'document' if held['documents'] == 1 else 'documents'}"
    if held["why"] == "missing":
        return (
            f"{count} to train on without a licence, which holds releases back: name it with 'factory data relabel --shard NAME "
            "--license none --to-license MIT', and for later files under 'fields' in data.yaml (license: =MIT)"
        )
    if held["why"] == "listed":
        return f"{count} to train on are under {name!r}, which holds releases back ('release: false' under licences in data.yaml)"
    return (
        f"{count} to train on are under {name!r}, which data.yaml does not list, and which holds releases back; the line that "
        f"allows it, under licences.known: {name!r}: {{train: true, release: true}}"
    )
