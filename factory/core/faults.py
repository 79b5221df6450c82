"""Faults of the machine: a full disk, a locked ledger, a read-only folder, no file handles, no memory.

A fault ends by itself, or after a person repaired the machine. The factory then repeats the failed action.
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
from kernels.contract.message import Message


@dataclass(frozen=True)
class Fault:
    """A fault of the machine: the ``problem``, its ``remedy``, and the ``path`` of the affected file if one is known.

    ``exit_code`` is the exit code of a command that ends because of the fault (as in sysexits.h). Two faults are equal if their problems are equal.
    """

    problem: Message
    remedy: Message = field(compare=False)
    exit_code: int = field(compare=False)
    path: str = field(default="", compare=False)

    @property
    def description(self) -> Message:
        """The problem, with the path if one is known."""
        return Message("faults.at", "{what} ({path})", what=self.problem, path=self.path) if self.path else self.problem


FREE_SPACE = Message("faults.free_space", "free some disk space")
END_PROGRAMS = Message("faults.end_programs", "end other programs")
FULL = Fault(Message("faults.disk_full", "the disk is full"), FREE_SPACE, 74)
NO_WRITE_PERMISSION = Fault(
    Message("faults.read_only", "writing is not permitted"),
    Message("faults.make_writable", "make the file and its folder writable for this user"),
    73,
)
NO_FILE_HANDLES = Fault(
    Message("faults.no_handles", "no more files can be opened, because no file handles are left"),
    Message("faults.more_handles", "raise 'ulimit -n' or end other programs"),
    71,
)
MEMORY = Fault(
    Message("faults.no_memory", "the machine has too little free memory, or allows no more processes"), END_PROGRAMS, 71
)
BROKEN = Fault(
    Message("faults.disk_error", "the disk reports an error"),
    Message("faults.check_disk", "free some disk space, and check the disk with 'dmesg'"),
    74,
)
MISPLACED_FOLDER = Fault(
    Message("faults.misplaced", "a folder was found where a file is expected, or a file where a folder is expected"),
    Message("faults.move_away", "move this file or folder to another place"),
    74,
)
AWAY = Fault(
    Message("faults.no_file_server", "the file system does not answer"),
    Message("faults.check_file_server", "check the server of this file system"),
    74,
)
LOCKED = Fault(
    Message("faults.ledger_locked", "the ledger is locked by another process"),
    Message("faults.end_locker", "end the process that locks the ledger"),
    75,
)
LEDGER_NOT_OPENED = Fault(
    Message("faults.ledger_unopened", "the ledger cannot be opened"),
    Message("faults.check_ledger_folder", "check the permissions of the ledger's folder, its disk and 'ulimit -n'"),
    74,
)
NO_LEDGER_SERVER = Fault(
    Message("faults.no_ledger_server", "the ledger's server does not answer"),
    Message("faults.check_ledger_server", "check the ledger's server"),
    75,
)

FAULT_BY_ERRNO = {
    errno.ENOSPC: FULL, errno.EDQUOT: FULL, errno.EFBIG: FULL, errno.EROFS: NO_WRITE_PERMISSION, errno.EACCES: NO_WRITE_PERMISSION,
    errno.EPERM: NO_WRITE_PERMISSION,
    errno.EMFILE: NO_FILE_HANDLES, errno.ENFILE: NO_FILE_HANDLES, errno.ENOMEM: MEMORY, errno.EAGAIN: MEMORY, errno.EIO: BROKEN, errno.ESTALE: AWAY,
    errno.ENOTCONN: AWAY, errno.EISDIR: MISPLACED_FOLDER, errno.ENOTDIR: MISPLACED_FOLDER,
}  # fmt: skip
FILE_FAULTS = (NO_WRITE_PERMISSION, MISPLACED_FOLDER)
FAULT_BY_SQLITE_TEXT = {
    "or disk is full": FULL, "database is locked": LOCKED, "table is locked": LOCKED,
    "a readonly database": NO_WRITE_PERMISSION, "disk I/O error": BROKEN, "unable to open database": LEDGER_NOT_OPENED,
    "Too many open files": NO_FILE_HANDLES, "No space left on device": FULL, "Read-only file system": NO_WRITE_PERMISSION,
}  # fmt: skip  # parts of SQLite's messages
PROBE_BYTES = 16 << 20  # written as a test: the count of free bytes shows neither a quota nor a lack of inodes
# Packages whose exceptions quote SQLite's. Exceptions of other packages may quote untrusted text.
PACKAGES_QUOTING_SQLITE = ("sqlalchemy", "mlflow")


def find_fault_in(error: BaseException) -> Fault | None:
    """Return the fault of the machine that caused an exception, directly or through its causes; None if no fault caused it."""
    for one in _with_causes(error):
        if isinstance(one, DiskFullError):
            return FULL
        if isinstance(one, MemoryError):
            return MEMORY
        if isinstance(one, OSError) and one.errno in FAULT_BY_ERRNO:
            return replace(FAULT_BY_ERRNO[one.errno], path=os.fsdecode(one.filename) if one.filename else "")
        if type(one).__module__.startswith("psycopg") and type(one).__name__ == "OperationalError":
            return NO_LEDGER_SERVER
        if isinstance(one, sqlite3.Error) or _quotes_sqlite(one):
            for words, found in FAULT_BY_SQLITE_TEXT.items():
                if words in str(one):
                    return found
        if isinstance(one, RuntimeError) and "can't start new thread" in str(one):
            return MEMORY
    return None


def is_machine_fault(error: BaseException) -> bool:
    """Return whether a fault of the machine caused the exception, so that the action is worth repeating."""
    return find_fault_in(error) is not None


def is_machine_fault_unrelated_to_files(error: BaseException) -> bool:
    """Return whether a fault of the machine caused the exception, and no file can cause that fault: the disk, memory, handles, a lock or a server.

    Untrusted code can leave a folder where a file is expected, or a file without permissions. Such an error counts against that code.
    """
    return find_fault_in(error) not in (None, *FILE_FAULTS)


def is_disk_full(error: BaseException) -> bool:
    """Return whether a full disk caused the exception."""
    return find_fault_in(error) == FULL


def has_room_for(folder: Path, size: int) -> bool:
    """Return whether ``size`` bytes can be written in a folder. The function allocates some of these bytes for a moment.

    Raises: OSError for an error other than a full disk.
    """
    status = os.statvfs(folder)
    if status.f_bavail * status.f_frsize < size:
        return False
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, min(size, PROBE_BYTES))
    except OSError as error:
        if is_disk_full(error):
            return False
        raise
    return True


def parse_printed_fault(words: str) -> OSError | None:
    """Return the fault of the machine that a program such as git printed at the end of a line, as an OSError; None if the program printed none.

    >>> parse_printed_fault("fatal: unable to create temporary file: No space left on device")
    OSError(28, 'No space left on device')
    >>> parse_printed_fault("fatal: not a git repository") is None
    True
    """
    for line in words.splitlines():
        for number, fault in FAULT_BY_ERRNO.items():
            if fault not in FILE_FAULTS and line.rstrip(".").endswith(f": {os.strerror(number)}"):
                return OSError(number, os.strerror(number))
    return None


def is_temporary_read_failure(error: BaseException) -> bool:
    """Return whether a read failed for a reason outside the file: no handle, no memory, or no answer from the file server.

    An error of the disk does not count, because the file may then be damaged.
    """
    return find_fault_in(error) in (NO_FILE_HANDLES, MEMORY, AWAY)


def _quotes_sqlite(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in PACKAGES_QUOTING_SQLITE and "(sqlite3." in str(error)


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
