"""Reads, from outside, how much a running sandbox uses: its processes, their memory, the bytes of its output folder.

The functions run during timed work, so they are cheap: they read only the ``/proc`` entries of the sandbox's processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HIDING = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ProcessTree:
    """A process and its descendants."""

    processes: list[int]  # the first process first
    tasks: int  # processes and their further threads
    memory: int  # resident bytes. Pages that several processes share count several times


def read_process_tree(root: int, max_processes: int) -> ProcessTree:
    """Read the processes of ``root`` and its descendants. At most ``max_processes`` processes are read.

    No process can leave the tree: in a pid namespace an orphan becomes a child of the namespace's init, which is below ``root``.
    """
    processes: list[int] = []
    memory = tasks = 0
    pending = [root]
    while pending and len(processes) <= max_processes:
        process = pending.pop()
        processes.append(process)
        try:
            with open(f"/proc/{process}/statm", "rb") as statm:
                memory += int(statm.read().split()[1]) * PAGE
            for thread in os.listdir(f"/proc/{process}/task"):
                tasks += 1
                with open(f"/proc/{process}/task/{thread}/children", "rb") as children:
                    pending += map(int, children.read().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended
    return ProcessTree(processes, tasks, memory)


def measure_memory(processes: Iterable[int]) -> int:
    """Return the bytes of memory that no file can give back: private pages, and shared ones divided among the processes that share them.

    It takes milliseconds for each gigabyte. Where the kernel does not tell (another user's process), all resident pages count.
    """
    found = 0
    for process in processes:
        try:
            with open(f"/proc/{process}/smaps_rollup", "rb") as said:
                sizes = dict(line.split()[:2] for line in said.read().splitlines()[1:])
            found += (int(sizes[b"Pss_Anon:"]) + int(sizes[b"Pss_Shmem:"])) * 1024
        except (PermissionError, KeyError):
            found += read_process_tree(process, 0).memory
        except OSError:
            continue  # the process has ended
    return found


def measure_memory_files(process: int) -> int:
    """Return the bytes of the files in ``/tmp`` and ``/dev/shm`` of a sandbox, which are in memory. ``process``: any of its processes."""
    found = 0
    for folder in ("tmp", "dev/shm"):
        with contextlib.suppress(OSError):
            said = os.statvfs(f"/proc/{process}/root/{folder}")
            found += (said.f_blocks - said.f_bfree) * said.f_frsize
    return found


def measure_folder(folder: Path) -> tuple[int, int]:
    """Return the bytes on disk and the number of entries of a folder to which processes may write. Links are counted, not followed.

    A folder inside that cannot be read (no permission, or too long a path) counts as more than any limit, because it could hide any amount.
    """
    size = entries = 0
    pending = [str(folder)]
    while pending:
        try:
            with os.scandir(pending.pop()) as found:
                for entry in found:
                    entries += 1
                    status = entry.stat(follow_symlinks=False)
                    size += max(status.st_blocks * 512, 0)
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except OSError as error:
            if error.errno in HIDING:
                return sys.maxsize, entries
    return size, entries  # after any other error: the folder was removed


def measure_free_disk_bytes(folder: Path) -> int:
    """Return the free bytes on the folder's disk."""
    found = os.statvfs(folder)
    return found.f_bfree * found.f_frsize


def measure_deleted_files(processes: Iterable[int], folder: Path) -> tuple[int, bool]:
    """Return the bytes of deleted files on the folder's disk that ``processes`` have open or mapped, and whether these are all.

    Not all can be measured: not files in transit through a socket, and without root not the files and mappings of a process that hides them.
    """
    device = os.stat(folder).st_dev
    inside = os.fsencode(folder) + b"/"
    found: dict[int, int] = {}
    whole = True
    for process in processes:
        for path in _held(process, inside):
            try:
                status = os.stat(path)
                if stat.S_ISSOCK(status.st_mode):
                    whole = whole and not _in_flight(path)
                elif status.st_dev == device and status.st_nlink == 0:
                    found[status.st_ino] = status.st_blocks * 512
            except PermissionError:
                whole = False
            except (FileNotFoundError, ProcessLookupError):
                continue  # the file was closed, or the process ended
    return sum(found.values()), whole


def _held(process: int, inside: bytes) -> Iterator[str]:
    """Yield the links in /proc to a process's open files (each thread may have its own table) and to deleted files that it has mapped."""
    entry = f"/proc/{process}"
    try:
        for thread in os.listdir(f"{entry}/task"):
            table = f"{entry}/task/{thread}/fd"
            try:
                yield from (f"{table}/{number}" for number in os.listdir(table))
            except PermissionError:
                yield f"{table}/0"  # is unreadable too, so that the caller notices that files are missing
        with open(f"{entry}/maps", "rb") as maps:
            gone = [line for line in maps if line.endswith(b"(deleted)\n") and inside in line]
        yield from (f"{entry}/map_files/{line.split()[0].decode()}" for line in gone)
    except (FileNotFoundError, ProcessLookupError):
        return
    except PermissionError:
        yield f"{entry}/fd/0"


def _in_flight(path: str) -> bool:
    """Return whether a socket contains files that were sent but not yet received."""
    with open(path.replace("/fd/", "/fdinfo/"), "rb") as info:
        return any(line.startswith(b"scm_fds:") and int(line.split()[1]) for line in info)
