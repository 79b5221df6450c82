"""How much a running sandbox uses, read from outside: its processes, their memory, the bytes in its output folder.

Cheap, because it runs while something is being timed: it walks the tree's own ``/proc`` entries, never the whole table.
"""

from __future__ import annotations

import os
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


def tree(root: int, enough: int) -> tuple[int, int]:
    """(processes, resident bytes) of ``root`` and everything below it; stops counting past ``enough`` processes.

    In a pid namespace an orphan falls to the namespace's init, which lies below ``root``: nothing leaves the tree.
    """
    count = memory = 0
    pending = [root]
    while pending and count <= enough:
        process = pending.pop()
        count += 1
        try:
            with open(f"/proc/{process}/statm", "rb") as statm:
                memory += int(statm.read().split()[1]) * PAGE
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children", "rb") as children:
                    pending += map(int, children.read().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended while we looked
    return count, memory


def folder_size(folder: Path) -> tuple[int, int]:
    """(bytes on disk, entries) of a folder that somebody may be writing to; links are counted, not followed."""
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
        except OSError:
            continue  # removed, or made unreadable, while we looked
    return size, entries
