"""A training step that takes minutes in C++ while a file exists, and the processes of a tree that remain after a signal."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

WITHIN = 10  # seconds from a signal to the end of all started processes

# While a file is there that the environment names, or ``mark`` in the segment's folder, the one that a sandboxed trainer sees.
# One operation, so that no Python handler runs meanwhile; and a child that a SIGTERM does not end, with a child of its own, as
# torch's compile workers have their compilers.
SLOW_STEP = """\
import os, subprocess, pathlib
if batch.step >= 4 and (mark := pathlib.Path(os.environ.get("SLOW_STEP") or self.writer.parent.with_name("mark"))).exists():
    begun = mark.with_name("slow-" + os.environ.get("RANK", "0"))
    subprocess.Popen(["sh", "-c", f"trap '' TERM; sleep 300 & touch {begun}; wait; sleep 300"])
    torch.linalg.eigvals(torch.rand(8000, 8000))
"""


def wait_for(path: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


def started_by(process: int) -> list[psutil.Process]:
    return psutil.Process(process).children(recursive=True)


def left_of(processes: list[psutil.Process], seconds: float = WITHIN) -> list[psutil.Process]:
    """Return the processes that still run after so many seconds. A zombie does not count as running."""
    deadline = time.monotonic() + seconds
    while left := [one for one in processes if _runs(one)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
