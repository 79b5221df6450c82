"""The git repository whose code is trained with and patched, handled as data.

Patches come as data and become commits and branches; a branch that people work on moves only by ``advance``. git never checks out a file
(``git_store``), so that no filter, line-ending rule or attribute runs.
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
from factory.core.faults import is_of_no_file
from factory.core.removal import remove
from factory.core.workspace import Workspace
from factory.git.git_store import ENVIRONMENT, REGULAR, commit_of, encoded, entries_of, git, hashes, line, write_files
from factory.git.git_store import RepositoryError as RepositoryError
from factory.git.scope import AgentsPolicy, Change, problems
from kernels.contract.files import sync_folder

NO_COMMIT = "0" * 40
LIVE_FOLDERS = ("kernels", "trainer", "agents", "policies")


class ScopeError(InputError):
    """A patch is out of the scope that agents may change. ``problems``: a sentence for each reason."""

    def __init__(self, found: list[str]) -> None:
        super().__init__("the patch is out of scope: " + "; ".join(found))
        self.problems = found


class CheckoutError(RepositoryError):
    """A commit that is there could not be checked out now."""


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
    top = line(repository, "rev-parse", "--show-toplevel", check=False)
    if not top or Path(top).resolve() != repository.resolve():
        raise RepositoryError(
            f"{repository} is not a git checkout (it may have been downloaded as an archive): clone the repository, or "
            "run 'git init && git add -A && git commit -m base' there; code is trained with and patched as commits"
        )
    head = line(repository, "rev-parse", "--verify", "--quiet", "HEAD^{commit}", check=False)
    if not head:
        raise RepositoryError(f"{repository} has no commit yet: make one ('git add -A && git commit -m base')")
    return head


def changed_files(repository: Path) -> list[str]:
    """Files below ``LIVE_FOLDERS`` that differ from HEAD's: their changes are *not* part of the live code."""
    entries = {path: blob for path, (mode, blob) in entries_of(repository, "HEAD").items() if mode in REGULAR}
    entries = {path: blob for path, blob in entries.items() if path.split("/")[0] in LIVE_FOLDERS}
    there = [path for path in entries if (repository / path).is_file() and not (repository / path).is_symlink()]
    now = dict(zip(there, hashes(repository, [repository / path for path in there]), strict=True))
    return sorted(path for path, blob in entries.items() if now.get(path) != blob)


def require_settled(repository: Path) -> None:
    """Raises: RepositoryError unless HEAD is a branch and the checkout holds its code, on which a proposal is made and merged."""
    if not line(repository, "symbolic-ref", "--quiet", "HEAD", check=False):
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
    """The folder that holds the live commit (or ``commit``); made when it is missing, and again when it was changed."""
    commit = commit or live_commit(workspace.repository)
    return checkout(workspace.repository, commit, checkout_folder(workspace.worktrees, commit))


def checkout_folder(worktrees: Path, commit: str) -> Path:
    """Where a commit is checked out, the live code's or a patch's: code cannot tell by its folder's name which it is."""
    return worktrees / f"live-{commit[:12]}"


