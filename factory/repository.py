"""The git repository whose code is trained with and patched, handled as data.

Every git command runs with a clean environment and with hooks, file-system monitors, transports and outside
configuration pinned off. Nothing is ever checked out by git: files are written here, byte for byte as stored, so no
filter, line-ending rule or attribute of anybody's can run or change them. Patches come as data and become a commit
through a temporary index.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from factory.errors import FactoryError, InputError
from factory.gates.patch_scope import AgentsPolicy, Change, problems
from factory.workspace import Workspace

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
NO_COMMIT = "0" * 40


class RepositoryError(FactoryError):
    """The code checkout cannot be used as a git repository: says which folder, and what to do."""

    exit_code = 2


class ScopeError(InputError):
    """A patch leaves the scope that agents may change. ``problems`` has a sentence for each reason."""

    def __init__(self, found: list[str]) -> None:
        super().__init__("the patch is out of scope: " + "; ".join(found))
        self.problems = found


@dataclass(frozen=True)
class Applied:
    """A patch as a commit on its own branch, checked out in its own folder."""

    branch: str
    commit: str
    base: str
    patch_sha256: str
    worktree: Path


def live_commit(repository: Path) -> str:
    """The commit that training runs on: the checkout's HEAD, on a branch or detached.

    Raises: RepositoryError when the folder is not the top of a git checkout, or has no commit yet.
    """
    if shutil.which("git", path=ENVIRONMENT["PATH"]) is None:
        raise RepositoryError("git is not installed: install it with your system's package manager")
    if not repository.is_dir():
        raise RepositoryError(f"{repository} is not a folder: set 'repository' in factory.yaml to a git checkout")
    top = _git(repository, "rev-parse", "--show-toplevel", check=False)
    if top.returncode or Path(os.fsdecode(top.stdout).rstrip("\n")).resolve() != repository.resolve():
        raise RepositoryError(
            f"{repository} is not a git checkout (it may have been downloaded as an archive): clone the repository, or "
            "run 'git init && git add -A && git commit -m base' there; code is trained with and patched as commits"
        )
    head = _git(repository, "rev-parse", "--verify", "--quiet", "HEAD^{commit}", check=False)
    if head.returncode:
        raise RepositoryError(f"{repository} has no commit yet: make one ('git add -A && git commit -m base')")
    return head.stdout.decode().strip()


def changed_files(repository: Path, folders: Sequence[str] = ("kernels", "trainer", "agents", "policies")) -> list[str]:
    """Files below ``folders`` whose bytes in the checkout differ from HEAD's: they are *not* part of the live code."""
    entries = {path: blob for path, (mode, blob) in _entries(repository, "HEAD").items() if mode in REGULAR}
    entries = {path: blob for path, blob in entries.items() if path.split("/")[0] in folders}
    there = [path for path in entries if (repository / path).is_file() and not (repository / path).is_symlink()]
    now = dict(zip(there, _hashes(repository, [repository / path for path in there]), strict=True))
    return sorted(path for path, blob in entries.items() if now.get(path) != blob)


def require_settled(repository: Path) -> None:
    """Raises: RepositoryError unless HEAD is a branch and the checkout holds its code: a proposal is made on, and merged into, that."""
    if _git(repository, "symbolic-ref", "--quiet", "HEAD", check=False).returncode:
        raise RepositoryError(
            f"{repository} is on no branch (detached HEAD): 'git switch' to the branch that proposals are for, or make one with "
            "'git switch -c NAME'"
        )
    if changed := changed_files(repository):
        raise RepositoryError(
            f"{repository} has changes that are not committed: {', '.join(changed[:5])}; commit or stash them first, a proposal is "
            "measured against commits"
        )


def checkout_live(workspace: Workspace, commit: str = "") -> Path:
    """The folder that holds the live commit (or the one named), made when missing and mended when it was touched."""
    commit = commit or live_commit(workspace.repository)
    return checkout(workspace.repository, commit, workspace.worktrees / f"live-{commit[:12]}")


