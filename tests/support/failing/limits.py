"""Real faults of the machine, made by the limits that a process has."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def few_handles() -> Iterator[None]:
    """All file handles are taken."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                files.append(open("/dev/null", "rb"))  # noqa: SIM115 - they are to stay open
        yield
    finally:
        for file in files:
            file.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
