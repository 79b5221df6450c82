"""Uses git as a store of trees. Each command runs with a clean environment, without hooks, file-system monitors, transports or other configuration.
The factory itself writes the files of a worktree, byte for byte as stored: git checks no file out.

Commands that change a repository run one at a time (``hold_repository_lock``). A killed git leaves lock files (``index.lock``, ``HEAD.lock``,
``refs/…/main.lock``), and git then refuses every later command. A lock file does not name its owner, so the factory must find out which lock files a
killed command left.

The factory's commands take turns under a lock of the kernel. git inherits this lock, and still holds it if its factory is killed. While a command
works, a *mark* file names the lock files that existed before. If the next command finds a mark, the command that wrote it was killed. All lock files
that the mark does not name are from that command, and are removed. Lock files of a person's git stay, because the mark names them, or because that
git is still running. The registration of a worktree is removed too if git was killed while it wrote the registration.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from factory.core.errors import FactoryError
from factory.core.faults import parse_printed_fault
from factory.core.file_lock import hold_file_lock
from factory.core.path_removal import remove_path
from factory.git.scope import FileChange

TURN, MARK = "factory-turn", "factory-at-work"
CHANGING_COMMANDS = frozenset(
    {"update-index", "update-ref", "read-tree", "worktree"}
)  # the commands that make lock files in the repository
OWN = "factory@localhost"  # in the environment of every git that the factory starts
END = "end\n"  # the last line of a complete mark; with an incomplete mark, the command had not started


@contextmanager
def hold_repository_lock(folder: Path) -> Iterator[int | None]:
    """Wait until no other command of a factory changes the repository of ``folder``, and make other commands wait during the block.

    Yields the descriptor of the lock, which git must inherit; None if there is no repository. Raises: OSError.
    """
    common = find_git_folder(folder)
    if common is None:
        yield None
        return
    with hold_file_lock(common / TURN, math.inf) as held:
        mark = common / MARK
        before = _others_files(common, mark)
        with open(mark, "w", encoding="utf-8", errors="surrogateescape") as noted:
            noted.write("".join(f"{path}\n" for path in sorted(before)) + END)
            noted.flush()
            os.fsync(noted.fileno())
        try:
            yield held
        except Exception:  # not after an interrupt: git still runs then, and is killed
            _ended(common, mark, before)
            raise
        _ended(common, mark, before)


def find_git_folder(folder: Path) -> Path | None:
    """Return the git folder (``.git``) that a checkout or a worktree belongs to; None for any other folder."""
    found = folder / ".git"
    try:
        if found.is_dir():
            return found
        own = folder / found.read_text().removeprefix("gitdir: ").strip()
        return (own / (own / "commondir").read_text().strip()).resolve()
    except OSError:
        return None


def list_lock_files(git_folder: Path) -> set[str]:
    """Return the paths of lock files relative to ``git_folder``. The file ``locked`` of a half-made worktree counts as one."""
    found = [*git_folder.glob("*.lock"), *git_folder.glob("refs/**/*.lock"), *git_folder.glob("worktrees/*/*.lock")]
    found += [path for path in git_folder.glob("worktrees/*/locked") if _says(path).strip() in ("", "initializing")]
    return {str(path.relative_to(git_folder)) for path in found}


def _ended(common: Path, mark: Path, before: set[str]) -> None:
    """Remove the mark of a command that left no lock file. A command that left a lock file (on a failing disk) counts as killed."""
    if not list_lock_files(common) - before:
        mark.unlink()


def _others_files(common: Path, mark: Path) -> set[str]:
    """Return the lock files that are not the factory's. Remove those of a killed command, unless a person's git runs."""
    said = _says(mark).splitlines(keepends=True)
    if said[-1:] != [END]:
        return list_lock_files(common)
    named = {line.rstrip("\n") for line in said}
    if _another_at_work(common.parent):
        return list_lock_files(common) & named  # the next command tries to remove them again
    for name in list_lock_files(common) - named:
        (common / name).unlink(missing_ok=True)
    _forget_cut_off(common)
    return list_lock_files(common)


def _forget_cut_off(common: Path) -> None:
    """Remove the registration of each worktree whose path is incomplete, because git was killed while it wrote it. A complete path ends in ``/.git``.

    An incomplete path may name an existing folder, and then 'git worktree prune' would keep the registration for ever.
    """
    for path in common.glob("worktrees/*/gitdir"):
        with contextlib.suppress(OSError):
            if not path.read_bytes().rstrip().endswith(b"/.git"):
                remove_path(path.parent)


def _another_at_work(checkout: Path) -> bool:
    """Return whether a person's git runs in this checkout. Only processes that this user may inspect are seen."""
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


PINNED_CONFIGURATION = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    "core.autocrlf": "false",
    "core.protectHFS": "true",
    "core.protectNTFS": "true",
    "core.untrackedCache": "false",
    "core.fsync": "all",  # commits that the ledger names must survive a power cut
    "core.fsyncMethod": "fsync",
    "core.sshCommand": "false",
    "commit.gpgSign": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "protocol.allow": "never",
    "safe.directory": "*",  # the checkout may have another owner (a volume, a CI user); git runs nothing from it
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
    """The checkout of the code cannot be used as a git repository. The message names the folder and the remedy."""

    exit_code = 2


