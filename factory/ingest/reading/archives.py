"""Reads zip and tar archives as a stream of members. Each member is a ``ReadableFile``, and its suffix selects the reader.

The limits of the data policy apply to all members together. A refused member is left out and reported, and the other members are read. The
readers refuse links, devices, paths that lead out of the archive, archives in archives, encrypted members, unsupported kinds, and damaged members
of a zip file. Only a member that needs random access (Parquet, Arrow) is unpacked to disk, into an unnamed file.
"""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from factory.ingest.reading.file_kinds import detect_kind, is_archive
from factory.ingest.reading.rows import LimitExceeded, RawRow, ShardProblem, add_path
from factory.ingest.reading.streams import (
    BROKEN,
    ByteStream,
    DecompressionBudget,
    ReadableFile,
    decompress,
    open_seekable,
    raise_if_machine_fault,
)
from kernels.contract.message import Message

ReadMember = Callable[[ReadableFile], Iterator[RawRow]]  # raises ShardProblem for a member that cannot be read


def read_zip(source: ReadableFile, read_member: ReadMember) -> Iterator[RawRow]:
    budget = DecompressionBudget(source.size, source.limits)
    try:
        with open_seekable(source) as file, zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                name = _name(info.filename)
                if info.is_dir() or _refused(info.filename, source):
                    continue
                mode = info.external_attr >> 16
                if mode & 0o170000 not in (0, 0o100000):
                    source.left_out(info.filename, _is_special())
                elif info.flag_bits & 1:
                    source.left_out(info.filename, Message("reading.encrypted", "the member is encrypted"))
                else:
                    opens = lambda info=info: _opened(archive, info, budget)
                    yield from _member(
                        ReadableFile(name, opens, source.limits, info.file_size, source.left_out), source, read_member
                    )
    except BROKEN as error:
        raise_if_machine_fault(source.name, error)
        raise ShardProblem(
            "reading.zip", "the file cannot be read as a zip archive: {error}", error=str(error)[:200]
        ) from error


def _opened(archive: zipfile.ZipFile, info: zipfile.ZipInfo, budget: DecompressionBudget) -> ByteStream:
    try:
        return ByteStream(decompress(archive.open(info), detect_kind(info.filename)[1]), info.filename, budget)
    except (*BROKEN, NotImplementedError, RuntimeError) as error:
        raise ShardProblem(
            "reading.unpacking", "this member of the archive cannot be unpacked: {error}", error=error
        ) from error


def read_tar(source: ReadableFile, read_member: ReadMember) -> Iterator[RawRow]:
    with source.open() as stream:
        budget = DecompressionBudget(source.size, source.limits)
        try:
            with tarfile.open(fileobj=stream, mode="r|", errorlevel=2) as archive:
                for info in archive:
                    if info.isdir() or (info.isreg() and _refused(info.name, source)):
                        continue
                    content = archive.extractfile(info) if info.isreg() else None
                    if content is None:
                        source.left_out(info.name, _is_special())
                        continue
                    name = _name(info.name)
                    inner = lambda content=content, name=name: decompress(content, detect_kind(name)[1])
                    opens = lambda inner=inner, name=name: ByteStream(inner(), name, budget)
                    yield from _member(
                        ReadableFile(name, opens, source.limits, info.size, source.left_out), source, read_member
                    )
        except BROKEN as error:
            raise_if_machine_fault(source.name, error)
            raise ShardProblem(
                "reading.tar", "the file cannot be read as a tar archive: {error}", error=str(error)[:200]
            ) from error


def _member(member: ReadableFile, whole: ReadableFile, read: ReadMember) -> Iterator[RawRow]:
    try:
        for row in read(member):
            yield add_path(row, member.name)
    except LimitExceeded:
        raise
    except ShardProblem as problem:
        whole.left_out(member.name, Message.from_json(problem.message))


def _is_special() -> Message:
    return Message("reading.special_file", "the member is a link or a device")


def _name(path: str) -> str:
    return path.removeprefix("./").encode("utf-8", "backslashreplace").decode()


def _refused(path: str, source: ReadableFile) -> bool:
    pure = PurePosixPath(path.replace("\\", "/"))
    if any(part.startswith(".") and part not in (".", "..") for part in pure.parts) or "__MACOSX" in pure.parts:
        return True  # hidden members are skipped, as hidden files of a folder are
    if pure.is_absolute() or ".." in pure.parts or ":" in pure.parts[0]:
        source.left_out(path, Message("reading.outside_path", "the path of the member leads out of the archive"))
    elif is_archive(path):
        source.left_out(
            path,
            Message(
                "reading.inner_archive", "the member is an archive inside an archive: unpack the inner archive first"
            ),
        )
    else:
        return False
    return True
