"""Shard files as a stream of rows, in bounded memory: JSONL (plain, .gz, .zst), Parquet, plain text and code.

``READERS`` names the reader of each suffix. A row that cannot be read is still a row: it is passed on as a ``BadRow`` and
gets its fate like any other. What is wrong with the file as a whole (not of a known kind, cut off inside its compression,
a decompression bomb …) raises ``ShardProblem``, and the shard is quarantined.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from factory.core.errors import InputError
from factory.core.faults import is_of_no_file
from factory.ingest.document import BadRow
from factory.ingest.rules.policy import ShardLimits

CODE = (
    ".py",
    ".pyi",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".cu",
    ".rs",
    ".go",
    ".js",
    ".ts",
    ".java",
    ".sh",
    ".sql",
    ".toml",
    ".yaml",
)
TEXT = (".txt", ".md", ".rst")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
SUPPORTED = (
    "JSONL (.jsonl, .jsonl.gz, .jsonl.zst), Parquet (.parquet), text (.txt, .md, .rst) and code (.py, .c, .rs …)"
)

_BLOCK = 1 << 20
_FREE_EXPANSION = 64 << 20  # bytes before the expansion of a compressed shard is judged

# What a reader hands on: a line of JSON, a decoded object, or a row that cannot be read.
RawRow = bytes | dict[str, Any] | BadRow


class ShardProblem(Exception):
    """The whole file is unusable; the message says why, for a person. ``rows`` and ``dropped`` by rule, where known."""

    def __init__(self, reason: str, rows: int = 0, dropped: dict[str, int] | None = None) -> None:
        super().__init__(reason)
        self.rows = rows
        self.dropped = dropped or {}


def read_rows(path: Path, limits: ShardLimits) -> Iterator[RawRow]:
    """The rows of a shard, in order. Raises: ShardProblem; InputError where the machine cannot read it."""
    suffixes = [s.lower() for s in path.suffixes] or [""]
    compression = COMPRESSIONS.get(suffixes[-1], "")
    read = READERS.get((suffixes[:-1] or [""])[-1] if compression else suffixes[-1])
    if path.stat().st_size == 0:
        raise ShardProblem("the file is empty")
    if read is None or (compression and read is _parquet):
        raise ShardProblem(f"not a kind of file that can be ingested: {path.name}; supported: {SUPPORTED}")
    yield from read(path, compression, limits)


class _Bounded(io.RawIOBase):
    """A decompressing stream that stops at a bomb and says what is wrong with a broken file."""

    def __init__(self, inner: Any, path: Path, limits: ShardLimits) -> None:
        self._inner, self._name, self._limits = inner, path.name, limits
        self._size = path.stat().st_size
        self._given = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        try:
            block: bytes = self._inner.read(_BLOCK if size is None or size < 0 else size)
        except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
            _refuse_unread(self._name, error)
            raise ShardProblem(f"cannot be decompressed after {self._given} bytes: {error}") from error
        self._given += len(block)
        if self._given > self._limits.max_shard_bytes:
            raise ShardProblem(f"more than {self._limits.max_shard_bytes} bytes (limits.max_shard_bytes): split it")
        if self._given > _FREE_EXPANSION and self._given > self._limits.max_expansion * self._size:
            raise ShardProblem(
                f"expands more than {self._limits.max_expansion:g} times (limits.max_expansion): a bomb?"
            )
        return block

    def close(self) -> None:
        self._inner.close()
        super().close()


def _opened(path: Path, compression: str, limits: ShardLimits) -> _Bounded:
    inner: Any
    try:
        if compression == "gzip":
            inner = gzip.open(path, "rb")  # noqa: SIM115 (closed by _Bounded)
        elif compression == "zstd":
            inner = pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")
        else:
            inner = open(path, "rb")  # noqa: SIM115 (closed by _Bounded)
    except (OSError, pa.ArrowException) as error:
        _refuse_unread(path.name, error)
        raise ShardProblem(f"cannot be opened: {error}") from error
    return _Bounded(inner, path, limits)


def _refuse_unread(name: str, error: Exception) -> None:
    """Raises: InputError for what the machine did, which says nothing about the shard: it is not quarantined."""
    if is_of_no_file(error):
        raise InputError(f"{name} cannot be read: {error}") from error


def _jsonl(path: Path, compression: str, limits: ShardLimits) -> Iterator[RawRow]:
    with _opened(path, compression, limits) as stream:
        yield from _lines(stream, limits.max_row_bytes)


def _text(path: Path, compression: str, limits: ShardLimits) -> Iterator[RawRow]:
    """A text file is one document whose source is the file's name."""
    with _opened(path, compression, limits) as stream:
        yield {"text": _whole(stream, limits), "source": path.name}


