"""Reads CSV and TSV (RFC 4180). The first record names the columns, and each further record is a row of strings.

    id,text                      {"id": "1", "text": "two\\nlines"}
    1,"two                  →    {"id": "2", "text": "a \\"word\\""}
    lines"
    2,"a ""word\"""

The delimiter of a ``.csv`` file is the one of ``, ; TAB |`` that occurs most often in the first line, outside quotes. A line ``sep=;`` before
the header, as Excel writes it, sets the delimiter. Lines end in LF, CR LF, or CR. An empty field is None. A record becomes a dropped row if its
number of fields differs from the header's, if a quoted field contains a single quote sign, or if it has more bytes than a row may have. A record
that is too long is never held in memory.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterator

from factory.ingest.reading.rows import (
    BadRow,
    RawRow,
    ShardProblem,
    make_duplicate_column_error,
    make_row_too_long_error,
)
from factory.ingest.reading.streams import ByteStream, ReadableFile, read_blocks
from kernels.contract.message import Message

_DELIMITERS = ",;\t|"
_SAID = re.compile(r'"?sep=([^\w"\r\n])"?[\r\n]*', re.IGNORECASE)
_QUOTED = re.compile(r'"(?:[^"]|"")*"')


class _TooLong(Exception):
    pass


def read_csv(source: ReadableFile) -> Iterator[RawRow]:
    yield from _table(source, "")


def read_tsv(source: ReadableFile) -> Iterator[RawRow]:
    yield from _table(source, "\t")


def _table(source: ReadableFile, delimiter: str) -> Iterator[RawRow]:
    limit = source.limits.max_row_bytes
    csv.field_size_limit(max(limit, csv.field_size_limit()))
    with source.open() as stream:
        records = _Records(stream, limit, delimiter)
        header = next(iter(records), None)
        if not isinstance(header, list):
            raise ShardProblem(
                "reading.table_header",
                "the first line of the table must name the columns, but it cannot be read: {header}",
                header=header,
            )
        columns = [name.strip() for name in header]
        if twice := sorted({name for name in columns if columns.count(name) > 1 and name}):
            raise make_duplicate_column_error(twice[0])
        for record in records:
            if isinstance(record, BadRow):
                yield record
            elif len(record) != len(columns):
                fields = Message(
                    "reading.table_fields",
                    "the record has {fields:,|field|fields}, but the header has {columns}",
                    fields=len(record),
                    columns=len(columns),
                )
                yield BadRow("bad_csv", fields)
            else:
                yield {name: value or None for name, value in zip(columns, record) if name}


class _Records:
    """The records of a CSV stream. A record over the limit is skipped up to the line that closes its quotes."""

    def __init__(self, stream: ByteStream, limit: int, delimiter: str) -> None:
        self.limit, self.delimiter = limit, delimiter
        self.size = self.quotes = 0  # the characters and the quotes of the current record so far
        self.text = _text(stream, limit)
        self.last = ""  # the last line
        self.last = next(self.text, "")
        if said := _SAID.fullmatch(self.last):
            self.delimiter = said[1]
            return
        if not delimiter:
            self.delimiter = max(_DELIMITERS, key=_QUOTED.sub("", self.last).count)
        self.text = itertools.chain([self.last] if self.last else [], self.text)

    def __iter__(self) -> Iterator[list[str] | BadRow]:
        while True:
            try:
                for record in csv.reader(self._lines(), delimiter=self.delimiter, strict=True):
                    self.size = self.quotes = 0
                    if record:
                        yield record
                return
            except csv.Error as error:
                cut = "unexpected end" in str(error)
                ends = Message("reading.table_cut_off", "the file ends inside a quoted field")
                yield BadRow("bad_csv", ends if cut else str(error)[:200])
            except _TooLong:
                yield make_row_too_long_error(self._pass_over(), self.limit)
            self.size = self.quotes = 0

    def _lines(self) -> Iterator[str]:
        for line in self.text:
            self.last = line
            self.size += len(self.last)
            self.quotes += self.last.count('"')
            if self.size > self.limit:
                raise _TooLong
            yield self.last

    def _pass_over(self) -> int:
        """Skip to the end of a record that is too long. Returns its length in characters."""
        while self.quotes % 2 or not self.last.endswith(("\n", "\r")):
            if not (line := next(self.text, "")):
                break
            self.last = line
            self.size += len(line)
            self.quotes += line.count('"')
        return self.size


def _text(stream: ByteStream, limit: int) -> Iterator[str]:
    """Yield the lines of a stream with their line ends. A very long line comes in pieces. Bytes that are not UTF-8 become half surrogates, so that a
    later check drops the row."""
    rest, start = b"", True
    for block in read_blocks(stream):
        if start:
            block, start = block.removeprefix(b"\xef\xbb\xbf"), False
        found = (rest + block).splitlines(keepends=True)  # bytes are split at LF, CR LF and CR only
        rest = (
            b"" if not found or found[-1].endswith(b"\n") else found.pop()
        )  # the LF after a CR may be in the next block
        for line in found:
            yield line.decode("utf-8", "surrogateescape")
        if len(rest) > limit:
            yield rest.decode("utf-8", "surrogateescape")
            rest = b""
    if rest:
        yield rest.decode("utf-8", "surrogateescape")
