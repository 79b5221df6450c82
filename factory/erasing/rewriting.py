"""A shard's file again without the content of some of its rows; all others keep their numbers.

As ``readers`` numbers rows. What stands in a row's place is no document, and is dropped should anyone read it.
"""

from __future__ import annotations

import gzip
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from factory.ingest.readers import COMPRESSIONS

ROW = b'{"erased": true}'  # in place of a line


def rewrite_without(path: Path, name: str, rows: Collection[int], target: Path) -> None:
    """Write ``path``, a shard that arrived as ``name``, to ``target`` without the content of these rows.

    Raises: OSError; pyarrow.ArrowException for a damaged file.
    """
    suffixes = [suffix.lower() for suffix in Path(name).suffixes] or [""]
    compression = COMPRESSIONS.get(suffixes[-1], "")
    kind = (suffixes[:-1] or [""])[-1] if compression else suffixes[-1]
    if kind in (".jsonl", ".ndjson", ".json"):
        _lines(path, compression, rows, target)
    elif kind == ".parquet":
        _parquet(path, rows, target)
    else:  # one document a file
        target.write_bytes(b"" if rows else path.read_bytes())


def _lines(path: Path, compression: str, rows: Collection[int], target: Path) -> None:
    with ExitStack() as opened:
        source: IO[bytes]
        out: Any
        if compression == "gzip":
            source = cast(IO[bytes], opened.enter_context(gzip.open(path, "rb")))
            made = opened.enter_context(open(target, "wb"))
            out = opened.enter_context(gzip.GzipFile("", "wb", fileobj=made, mtime=0))  # the same bytes each time
        elif compression == "zstd":
            source = opened.enter_context(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))
            out = opened.enter_context(pa.CompressedOutputStream(pa.OSFile(str(target), "wb"), "zstd"))
        else:
            source = opened.enter_context(open(path, "rb"))
            out = opened.enter_context(open(target, "wb"))
        for number, line in enumerate(_each_line(source)):
            out.write(ROW + b"\n" * line.endswith(b"\n") if number in rows else line)


def _each_line(source: IO[bytes]) -> Iterator[bytes]:
    """Lines with their ends; a pyarrow stream has no ``readline`` of its own that is fast."""
    rest = b""
    while block := source.read(1 << 20):
        *lines, rest = (rest + block).split(b"\n")
        yield from (line + b"\n" for line in lines)
    if rest:
        yield rest


def _parquet(path: Path, rows: Collection[int], target: Path) -> None:
    with pq.ParquetFile(path) as file:
        schema = pa.schema([field.with_nullable(True) for field in file.schema_arrow])
        with pq.ParquetWriter(target, schema) as out:
            number = 0
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                keep = pa.array([number + row not in rows for row in range(table.num_rows)])
                number += table.num_rows
                blank = [pa.nulls(table.num_rows, field.type) for field in schema]
                columns = [
                    pa.chunked_array([pc.if_else(keep, column.combine_chunks(), nothing)])
                    for column, nothing in zip(table.columns, blank, strict=True)
                ]
                out.write_table(pa.table(columns, schema=schema))
