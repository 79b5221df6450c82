"""Shows many files of one folder in a sandbox with one mount.

bubblewrap accepts at most 9,000 arguments, and for each mount it reads all mounts again: 500 mounts take 0.7 s, 2,900 take 21 s, and 3,000 are
refused. If more than ``MOST`` paths are in one folder, this module makes a folder of hard links to them and mounts it at the path of the original
folder. Other files of the original folder stay invisible.

    shards/ab/tokens.bin   requested             shards/.seen-1x/ab/tokens.bin   the same file
    shards/cd/tokens.bin   not requested   →     mounted at shards/

A path that cannot be linked, for example on another disk, gets a mount of its own. The links are removed when the sandbox ends. The links of a
killed process are removed when new links are made, and before text is erased (``remove_unused_links``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

MOST = 500
_PREFIX = ".seen-"

Mounts = list[tuple[str, str]]  # (source, place in the sandbox)


@contextlib.contextmanager
def make_linked_mounts(paths: Sequence[Path]) -> Iterator[Mounts]:
    """Yield the mounts that show ``paths`` at the same paths in the sandbox, folders of links first. The links exist during the block."""
    by_folder: dict[Path, list[Path]] = defaultdict(list)
    for path in dict.fromkeys(paths):
        by_folder[path.parent].append(path)
    with contextlib.ExitStack() as stack:
        folders: Mounts = []
        single = [path for path in paths if len(by_folder[path.parent]) <= MOST]
        for folder, inside in by_folder.items():
            if len(inside) > MOST:
                links = stack.enter_context(_folder_of_links(folder))
                folders.append((str(links), str(folder)))
                single += [path for path in inside if not _link(path, links / path.name)]
        yield folders + [(str(path), str(path)) for path in single]


def remove_unused_links(folder: Path) -> None:
    """Remove the links in ``folder`` that no process uses. Such a hard link would keep a deleted file's content on the disk."""
    for left in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError), _locked(left) as free:
            if free:
                shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _folder_of_links(folder: Path) -> Iterator[Path]:
    remove_unused_links(folder)
    made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
    try:
        with _locked(made):
            made.chmod(0o755)
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder. Yields False if another process holds the lock. The kernel releases the lock when this process dies."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _link(path: Path, at: Path) -> bool:
    """Make a hard link ``at`` to ``path``. If that is impossible, returns False, and ``at`` is an empty file or folder to mount ``path`` on."""
    is_folder = path.is_dir()
    try:
        if path.is_symlink():
            raise OSError("leads elsewhere")
        shutil.copytree(path, at, copy_function=os.link) if is_folder else os.link(path, at)
    except OSError:  # shutil.Error is an OSError too
        shutil.rmtree(at, ignore_errors=True)
        at.unlink(missing_ok=True)
        at.mkdir() if is_folder else at.touch()
        return False
    return True
