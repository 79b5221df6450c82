"""git as a store of trees: every command runs with a clean environment, and with hooks, file-system monitors, transports
and outside configuration pinned off. Files are written byte for byte as stored; git itself checks nothing out.

Commands that change a repository run one at a time (``alone``), and what a killed one left is removed. git marks what it changes with a lock file
(``index.lock``, ``HEAD.lock``, ``refs/…/main.lock``) and leaves it behind when it is killed; every later command is refused then. A lock file does
not say whose it is. So the factory's commands take turns under a lock that the kernel holds, which git inherits and so holds when only its
factory was killed. Each leaves a mark while it works: the names of the lock files that were there before it. A mark that another command finds
was left by one that was killed, and the lock files that it does not name are that one's. Those of a person's own git stay: they were there
before, or that git is still at work. A worktree whose registration it cut off is forgotten, too.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from factory.core.errors import FactoryError
from factory.core.faults import printed
from factory.core.file_lock import file_lock
from factory.core.removal import remove
from factory.git.scope import Change

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
        with open(mark, "w", encoding="utf-8", errors="surrogateescape") as noted:
            noted.write("".join(f"{path}\n" for path in sorted(before)) + END)
            noted.flush()
            os.fsync(noted.fileno())
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


PINNED = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    "core.autocrlf": "false",
    "core.protectHFS": "true",
    "core.protectNTFS": "true",
    "core.untrackedCache": "false",
    "core.fsync": "all",  # what the ledger names must be there after a power cut
    "core.fsyncMethod": "fsync",
    "core.sshCommand": "false",
    "commit.gpgSign": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "protocol.allow": "never",
    "safe.directory": "*",  # the checkout may have another owner (a volume, a CI user); nothing in it is run
}
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/nonexistent",
    "LC_ALL": "C.UTF-8",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_AUTHOR_NAME": "factory",
    "GIT_AUTHOR_EMAIL": "factory@localhost",
    "GIT_COMMITTER_NAME": "factory",
    "GIT_COMMITTER_EMAIL": OWN,
}
AS_BYTES: dict[str, Any] = {"with_extended_output": True, "with_exceptions": False, "shell": False}
AS_BYTES |= {"stdout_as_string": False, "strip_newline_in_stdout": False}
REGULAR = ("100644", "100755")


class RepositoryError(FactoryError):
    """The code checkout cannot be used as a git repository: says which folder, and what to do."""

    exit_code = 2


def git(
    folder: Path, *arguments: str, data: bytes = b"", environment: Mapping[str, str] | None = None, check: bool = True
) -> bytes:
    """The output of one git command with ``data`` as standard input. Raises: RepositoryError; without ``check``, a failure is '', unless it is
    the machine's.

    GitPython passes the factory's environment on, so ``env -i`` comes before git. GitPython's ``Repo`` is not used: it reads the
    repository's configuration, and what that includes, past the pinned one.
    """
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # ``live_commit`` says that git is missing
    from git.cmd import Git

    clean = [f"{key}={value}" for key, value in {**ENVIRONMENT, **(environment or {})}.items()]
    pinned = [word for key, value in PINNED.items() for word in ("-c", f"{key}={value}")]
    changes = arguments[0] in CHANGING and "GIT_INDEX_FILE" not in (environment or {})
    with tempfile.TemporaryFile() as given, alone(folder) if changes else nullcontext() as turn:
        given.write(data)
        given.seek(0)
        words = ["/usr/bin/env", "-i", *clean, "git", "-C", str(folder), *pinned, *arguments]
        inherited = [] if turn is None else [turn]
        status, output, error = Git().execute(words, istream=given, pass_fds=inherited, **AS_BYTES)
    fault = printed(error) if status else None
    if status and (check or fault):
        why = error.strip()[-500:] or f"it ended with {status}"
        raise RepositoryError(f"git {arguments[0]} in {folder}: {why}") from fault
    return b"" if status else output


def line(folder: Path, *arguments: str, **how: Any) -> str:
    """The line that a git command prints; '': none."""
    return os.fsdecode(git(folder, *arguments, **how)).rstrip("\n")


def commit_of(repository: Path, base: str, edited: Sequence[Change], message: str) -> str | None:
    """A commit on top of ``base`` that is on no branch yet; None when it would change nothing."""
    with tempfile.TemporaryDirectory(prefix="factory-index-") as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        git(repository, "read-tree", base, environment=index)
        for change in edited:
            if change.content is None:
                git(repository, "update-index", "--force-remove", change.path, environment=index)
                continue
            blob = line(repository, "hash-object", "-w", "--no-filters", "--stdin", data=change.content)
            entry = f"{change.mode},{blob},{change.path}"
            git(repository, "update-index", "--add", "--cacheinfo", entry, environment=index)
        tree = line(repository, "write-tree", environment=index)
    if tree == line(repository, "rev-parse", f"{base}^{{tree}}"):
        return None
    return line(repository, "commit-tree", tree, "-p", base, data=message.encode())


def entries_of(repository: Path, commit: str | None) -> dict[str, tuple[str, str]]:
    """path → (mode, blob) of a commit's tree; None: of the index."""
    listing = ("ls-tree", "-r", "--full-tree", "-z", commit) if commit else ("ls-files", "--stage", "-z")
    entries = {}
    for entry in git(repository, *listing).split(b"\0")[:-1]:
        head, path = entry.split(b"\t", 1)
        words = head.decode().split(" ")
        entries[os.fsdecode(path)] = (words[0], words[2 if commit else 1])
    return entries


def hashes(repository: Path, files: Sequence[Path]) -> list[str]:
    names = "".join(f"{file.absolute()}\n" for file in files)
    return line(repository, "hash-object", "--no-filters", "--stdin-paths", data=os.fsencode(names)).split()


def write_files(repository: Path, entries: dict[str, tuple[str, str]], folder: Path, *, flushed: bool = False) -> None:
    """Write a tree's regular files as stored; ``flushed``: they are on the disk then, but not their names. Links and submodules are left out.

    Raises: RepositoryError for a file that the repository has lost; OSError.
    """
    regular = [(path, mode, blob) for path, (mode, blob) in entries.items() if mode in REGULAR]
    stored = git(repository, "cat-file", "--batch", data="".join(f"{blob}\n" for _, _, blob in regular).encode())
    at = 0
    for path, mode, _ in regular:
        end = stored.index(b"\n", at)
        said = stored[at:end].split(b" ")
        if len(said) != 3:
            raise RepositoryError(
                f"{repository} has lost {path}: {os.fsdecode(stored[at:end])}; 'git fsck' there names all that is lost"
            )
        size = int(said[2])
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "wb") as out:
            out.write(stored[end + 1 : end + 1 + size])
            if flushed:
                out.flush()
                os.fsync(out.fileno())
        target.chmod(0o755 if mode == "100755" else 0o644)
        at = end + 1 + size + 1


def encoded(text: str) -> bytes:
    # A lone surrogate is not UTF-8; the scope rules refuse it.
    return text.encode("utf-8", "surrogatepass")
