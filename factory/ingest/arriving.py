"""Is a file of the inbox whole? Nobody writes to it any more, and it does not end in the middle of a row.

A writer is seen by the kernel's read lease, which it refuses while any process has the file open for writing; where a file system has
no leases, by the open files of all processes that this one may look at. What is written from another machine is seen by neither: the
last row is looked at too. Little is imported: ``factory status`` asks as well.
"""

from __future__ import annotations

import bz2
import errno
import fcntl
import gzip
import json
import lzma
import os
import signal
import stat
import zipfile
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from factory.ingest.reading.kinds import kind_of

Stamp = tuple[int, ...]  # of a file's content: another one, another content
STILL_SECONDS = 600.0  # without a change, after which a file is whole whatever its last row looks like
TAIL = 1 << 20  # bytes of the last row that are looked at
ENDS = {
    ".parquet": b"PAR1",
    **dict.fromkeys((".arrow", ".feather", ".ipc"), b"ARROW1"),
}  # with which such files begin and end
ROWS = (".jsonl", ".ndjson", ".jsonlines", ".json")


def stamp_of(path: Path) -> Stamp:
    """Size, times in ns of its content and of its name, owner and mode. Of what is no file: its inode. Raises: OSError."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        return (status.st_ino,)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def writer_of(path: Path) -> str:
    """Who has a file open for writing, in words; '': nobody, as far as this process can see."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""  # what cannot be opened cannot be ingested either, which says why
    try:
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)  # for who opens it meanwhile; SIGIO would end this process
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return ""
    except OSError as error:
        return _listed_writer(os.fstat(handle)) or ("a process" if error.errno == errno.EAGAIN else "")
    finally:
        os.close(handle)


def _listed_writer(wanted: os.stat_result) -> str:
    """The process that has the file open for writing, of those whose open files can be read."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for opened in (process / "fd").iterdir():
                found = opened.stat()
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino) and _writes(process, opened.name):
                    return f"process {process.name} ({(process / 'comm').read_text(errors='replace').strip()})"
        except OSError:
            continue  # ended, or another user's
    return ""


def _writes(process: Path, descriptor: str) -> bool:
    flags = next(
        line for line in (process / "fdinfo" / descriptor).read_text().splitlines() if line.startswith("flags:")
    )
    return int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY


def cut_off(path: Path) -> str:
    """Where a file ends too early, in words; '': it ends as a file of its kind does, or it is of a kind that cannot tell.

    Raises: OSError.
    """
    return _cut_off(path, stamp_of(path))


@lru_cache(maxsize=256)
def _cut_off(path: Path, stamp: Stamp) -> str:
    """Compressed files are read whole, once for each ``stamp``."""
    kind, compression = kind_of(path.name)
    if kind == ".zip":
        return "" if zipfile.is_zipfile(path) else "it has no directory of a zip file yet"
    if not compression and kind in ENDS:
        with open(path, "rb") as file:
            head = file.read(len(ENDS[kind]))
            file.seek(max(0, stamp[0] - len(ENDS[kind])))
            if file.read() == ENDS[kind] or (
                kind != ".parquet" and head != ENDS[kind]
            ):  # else an Arrow stream, which cannot tell
                return ""
            return "it has no Parquet footer yet" if kind == ".parquet" else "it has no Arrow footer yet"
    if compression:
        last = b""
        try:
            with _opened(path, compression) as file:
                while block := file.read(TAIL):
                    last = (last + block)[-TAIL:]
        except EOFError:
            return "its compressed data end too early"
        except OSError as error:  # what is damaged, waiting does not mend
            return "its compressed data end too early" if "Truncated" in str(error) else ""
        except (zlib.error, lzma.LZMAError):
            return ""
    else:
        with open(path, "rb") as file:
            array = kind == ".json" and file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
            file.seek(max(0, stamp[0] - TAIL))
            last = file.read(TAIL)
        if array:
            return "" if last.rstrip().endswith(b"]") else "its JSON array is not closed yet"
    if kind == ".json" and last.rstrip().endswith((b"]", b"}")):
        return ""
    return _last_row(last) if kind in ROWS else ""


def _opened(path: Path, compression: str) -> Any:
    if compression in ("zstd", "lz4"):
        import pyarrow as pa

        return pa.CompressedInputStream(pa.OSFile(str(path)), compression)
    return {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}[compression](path, "rb")  # type: ignore[operator]


def _last_row(tail: bytes) -> str:
    """
    >>> _last_row(b'{"text": "a"}\\n'), _last_row(b'{"text": "a"}\\n{"text": "b"}')
    ('', '')
    >>> _last_row(b'{"text": "a"}\\n{"te')
    'its last row is cut off'
    """
    row = tail.rpartition(b"\n")[2]
    try:
        if row.strip():
            json.loads(row)
    except (ValueError, RecursionError):
        return "its last row is cut off"
    return ""
