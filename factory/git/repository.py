"""The git repository with the training code that agents patch.

A patch becomes a commit on a branch of its own. Only ``advance_branch`` moves a branch that people use. git itself never checks out a file
(``git_store``), so no filter, line-ending rule or attribute applies.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from factory.core.errors import InputError
from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.core.path_removal import remove_path
from factory.core.workspace import Workspace
from factory.git.git_store import (
    ENVIRONMENT,
    REGULAR,
    encode_text,
    hash_files_as_blobs,
    make_commit,
    read_git_line,
    read_tree_entries,
    run_git,
    write_tree_files,
)
from factory.git.git_store import RepositoryError as RepositoryError
from factory.git.scope import AgentsPolicy, FileChange, find_scope_problems, make_no_change_problem
from kernels.contract.files import sync_folder

NO_COMMIT = "0" * 40
LIVE_FOLDERS = ("kernels", "models", "trainer", "agents", "policies")


class ScopeError(InputError):
    """A patch is out of scope: it changes files that agents may not change. ``problems`` has a message for each reason."""

    def __init__(self, found: list[str]) -> None:
        super().__init__("git.out_of_scope", "The patch is out of scope: {problems}", problems="; ".join(found))
        self.problems = found


class CheckoutError(RepositoryError):
    """An existing commit could not be checked out, because of a fault that may be temporary."""


@dataclass(frozen=True)
class AppliedPatch:
    """A patch as a commit on its own branch, checked out in its own folder."""

    branch: str
    commit: str
    base: str
    patch_sha256: str
    worktree: Path


def get_live_commit(repository: Path) -> str:
    """Return the live commit: the HEAD of the checkout, on a branch or detached. Training runs with its code.

    Raises: RepositoryError when the folder is not the top of a git checkout, or has no commit yet.
    """
    if shutil.which("git", path=ENVIRONMENT["PATH"]) is None:
        raise RepositoryError(
            "git.not_installed", "git is not installed: install it with your system's package manager"
        )
    if not repository.is_dir():
        raise RepositoryError(
            "git.no_folder",
            "{repository} is not a folder: set 'repository' in factory.yaml to a git checkout",
            repository=repository,
        )
    top = read_git_line(repository, "rev-parse", "--show-toplevel", check=False)
    if not top or Path(top).resolve() != repository.resolve():
        raise RepositoryError(
            "git.no_checkout",
            "{repository} is not a git checkout (perhaps an unpacked archive). The factory needs a checkout "
            "with commits. Clone the repository, or run 'git init && git add -A && git commit -m base' in "
            "this folder",
            repository=repository,
        )
    head = read_git_line(repository, "rev-parse", "--verify", "--quiet", "HEAD^{commit}", check=False)
    if not head:
        raise RepositoryError(
            "git.no_commit",
            "{repository} has no commit yet: run 'git add -A && git commit -m base' in this folder",
            repository=repository,
        )
    return head


def list_changed_files(repository: Path) -> list[str]:
    """Return the files below ``LIVE_FOLDERS`` that differ from HEAD. These changes are *not* part of the live code."""
    entries = {path: blob for path, (mode, blob) in read_tree_entries(repository, "HEAD").items() if mode in REGULAR}
    entries = {path: blob for path, blob in entries.items() if path.split("/")[0] in LIVE_FOLDERS}
    there = [path for path in entries if (repository / path).is_file() and not (repository / path).is_symlink()]
    now = dict(zip(there, hash_files_as_blobs(repository, [repository / path for path in there]), strict=True))
    return sorted(path for path, blob in entries.items() if now.get(path) != blob)


def check_nothing_uncommitted(repository: Path) -> None:
    """Check that a branch is checked out without uncommitted changes. Proposals are made and merged only then. Raises: RepositoryError."""
    if not read_git_line(repository, "symbolic-ref", "--quiet", "HEAD", check=False):
        raise RepositoryError(
            "git.no_branch",
            "{repository} is on no branch (detached HEAD). Switch to the branch for proposals with 'git switch NAME', "
            "or make one with 'git switch -c NAME'",
            repository=repository,
        )
    if changed := list_changed_files(repository):
        raise RepositoryError(
            "git.uncommitted",
            "{repository} has uncommitted changes in {files}, but proposals are measured against commits. "
            "Commit the changes, or put them away with 'git stash'",
            repository=repository,
            files=changed[:5],
        )


def checkout_live_code(workspace: Workspace, commit: str = "") -> Path:
    """Return a worktree of the live commit, or of ``commit``. Make the worktree if it is missing or was changed."""
    commit = commit or get_live_commit(workspace.repository)
    return checkout_commit(workspace.repository, commit, get_checkout_folder(workspace.worktrees, commit))


def get_checkout_folder(worktrees: Path, commit: str) -> Path:
    """Return the folder for a commit's worktree. Folders of live code and of patches have similar names, so that code cannot tell which it is."""
    return worktrees / f"live-{commit[:12]}"