def checkout(repository: Path, commit: str, folder: Path) -> Path:
    """A detached worktree of ``commit`` at ``folder``. A folder that holds exactly that is left as it is.

    Raises: RepositoryError where there is no such commit; CheckoutError where there is.
    """
    entries = entries_of(repository, commit)
    if not _holds(repository, folder, commit, entries):
        remove_worktree(repository, folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        add = ("worktree", "add", "--quiet", "--force", "--force", "--no-checkout", "--detach")
        try:
            git(repository, *add, str(folder), commit)
            write_files(repository, entries, folder)
            git(folder, "read-tree", commit)
        except RepositoryError as error:
            raise CheckoutError(str(error)) from error
    return folder


def remove_worktree(repository: Path, folder: Path) -> None:
    """Remove a worktree and its registration, whatever is left of either."""
    remove(folder)
    git(repository, "worktree", "prune", "--expire", "now", check=False)


def make_branch(repository: Path, branch: str, commit: str) -> None:
    """Raises: RepositoryError when the branch is there already."""
    git(repository, "update-ref", f"refs/heads/{branch}", commit, NO_COMMIT)


def remove_branch(repository: Path, branch: str) -> None:
    """Delete a proposal's branch, if there is one."""
    assert branch.startswith("factory/"), branch
    git(repository, "update-ref", "-d", f"refs/heads/{branch}", check=False)


def branch_numbers(repository: Path) -> set[int]:
    """The numbers in the names of branches ``factory/<agent>/<number>-<slug>``."""
    names = line(repository, "for-each-ref", "--format=%(refname)", "refs/heads/factory/").split()
    found = (re.fullmatch(r"refs/heads/factory/[^/]+/(\d+)-.*", name) for name in names)
    return {int(match.group(1)) for match in found if match}


def branch_name(agent: str, number: int, title: str) -> str:
    """``factory/<agent>/<number>-<slug>``; the slug is the title's letters and digits."""
    return f"factory/{_slug(agent) or 'agent'}/{number}-{_slug(title) or 'patch'}"


def fork(source: Path, target: Path, edits: Mapping[str, Callable[[str], str]], message: str) -> None:
    """Make the repository ``target``: the live commit of ``source``, and a commit that edits files (path → new text from old).

    ``target`` is complete or absent. Raises: RepositoryError.
    """
    base = live_commit(source)
    aside = target.with_name(f".{target.name}.part")
    remove(aside)
    clone = ("-c", "protocol.file.allow=always", "clone", "--quiet", "--no-checkout", "--no-hardlinks", "--template=")
    git(source, *clone, "--", str(source), str(aside))
    git(aside, "remote", "remove", "origin")
    held = entries_of(aside, base)
    changes = [
        Change(path, encoded(edit(file_text(aside, base, path))), held[path][0], held[path][0])
        for path, edit in edits.items()
    ]
    commit = commit_of(aside, base, changes, message) or base
    git(aside, "read-tree", commit)
    git(aside, "symbolic-ref", "HEAD", "refs/heads/main")  # the source may be on no branch
    git(aside, "update-ref", "HEAD", commit)
    write_files(aside, entries_of(aside, commit), aside)
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
) -> Applied:
    """Commit ``edits`` (path, new text) on top of ``base`` as a new branch, and check it out in a folder below ``worktrees``.

    Raises: ScopeError before anything is written; RepositoryError when git fails. Neither leaves a branch or a folder.
    """
    existing = modes(repository, base)
    changes = proposed(existing, edits)
    found = problems(policy, changes, existing)
    if found:
        raise ScopeError(found)
    commit = commit_of(repository, base, changes, message)
    if commit is None:
        raise ScopeError(["the patch changes nothing"])
    make_branch(repository, branch, commit)
    worktree = checkout_folder(worktrees, commit)
    try:
        checkout(repository, commit, worktree)
        return Applied(branch, commit, base, patch_sha256(repository, base, commit), worktree)
    except BaseException:
        try:
            remove_worktree(repository, worktree)
        finally:
            remove_branch(repository, branch)
        raise


def proposed(existing: Mapping[str, str], edits: Iterable[tuple[str, str]]) -> list[Change]:
    """``edits`` (path, new text) as changes to a commit; ``existing``: path → mode of its files."""
    return [
        Change(path, encoded(text), *(2 * (existing[path],) if path in existing else ("100644", None)))
        for path, text in edits
    ]


def branch_commit(repository: Path, branch: str) -> str | None:
    """Where a branch points; None when there is none."""
    return line(repository, "rev-parse", "--verify", "--quiet", f"refs/heads/{branch}^{{commit}}", check=False) or None


def contains(repository: Path, commit: str, older: str) -> bool:
    """Is ``older`` an ancestor of ``commit``, or that commit itself? Raises: RepositoryError for a fault of the machine."""
    try:
        git(repository, "merge-base", "--is-ancestor", older, commit)
    except RepositoryError as error:
        if is_of_no_file(error):
            raise
        return False
    return True


def undoing(repository: Path, live: str, base: str, commit: str, message: str) -> str:
    """A commit on top of ``live`` that undoes what ``commit`` changed against ``base``; no branch is moved.

    ``live`` itself when that was done before. Raises: RepositoryError naming the files that were changed again since.
    """
    now, ours, before = (entries_of(repository, name) for name in (live, commit, base))
    paths = [path for path in ours.keys() | before.keys() if ours.get(path) != before.get(path)]
    if all(now.get(path) == before.get(path) for path in paths):
        return live
    if newer := sorted(path for path in paths if now.get(path) != ours.get(path)):
        raise RepositoryError(f"{', '.join(newer)} changed again since: undo it by hand")
    return commit_of(repository, live, changes(repository, commit, base), message) or live


def advance(repository: Path, base: str, commit: str) -> None:
    """Move the checked-out branch from ``base`` to ``commit``, with files and index. After a kill, the same call finishes.

    Raises: RepositoryError, and nothing has moved, when no branch is checked out, it is no longer at ``base``, or a file that would
    change has uncommitted changes.
    """
    head = line(repository, "symbolic-ref", "--quiet", "HEAD", check=False)
    if not head:
        raise RepositoryError(f"{repository} has no branch checked out (its HEAD is detached): check one out first")
    before, after = entries_of(repository, base), entries_of(repository, commit)
    changed = [path for path in sorted(before.keys() | after.keys()) if before.get(path) != after.get(path)]
    staged = entries_of(repository, None)
    edited = [
        path
        for path in changed
        if staged.get(path) not in (sides := (before.get(path), after.get(path)))
        or not _is_either(repository, path, *sides)
    ]
    if edited:
        raise RepositoryError(
            f"{repository} holds changes to {', '.join(edited)} that are not committed: commit or stash them first"
        )
    for path in changed:
        aside = repository / f"{path}.factory-part"
        if path in after:
            write_files(repository, {f"{path}.factory-part": after[path]}, repository, flushed=True)
            aside.replace(repository / path)
            git(repository, "update-index", "--add", "--cacheinfo", ",".join((*after[path], path)))
        else:
            (repository / path).unlink(missing_ok=True)
            git(repository, "update-index", "--force-remove", path)
    for folder in sorted({parent for path in changed for parent in (repository / path).parents if parent.is_dir()}):
        if folder.is_relative_to(repository):
            sync_folder(folder)
    git(repository, "update-ref", head, commit, base)  # fails when it has moved


