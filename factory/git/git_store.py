"""git as a store of trees: every command runs with a clean environment, and with hooks, file-system monitors, transports
and outside configuration pinned off. Files are written byte for byte as stored; git itself checks nothing out.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from factory.core.errors import FactoryError
from factory.core.faults import printed
from factory.git.durable import CHANGING, OWN, alone
from factory.git.scope import Change

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


def staged_entries(repository: Path) -> dict[str, tuple[str, str]]:
    """path → (mode, blob) in the index."""
    found = {}
    for entry in git(repository, "ls-files", "--stage", "-z").split(b"\0")[:-1]:
        head, path = entry.split(b"\t", 1)
        mode, blob, _ = head.decode().split(" ")
        found[os.fsdecode(path)] = (mode, blob)
    return found


def entries_of(repository: Path, commit: str) -> dict[str, tuple[str, str]]:
    """path → (mode, blob) of a commit's tree."""
    listed = git(repository, "ls-tree", "-r", "-z", "--full-tree", commit)
    entries = {}
    for entry in listed.split(b"\0")[:-1]:
        head, path = entry.split(b"\t", 1)
        mode, _, blob = head.decode().split(" ")
        entries[os.fsdecode(path)] = (mode, blob)
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
