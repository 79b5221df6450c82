"""Many files and folders of one folder, visible in a sandbox by one mount.

bubblewrap takes 9,000 arguments, those of ``--args`` too, and reads all mounts again for each that it makes: 500 take 0.7 s, 2,900 take
21 s, and 3,000 are refused. So of more than ``MOST`` paths in one folder a folder of hard links is made beside
them, and mounted in place of theirs. What was not asked for stays out of sight, as with a mount for each.

    shards/ab/tokens.bin   asked for         shards/.seen-1x/ab/tokens.bin   the same file
    shards/cd/tokens.bin   not         →     mounted at shards/

What has no hard link here, as it lies on another disk, keeps a mount of its own. The links are removed once the sandbox has ended; those of a
process that was killed by the next one that makes some, and before text is erased (``remove_left``).
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

Mounts = list[tuple[str, str]]  # (what is seen, where)


@contextlib.contextmanager
def together(paths: Sequence[Path]) -> Iterator[Mounts]:
    """The mounts that show ``paths`` at their own places, those of whole folders first; their links are there as long as the block lasts."""
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


def remove_left(folder: Path) -> None:
    """Remove the links in ``folder`` that no process needs any more: hard links keep a file's content."""
    for left in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError), _locked(left) as free:
            if free:
                shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _folder_of_links(folder: Path) -> Iterator[Path]:
    remove_left(folder)
    made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
    try:
        with _locked(made):
            made.chmod(0o755)
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Yields whether no other process holds it. The kernel lets go of it when this process dies."""
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
    """Show ``path`` at ``at``; False: by an empty place there, for a mount of its own."""
    is_folder = path.is_dir()
    try:
        if path.is_symlink():
            raise OSError("leads elsewhere")
        shutil.copytree(path, at, copy_function=os.link) if is_folder else os.link(path, at)
    except OSError:  # shutil.Error is one
        shutil.rmtree(at, ignore_errors=True)
        at.unlink(missing_ok=True)
        at.mkdir() if is_folder else at.touch()
        return False
    return True