def reword(repository: Path, applied: Applied, message: str) -> str:
    """Give the proposal's commit another message (same tree, same parent); returns the new commit."""
    new = line(repository, "commit-tree", f"{applied.commit}^{{tree}}", "-p", applied.base, data=message.encode())
    git(repository, "update-ref", f"refs/heads/{applied.branch}", new, applied.commit)
    return new


def message(repository: Path, commit: str) -> str:
    """A commit's message."""
    return git(repository, "show", "--no-patch", "--format=%B", commit).decode("utf-8", "replace")


def commits_between(repository: Path, older: str, commit: str) -> set[str]:
    """The names of the commits that ``commit`` has and ``older`` has not. Raises: RepositoryError."""
    return set(git(repository, "rev-list", "--end-of-options", f"{older}..{commit}").decode().split())


def subjects(repository: Path, older: str, commit: str) -> list[str]:
    """The commits that ``commit`` has and ``older`` has not, newest first, as '1a2b3c4 What it does'; none where a commit is not there."""
    try:
        found = git(repository, "log", "--max-count=200", "--format=%h %s", "--end-of-options", f"{older}..{commit}")
    except RepositoryError:
        return []
    return found.decode("utf-8", "replace").splitlines()


def patch(repository: Path, base: str, commit: str) -> str:
    """The patch as text, with whole object names: it is shown to people, hashed, and approved."""
    flags = ("--full-index", "--binary", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color")
    return os.fsdecode(git(repository, "diff-tree", "-p", *flags, base, commit))


def patch_sha256(repository: Path, base: str, commit: str) -> str:
    return hashlib.sha256(os.fsencode(patch(repository, base, commit))).hexdigest()


def changes(repository: Path, base: str, commit: str) -> list[Change]:
    """What a commit changes against ``base``, read from the stored trees."""
    before, after = entries_of(repository, base), entries_of(repository, commit)
    found = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        content = None
        if new is not None and new[0] != "160000":
            content = git(repository, "cat-file", "blob", new[1])
        found.append(
            Change(path, content, new[0] if new else (old or new or ("100644", ""))[0], old[0] if old else None)
        )
    return found


def file_text(repository: Path, commit: str, path: str) -> str:
    """A stored file as text; bytes that are not UTF-8 are replaced."""
    return git(repository, "cat-file", "blob", f"{commit}:{path}").decode("utf-8", "replace")


def last_changed(repository: Path, commit: str, path: str) -> list[str]:
    """The commit that each line of a stored file is from. Raises: RepositoryError when there is no such file."""
    blame = ("-c", "blame.ignoreRevsFile=", "blame", "--line-porcelain", "--no-textconv", commit, "--", path)
    lines = git(repository, *blame).split(b"\n")
    # A line of the file stands behind a tab; the first line of what is said about it names the commit.
    starts = [0, *(number + 1 for number, line in enumerate(lines) if line.startswith(b"\t"))]
    return [lines[start].split(b" ")[0].decode() for start in starts[:-1]]


def modes(repository: Path, commit: str) -> dict[str, str]:
    """path → mode of every file of a commit."""
    return {path: mode for path, (mode, _) in entries_of(repository, commit).items()}


# -- the checkout ---------------------------------------------------------------------------------------------------------
def _holds(repository: Path, folder: Path, commit: str, entries: dict[str, tuple[str, str]]) -> bool:
    """Is ``folder`` a registered worktree at ``commit`` whose files are all there, byte for byte?"""
    if folder.is_symlink() or not (folder / ".git").is_file():
        return False
    head = line(folder, "rev-parse", "--verify", "--quiet", "HEAD^{commit}", check=False)
    common = ("rev-parse", "--path-format=absolute", "--git-common-dir")
    if head != commit or line(folder, *common, check=False) != line(repository, *common):
        return False
    files = {folder / path: blob for path, (mode, blob) in entries.items() if mode in REGULAR}
    if not all(file.is_file() and not file.is_symlink() for file in files):
        return False
    return hashes(repository, list(files)) == list(files.values())


def _is_either(repository: Path, path: str, *entries: tuple[str, str] | None) -> bool:
    """Is the checkout's file equal to one of these entries? None: no file."""
    file = repository / path
    if not file.exists() and not file.is_symlink():
        return None in entries
    if not file.is_file() or file.is_symlink():
        return False
    return hashes(repository, [file])[0] in [entry[1] for entry in entries if entry]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
