"""Reads JSON arrays and sequences of JSON values, value by value. A file of any size needs memory for one value only.

The end of a value is found from brackets and quotes alone. Values are decoded later, so a value that is not valid JSON costs one dropped row.

    >>> list(split_json_values(iter([b'[{"a": "]"}, {"b', b'": [1]}]']), 100))
    [b'{"a": "]"}', b'{"b": [1]}']
    >>> list(split_json_values(iter([b'{"a": 1}\\n{"a":\\n 2}']), 100))
    [b'{"a": 1}', b'{"a":\\n 2}']
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from factory.ingest.reading.rows import RawRow, ShardProblem, make_row_too_long_error
from factory.ingest.reading.streams import ReadableFile, read_blocks, split_lines

_BLANK = b" \t\r\n"
_OUTSIDE = re.compile(rb'["{}\[\],]')


def read_json(source: ReadableFile) -> Iterator[RawRow]:
    """Read a ``.json`` file: one array whose items are rows, JSON lines, or objects that span several lines."""
    with source.open() as stream:
        found = read_blocks(stream)
        head = next(found)
        read = split_lines if _in_lines(head) else split_json_values
        yield from read(itertools.chain([head], found), source.limits.max_row_bytes)


def is_json_lines(source: ReadableFile) -> bool:
    """Return whether each line of a file holds one row. False for one array, and for values that span several lines."""
    with source.open() as stream:
        return _in_lines(next(read_blocks(stream)))


def _in_lines(head: bytes) -> bool:
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip(_BLANK)
    first = head.split(b"\n", 1)[0].rstrip(_BLANK)
    if head.startswith(b"["):
        return False
    return not head.startswith(b"{") or _is_closed(first) or (b"\n" not in head and len(first) > 0)


def _is_closed(line: bytes) -> bool:
    """
    >>> _is_closed(b'{"a": "}"}'), _is_closed(b'{"a":')
    (True, False)
    """
    scan = _Scan(len(line))
    try:
        return len(list(scan.feed(line))) > 0 and not scan.held.strip(_BLANK)
    except ShardProblem:
        return False


def split_json_values(blocks: Iterator[bytes], max_bytes: int) -> Iterator[RawRow]:
    """Yield the items of an array, or the objects of a sequence. A value over ``max_bytes`` is skipped without being held in memory.

    Raises: ShardProblem for a file that ends too early, or has text after its array.
    """
    scan = _Scan(max_bytes)
    for block in blocks:
        yield from scan.feed(block)
    yield from scan.end()


class _Scan:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.array: bool | None = None  # None: nothing but blanks so far
        self.closed = False  # the array has ended
        self.depth = 0  # nesting depth of brackets inside a value
        self.quoted = self.escaped = False
        self.held = bytearray()
        self.passed = 0  # bytes that were skipped of a value that is too long
        self.count = 0

    def feed(self, block: bytes) -> Iterator[RawRow]:
        at = 0
        if self.array is None:
            block = block.removeprefix(b"\xef\xbb\xbf").lstrip(_BLANK)
            if not block:
                return
            self.array = block.startswith(b"[")
            at = 1 if self.array else 0
        start = at
        while at < len(block):
            if self.escaped:
                self.escaped, at = False, at + 1
                continue
            if self.quoted:
                quote = block.find(b'"', at)
                until = len(block) if quote < 0 else quote
                slash = block.find(b"\\", at, until)
                self.escaped, self.quoted = slash >= 0, slash >= 0 or quote < 0
                at = (until if slash < 0 else slash) + 1
                continue
            match = _OUTSIDE.search(block, at)
            if match is None:
                break
            at, sign = match.end(), match.group()
            if sign == b'"':
                self.quoted = True
            elif sign in b"{[":
                self.depth += 1
            elif sign == b",":
                if self.depth == 0:
                    self._keep(block[start : match.start()])
                    yield from self._value(needed=True)
                    start = at
            elif self.depth:
                self.depth -= 1
                if self.depth == 0 and not self.array:
                    self._keep(block[start:at])
                    yield from self._value()
                    start = at
            else:
                self._keep(block[start : match.start()])
                yield from self._value(needed=False)
                if not self.array or sign != b"]" or self.closed:
                    raise ShardProblem(
                        "reading.json_unopened",
                        "the file is not JSON: the {sign!r} after {values:,|value|values} has no opening bracket",
                        values=self.count,
                        sign=sign.decode(),
                    )
                self.closed, start = True, at
        self._keep(block[start:])

    def end(self) -> Iterator[RawRow]:
        if self.array and not self.closed:
            raise ShardProblem(
                "reading.json_cut_off",
                "the JSON array is cut off after {items:,|complete item|complete items}",
                items=self.count,
            )
        yield from self._value()

    def _keep(self, piece: bytes) -> None:
        if self.closed and piece.strip(_BLANK):
            raise ShardProblem(
                "reading.json_after_array",
                "the JSON array ends after {items:,|item|items}, but more text follows: {rest!r}",
                items=self.count,
                rest=piece.strip()[:20],
            )
        if self.passed or len(self.held) + len(piece) > self.max_bytes + 4096:  # blanks around the value do not count
            self.passed += len(self.held) + len(piece)
            self.held.clear()
        else:
            self.held += piece

    def _value(self, needed: bool = False) -> Iterator[RawRow]:
        value, passed = bytes(self.held).strip(_BLANK), self.passed
        self.held.clear()
        self.passed = 0
        if passed or len(value) > self.max_bytes:
            self.count += 1
            yield make_row_too_long_error(passed or len(value), self.max_bytes)
        elif value or needed:  # an empty item between two commas is a row too
            self.count += 1
            yield value
