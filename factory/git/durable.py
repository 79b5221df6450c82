"""git commands that change a repository: one at a time, and what a killed one left is removed.

git marks what it changes with a lock file (``index.lock``, ``HEAD.lock``, ``refs/…/main.lock``) and leaves it behind when it is killed; every
later command is refused then. A lock file does not say whose it is. So the factory's commands take turns under a lock that the kernel
holds, which git inherits and so holds when only its factory was killed. Each leaves a mark while it works: the names of the lock files
that were there before it. A mark that another command finds was left by one that was killed, and the lock files that it does not name are
that one's. Those of a person's own git stay: they were there before, or that git is still at work. A worktree whose registration it cut off
is forgotten, too.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from factory.core.file_lock import file_lock
from factory.core.removal import remove

TURN, MARK = "factory-turn", "factory-at-work"
CHANGING = frozenset(
    {"update-index", "update-ref", "read-tree", "worktree"}
)  # those that take lock files in the repository
OWN = "factory@localhost"  # in the environment of the factory's git
END = "end\n"  # of a mark that is whole: only then was anything begun


@contextmanager
def alone(folder: Path) -> Iterator[int | None]:
    """While the block runs one command that changes the repository of ``folder``, no other command of a factory changes it.

    Yields a descriptor for git to inherit; None where there is no repository. Waits as long as the one before takes. Raises: OSError.
    """
    common = common_folder(folder)
    if common is None:
        yield None
        return
    with file_lock(common / TURN, math.inf) as held:
        mark = common / MARK
        before = _others_files(common, mark)
        with open(mark, "w", encoding="utf-8", errors="surrogateescape") as out:
            out.write("".join(f"{path}\n" for path in sorted(before)) + END)
            out.flush()
            os.fsync(out.fileno())
        try:
            yield held
        except Exception:  # not when this process is stopped: git is at work then, and is killed
            _ended(common, mark, before)
            raise
        _ended(common, mark, before)


def common_folder(folder: Path) -> Path | None:
    """The folder of the repository that ``folder`` is a checkout or a worktree of; None where it is neither."""
    found = folder / ".git"
    try:
        if found.is_dir():
            return found
        own = folder / found.read_text().removeprefix("gitdir: ").strip()
        return (own / (own / "commondir").read_text().strip()).resolve()
    except OSError:
        return None


def lock_files(common: Path) -> set[str]:
    """Relative to ``common``; also the ``locked`` of a worktree that was being made."""
    found = [*common.glob("*.lock"), *common.glob("refs/**/*.lock"), *common.glob("worktrees/*/*.lock")]
    found += [path for path in common.glob("worktrees/*/locked") if _says(path).strip() in ("", "initializing")]
    return {str(path.relative_to(common)) for path in found}


def _ended(common: Path, mark: Path, before: set[str]) -> None:
    """A command that could not remove its lock files, on a disk that fails, counts as killed."""
    if not lock_files(common) - before:
        mark.unlink()


def _others_files(common: Path, mark: Path) -> set[str]:
    """The lock files that are not the factory's; those that a killed command left are removed, unless a person's git is at work."""
    said = _says(mark).splitlines(keepends=True)
    if said[-1:] != [END]:
        return lock_files(common)
    named = {line.rstrip("\n") for line in said}
    if _another_at_work(common.parent):
        return lock_files(common) & named  # the next command tries again
    for name in lock_files(common) - named:
        (common / name).unlink(missing_ok=True)
    _forget_cut_off(common)
    return lock_files(common)


def _forget_cut_off(common: Path) -> None:
    """Remove the registration of a worktree whose path was cut off while git wrote it: a part of a path may name a folder that is there, and
    then 'git worktree prune' keeps it for ever. Whole, it ends in ``/.git``."""
    for path in common.glob("worktrees/*/gitdir"):
        with contextlib.suppress(OSError):
            if not path.read_bytes().rstrip().endswith(b"/.git"):
                remove(path.parent)


def _another_at_work(checkout: Path) -> bool:
    """Does a git that is not the factory's run in this checkout, as far as this user may see?"""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            here = (process / "comm").read_text() == "git\n" and Path(os.readlink(process / "cwd")).is_relative_to(
                checkout
            )
            if here and OWN.encode() not in (process / "environ").read_bytes():
                return True
    return False


def _says(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
