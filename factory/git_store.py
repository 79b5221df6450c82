"""git as a store of trees: every command runs with a clean environment, and with hooks, file-system monitors, transports
and outside configuration pinned off. Files are written byte for byte as stored; git itself checks nothing out.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from factory.errors import FactoryError
from factory.gates.patch_scope import Change

PINNED = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    "core.autocrlf": "false",
    "core.protectHFS": "true",
    "core.protectNTFS": "true",
    "core.untrackedCache": "false",
    "core.sshCommand": "false",
    "commit.gpgSign": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "protocol.allow": "never",
    "safe.directory": "*",  # the checkout may belong to somebody else (a volume, a CI user); nothing of it is run
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
    "GIT_COMMITTER_EMAIL": "factory@localhost",
}
REGULAR = ("100644", "100755")


class RepositoryError(FactoryError):
    """The code checkout cannot be used as a git repository: says which folder, and what to do."""

    exit_code = 2


def git(
    folder: Path,
    *arguments: str,
    data: bytes | None = None,
    environment: dict[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[bytes]:
    pinned = [word for key, value in PINNED.items() for word in ("-c", f"{key}={value}")]
    done = subprocess.run(
        ["git", "-C", str(folder), *pinned, *arguments],
        input=data or b"",
        capture_output=True,
        env={**ENVIRONMENT, **(environment or {})},
    )
    if check and done.returncode:
        raise RepositoryError(f"git {arguments[0]} in {folder}: {done.stderr.decode(errors='replace').strip()[-500:]}")
    return done


def commit_of(repository: Path, base: str, edited: Sequence[Change], message: str) -> str | None:
    """A commit on top of ``base``, of which no branch knows yet; None when it would change nothing."""
    with tempfile.TemporaryDirectory(prefix="factory-index-") as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        git(repository, "read-tree", base, environment=index)
        for change in edited:
            if change.content is None:
                git(repository, "update-index", "--force-remove", change.path, environment=index)
                continue
            stored = git(repository, "hash-object", "-w", "--no-filters", "--stdin", data=change.content)
            entry = f"{change.mode},{stored.stdout.decode().strip()},{change.path}"
            git(repository, "update-index", "--add", "--cacheinfo", entry, environment=index)
        tree = git(repository, "write-tree", environment=index).stdout.decode().strip()
    if tree == git(repository, "rev-parse", f"{base}^{{tree}}").stdout.decode().strip():
        return None
    return git(repository, "commit-tree", tree, "-p", base, data=message.encode()).stdout.decode().strip()


def staged_entries(repository: Path) -> dict[str, tuple[str, str]]:
    """path → (mode, blob) of what is staged."""
    found = {}
    for line in git(repository, "ls-files", "--stage", "-z").stdout.split(b"\0")[:-1]:
        head, path = line.split(b"\t", 1)
        mode, blob, _ = head.decode().split(" ")
        found[os.fsdecode(path)] = (mode, blob)
    return found


def entries_of(repository: Path, commit: str) -> dict[str, tuple[str, str]]:
    """path → (mode, blob) of a commit's tree."""
    listed = git(repository, "ls-tree", "-r", "-z", "--full-tree", commit).stdout
    entries = {}
    for line in listed.split(b"\0")[:-1]:
        head, path = line.split(b"\t", 1)
        mode, _, blob = head.decode().split(" ")
        entries[os.fsdecode(path)] = (mode, blob)
    return entries


def hashes(repository: Path, files: Sequence[Path]) -> list[str]:
    names = "".join(f"{file.absolute()}\n" for file in files)
    return (
        git(repository, "hash-object", "--no-filters", "--stdin-paths", data=os.fsencode(names)).stdout.decode().split()
    )


def write_files(repository: Path, entries: dict[str, tuple[str, str]], folder: Path) -> None:
    """Write a tree's regular files as stored. Links and submodules are left out: no code of ours needs them."""
    regular = [(path, mode, blob) for path, (mode, blob) in entries.items() if mode in REGULAR]
    stored = git(repository, "cat-file", "--batch", data="".join(f"{blob}\n" for _, _, blob in regular).encode()).stdout
    at = 0
    for path, mode, _ in regular:
        end = stored.index(b"\n", at)
        size = int(stored[at:end].split(b" ")[2])
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(stored[end + 1 : end + 1 + size])
        target.chmod(0o755 if mode == "100755" else 0o644)
        at = end + 1 + size + 1


def encoded(text: str) -> bytes:
    # A lone surrogate cannot be stored as UTF-8; let the scope rules say so.
    return text.encode("utf-8", "surrogatepass")
