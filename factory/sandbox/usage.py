"""How much a running sandbox uses, read from outside: its processes, their memory, the bytes of its output folder.

Cheap, because it runs while something is being timed: it walks the tree's own ``/proc`` entries, never the whole table.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

HIDING = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
PAGE = os.sysconf("SC_PAGE_SIZE")


def tree(root: int, enough: int) -> tuple[list[int], int]:
    """(processes, resident bytes) of ``root``, which comes first, and everything below it; stops past ``enough`` processes.

    In a pid namespace an orphan becomes a child of the namespace's init, which is below ``root``: nothing leaves the tree.
    """
    processes: list[int] = []
    memory = 0
    pending = [root]
    while pending and len(processes) <= enough:
        process = pending.pop()
        processes.append(process)
        try:
            with open(f"/proc/{process}/statm", "rb") as statm:
                memory += int(statm.read().split()[1]) * PAGE
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children", "rb") as children:
                    pending += map(int, children.read().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return processes, memory


def folder_size(folder: Path) -> tuple[int, int]:
    """(bytes on disk, entries) of a folder that may be written to meanwhile; links are counted, not followed.

    A folder inside that cannot be looked into (unreadable, or deeper than a path may be long) counts as more than any limit: anything
    could be hidden there.
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
    return size, entries  # what else went wrong: the folder was removed meanwhile


def free_space(folder: Path) -> int:
    """Bytes left on the folder's disk."""
    found = os.statvfs(folder)
    return found.f_bfree * found.f_frsize


def unlinked(processes: Iterable[int], folder: Path) -> tuple[int, bool]:
    """(bytes on disk, whether these are all) of files on the folder's disk without a name that ``processes`` have open or mapped.

    They are not all when something cannot be measured: files on their way through a socket; and, without root, mappings and the files of
    a process that hides them.
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
                continue  # closed or ended meanwhile
    return sum(found.values()), whole


def _held(process: int, inside: bytes) -> Iterator[str]:
    """Links in /proc to what a process has open (threads may have tables of their own), and to deleted files that it mapped."""
    entry = f"/proc/{process}"
    try:
        for thread in os.listdir(f"{entry}/task"):
            table = f"{entry}/task/{thread}/fd"
            try:
                yield from (f"{table}/{number}" for number in os.listdir(table))
            except PermissionError:
                yield f"{table}/0"  # which cannot be read either
        with open(f"{entry}/maps", "rb") as maps:
            gone = [line for line in maps if line.endswith(b"(deleted)\n") and inside in line]
        yield from (f"{entry}/map_files/{line.split()[0].decode()}" for line in gone)
    except (FileNotFoundError, ProcessLookupError):
        return
    except PermissionError:
        yield f"{entry}/fd/0"


def _in_flight(path: str) -> bool:
    """Are there files in the socket that were sent and not received yet?"""
    with open(path.replace("/fd/", "/fdinfo/"), "rb") as info:
        return any(line.startswith(b"scm_fds:") and int(line.split()[1]) for line in info)
