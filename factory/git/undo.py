"""Undoes a patch below later edits, by git's three-way merge of each file of the patch.

The file as the patch left it is the ancestor. One side is the live file, with the edits that people made since. The other side is the file before
the patch. Lines that only one side changed need no decision. Only lines that both changed are a conflict, and the error names them.

``git merge-file`` gets three files and reads no attribute, so no merge driver of a repository is started.
"""

from __future__ import annotations

import difflib
import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

from factory.git.git_store import (
    REGULAR,
    RepositoryError,
    make_commit,
    read_tree_entries,
    run_git,
)
from factory.git.scope import FileChange
from kernels.contract.message import Message

Entry = tuple[str, str]  # mode and blob of a file in a tree
MAX_CONFLICTS = 127  # the largest exit code with which 'git merge-file' counts conflicts; larger codes are errors


def make_revert_commit(
    repository: Path, live: str, base: str, commit: str, message: str, *, drop_edited_new_files: bool = False
) -> str:
    """Make a commit on top of ``live`` that reverts the changes from ``base`` to ``commit``. No branch is moved.

    Later edits of other lines remain, also if a file was renamed since. ``drop_edited_new_files``: a file that the patch added and somebody edited
    since is removed; otherwise it is a conflict.

    Returns the commit; ``live`` if the changes are reverted already. Raises: RepositoryError that names the conflicting files and lines.
    """
    now, ours, before = (read_tree_entries(repository, name) for name in (live, commit, base))
    paths = sorted(path for path in ours.keys() | before.keys() if ours.get(path) != before.get(path))
    renamed = _read_renames(repository, commit, live) if any(path in ours.keys() - now.keys() for path in paths) else {}
    changes: list[FileChange] = []
    conflicts: list[Message] = []
    for path in paths:
        place = path if path in now else renamed.get(path, path)
        here, theirs, old = now.get(place), ours.get(path), before.get(path)
        if here == old:
            continue
        if here == theirs:
            changes.append(_make_change(repository, place, here, old))
        elif here is None:
            conflicts.append(Message("git.file_removed", "{file} (removed or rewritten elsewhere since)", file=place))
        elif old is None and drop_edited_new_files:
            changes.append(FileChange(place, None, here[0], here[0]))
        elif theirs is None or old is None:
            conflicts.append(
                Message("git.file_edited", "{file} (all of it: one of the two edits adds the file)", file=place)
            )
        else:
            merged, lines = _merge(repository, here, theirs, old)
            conflicts += [
                Message("git.lines_edited", "{file} lines {first}–{last}", file=place, first=first, last=last)
                for first, last in lines
            ]
            mode = here[0] if here[0] != theirs[0] else old[0]
            changes.append(FileChange(place, merged, mode, here[0]))
    if conflicts:
        raise RepositoryError(
            "git.undo_conflict",
            "The undo of commit {commit:.12} conflicts with later edits: {places}. To undo the commit by hand, run "
            "'git revert {commit:.12}', correct these places, and commit the result",
            commit=commit,
            places=conflicts,
        )
    return make_commit(repository, live, changes, message) or live


def find_conflicting_lines(ancestor: str, live: str, other: str) -> list[tuple[int, int]]:
    """Return the first and last line, in ``live``, of each edit that touches lines which ``other`` changes too. Lines are counted from 1.

    >>> find_conflicting_lines("a\\nb\\nc\\n", "a\\nB\\nc\\nd\\n", "a\\nx\\nc\\n")
    [(2, 2)]
    """
    ours, theirs = (_list_edits(ancestor.splitlines(), text.splitlines()) for text in (live, other))
    both = [edit for edit in ours if any(edit[0] <= end and first <= edit[1] for first, end, *_ in theirs)]
    return [(begin + 1, max(begin + 1, end)) for _, _, begin, end in both or ours]


def _list_edits(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int, int, int]]:
    """Return (begin, end in ``old``, begin, end in ``new``) of each changed range."""
    found = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [tuple(places) for kind, *places in found if kind != "equal"]  # type: ignore[misc]


def _merge(repository: Path, here: Entry, theirs: Entry, old: Entry) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the merged content, and the conflicting lines of the live file; no lines: the merge is clean."""
    if not all(entry[0] in REGULAR for entry in (here, theirs, old)):
        return b"", [(1, 1)]
    contents = [run_git(repository, "cat-file", "blob", entry[1]) for entry in (here, theirs, old)]
    live, ancestor, other = (content.decode("utf-8", "surrogateescape") for content in contents)
    if any(b"\0" in content for content in contents):  # git cannot merge binary files
        return b"", [(1, max(1, live.count("\n")))]
    mark = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="factory-undo-") as folder:
        files = [Path(folder, name) for name in ("live", "ancestor", "other")]
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)
        labels = [word for _ in files for word in ("-L", mark)]
        words = ("merge-file", "-p", "-q", *labels, *map(str, files))
        merged = run_git(repository, *words, accepted_codes=range(MAX_CONFLICTS + 1))
    return merged, find_conflicting_lines(ancestor, live, other) if mark.encode() in merged else []


def _make_change(repository: Path, path: str, here: Entry | None, wanted: Entry | None) -> FileChange:
    """Return the change that gives a file the content of ``wanted``; None removes the file."""
    content = None
    if wanted is not None and wanted[0] != "160000":
        content = run_git(repository, "cat-file", "blob", wanted[1])
    mode = (wanted or here or ("100644", ""))[0]
    return FileChange(path, content, mode, here[0] if here else None)


def _read_renames(repository: Path, commit: str, live: str) -> dict[str, str]:
    """Return old path → new path of the files that were renamed from ``commit`` to ``live``, as git finds them by their content."""
    words = ("diff-tree", "-r", "-z", "-M", "--diff-filter=R", "--name-status", "--no-ext-diff", commit, live)
    parts = [os.fsdecode(part) for part in run_git(repository, *words).split(b"\0")[:-1]]
    return dict(zip(parts[1::3], parts[2::3]))
