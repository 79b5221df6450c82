"""Decompressed bytes of a file or of a member, within the limits of the data policy; lines and whole texts of them."""

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
from factory.core.faults import is_of_no_file
from factory.ingest.reading.rows import LeftOut, OverLimit, RawRow, ShardProblem, too_long
from factory.ingest.rules.policy import ShardLimits

BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, pa.ArrowException)

BLOCK = 1 << 20
FREE_EXPANSION = 64 << 20  # bytes before the expansion of a compressed file is judged


class Allowance:
    """How much may come out of a compressed file, or an archive, of ``size`` bytes, whatever number of members it has."""

    def __init__(self, size: int, limits: ShardLimits) -> None:
        self.size, self.limits, self.given = size, limits, 0

    def take(self, count: int) -> None:
        """Raises: OverLimit."""
        self.given += count
        if self.given > self.limits.max_shard_bytes:
            raise OverLimit(f"more than {self.limits.max_shard_bytes} bytes (limits.max_shard_bytes): split it")
        if self.given > FREE_EXPANSION and self.given > self.limits.max_expansion * self.size:
            raise OverLimit(f"expands more than {self.limits.max_expansion:g} times (limits.max_expansion): a bomb?")


class ByteStream(io.RawIOBase):
    """A decompressing stream that stops at a bomb and says what is wrong with a broken file."""

    def __init__(self, inner: Any, name: str, budget: Allowance | None) -> None:
        self._inner, self._name, self._budget = inner, name, budget
        self._given = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        try:
            block: bytes = self._inner.read(BLOCK if size is None or size < 0 else size)
        except BROKEN as error:
            refuse_unread(self._name, error)
            raise ShardProblem(f"cannot be decompressed after {self._given} bytes: {error}") from error
        self._given += len(block)
        if self._budget:
            self._budget.take(len(block))
        return block

    def close(self) -> None:
        self._inner.close()
        super().close()


@dataclass(frozen=True)
class Readable:
    """A file, or a member of one, as readers see it. ``open``: its decompressed bytes, from the beginning, once. ``path``: of a file that
    is not compressed, so that it can be mapped. ``left_out`` is told what is not read of it."""

    name: str
    open: Callable[[], ByteStream]
    limits: ShardLimits
    size: int  # bytes, as it lies on disk or in the archive
    left_out: LeftOut
    path: Path | None = None


def open_file(path: Path, compression: str, limits: ShardLimits) -> ByteStream:
    """``compression``: a value of ``COMPRESSIONS``, or ''. Raises: ShardProblem, InputError."""
    try:
        budget = Allowance(path.stat().st_size, limits) if compression else None
        if compression in ("zstd", "lz4"):
            inner: Any = pa.CompressedInputStream(pa.OSFile(str(path)), compression)
        elif compression:
            openers: dict[str, Any] = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}
            inner = openers[compression](path, "rb")
        else:
            inner = open(path, "rb")  # noqa: SIM115 (closed by ByteStream)
    except (OSError, pa.ArrowException) as error:
        refuse_unread(path.name, error)
        raise ShardProblem(f"cannot be opened: {error}") from error
    return ByteStream(inner, path.name, budget)


def decompressed(raw: IO[bytes], compression: str) -> Any:
    """The content of an open file, which its opener closes. ``compression``: a value of ``COMPRESSIONS``, or ''."""
    if compression in ("zstd", "lz4"):
        return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression)
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw)
    return {"bz2": bz2.BZ2File, "xz": lzma.LZMAFile, "": lambda raw: raw}[compression](raw)  # type: ignore[operator]


def refuse_unread(name: str, error: Exception) -> None:
    """Raises: InputError for what the machine did, which says nothing about the shard: it is not quarantined."""
    if is_of_no_file(error):
        raise InputError(f"{name} cannot be read: {error}") from error


def blocks(stream: ByteStream) -> Iterator[bytes]:
    """Raises: ShardProblem for a file that is empty, or in another encoding than UTF-8."""
    first = True
    while block := stream.read(BLOCK):
        if first:
            refuse_other_encodings(block)
            first = False
        yield block
    if first:
        raise ShardProblem("the file is empty once decompressed")


def lines(found: Iterable[bytes], max_bytes: int) -> Iterator[RawRow]:
    """Lines of blocks, without their ends; a line over ``max_bytes`` is passed over without being held in memory."""
    rest = b""
    skipped = 0  # bytes of an over-long line passed over so far
    for block in found:
        *whole_lines, rest = (rest + block).split(b"\n")
        for line in whole_lines:
            if skipped or len(line) > max_bytes:
                yield too_long(skipped + len(line), max_bytes)
                skipped = 0
            else:
                yield line
        if skipped or len(rest) > max_bytes:
            skipped += len(rest)
            rest = b""
    if skipped:
        yield too_long(skipped, max_bytes)
    elif rest:
        yield rest


def whole(stream: ByteStream, limits: ShardLimits) -> bytes:
    """All of it, as of one document. Raises: ShardProblem for more than a row may have."""
    found: list[bytes] = []
    size = 0
    while block := stream.read(BLOCK):
        found.append(block)
        size += len(block)
        if size > limits.max_row_bytes:
            raise ShardProblem(f"a document of more than {limits.max_row_bytes} bytes (limits.max_row_bytes)")
    return b"".join(found)


def as_text(data: bytes) -> str:
    """Raises: ShardProblem."""
    refuse_other_encodings(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ShardProblem(f"not UTF-8 at byte {error.start}: convert it, for example with iconv") from error


def refuse_other_encodings(head: bytes) -> None:
    for mark, name in ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"), (b"\x00\x00\xfe\xff", "UTF-32")):
        if head.startswith(mark):
            raise ShardProblem(f"encoded as {name}, not UTF-8: convert it, for example with iconv")


def seekable(source: Readable) -> Any:
    """A pyarrow file of all the bytes, which can be read at any place: mapped, or from a copy without a name. Raises: ShardProblem, OSError."""
    if source.path is not None:
        return pa.memory_map(str(source.path), "r")
    with tempfile.TemporaryFile() as copy, source.open() as stream:
        while block := stream.read(BLOCK):
            copy.write(block)
        copy.flush()
        return pa.memory_map(f"/proc/self/fd/{copy.fileno()}", "r")