def run_git(
    folder: Path,
    *arguments: str,
    data: bytes = b"",
    environment: Mapping[str, str] | None = None,
    check: bool = True,
    accepted_codes: Collection[int] = (0,),
) -> bytes:
    """Run one git command with ``data`` as standard input, and return its output. With another exit code than ``accepted_codes``, it has failed.

    Raises: RepositoryError if the command fails. Without ``check``, a failed command returns b'', unless a fault of the machine is the cause.

    ``env -i`` removes the factory's environment, which GitPython would pass on. GitPython's ``Repo`` is not used, because it would read the
    repository's configuration in addition to the pinned one.
    """
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # ``get_live_commit`` reports a missing git
    from git.cmd import Git

    clean = [f"{key}={value}" for key, value in {**ENVIRONMENT, **(environment or {})}.items()]
    pinned = [word for key, value in PINNED_CONFIGURATION.items() for word in ("-c", f"{key}={value}")]
    changes = arguments[0] in CHANGING_COMMANDS and "GIT_INDEX_FILE" not in (environment or {})
    with tempfile.TemporaryFile() as given, hold_repository_lock(folder) if changes else nullcontext() as turn:
        given.write(data)
        given.seek(0)
        words = ["/usr/bin/env", "-i", *clean, "git", "-C", str(folder), *pinned, *arguments]
        inherited = [] if turn is None else [turn]
        status, output, error = Git().execute(words, istream=given, pass_fds=inherited, **AS_BYTES)
    failed = status not in accepted_codes
    fault = parse_printed_fault(error) if failed else None
    if failed and (check or fault):
        raise RepositoryError(
            "git.command_failed",
            "git {command} failed in {folder}: {why}",
            command=arguments[0],
            folder=folder,
            why=error.strip()[-500:] or f"exit code {status}",
        ) from fault
    return b"" if failed else output


def read_git_line(folder: Path, *arguments: str, **how: Any) -> str:
    """Run a git command and return the line that it prints; '' if it prints nothing."""
    return os.fsdecode(run_git(folder, *arguments, **how)).rstrip("\n")


def make_commit(repository: Path, base: str, edited: Sequence[FileChange], message: str) -> str | None:
    """Make a commit on top of ``base``, without a branch. Returns the commit's hash; None if the edits change nothing."""
    with tempfile.TemporaryDirectory(prefix="factory-index-") as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        run_git(repository, "read-tree", base, environment=index)
        for change in edited:
            if change.content is None:
                run_git(repository, "update-index", "--force-remove", change.path, environment=index)
                continue
            blob = read_git_line(repository, "hash-object", "-w", "--no-filters", "--stdin", data=change.content)
            entry = f"{change.mode},{blob},{change.path}"
            run_git(repository, "update-index", "--add", "--cacheinfo", entry, environment=index)
        tree = read_git_line(repository, "write-tree", environment=index)
    if tree == read_git_line(repository, "rev-parse", f"{base}^{{tree}}"):
        return None
    return read_git_line(repository, "commit-tree", tree, "-p", base, data=message.encode())


def read_tree_entries(repository: Path, commit: str | None) -> dict[str, tuple[str, str]]:
    """Return path → (mode, blob) of a commit's tree; of the index if ``commit`` is None."""
    listing = ("ls-tree", "-r", "--full-tree", "-z", commit) if commit else ("ls-files", "--stage", "-z")
    entries = {}
    for entry in run_git(repository, *listing).split(b"\0")[:-1]:
        head, path = entry.split(b"\t", 1)
        words = head.decode().split(" ")
        entries[os.fsdecode(path)] = (words[0], words[2 if commit else 1])
    return entries


def hash_files_as_blobs(repository: Path, files: Sequence[Path]) -> list[str]:
    """Return the blob hash that git would give each file, in order."""
    names = "".join(f"{file.absolute()}\n" for file in files)
    return read_git_line(repository, "hash-object", "--no-filters", "--stdin-paths", data=os.fsencode(names)).split()


def write_tree_files(
    repository: Path, entries: dict[str, tuple[str, str]], folder: Path, *, flushed: bool = False
) -> None:
    """Write a tree's regular files as stored. Links and submodules are not written. ``flushed``: flush the files' contents, but not the folders.

    Raises: RepositoryError for a file that the repository has lost; OSError.
    """
    regular = [(path, mode, blob) for path, (mode, blob) in entries.items() if mode in REGULAR]
    stored = run_git(repository, "cat-file", "--batch", data="".join(f"{blob}\n" for _, _, blob in regular).encode())
    at = 0
    for path, mode, _ in regular:
        end = stored.index(b"\n", at)
        said = stored[at:end].split(b" ")
        if len(said) != 3:
            raise RepositoryError(
                "git.lost_file",
                "The repository {repository} has lost the content of {path}: {why}. Find all losses in this "
                "repository with 'git fsck'",
                repository=repository,
                path=path,
                why=os.fsdecode(stored[at:end]),
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


def encode_text(text: str) -> bytes:
    """Return a file's text as UTF-8, also if it contains a lone surrogate."""
    # A lone surrogate is not UTF-8. The scope rules refuse such a file later.
    return text.encode("utf-8", "surrogatepass")
