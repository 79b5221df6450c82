"""Defines what readers yield: rows, rows that cannot be read, and the origin of each row.

A row is a line of JSON (bytes), a decoded object, or a ``BadRow``. If the row's file is not itself a shard (a member of an archive, one of
many small files), the row names the file's path under ``PATH``. A reader leaves a value that it cannot read out of the row and names the value's key
under ``UNREADABLE``. Such a row is dropped only if ingest needs that key. ``pop_row_origin`` removes both keys from the row.

    >>> add_path(b'{"text": "a"}', "docs/a.jsonl")
    b'{"factory:path": "docs/a.jsonl", "text": "a"}'
    >>> row = {"text": "a", "factory:path": "docs/a.jsonl", "factory:unreadable": {"created": "year 33658"}}
    >>> pop_row_origin(row), row
    (RowOrigin(path='docs/a.jsonl', unreadable={'created': 'year 33658'}), {'text': 'a'})
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from factory.ingest.shapes.bad_row import BadRow as BadRow
from kernels.contract.message import CodedError, Message

PATH, UNREADABLE, BAD = "factory:path", "factory:unreadable", "factory:bad"
# Rules of rows that cannot be read at all. A shard with too many of these rows is quarantined.
UNREADABLE_ROW_RULES = frozenset({"bad_json", "bad_encoding", "bad_schema", "bad_csv", "row_too_long", "empty"})

LeftOutCallback = Callable[[str, Message], object]  # called with (a member's path, why it is not read)


RawRow = bytes | dict[str, Any] | BadRow


class ShardProblem(CodedError):
    """The error of a file that is unusable as a whole. The message says why. ``rows`` and ``dropped`` (by rule) are set if they are known."""

    def __init__(
        self, code: str, template: str = "", /, *, rows: int = 0, dropped: dict[str, int] | None = None, **data: Any
    ) -> None:
        super().__init__(code, template, **data)
        self.rows = rows
        self.dropped = dropped or {}


class LimitExceeded(ShardProblem):
    """The error of a file that exceeds a limit of the data policy. Reading of the file ends, and so does reading of the archive that contains it."""


@dataclass(frozen=True)
class RowOrigin:
    """Where a row came from. ``path`` is the path of the row's file inside an archive, folder or data set, or '' if that file is the shard itself.
    ``unreadable`` has, by key, the reason why the value could not be read."""

    path: str = ""
    unreadable: dict[str, str] = field(default_factory=dict)

    def refuse_unreadable_values(self, keys: Iterable[str]) -> None:
        """Check that the values of these keys could be read. Raises: BadRow."""
        for key in keys:
            if key in self.unreadable:
                unread = Message(
                    "reading.unreadable_value", "{key!r} cannot be read: {why}", key=key, why=self.unreadable[key]
                )
                raise BadRow("bad_schema", unread)


def pop_row_origin(row: Any) -> RowOrigin:
    """Remove the keys that name the origin from a decoded row, and return the origin. Raises: BadRow if the row stands for an unreadable row."""
    if not isinstance(row, dict):
        return RowOrigin()
    bad, path, unreadable = row.pop(BAD, None), row.pop(PATH, ""), row.pop(UNREADABLE, {})
    if bad is not None:
        rule, detail = bad if isinstance(bad, list) and len(bad) == 2 else ("", "")
        raise BadRow(rule if rule in UNREADABLE_ROW_RULES else "bad_schema", str(detail))
    return RowOrigin(
        path if isinstance(path, str) else "",
        {str(key): str(why) for key, why in unreadable.items()} if isinstance(unreadable, dict) else {},
    )


def add_path(row: RawRow, path: str) -> RawRow:
    """Return the row with ``path`` as its origin. A row that already has an origin keeps it, because that origin names the innermost file. A line
    that is not a JSON object stays as it is, and a later check drops it."""
    if isinstance(row, dict):
        return row if PATH in row else {**row, PATH: path}
    if isinstance(row, BadRow):
        return row
    bare = row.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not bare.startswith(b"{"):
        return row
    rest = bare[1:].lstrip()
    return b"{" + json.dumps({PATH: path})[1:-1].encode() + (b"" if rest.startswith(b"}") else b", ") + rest


def format_row_as_line(row: RawRow) -> bytes:
    """Return a row as one line of JSON. Reading the line gives the same row.

    >>> format_row_as_line(b'{"text":\\n "a"}'), format_row_as_line({"text": "a"}), format_row_as_line(BadRow("bad_csv", "4 fields"))
    (b'{"text":  "a"}', b'{"text": "a"}', b'{"factory:bad": ["bad_csv", "4 fields"]}')
    """
    if isinstance(row, bytes):  # a raw line end in valid JSON is only white space: inside strings, JSON writes it as \n
        return row.replace(b"\n", b" ").replace(b"\r", b" ")
    if isinstance(row, BadRow):
        row = {BAD: [row.rule, row.detail]}
    return json.dumps(row, ensure_ascii=False, allow_nan=True).encode("utf-8", "surrogatepass")


def make_row_too_long_error(size: int, limit: int) -> BadRow:
    """Return the error of a row that exceeds ``limits.max_row_bytes``. Both arguments are in bytes."""
    said = Message(
        "reading.row_too_long",
        "the row has {size} bytes; at most {limit} are allowed (limits.max_row_bytes in data.yaml)",
        size=size,
        limit=limit,
    )
    return BadRow("row_too_long", said)


def make_duplicate_column_error(name: str) -> ShardProblem:
    """Return the error of a table or columnar file in which two columns have the same name."""
    return ShardProblem("reading.same_column_name", "two columns have the name {name!r}", name=name)
