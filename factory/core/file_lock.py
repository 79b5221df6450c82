"""A lock on a file, between processes: the kernel holds it, so it ends with its process, however that ends."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_SECONDS = 0.05


class LockedError(Exception):
    """Another process holds the lock; the text is its process number."""


@contextmanager
def file_lock(path: Path, patience: float = 0.0) -> Iterator[int]:
    """Hold the lock on ``path``; yields its descriptor.

    Children do not inherit the lock. A child that is given the descriptor (``pass_fds``) holds it too, until both ended.

    Raises: LockedError when another holds it and does not release it within ``patience`` seconds.
    """
    from filelock import lock_descriptor

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + patience
    try:
        while not lock_descriptor(descriptor, blocking=False):
            if time.monotonic() >= deadline:
                raise LockedError(os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown")
            time.sleep(POLL_SECONDS)
        with contextlib.suppress(OSError):  # a full disk: the kernel holds the lock, the number is for people
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def holders(path: Path) -> list[int]:
    """The other processes that have a lock's file open, as far as this user may see them: its holder, and those that wait for it."""
    found = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            for descriptor in os.scandir(f"/proc/{process}/fd"):
                if int(process) != os.getpid() and os.readlink(descriptor.path) == os.path.abspath(path):
                    found.append(int(process))
                    break
    return sorted(found)
