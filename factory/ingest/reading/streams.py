"""Reads the decompressed bytes of a file or of an archive's member, as lines or as one text, within the limits of the data policy."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from factory.core.errors import InputError
from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.ingest.reading.rows import LeftOutCallback, LimitExceeded, RawRow, ShardProblem, make_row_too_long_error
from factory.ingest.rules.policy import ShardLimits

BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, pa.ArrowException)

BLOCK = 1 << 20
UNCHECKED_BYTES = 64 << 20  # limits.max_expansion is checked only after this many decompressed bytes


class DecompressionBudget:
    """Limits how many bytes may come out of a compressed file or archive of ``size`` bytes, over all its members."""

    def __init__(self, size: int, limits: ShardLimits) -> None:
        self.size, self.limits, self.given = size, limits, 0

    def spend(self, count: int) -> None:
        """Count ``count`` more bytes. Raises: LimitExceeded."""
        self.given += count
        if self.given > self.limits.max_shard_bytes:
            raise LimitExceeded(
                "reading.shard_too_large",
                "the file decompresses to more than {limit} bytes (limits.max_shard_bytes in data.yaml): split the file",
                limit=self.limits.max_shard_bytes,
            )
        if self.given > UNCHECKED_BYTES and self.given > self.limits.max_expansion * self.size:
            raise LimitExceeded(
                "reading.expansion",
                "decompression makes the file more than {limit:g} times larger (limits.max_expansion in data.yaml), so the file may be "
                "a decompression bomb",
                limit=self.limits.max_expansion,
            )


class ByteStream(io.RawIOBase):
    """A decompressing stream. It raises ``ShardProblem`` at the limits of the data policy, and for a file that cannot be decompressed."""

    def __init__(self, inner: Any, name: str, budget: DecompressionBudget | None) -> None:
        self._inner, self._name, self._budget = inner, name, budget
        self._given = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        try:
            block: bytes = self._inner.read(BLOCK if size is None or size < 0 else size)
        except BROKEN as error:
            raise_if_machine_fault(self._name, error)
            raise ShardProblem(
                "reading.decompression",
                "decompression of the file failed after {bytes} bytes: {error}",
                bytes=self._given,
                error=error,
            ) from error
        self._given += len(block)
        if self._budget:
            self._budget.spend(len(block))
        return block

    def close(self) -> None:
        self._inner.close()
        super().close()


@dataclass(frozen=True)
class ReadableFile:
    """A file, or a member of an archive, as readers see it. ``open`` may be called once, and returns the decompressed bytes from the beginning.
    ``path`` is set for a file that is not compressed, so that a reader can map it into memory. A reader calls ``left_out`` for each part that it
    does not read."""

    name: str
    open: Callable[[], ByteStream]
    limits: ShardLimits
    size: int  # bytes on disk or in the archive, before decompression
    left_out: LeftOutCallback
    path: Path | None = None


def open_file(path: Path, compression: str, limits: ShardLimits) -> ByteStream:
    """Open a file as a decompressing stream. ``compression`` is a value of ``COMPRESSIONS``, or ''. Raises: ShardProblem, InputError."""
    try:
        budget = DecompressionBudget(path.stat().st_size, limits) if compression else None
        if compression in ("zstd", "lz4"):
            inner: Any = pa.CompressedInputStream(pa.OSFile(str(path)), compression)
        elif compression:
            openers: dict[str, Any] = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}
            inner = openers[compression](path, "rb")
        else:
            inner = open(path, "rb")  # noqa: SIM115 (closed by ByteStream)
    except (OSError, pa.ArrowException) as error:
        raise_if_machine_fault(path.name, error)
        raise ShardProblem("reading.opening", "the file cannot be opened: {error}", error=error) from error
    return ByteStream(inner, path.name, budget)


def decompress(raw: IO[bytes], compression: str) -> Any:
    """Return a file object with the decompressed content of ``raw``, which the caller closes. ``compression`` is a value of ``COMPRESSIONS``, or
    ''."""
    if compression in ("zstd", "lz4"):
        return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression)
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw)
    return {"bz2": bz2.BZ2File, "xz": lzma.LZMAFile, "": lambda raw: raw}[compression](raw)  # type: ignore[operator]


def raise_if_machine_fault(name: str, error: Exception) -> None:
    """Raise InputError if the error is a fault of the machine. Such a fault says nothing about the shard, so the shard is not quarantined."""
    if is_machine_fault_unrelated_to_files(error):
        raise InputError("reading.machine_fault", "{file} cannot be read: {error}", file=name, error=error) from error


def make_unreadable_file_error(path: Path | str, error: OSError) -> InputError:
    """Return the error of a file that the operating system does not let the factory read."""
    return InputError("reading.unreadable_file", "{path} cannot be read: {error}", path=path, error=error.strerror)


def read_blocks(stream: ByteStream) -> Iterator[bytes]:
    """Yield the blocks of a stream. Raises: ShardProblem for a file that is empty, or whose encoding is not UTF-8."""
    first = True
    while block := stream.read(BLOCK):
        if first:
            refuse_other_encodings(block)
            first = False
        yield block
    if first:
        raise ShardProblem("reading.nothing_inside", "the decompressed file is empty")


def split_lines(blocks: Iterable[bytes], max_bytes: int) -> Iterator[RawRow]:
    """Yield the lines in ``blocks``, without line ends. A line over ``max_bytes`` is skipped without being held in memory."""
    rest = b""
    skipped = 0  # bytes of an over-long line that were skipped so far
    for block in blocks:
        *whole_lines, rest = (rest + block).split(b"\n")
        for line in whole_lines:
            if skipped or len(line) > max_bytes:
                yield make_row_too_long_error(skipped + len(line), max_bytes)
                skipped = 0
            else:
                yield line
        if skipped or len(rest) > max_bytes:
            skipped += len(rest)
            rest = b""
    if skipped:
        yield make_row_too_long_error(skipped, max_bytes)
    elif rest:
        yield rest


def read_all(stream: ByteStream, limits: ShardLimits) -> bytes:
    """Return all bytes of a stream that is one document. Raises: ShardProblem for more bytes than a row may have."""
    found: list[bytes] = []
    size = 0
    while block := stream.read(BLOCK):
        found.append(block)
        size += len(block)
        if size > limits.max_row_bytes:
            raise ShardProblem(
                "reading.document_too_large",
                "the document has more than {limit} bytes (limits.max_row_bytes in data.yaml)",
                limit=limits.max_row_bytes,
            )
    return b"".join(found)


def decode_text(data: bytes) -> str:
    """Decode ``data`` from UTF-8. Raises: ShardProblem."""
    refuse_other_encodings(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ShardProblem(
            "reading.not_utf8",
            "byte {byte} of the file is not valid UTF-8. Convert the file, for example with iconv",
            byte=error.start,
        ) from error


def refuse_other_encodings(head: bytes) -> None:
    """Raise ShardProblem if a file begins with the byte order mark of an encoding other than UTF-8."""
    for mark, name in ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"), (b"\x00\x00\xfe\xff", "UTF-32")):
        if head.startswith(mark):
            raise ShardProblem(
                "reading.other_encoding",
                "the file is encoded as {encoding}, not UTF-8. Convert the file, for example with iconv",
                encoding=name,
            )


def open_seekable(source: ReadableFile) -> Any:
    """Return a pyarrow file with random access to all bytes of ``source``: a memory map of the file or of an unnamed copy.

    Raises: ShardProblem, OSError.
    """
    if source.path is not None:
        return pa.memory_map(str(source.path), "r")
    with tempfile.TemporaryFile() as copy, source.open() as stream:
        while block := stream.read(BLOCK):
            copy.write(block)
        copy.flush()
        return pa.memory_map(f"/proc/self/fd/{copy.fileno()}", "r")
