"""Removes a folder in which untrusted code wrote files, whatever the depth, names and modes of its contents.

``shutil.rmtree`` recurses once for each level, fails after a thousand levels, and leaves folders that their owner made unreadable. This module moves
inner folders up to the top and empties them there. At any depth, it needs two open folders and no long path.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from itertools import count
from pathlib import Path

TRIES = 2
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_path(path: Path) -> None:
    """Remove a file, a link (never its target), or a folder with its contents.

    A missing path is not an error. After a failure, the function tries once more. It raises nothing if a path cannot be removed (a mount, another
    user's file). A caller that needs the path free gets an error when it creates the path.
    """
    for _ in range(TRIES):
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                with _opened(os.fspath(path)) as top:
                    _empty(top)
                os.rmdir(path)
            else:
                os.unlink(path)
        if not os.path.lexists(path):
            return


def _empty(top: int) -> None:
    """Remove everything in a folder."""
    pending = _without_files(top)
    numbers = count()
    while pending:
        name = pending.pop()
        with contextlib.suppress(OSError):
            with _opened(name, top) as folder:
                for inner in _without_files(folder):
                    moved = _free_name(top, numbers)
                    with contextlib.suppress(OSError):
                        with _opened(inner, folder):  # only a user who may write to a folder can move it
                            os.rename(inner, moved, src_dir_fd=folder, dst_dir_fd=top)
                        pending.append(moved)
            os.rmdir(name, dir_fd=top)


def _without_files(folder: int) -> list[str]:
    """Remove all entries that are not folders. Return the names of the folders."""
    folders = []
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if is_folder:
            folders.append(name)
        else:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
    return folders


def _free_name(top: int, numbers: Iterator[int]) -> str:
    """Return a name that no entry of the folder has."""
    while True:
        name = f".removed-{next(numbers)}"
        try:
            os.lstat(name, dir_fd=top)
        except FileNotFoundError:
            return name


@contextlib.contextmanager
def _opened(name: str, within: int | None = None) -> Iterator[int]:
    """Open a folder as a descriptor, after making it readable and writable for its owner. Links are not followed. Raises: OSError."""
    named = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    try:
        if os.fstat(named).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{named}", 0o700)
        handle = os.open(".", FOLDER, dir_fd=named)
    finally:
        os.close(named)
    try:
        yield handle
    finally:
        os.close(handle)