def _code(path: Path, compression: str, limits: ShardLimits) -> Iterator[RawRow]:
    with _opened(path, compression, limits) as stream:
        yield {"text": _whole(stream, limits), "source": path.name, "domain": "code"}


def _lines(stream: _Bounded, max_bytes: int) -> Iterator[RawRow]:
    """Lines without their ends; a line over ``max_bytes`` is passed over without being held in memory."""
    rest = b""
    skipped = 0  # bytes of an over-long line passed over so far
    first = True
    while block := stream.read(_BLOCK):
        if first:
            _refuse_other_encodings(block)
            first = False
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if skipped or len(line) > max_bytes:
                yield _too_long(skipped + len(line), max_bytes)
                skipped = 0
            else:
                yield line
        if skipped or len(rest) > max_bytes:
            skipped += len(rest)
            rest = b""
    if skipped:
        yield _too_long(skipped, max_bytes)
    elif rest:
        yield rest
    elif first:
        raise ShardProblem("the file is empty once decompressed")


def _too_long(size: int, limit: int) -> BadRow:
    return BadRow("row_too_long", f"a row of {size} bytes; limits.max_row_bytes is {limit}")


def _whole(stream: _Bounded, limits: ShardLimits) -> str:
    blocks: list[bytes] = []
    size = 0
    while block := stream.read(_BLOCK):
        blocks.append(block)
        size += len(block)
        if size > limits.max_row_bytes:
            raise ShardProblem(f"a document of more than {limits.max_row_bytes} bytes (limits.max_row_bytes)")
    data = b"".join(blocks)
    _refuse_other_encodings(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ShardProblem(f"not UTF-8 at byte {error.start}: convert it, for example with iconv") from error


def _refuse_other_encodings(head: bytes) -> None:
    for mark, name in ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"), (b"\x00\x00\xfe\xff", "UTF-32")):
        if head.startswith(mark):
            raise ShardProblem(f"encoded as {name}, not UTF-8: convert it, for example with iconv")


def _parquet(path: Path, compression: str, limits: ShardLimits) -> Iterator[RawRow]:
    try:
        with pq.ParquetFile(path) as file:
            total = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            if total > limits.max_shard_bytes:
                raise ShardProblem(f"more than {limits.max_shard_bytes} bytes (limits.max_shard_bytes): split it")
            if total > _FREE_EXPANSION and total > limits.max_expansion * path.stat().st_size:
                raise ShardProblem(f"expands more than {limits.max_expansion:g} times (limits.max_expansion): a bomb?")
            for batch in file.iter_batches(batch_size=64):
                for row in range(batch.num_rows):
                    yield _parquet_row(batch, row, limits.max_row_bytes)
    except (OSError, pa.ArrowException) as error:
        _refuse_unread(path.name, error)
        raise ShardProblem(f"not readable as Parquet: {str(error)[:200]}") from error


def _parquet_row(batch: pa.RecordBatch, row: int, max_bytes: int) -> RawRow:
    try:
        values = {name: batch.column(i)[row].as_py() for i, name in enumerate(batch.schema.names)}
    except UnicodeDecodeError as error:
        return BadRow("bad_encoding", f"not UTF-8: {error.reason}")
    text = values.get("text")
    if isinstance(text, str) and len(text) > max_bytes:
        return _too_long(len(text), max_bytes)
    return {name: value for name, value in values.items() if value is not None}


Reader = Callable[[Path, str, ShardLimits], Iterator[RawRow]]  # of (file, its compression or '', limits)
READERS: dict[str, Reader] = {  # by suffix, without that of a compression
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), _jsonl),
    **dict.fromkeys(TEXT, _text),
    **dict.fromkeys(CODE, _code),
    ".parquet": _parquet,
}
