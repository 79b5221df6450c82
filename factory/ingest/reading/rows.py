"""What a reader hands on: rows, rows that cannot be read, and where each came from.

A row is a line of JSON (bytes), a decoded object, or a ``BadRow``. Of a file that is not itself a shard (a member of an archive, one of many
small files) the row names the path under ``PATH``; a value that cannot be read is left out of the row and named under ``UNREADABLE``, so that
it costs nothing where nobody asks for it. ``take_origin`` takes both keys out again, before the row is looked at.

    >>> with_path(b'{"text": "a"}', "docs/a.jsonl")
    b'{"factory:path": "docs/a.jsonl", "text": "a"}'
    >>> row = {"text": "a", "factory:path": "docs/a.jsonl", "factory:unreadable": {"created": "year 33658"}}
    >>> take_origin(row), row
    (Origin(path='docs/a.jsonl', unreadable={'created': 'year 33658'}), {'text': 'a'})
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from factory.ingest.shapes.bad_row import BadRow as BadRow

PATH, UNREADABLE, BAD = "factory:path", "factory:unreadable", "factory:bad"
# Rules of rows that cannot be read at all; with too many of them a shard is quarantined.
BAD_RULES = frozenset({"bad_json", "bad_encoding", "bad_schema", "bad_csv", "row_too_long", "empty"})

LeftOut = Callable[[str, str], object]  # of (a member's path, why it is not read)


RawRow = bytes | dict[str, Any] | BadRow


class ShardProblem(Exception):
    """The whole file is unusable; the message says why, for a person. ``rows`` and ``dropped`` by rule, where known."""

    def __init__(self, reason: str, rows: int = 0, dropped: dict[str, int] | None = None) -> None:
        super().__init__(reason)
        self.rows = rows
        self.dropped = dropped or {}


class OverLimit(ShardProblem):
    """A limit of the data policy for the whole file is reached: nothing more of it is read, whatever it is a member of."""


@dataclass(frozen=True)
class Origin:
    """``path``: inside the archive, folder or data set that a row came in; '': its shard is the file. ``unreadable``: by key, why its value
    could not be read."""

    path: str = ""
    unreadable: dict[str, str] = field(default_factory=dict)

    def refuse(self, keys: Iterable[str]) -> None:
        """Raises: BadRow where the value of one of these keys could not be read."""
        for key in keys:
            if key in self.unreadable:
                raise BadRow("bad_schema", f"{key!r} cannot be read: {self.unreadable[key]}")


def take_origin(row: Any) -> Origin:
    """Where a decoded row came from; the keys that say so are taken out of it. Raises: BadRow, where it stands for a row that was none."""
    if not isinstance(row, dict):
        return Origin()
    bad, path, unreadable = row.pop(BAD, None), row.pop(PATH, ""), row.pop(UNREADABLE, {})
    if bad is not None:
        rule, detail = bad if isinstance(bad, list) and len(bad) == 2 else ("", "")
        raise BadRow(rule if rule in BAD_RULES else "bad_schema", str(detail))
    return Origin(
        path if isinstance(path, str) else "",
        {str(key): str(why) for key, why in unreadable.items()} if isinstance(unreadable, dict) else {},
    )


def with_path(row: RawRow, path: str) -> RawRow:
    """The row, saying which member it came from: the first to be said counts, as the innermost. A line that is no object stays: it is dropped."""
    if isinstance(row, dict):
        return row if PATH in row else {**row, PATH: path}
    if isinstance(row, BadRow):
        return row
    bare = row.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not bare.startswith(b"{"):
        return row
    rest = bare[1:].lstrip()
    return b"{" + json.dumps({PATH: path})[1:-1].encode() + (b"" if rest.startswith(b"}") else b", ") + rest


def as_line(row: RawRow) -> bytes:
    """A row as one line of JSON, which reads as that row again.

    >>> as_line(b'{"text":\\n "a"}'), as_line({"text": "a"}), as_line(BadRow("bad_csv", "4 fields"))
    (b'{"text":  "a"}', b'{"text": "a"}', b'{"factory:bad": ["bad_csv", "4 fields"]}')
    """
    if isinstance(row, bytes):  # a line end inside JSON is a blank: in a string it is written \n
        return row.replace(b"\n", b" ").replace(b"\r", b" ")
    if isinstance(row, BadRow):
        row = {BAD: [row.rule, row.detail]}
    return json.dumps(row, ensure_ascii=False, allow_nan=True).encode("utf-8", "surrogatepass")


def too_long(size: int, limit: int) -> BadRow:
    return BadRow("row_too_long", f"a row of {size} bytes; limits.max_row_bytes is {limit}")