def checkout_commit(repository: Path, commit: str, folder: Path) -> Path:
    """Make ``folder`` a detached worktree of ``commit``, unless it already is one without any change. Returns the folder.

    Raises: RepositoryError for an unknown commit; CheckoutError if a known commit cannot be checked out.
    """
    entries = read_tree_entries(repository, commit)
    if not _holds(repository, folder, commit, entries):
        remove_worktree(repository, folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        add = ("worktree", "add", "--quiet", "--force", "--force", "--no-checkout", "--detach")
        try:
            run_git(repository, *add, str(folder), commit)
            write_tree_files(repository, entries, folder)
            run_git(folder, "read-tree", commit)
        except RepositoryError as error:
            raise CheckoutError(error.message) from error
    return folder


def remove_worktree(repository: Path, folder: Path) -> None:
    """Remove a worktree and its registration, if they exist."""
    remove_path(folder)
    run_git(repository, "worktree", "prune", "--expire", "now", check=False)


def make_branch(repository: Path, branch: str, commit: str) -> None:
    """Make a branch at a commit. Raises: RepositoryError when the branch exists."""
    run_git(repository, "update-ref", f"refs/heads/{branch}", commit, NO_COMMIT)


def remove_branch(repository: Path, branch: str) -> None:
    """Delete a proposal's branch, if it exists."""
    assert branch.startswith("factory/"), branch
    run_git(repository, "update-ref", "-d", f"refs/heads/{branch}", check=False)


def list_numbers_of_proposal_branches(repository: Path) -> set[int]:
    """Return the numbers in the names of branches ``factory/<agent>/<number>-<slug>``."""
    names = read_git_line(repository, "for-each-ref", "--format=%(refname)", "refs/heads/factory/").split()
    found = (re.fullmatch(r"refs/heads/factory/[^/]+/(\d+)-.*", name) for name in names)
    return {int(match.group(1)) for match in found if match}


def make_branch_name(agent: str, number: int, title: str) -> str:
    """Return ``factory/<agent>/<number>-<slug>``. The slug is the title's letters and digits."""
    return f"factory/{_slug(agent) or 'agent'}/{number}-{_slug(title) or 'patch'}"


def fork_repository(source: Path, target: Path, edits: Mapping[str, Callable[[str], str]], message: str) -> None:
    """Make the repository ``target`` from the live commit of ``source``, with a commit on top. ``edits``: path → function from old to new text.

    After a kill, ``target`` is complete or absent. Raises: RepositoryError.
    """
    base = get_live_commit(source)
    aside = target.with_name(f".{target.name}.part")
    remove_path(aside)
    clone = ("-c", "protocol.file.allow=always", "clone", "--quiet", "--no-checkout", "--no-hardlinks", "--template=")
    run_git(source, *clone, "--", str(source), str(aside))
    run_git(aside, "remote", "remove", "origin")
    held = read_tree_entries(aside, base)
    changes = [
        FileChange(path, encode_text(edit(read_file_text(aside, base, path))), held[path][0], held[path][0])
        for path, edit in edits.items()
    ]
    commit = make_commit(aside, base, changes, message) or base
    run_git(aside, "read-tree", commit)
    run_git(aside, "symbolic-ref", "HEAD", "refs/heads/main")  # the source may be on no branch
    run_git(aside, "update-ref", "HEAD", commit)
    write_tree_files(aside, read_tree_entries(aside, commit), aside)
    os.rename(aside, target)


def apply_proposal(
    repository: Path,
    base: str,
    edits: Iterable[tuple[str, str]],
    *,
    policy: AgentsPolicy,
    branch: str,
    message: str,
    worktrees: Path,
) -> AppliedPatch:
    """Commit ``edits`` (path, new text) on top of ``base`` as a new branch, and check the commit out in a folder below ``worktrees``.

    Raises: ScopeError before anything is written; RepositoryError if git fails. After an error, no branch and no folder remains.
    """
    existing = read_file_modes(repository, base)
    changes = convert_edits_to_changes(existing, edits)
    found = find_scope_problems(policy, changes, existing)
    if found:
        raise ScopeError(found)
    commit = make_commit(repository, base, changes, message)
    if commit is None:
        raise ScopeError([make_no_change_problem()])
    make_branch(repository, branch, commit)
    worktree = get_checkout_folder(worktrees, commit)
    try:
        checkout_commit(repository, commit, worktree)
        return AppliedPatch(branch, commit, base, hash_patch(repository, base, commit), worktree)
    except BaseException:
        try:
            remove_worktree(repository, worktree)
        finally:
            remove_branch(repository, branch)
        raise


def convert_edits_to_changes(existing: Mapping[str, str], edits: Iterable[tuple[str, str]]) -> list[FileChange]:
    """Return ``edits`` (path, new text) as changes to a commit. ``existing``: path → mode of each file of the commit."""
    return [
        FileChange(path, encode_text(text), *(2 * (existing[path],) if path in existing else ("100644", None)))
        for path, text in edits
    ]


def get_branch_commit(repository: Path, branch: str) -> str | None:
    """Return the commit of a branch; None if the branch does not exist."""
    return (
        read_git_line(repository, "rev-parse", "--verify", "--quiet", f"refs/heads/{branch}^{{commit}}", check=False)
        or None
    )


def is_ancestor(repository: Path, commit: str, older: str) -> bool:
    """Return whether ``older`` is an ancestor of ``commit`` or equal to it. Raises: RepositoryError for a fault of the machine."""
    try:
        run_git(repository, "merge-base", "--is-ancestor", older, commit)
    except RepositoryError as error:
        if is_machine_fault_unrelated_to_files(error):
            raise
        return False
    return True


def advance_branch(repository: Path, base: str, commit: str) -> None:
    """Move the checked-out branch from ``base`` to ``commit``, with files and index. After a kill, the same call completes the move.

    Raises: RepositoryError without moving the branch if no branch is checked out, the branch is no longer at ``base``, or a file to change has
    uncommitted changes.
    """
    head = read_git_line(repository, "symbolic-ref", "--quiet", "HEAD", check=False)
    if not head:
        raise RepositoryError(
            "git.detached",
            "{repository} has no branch checked out (its HEAD is detached): check out a branch first",
            repository=repository,
        )
    before, after = read_tree_entries(repository, base), read_tree_entries(repository, commit)
    changed = [path for path in sorted(before.keys() | after.keys()) if before.get(path) != after.get(path)]
    staged = read_tree_entries(repository, None)
    edited = [
        path
        for path in changed
        if staged.get(path) not in (sides := (before.get(path), after.get(path)))
        or not _is_either(repository, path, *sides)
    ]
    if edited:
        raise RepositoryError(
            "git.edited",
            "{repository} has uncommitted changes in {files}, which the merge would overwrite. "
            "Commit the changes, or put them away with 'git stash'",
            repository=repository,
            files=edited,
        )
    for path in changed:
        aside = repository / f"{path}.factory-part"
        if path in after:
            write_tree_files(repository, {f"{path}.factory-part": after[path]}, repository, flushed=True)
            aside.replace(repository / path)
            run_git(repository, "update-index", "--add", "--cacheinfo", ",".join((*after[path], path)))
        else:
            (repository / path).unlink(missing_ok=True)
            run_git(repository, "update-index", "--force-remove", path)
    for folder in sorted({parent for path in changed for parent in (repository / path).parents if parent.is_dir()}):
        if folder.is_relative_to(repository):
            sync_folder(folder)
    run_git(repository, "update-ref", head, commit, base)  # fails if the branch is no longer at ``base``


def reword_commit(repository: Path, applied: AppliedPatch, message: str) -> str:
    """Give the proposal's commit another message, and move its branch to the new commit. Returns the new commit: same tree, same parent."""
    new = read_git_line(
        repository, "commit-tree", f"{applied.commit}^{{tree}}", "-p", applied.base, data=message.encode()
    )
    run_git(repository, "update-ref", f"refs/heads/{applied.branch}", new, applied.commit)
    return new


def read_commit_message(repository: Path, commit: str) -> str:
    """Return a commit's message."""
    return run_git(repository, "show", "--no-patch", "--format=%B", commit).decode("utf-8", "replace")


def list_commits_between(repository: Path, older: str, commit: str) -> set[str]:
    """Return the ancestors of ``commit`` (and itself) that are not ancestors of ``older``. Raises: RepositoryError."""
    return set(run_git(repository, "rev-list", "--end-of-options", f"{older}..{commit}").decode().split())


def list_commit_subjects(repository: Path, older: str, commit: str) -> list[str]:
    """Return the commits from ``older`` to ``commit``, newest first, as '1a2b3c4 What it does'; none if a commit is unknown."""
    try:
        found = run_git(
            repository, "log", "--max-count=200", "--format=%h %s", "--end-of-options", f"{older}..{commit}"
        )
    except RepositoryError:
        return []
    return found.decode("utf-8", "replace").splitlines()


def read_patch(repository: Path, base: str, commit: str) -> str:
    """Return the patch as text, with full object names. People read this text, and approve it by its hash."""
    flags = ("--full-index", "--binary", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color")
    return os.fsdecode(run_git(repository, "diff-tree", "-p", *flags, base, commit))


def hash_patch(repository: Path, base: str, commit: str) -> str:
    """Return the SHA-256 of the patch's text (``read_patch``)."""
    return hashlib.sha256(os.fsencode(read_patch(repository, base, commit))).hexdigest()


def read_file_changes(repository: Path, base: str, commit: str) -> list[FileChange]:
    """Return the changes from ``base`` to a commit, from the stored trees."""
    before, after = read_tree_entries(repository, base), read_tree_entries(repository, commit)
    found = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        content = None
        if new is not None and new[0] != "160000":
            content = run_git(repository, "cat-file", "blob", new[1])
        found.append(
            FileChange(path, content, new[0] if new else (old or new or ("100644", ""))[0], old[0] if old else None)
        )
    return found


def read_file_text(repository: Path, commit: str, path: str) -> str:
    """Return a stored file as text. Bytes that are not UTF-8 are replaced."""
    return run_git(repository, "cat-file", "blob", f"{commit}:{path}").decode("utf-8", "replace")


def list_last_commits_of_lines(repository: Path, commit: str, path: str) -> list[str]:
    """Return for each line of a stored file the commit that last changed it. Raises: RepositoryError for an unknown file."""
    blame = ("-c", "blame.ignoreRevsFile=", "blame", "--line-porcelain", "--no-textconv", commit, "--", path)
    lines = run_git(repository, *blame).split(b"\n")
    # In git's output, a line of the file stands after a tab. The lines before it describe it, and the first of these names the commit.
    starts = [0, *(number + 1 for number, line in enumerate(lines) if line.startswith(b"\t"))]
    return [lines[start].split(b" ")[0].decode() for start in starts[:-1]]


def read_file_modes(repository: Path, commit: str) -> dict[str, str]:
    """Return path → mode of all files of a commit."""
    return {path: mode for path, (mode, _) in read_tree_entries(repository, commit).items()}


# -- the checkout ---------------------------------------------------------------------------------------------------------
def _holds(repository: Path, folder: Path, commit: str, entries: dict[str, tuple[str, str]]) -> bool:
    """Return whether ``folder`` is a registered worktree at ``commit`` with all files, byte for byte."""
    if folder.is_symlink() or not (folder / ".git").is_file():
        return False
    head = read_git_line(folder, "rev-parse", "--verify", "--quiet", "HEAD^{commit}", check=False)
    common = ("rev-parse", "--path-format=absolute", "--git-common-dir")
    if head != commit or read_git_line(folder, *common, check=False) != read_git_line(repository, *common):
        return False
    files = {folder / path: blob for path, (mode, blob) in entries.items() if mode in REGULAR}
    if not all(file.is_file() and not file.is_symlink() for file in files):
        return False
    return hash_files_as_blobs(repository, list(files)) == list(files.values())


def _is_either(repository: Path, path: str, *entries: tuple[str, str] | None) -> bool:
    """Return whether the checkout's file equals one of these entries. None stands for no file."""
    file = repository / path
    if not file.exists() and not file.is_symlink():
        return None in entries
    if not file.is_file() or file.is_symlink():
        return False
    return hash_files_as_blobs(repository, [file])[0] in [entry[1] for entry in entries if entry]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
