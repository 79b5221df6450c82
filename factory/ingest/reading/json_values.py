"""JSON arrays, and JSON values one after another, value by value: a file of any size in the memory of one value.

Where a value ends is seen by its brackets and quotes alone. What is inside is decoded later, so that one that is no JSON costs its row.

    >>> list(values(iter([b'[{"a": "]"}, {"b', b'": [1]}]']), 100))
    [b'{"a": "]"}', b'{"b": [1]}']
    >>> list(values(iter([b'{"a": 1}\\n{"a":\\n 2}']), 100))
    [b'{"a": 1}', b'{"a":\\n 2}']
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from factory.ingest.reading.rows import RawRow, ShardProblem, too_long
from factory.ingest.reading.streams import Readable, blocks, lines

_BLANK = b" \t\r\n"
_OUTSIDE = re.compile(rb'["{}\[\],]')


def read_json(source: Readable) -> Iterator[RawRow]:
    """A ``.json`` file: one array, whose items are rows; or, as today, JSON lines; or objects written over several lines."""
    with source.open() as stream:
        found = blocks(stream)
        head = next(found)
        read = lines if _in_lines(head) else values
        yield from read(itertools.chain([head], found), source.limits.max_row_bytes)


def is_lines(source: Readable) -> bool:
    """Does a file hold a row in each line, and not one array or values over several lines?"""
    with source.open() as stream:
        return _in_lines(next(blocks(stream)))


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


def values(found: Iterator[bytes], max_bytes: int) -> Iterator[RawRow]:
    """The items of an array, or objects one after another. One over ``max_bytes`` is passed over without being held in memory.

    Raises: ShardProblem for a file that ends too early, or holds something after its array.
    """
    scan = _Scan(max_bytes)
    for block in found:
        yield from scan.feed(block)
    yield from scan.end()


class _Scan:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.array: bool | None = None  # None: nothing but blanks so far
        self.closed = False  # the array was
        self.depth = 0  # of brackets, inside a value
        self.quoted = self.escaped = False
        self.held = bytearray()
        self.passed = 0  # bytes of a value that is too long
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
                    raise ShardProblem(f"not JSON: a {sign.decode()!r} that closes nothing, after {self.count} values")
                self.closed, start = True, at
        self._keep(block[start:])

    def end(self) -> Iterator[RawRow]:
        if self.array and not self.closed:
            raise ShardProblem(f"the JSON array is cut off after {self.count} whole items")
        yield from self._value()

    def _keep(self, piece: bytes) -> None:
        if self.closed and piece.strip(_BLANK):
            raise ShardProblem(f"something follows the JSON array of {self.count} items: {piece.strip()[:20]!r}")
        if self.passed or len(self.held) + len(piece) > self.max_bytes + 4096:  # blanks around it may go yet
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
            yield too_long(passed or len(value), self.max_bytes)
        elif value or needed:  # two commas: an item that is none
            self.count += 1
            yield value
