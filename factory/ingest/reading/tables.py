"""CSV and TSV (RFC 4180): the first record names the columns, each further one is a row of strings.

    id,text                      {"id": "1", "text": "two\\nlines"}
    1,"two                  →    {"id": "2", "text": "a \\"word\\""}
    lines"
    2,"a ""word\"""

The delimiter of a ``.csv`` file is the one of ``, ; TAB |`` that its first line has most of, outside quotes; a line ``sep=;`` before the header,
as Excel writes it, says it. Lines end in LF, CR LF, or CR. An empty field is no value (None). A
record with another number of fields than the header, or with a quote inside a quoted field, costs its row.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterator

from factory.ingest.reading.rows import BadRow, RawRow, ShardProblem
from factory.ingest.reading.streams import ByteStream, Readable, blocks

_DELIMITERS = ",;\t|"
_SAID = re.compile(r'"?sep=([^\w"\r\n])"?[\r\n]*', re.IGNORECASE)
_QUOTED = re.compile(r'"(?:[^"]|"")*"')


def read_table(source: Readable, delimiter: str = "") -> Iterator[RawRow]:
    """``delimiter`` '': the first line tells."""
    limit = source.limits.max_row_bytes
    csv.field_size_limit(max(limit, csv.field_size_limit()))
    with source.open() as stream:
        records = _records(stream, limit, delimiter)
        header = next(records, None)
        if not isinstance(header, list):
            raise ShardProblem(f"the first line of a table names its columns, and this one cannot be read: {header}")
        columns = [name.strip() for name in header]
        if twice := sorted({name for name in columns if columns.count(name) > 1 and name}):
            raise ShardProblem(f"two columns of the table have the name {twice[0]!r}")
        for record in records:
            if isinstance(record, BadRow):
                yield record
            elif len(record) != len(columns):
                yield BadRow("bad_csv", f"{len(record)} fields; the header has {len(columns)}")
            else:
                yield {name: value or None for name, value in zip(columns, record) if name}


def _records(stream: ByteStream, limit: int, delimiter: str) -> Iterator[list[str] | BadRow]:
    """Raises: ShardProblem for a record over the limit: of a quote that nothing closes, all that follows it is one."""
    text = _text(stream, limit)
    first = next(text, "")
    if said := _SAID.fullmatch(first):
        delimiter = said[1]
    else:
        delimiter = delimiter or max(_DELIMITERS, key=_QUOTED.sub("", first).count)
        text = itertools.chain([first] if first else [], text)
    size = 0  # characters of the record under way

    def counted() -> Iterator[str]:
        nonlocal size
        for line in text:
            size += len(line)
            if size > limit:
                raise ShardProblem(
                    f"a record of more than {limit} bytes (limits.max_row_bytes), or a quote that is not closed"
                )
            yield line

    while True:
        try:
            for record in csv.reader(counted(), delimiter=delimiter, strict=True):
                size = 0
                if record:
                    yield record
            return
        except csv.Error as error:
            cut = "unexpected end" in str(error)
            yield BadRow("bad_csv", "the file ends inside a quoted field" if cut else str(error)[:200])
            size = 0


def _text(stream: ByteStream, limit: int) -> Iterator[str]:
    """Lines with their ends; a very long one in pieces. Bytes that are not UTF-8 become half surrogates, which cost the row."""
    rest, start = b"", True
    for block in blocks(stream):
        if start:
            block, start = block.removeprefix(b"\xef\xbb\xbf"), False
        found = (rest + block).splitlines(keepends=True)  # of bytes: at LF, CR LF and CR alone
        rest = (
            b"" if not found or found[-1].endswith(b"\n") else found.pop()
        )  # of a CR, the LF may be in the next block
        for line in found:
            yield line.decode("utf-8", "surrogateescape")
        if len(rest) > limit:
            yield rest.decode("utf-8", "surrogateescape")
            rest = b""
    if rest:
        yield rest.decode("utf-8", "surrogateescape")
