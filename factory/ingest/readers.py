"""Reads shard files as a stream of rows, in bounded memory. ``READERS`` maps each suffix to its reader. The readers are in ``reading/``.

A row that cannot be read is still a row: the reader yields a ``BadRow``, and ingest drops it. For a file that is
unusable as a whole (unknown kind, truncated compressed data, decompression bomb …) the reader raises ``ShardProblem``, and ingest quarantines
the shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from factory.ingest.reading.archives import read_tar, read_zip
from factory.ingest.reading.columns import is_dataset, read_arrow, read_dataset, read_parquet
from factory.ingest.reading.file_kinds import CODE, COMPRESSIONS, TEXT, detect_kind, find_conversion_hint
from factory.ingest.reading.json_values import is_json_lines, read_json
from factory.ingest.reading.pages import read_html, read_notebook, read_warc
from factory.ingest.reading.rows import LeftOutCallback, RawRow, ShardProblem, make_row_too_long_error
from factory.ingest.reading.streams import ReadableFile, decode_text, open_file, read_all, read_blocks, split_lines
from factory.ingest.reading.tables import read_csv, read_tsv
from factory.ingest.rules.policy import ShardLimits
from kernels.contract.message import Message

__all__ = [
    "COMPRESSIONS",
    "RawRow",
    "ShardProblem",
    "exceeds_one_shard",
    "is_readable_kind",
    "is_ingested_without_conversion",
    "read_rows",
    "make_row_too_long_error",
]

SUPPORTED_KINDS = Message(
    "ingest.supported_kinds",
    "the supported types are JSON (.jsonl, .json), tables (.parquet, .csv, .tsv, .arrow, .feather), text (.txt, .md, .rst …), code, HTML, "
    ".warc and .ipynb. Each may be compressed (.gz, .zst, .bz2, .xz). A .zip or .tar archive may contain such files",
)


def _nothing(path: str, why: Message) -> None: ...


def read_rows(
    path: Path, limits: ShardLimits, on_left_out: LeftOutCallback = _nothing, name: str = ""
) -> Iterator[RawRow]:
    """Yield the rows of a shard, in order. ``path`` may be the folder of a Hugging Face data set. ``on_left_out`` is called for each member of an
    archive that is not read. ``name`` is the source of the rows, if it is not the file's name.

    Raises: ShardProblem; InputError if a fault of the machine prevents reading the file.
    """
    if path.is_dir():
        if not is_dataset(path):
            raise ShardProblem(
                "ingest.not_a_dataset", "the folder is not a data set that Hugging Face's save_to_disk wrote"
            )
        yield from read_dataset(path, limits, on_left_out)
        return
    compression = detect_kind(path.name)[1]
    if path.stat().st_size == 0:
        raise ShardProblem("ingest.empty_file", "the file is empty")
    opens = functools.partial(open_file, path, compression, limits)
    source = ReadableFile(
        name or path.name, opens, limits, path.stat().st_size, on_left_out, None if compression else path
    )
    yield from read_source_rows(source)


def read_source_rows(source: ReadableFile) -> Iterator[RawRow]:
    """Yield the rows of a file or of an archive's member. Raises: ShardProblem."""
    read = READERS.get(detect_kind(source.name)[0])
    if read is None:
        raise ShardProblem(
            "ingest.unknown_kind",
            "files of the type of {file} are not supported: {hint}",
            file=source.name,
            hint=find_conversion_hint(source.name) or SUPPORTED_KINDS,
        )
    yield from read(source)


def is_readable_kind(name: str) -> bool:
    """Return whether a reader exists for files with this name."""
    return detect_kind(name)[0] in READERS


def is_ingested_without_conversion(path: Path, limits: ShardLimits) -> bool:
    """Return whether a file is ingested as it is. This holds for JSON lines, Parquet, and text or code of one document: rows of these files can be
    read again by number, and the file can be written again without a row. Other kinds are first converted to JSON lines (``file_groups``)."""
    kind, compression = detect_kind(path.name)
    if kind == ".json":
        source = ReadableFile(path.name, functools.partial(open_file, path, compression, limits), limits, 0, _nothing)
        try:
            return is_json_lines(source)
        except ShardProblem:
            return True  # ingest will report what is wrong
    return kind not in READERS or READERS[kind] in (_jsonl, _text, _code) or (kind == ".parquet" and not compression)


def exceeds_one_shard(path: Path, limits: ShardLimits) -> bool:
    """Return whether a file is too large for one shard, in bytes on disk or in rows. False for an unreadable file: ingest reports what is wrong."""
    kind, compression = detect_kind(path.name)
    size = path.stat().st_size
    if size > limits.part_bytes or READERS.get(kind) not in (_jsonl, read_json, read_parquet):
        return size > limits.part_bytes
    if not compression and size <= limits.max_rows:
        return False
    try:
        if kind == ".parquet":
            return pq.read_metadata(path).num_rows > limits.max_rows
        return next(islice(read_rows(path, limits), limits.max_rows, None), None) is not None
    except (ShardProblem, pa.ArrowException, OSError):
        return False


def _jsonl(source: ReadableFile) -> Iterator[RawRow]:
    with source.open() as stream:
        yield from split_lines(read_blocks(stream), source.limits.max_row_bytes)


def _text(source: ReadableFile) -> Iterator[RawRow]:
    """Yield the one row of a text file: the document is the whole file, and its source is the file's name."""
    with source.open() as stream:
        yield {"text": decode_text(read_all(stream, source.limits)), "source": source.name}


def _code(source: ReadableFile) -> Iterator[RawRow]:
    for row in _text(source):
        assert isinstance(row, dict)
        yield row | {"domain": "code"}


Reader = Callable[[ReadableFile], Iterator[RawRow]]
READERS: dict[str, Reader] = {  # by suffix, ignoring a suffix such as .gz
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), _jsonl),
    ".json": read_json,
    **dict.fromkeys(TEXT, _text),
    **dict.fromkeys(CODE, _code),
    ".parquet": read_parquet,
    **dict.fromkeys((".arrow", ".feather", ".ipc", ".arrows"), read_arrow),
    ".csv": read_csv,
    **dict.fromkeys((".tsv", ".tab"), read_tsv),
    **dict.fromkeys((".html", ".htm", ".xhtml"), read_html),
    **dict.fromkeys((".warc", ".wet"), read_warc),
    ".ipynb": read_notebook,
    ".zip": functools.partial(read_zip, read_member=read_source_rows),
    ".tar": functools.partial(read_tar, read_member=read_source_rows),
}
