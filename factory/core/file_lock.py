"""A lock on a file, between processes. The kernel releases the lock when its process ends, also when the process is killed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_SECONDS = 0.05


class LockedError(Exception):
    """Another process has the lock. The text of the error is that process's number."""


@contextmanager
def hold_file_lock(path: Path, patience: float = 0.0) -> Iterator[int]:
    """Hold the lock on ``path`` during the block. Yields the file's descriptor.

    Child processes do not inherit the lock. A child that gets the descriptor (``pass_fds``) holds the lock too, until both processes have ended.

    Raises: LockedError when another process does not release the lock within ``patience`` seconds.
    """
    from filelock import lock_descriptor

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + patience
    try:
        while not lock_descriptor(descriptor, blocking=False):
            if time.monotonic() >= deadline:
                raise LockedError(os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown")
            time.sleep(POLL_SECONDS)
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same; only people read the number
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def find_lock_holders(path: Path) -> list[int]:
    """Return the other processes that hold the lock or wait for it: those that have its file open, as far as this user may see them."""
    found = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process ended, or belongs to another user
            for descriptor in os.scandir(f"/proc/{process}/fd"):
                if int(process) != os.getpid() and os.readlink(descriptor.path) == os.path.abspath(path):
                    found.append(int(process))
                    break
    return sorted(found)
