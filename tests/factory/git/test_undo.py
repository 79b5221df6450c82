"""Undoing a patch in a real git repository after people changed the same files: edits of other lines remain, and conflicts are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factory.git.git_store import RepositoryError, read_tree_entries, run_git
from factory.git.undo import find_conflicting_lines, make_revert_commit
from tests.support.git import git
from tests.support.messages import refused

OPS = "".join(f"line {number}\n" for number in range(1, 21))
PATCHED = OPS.replace("line 5\n", "line 5, faster\n").replace("line 15\n", "")
BASE = {"kernels/ops.py": OPS, "kernels/odd name ü.py": OPS, "trainer/gone.py": "old = 1\n", "README.md": "# target\n"}
PATCH = {"kernels/ops.py": PATCHED, "kernels/fused.py": "y = 1\n", "trainer/gone.py": None}
Files = dict[str, str | None]


class Target:
    """A repository with a base commit and a patch on top of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        git(folder, "init", "-q", "-b", "main")
        self.base = self.commit(BASE)
        self.patch = self.commit(PATCH)

    def commit(self, files: Files) -> str:
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                path.unlink()
            else:
                path.write_bytes(text.encode("utf-8", "surrogateescape"))
        git(self.folder, "add", "-A")
        git(self.folder, "commit", "-q", "-m", "edit")
        return git(self.folder, "rev-parse", "HEAD")

    def undo(self, live: str, drop: bool = False) -> str:
        return make_revert_commit(self.folder, live, self.base, self.patch, "undo", drop_edited_new_files=drop)

    def read(self, commit: str) -> Files:
        names = read_tree_entries(self.folder, commit)
        blob = lambda name: run_git(self.folder, "cat-file", "blob", f"{commit}:{name}")
        return {name: blob(name).decode("utf-8", "surrogateescape") for name in names}


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return Target(tmp_path)


@pytest.mark.parametrize(
    ("later", "changed"),
    [
        ({}, {}),
        ({"README.md": "# newer\n"}, {"README.md": "# newer\n"}),
        ({"kernels/ops.py": PATCHED + "more\n"}, {"kernels/ops.py": OPS + "more\n"}),
        ({"kernels/ops.py": "# first\n" + PATCHED}, {"kernels/ops.py": "# first\n" + OPS}),
        ({"kernels/ops.py": PATCHED.replace("line 10", "ten")}, {"kernels/ops.py": OPS.replace("line 10", "ten")}),
        ({"kernels/ops.py": OPS}, {}),  # a person already undid this file
        ({"kernels/ops.py": OPS + "more\n"}, {"kernels/ops.py": OPS + "more\n"}),  # and edited it
        ({"kernels/fused.py": None}, {}),
        (
            {"kernels/ops.py": None, "kernels/moved.py": PATCHED + "more\n"},
            {"kernels/ops.py": None, "kernels/moved.py": OPS + "more\n"},
        ),
        ({"kernels/fused.py": None, "kernels/fusion.py": "y = 1\n"}, {}),
    ],
    ids=[
        "nothing",
        "another file",
        "lines appended",
        "lines inserted above",
        "a line between the patch's lines",
        "undone by hand",
        "undone by hand and edited",
        "added file removed",
        "renamed and edited",
        "added file renamed",
    ],
)
def test_an_undo_keeps_later_edits_of_other_lines(later: Files, changed: Files, target: Target) -> None:
    live = target.commit(later) if later else target.patch
    expected = {name: text for name, text in (BASE | changed).items() if text is not None}
    undone = target.undo(live)
    assert target.read(undone) == expected
    assert git(target.folder, "rev-parse", "HEAD") == live and git(target.folder, "status", "--porcelain") == ""
    assert target.undo(undone) == undone, "a second undo changes nothing"


@pytest.mark.parametrize(
    ("later", "places"),
    [
        (
            {"kernels/ops.py": "# first\n" + PATCHED.replace("line 5, faster", "line 5, mine")},
            [("git.lines_edited", {"file": "kernels/ops.py", "first": 6, "last": 6})],
        ),
        (
            {"kernels/ops.py": PATCHED.replace("line 14\n", "14\n").replace("line 5, faster", "5")},
            [("git.lines_edited", {"file": "kernels/ops.py", "first": line, "last": line}) for line in (5, 14)],
        ),
        ({"kernels/ops.py": None}, [("git.file_removed", {"file": "kernels/ops.py"})]),
        ({"kernels/fused.py": "y = 2\n"}, [("git.file_edited", {"file": "kernels/fused.py"})]),
        ({"trainer/gone.py": "new = 2\n"}, [("git.file_edited", {"file": "trainer/gone.py"})]),
        (
            {"kernels/ops.py": PATCHED.replace("line 1\n", "\0\n")},
            [("git.lines_edited", {"file": "kernels/ops.py", "first": 1, "last": 19})],
        ),
    ],
    ids=["the same line", "two places", "file removed", "added file edited", "removed file added again", "binary"],
)
def test_a_conflict_names_the_file_and_the_lines(
    later: Files, places: list[tuple[str, object]], target: Target
) -> None:
    live = target.commit(later)
    with refused("git.undo_conflict", RepositoryError, commit=target.patch) as found:
        target.undo(live)
    assert [(place.code, place.data) for place in found.value.data["places"]] == places
    assert git(target.folder, "rev-parse", "HEAD") == live


def test_a_replay_drops_an_added_file_that_people_edited(target: Target) -> None:
    live = target.commit({"kernels/fused.py": "y = 2\n", "README.md": "# newer\n"})
    assert target.read(target.undo(live, drop=True)) == BASE | {"README.md": "# newer\n"}


def test_an_edited_mode_survives_the_undo(target: Target) -> None:
    git(target.folder, "update-index", "--chmod=+x", "kernels/ops.py")
    git(target.folder, "commit", "-q", "-m", "mode")
    (target.folder / "kernels/ops.py").chmod(0o755)
    undone = target.undo(git(target.folder, "rev-parse", "HEAD"))
    assert read_tree_entries(target.folder, undone)["kernels/ops.py"] == (
        "100755",
        read_tree_entries(target.folder, target.base)["kernels/ops.py"][1],
    )


def test_a_merge_driver_of_the_repository_is_not_started(target: Target) -> None:
    """The file's attribute asks for a driver, and the repository's configuration has a program for it."""
    sign = target.folder / "started"
    git(target.folder, "config", "merge.theirs.driver", f"touch {sign}; cp %B %A")
    live = target.commit({".gitattributes": "*.py merge=theirs\n", "kernels/ops.py": PATCHED + "more\n"})
    assert target.read(target.undo(live))["kernels/ops.py"] == OPS + "more\n" and not sign.exists()


LINES = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "d\n"]), max_size=8)


@given(ancestor=LINES, live=LINES, other=LINES)
def test_conflicting_lines_lie_in_the_live_file(ancestor: list[str], live: list[str], other: list[str]) -> None:
    found = find_conflicting_lines("".join(ancestor), "".join(live), "".join(other))
    assert all(1 <= first <= last <= max(first, len(live)) for first, last in found)
    assert bool(found) == (ancestor != live)
