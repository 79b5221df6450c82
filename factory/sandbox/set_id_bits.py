"""Takes the bits of setuid and setgid away from what a sandbox left.

The filter of system calls (``seccomp_filter``) lets no program set them. This is the second wall: for a processor that has no filter, and for files
of older versions of the factory.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from factory.sandbox.seccomp_filter import SET_ID

FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def remove_set_id_bits(top: Path) -> int:
    """Remove the bits from all files and folders below ``top``, where no process may write any more. Returns the number of changed entries.

    No link is followed, and at any depth two folders are open. Folders keep setgid, which only says who owns new files, if ``top`` has it.
    A folder that its owner made unreadable becomes readable. Entries that cannot be changed (another user's) are left.
    """
    try:
        folder = os.open(top, FOLDER)
    except OSError:
        return 0  # removed
    of_folders = SET_ID & ~(os.fstat(folder).st_mode & stat.S_ISGID)
    changed, inner = _remove_in(folder, of_folders)
    pending, path = [inner], [_identify(folder)]
    try:
        while pending:
            if pending[-1]:
                try:
                    below = os.open(pending[-1].pop(), FOLDER, dir_fd=folder)
                except OSError:
                    continue
                os.close(folder)
                folder = below
                more, inner = _remove_in(folder, of_folders)
                changed += more
                pending.append(inner)
                path.append(_identify(folder))
            else:
                pending.pop()
                path.pop()
                if not path:
                    break
                above = os.open("..", FOLDER, dir_fd=folder)
                os.close(folder)
                folder = above
                if _identify(folder) != path[-1]:
                    break  # somebody moves folders
    except OSError:
        pass  # somebody removes folders
    finally:
        os.close(folder)
    return changed


def _identify(folder: int) -> tuple[int, int]:
    status = os.fstat(folder)
    return status.st_dev, status.st_ino


def _remove_in(folder: int, of_folders: int) -> tuple[int, list[str]]:
    """Remove the bits from a folder's entries. Returns how many were changed, and the names of the folders among them."""
    changed, inner = 0, []
    try:
        if os.fstat(folder).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{folder}", 0o700)
        readable = os.open(".", READ, dir_fd=folder)
    except OSError:
        return 0, []
    try:
        with os.scandir(readable) as entries:
            for entry in entries:
                try:
                    mode = entry.stat(follow_symlinks=False).st_mode
                    if stat.S_ISDIR(mode):
                        inner.append(entry.name)
                    if mode & (of_folders if stat.S_ISDIR(mode) else SET_ID) and not stat.S_ISLNK(mode):
                        changed += _remove_from(readable, entry.name, of_folders)
                except OSError:
                    continue
    finally:
        os.close(readable)
    return changed, inner


def _remove_from(folder: int, name: str, of_folders: int) -> int:
    """Remove the bits from one entry, which is opened first, so that it is not another one when its mode changes. Returns 1 if it changed."""
    opened = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        mode = os.fstat(opened).st_mode
        if stat.S_ISLNK(mode):
            return 0
        os.chmod(f"/proc/self/fd/{opened}", stat.S_IMODE(mode) & ~(of_folders if stat.S_ISDIR(mode) else SET_ID))
        return 1
    finally:
        os.close(opened)