def checkout(repository: Path, commit: str, folder: Path) -> Path:
    """A detached worktree of ``commit`` at ``folder``. A folder that holds exactly that is kept as it is."""
    entries = _entries(repository, commit)
    if not _holds(repository, folder, commit, entries):
        remove_worktree(repository, folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _git(
            repository,
            "worktree",
            "add",
            "--quiet",
            "--force",
            "--force",
            "--no-checkout",
            "--detach",
            str(folder),
            commit,
        )
        _write_files(repository, entries, folder)
        _git(folder, "read-tree", commit)
    return folder


def remove_worktree(repository: Path, folder: Path) -> None:
    """Remove a worktree and its registration, whatever is left of either."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    _git(repository, "worktree", "prune", "--expire", "now", check=False)


def remove_branch(repository: Path, branch: str) -> None:
    """Forget a proposal's branch; nothing happens when there is none."""
    assert branch.startswith("factory/"), branch
    _git(repository, "update-ref", "-d", f"refs/heads/{branch}", check=False)


def branch_numbers(repository: Path) -> set[int]:
    """The proposal numbers that branches ``factory/<agent>/<number>-<slug>`` already bear."""
    names = _git(repository, "for-each-ref", "--format=%(refname)", "refs/heads/factory/").stdout.decode().split()
    found = (re.fullmatch(r"refs/heads/factory/[^/]+/(\d+)-.*", name) for name in names)
    return {int(match.group(1)) for match in found if match}


def branch_name(agent: str, number: int, title: str) -> str:
    """``factory/<agent>/<number>-<slug>``; the slug is what letters and digits the title has."""
    return f"factory/{_slug(agent) or 'agent'}/{number}-{_slug(title) or 'patch'}"


def fork(source: Path, target: Path, edit: Callable[[str], str], path: str, message: str) -> None:
    """Make ``target`` a repository of its own: the live commit of ``source``, and one that edits the file ``path``.

    It is there whole or not at all. Raises: RepositoryError.
    """
    base = live_commit(source)
    aside = target.with_name(f".{target.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    clone = ("-c", "protocol.file.allow=always", "clone", "--quiet", "--no-checkout", "--no-hardlinks", "--template=")
    _git(source, *clone, "--", str(source), str(aside))
    _git(aside, "remote", "remove", "origin")
    mode, _ = _entries(aside, base)[path]
    text = edit(file_text(aside, base, path))
    blob = _git(aside, "hash-object", "-w", "--no-filters", "--stdin", data=_encoded(text)).stdout.decode().strip()
    _git(aside, "read-tree", base)
    _git(aside, "update-index", "--cacheinfo", f"{mode},{blob},{path}")
    tree = _git(aside, "write-tree").stdout.decode().strip()
    commit = _git(aside, "commit-tree", tree, "-p", base, data=message.encode()).stdout.decode().strip()
    _git(aside, "symbolic-ref", "HEAD", "refs/heads/main")  # the source may be on no branch
    _git(aside, "update-ref", "HEAD", commit)
    _write_files(aside, _entries(aside, commit), aside)
    os.rename(aside, target)


def apply_proposal(
    repository: Path,
    base: str,
    edits: Iterable[tuple[str, str]],
    *,
    policy: AgentsPolicy,
    branch: str,
    message: str,
    worktree: Path,
) -> Applied:
    """Commit ``edits`` (path, new text) on top of ``base`` as a new branch, and check it out at ``worktree``.

    Raises: ScopeError before anything is written; RepositoryError when git refuses. Either leaves no branch, no folder.
    """
    existing = modes(repository, base)
    changes = proposed(existing, edits)
    found = problems(policy, changes, existing)
    if found:
        raise ScopeError(found)
    with tempfile.TemporaryDirectory(prefix="factory-index-") as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        _git(repository, "read-tree", base, environment=index)
        for change in changes:
            blob = (
                _git(repository, "hash-object", "-w", "--no-filters", "--stdin", data=change.content)
                .stdout.decode()
                .strip()
            )
            _git(
                repository,
                "update-index",
                "--add",
                "--cacheinfo",
                f"{change.mode},{blob},{change.path}",
                environment=index,
            )
        tree = _git(repository, "write-tree", environment=index).stdout.decode().strip()
    if tree == _git(repository, "rev-parse", f"{base}^{{tree}}").stdout.decode().strip():
        raise ScopeError(["the patch changes nothing"])
    commit = _git(repository, "commit-tree", tree, "-p", base, data=message.encode()).stdout.decode().strip()
    _git(repository, "update-ref", f"refs/heads/{branch}", commit, NO_COMMIT)  # fails when the branch is there
    try:
        checkout(repository, commit, worktree)
        return Applied(branch, commit, base, patch_sha256(repository, base, commit), worktree)
    except BaseException:
        remove_worktree(repository, worktree)
        remove_branch(repository, branch)
        raise


def proposed(existing: Mapping[str, str], edits: Iterable[tuple[str, str]]) -> list[Change]:
    """``edits`` (path, new text) as changes of a commit whose files have the modes ``existing``."""
    return [
        Change(path, _encoded(text), *(2 * (existing[path],) if path in existing else ("100644", None)))
        for path, text in edits
    ]


def reword(repository: Path, applied: Applied, message: str) -> str:
    """Give the proposal's commit another message (same tree, same parent); returns the new commit."""
    commit = _git(repository, "commit-tree", f"{applied.commit}^{{tree}}", "-p", applied.base, data=message.encode())
    new = commit.stdout.decode().strip()
    _git(repository, "update-ref", f"refs/heads/{applied.branch}", new, applied.commit)
    return new


def patch(repository: Path, base: str, commit: str) -> str:
    """The patch as text, with whole object names: what is shown to people, hashed, and approved."""
    flags = ("--full-index", "--binary", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color")
    return os.fsdecode(_git(repository, "diff-tree", "-p", *flags, base, commit).stdout)


def patch_sha256(repository: Path, base: str, commit: str) -> str:
    return hashlib.sha256(os.fsencode(patch(repository, base, commit))).hexdigest()


def changes(repository: Path, base: str, commit: str) -> list[Change]:
    """What a commit changes against ``base``, read from the stored trees: the judge's own view of a patch."""
    before, after = _entries(repository, base), _entries(repository, commit)
    found = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        content = None
        if new is not None and new[0] != "160000":
            content = _git(repository, "cat-file", "blob", new[1]).stdout
        found.append(
            Change(path, content, new[0] if new else (old or new or ("100644", ""))[0], old[0] if old else None)
        )
    return found


def file_text(repository: Path, commit: str, path: str) -> str:
    """A stored file as text; bytes that are not UTF-8 are replaced."""
    return _git(repository, "cat-file", "blob", f"{commit}:{path}").stdout.decode("utf-8", "replace")


def modes(repository: Path, commit: str) -> dict[str, str]:
    """path → mode of every file of a commit."""
    return {path: mode for path, (mode, _) in _entries(repository, commit).items()}


# -- git as a store of trees -------------------------------------------------------------------------------------------
def _git(
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


def _entries(repository: Path, commit: str) -> dict[str, tuple[str, str]]:
    """path → (mode, blob) of a commit's tree."""
    listed = _git(repository, "ls-tree", "-r", "-z", "--full-tree", commit).stdout
    entries = {}
    for line in listed.split(b"\0")[:-1]:
        head, path = line.split(b"\t", 1)
        mode, _, blob = head.decode().split(" ")
        entries[os.fsdecode(path)] = (mode, blob)
    return entries


def _hashes(repository: Path, files: Sequence[Path]) -> list[str]:
    names = "".join(f"{file.absolute()}\n" for file in files)
    return (
        _git(repository, "hash-object", "--no-filters", "--stdin-paths", data=os.fsencode(names))
        .stdout.decode()
        .split()
    )


def _write_files(repository: Path, entries: dict[str, tuple[str, str]], folder: Path) -> None:
    """Write a tree's regular files as stored. Links and submodules are left out: no code of ours needs them."""
    regular = [(path, mode, blob) for path, (mode, blob) in entries.items() if mode in REGULAR]
    stored = _git(
        repository, "cat-file", "--batch", data="".join(f"{blob}\n" for _, _, blob in regular).encode()
    ).stdout
    at = 0
    for path, mode, _ in regular:
        end = stored.index(b"\n", at)
        size = int(stored[at:end].split(b" ")[2])
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(stored[end + 1 : end + 1 + size])
        target.chmod(0o755 if mode == "100755" else 0o644)
        at = end + 1 + size + 1


def _holds(repository: Path, folder: Path, commit: str, entries: dict[str, tuple[str, str]]) -> bool:
    """Is ``folder`` a registered worktree at ``commit`` whose files are all there, byte for byte?"""
    if folder.is_symlink() or not (folder / ".git").is_file():
        return False
    head = _git(folder, "rev-parse", "--verify", "--quiet", "HEAD^{commit}", check=False).stdout.decode().strip()
    ours = _git(folder, "rev-parse", "--path-format=absolute", "--git-common-dir", check=False).stdout
    if head != commit or ours != _git(repository, "rev-parse", "--path-format=absolute", "--git-common-dir").stdout:
        return False
    files = {folder / path: blob for path, (mode, blob) in entries.items() if mode in REGULAR}
    if not all(file.is_file() and not file.is_symlink() for file in files):
        return False
    return _hashes(repository, list(files)) == list(files.values())


def _encoded(text: str) -> bytes:
    # A lone surrogate cannot be stored as UTF-8; let the scope rules say so.
    return text.encode("utf-8", "surrogatepass")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
