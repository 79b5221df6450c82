"""Faults of the machine, as a person meets them: a full disk, a locked ledger, a read-only folder, no file handles, no memory.

They pass by themselves, or once a person did something about the machine: whatever was tried is tried again.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from factory.core.errors import DiskFullError


@dataclass(frozen=True)
class Fault:
    """``what`` is wrong; ``do`` is what helps; ``exit_code`` is that of a command which ends because of it (as in sysexits.h); ``where`` is the
    path that it was met at. Two are equal when the same is wrong, wherever.
    """

    what: str
    do: str = field(compare=False)
    exit_code: int = field(compare=False)
    where: str = field(default="", compare=False)

    @property
    def says(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


FULL = Fault("the disk is full", "free some space", 74)
READ_ONLY = Fault("there is no permission to write", "make it writable for this user", 73)
HANDLES = Fault("too few file handles are left", "raise 'ulimit -n', or end other programs", 71)
MEMORY = Fault("no memory or process is left", "end other programs", 71)
BROKEN = Fault("the disk reports an error", "free some space, look at the machine's log (dmesg),", 74)
MISPLACED = Fault("a folder is where a file belongs, or a file where a folder does", "move it away", 74)
AWAY = Fault("the file system does not answer", "look at its server", 74)
LOCKED = Fault("the ledger is locked by another process", "end that process", 75)
UNOPENED = Fault("the ledger cannot be opened", "look at its folder's permissions, its disk and 'ulimit -n'", 74)
UNREACHED = Fault("the ledger's server does not answer", "look at the server", 75)

BY_NUMBER = {
    errno.ENOSPC: FULL, errno.EDQUOT: FULL, errno.EFBIG: FULL, errno.EROFS: READ_ONLY, errno.EACCES: READ_ONLY, errno.EPERM: READ_ONLY,
    errno.EMFILE: HANDLES, errno.ENFILE: HANDLES, errno.ENOMEM: MEMORY, errno.EAGAIN: MEMORY, errno.EIO: BROKEN, errno.ESTALE: AWAY,
    errno.ENOTCONN: AWAY, errno.EISDIR: MISPLACED, errno.ENOTDIR: MISPLACED,
}  # fmt: skip
OF_A_FILE = (READ_ONLY, MISPLACED)
BY_WORDS = {
    "database or disk is full": FULL, "database is locked": LOCKED, "database table is locked": LOCKED,
    "attempt to write a readonly database": READ_ONLY, "disk I/O error": BROKEN, "unable to open database file": UNOPENED,
    "Too many open files": HANDLES, "No space left on device": FULL, "Read-only file system": READ_ONLY,
}  # fmt: skip  # of SQLite
TAKEN_BYTES = 16 << 20  # free bytes show neither a quota nor that no file may be added
QUOTE_SQLITE = ("sqlalchemy", "mlflow")  # packages whose exceptions do; any other may quote what untrusted code left


def fault_of(error: BaseException) -> Fault | None:
    """The fault of the machine that an exception, or what it came from, tells of; None: it is none."""
    for one in _with_causes(error):
        if isinstance(one, DiskFullError):
            return FULL
        if isinstance(one, MemoryError):
            return MEMORY
        if isinstance(one, OSError) and one.errno in BY_NUMBER:
            return replace(BY_NUMBER[one.errno], where=os.fsdecode(one.filename) if one.filename else "")
        if type(one).__module__.startswith("psycopg") and type(one).__name__ == "OperationalError":
            return UNREACHED
        if isinstance(one, sqlite3.Error) or _quotes_sqlite(one):
            for words, found in BY_WORDS.items():
                if words in str(one):
                    return found
        if isinstance(one, RuntimeError) and "can't start new thread" in str(one):
            return MEMORY
    return None


def is_of_the_machine(error: BaseException) -> bool:
    """Is the machine to blame, so that the same is tried again?"""
    return fault_of(error) is not None


def is_of_no_file(error: BaseException) -> bool:
    """As ``is_of_the_machine``, and nothing that a folder's owner put there can be the cause: a disk, memory, handles, a lock, a server. What
    untrusted code leaves behind, a folder for a file or one that may not be read, is an answer about that code."""
    return fault_of(error) not in (None, *OF_A_FILE)


def is_full(error: BaseException) -> bool:
    """Does it tell of a full disk?"""
    return fault_of(error) == FULL


def fits(folder: Path, size: int) -> bool:
    """Can so many bytes be written in a folder? Seen by taking some of them for a moment. Raises: OSError for what is not about room."""
    status = os.statvfs(folder)
    if status.f_bavail * status.f_frsize < size:
        return False
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, min(size, TAKEN_BYTES))
    except OSError as error:
        if is_full(error):
            return False
        raise
    return True


def printed(words: str) -> OSError | None:
    """The fault of the machine, of no file, that a program such as git named at the end of a line, as the system words it; None: it named none.

    >>> printed("fatal: unable to create temporary file: No space left on device")
    OSError(28, 'No space left on device')
    >>> printed("fatal: not a git repository") is None
    True
    """
    for line in words.splitlines():
        for number, fault in BY_NUMBER.items():
            if fault not in OF_A_FILE and line.rstrip(".").endswith(f": {os.strerror(number)}"):
                return OSError(number, os.strerror(number))
    return None


def cannot_be_read_now(error: BaseException) -> bool:
    """Does a failed read say nothing about the file: no handle, no memory, a file server that does not answer? A disk's error says that the file
    is damaged, or may be."""
    return fault_of(error) in (HANDLES, MEMORY, AWAY)


def _quotes_sqlite(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in QUOTE_SQLITE and "(sqlite3." in str(error)


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
