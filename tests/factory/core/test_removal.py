"""A folder that hostile code filled is removed completely, and nothing outside the folder is removed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from factory.core.path_removal import remove_path
from tests.chaos.folder import Folder

REMOVAL = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from factory.core.path_removal import remove_path
remove_path(Path("out"))
"""


def nest(folder: Path, depth: int, name: str = "d") -> None:
    """Make ``folder/d/d/…``, deeper than the longest possible path."""
    folder.mkdir()
    inner = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=inner)
        deeper = os.open(name, os.O_RDONLY, dir_fd=inner)
        os.close(inner)
        inner = deeper
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=inner))
    os.close(inner)


@pytest.mark.parametrize("name", ["d", "n" * 255, ".removed-1", "\udcff"])
def test_a_folder_too_deep_for_recursion_and_for_paths_is_removed(tmp_path: Path, name: str) -> None:
    nest(tmp_path / "out", 1100, name)
    try:
        remove_path(tmp_path / "out")
        assert os.listdir(tmp_path) == []
    finally:  # pytest itself cannot remove such a folder, and would end with its error
        subprocess.run(["rm", "-rf", tmp_path / "out"], check=True)


def test_links_are_removed_and_their_targets_are_kept(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("mine")
    out = tmp_path / "out"
    (out / "inner").mkdir(parents=True)
    (out / "link").symlink_to(kept)
    (out / "inner" / "link").symlink_to(kept / "file")
    (out / "inner" / "up").symlink_to("../..")
    (tmp_path / "name").symlink_to(kept)
    remove_path(out)
    remove_path(tmp_path / "name")
    assert os.listdir(tmp_path) == ["kept"] and (kept / "file").read_text() == "mine"


def test_pipes_and_entries_with_odd_names_and_modes_are_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    inner = out / "a\nb" / "\udcfe\udcff"
    inner.mkdir(parents=True)
    os.mkfifo(inner / "pipe")
    (inner / ".removed-0").mkdir()
    (out / ".removed-0").mkdir()
    (out / ".removed-1").write_text("")
    (inner / "file").write_text("")
    inner.chmod(0o000)
    inner.parent.chmod(0o000)
    out.chmod(0o000)
    remove_path(out)
    assert os.listdir(tmp_path) == []


def test_a_file_is_removed_and_a_missing_path_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    remove_path(tmp_path / "file")
    remove_path(tmp_path / "file")
    remove_path(tmp_path / "no" / "where")
    assert os.listdir(tmp_path) == []


def test_a_path_is_removed_after_one_error_of_the_disk(tmp_path: Path) -> None:
    """An error occurs at each effect in turn. Paths that the disk refuses for good stay, without an error."""
    folder, program = Folder(tmp_path), REMOVAL.format(path=sys.path)
    out = folder.root / "out"

    def made() -> None:
        (out / "a" / "b").mkdir(parents=True, exist_ok=True)
        for name in ("file", "a/file", "a/b/file"):
            (out / name).write_text("")

    made()
    assert folder.run(program) == (0, "") and not out.exists()
    for effect in folder.effects:
        made()
        assert folder.run(program, "EIO", effect.number) == (0, "")
        assert folder.control.fired and not out.exists(), effect
    made()
    assert folder.run(program, "EIO for good", 1) == (0, "") and (out / "a" / "b" / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_user_without_rights_removes_its_own_unreadable_folders() -> None:
    """Root ignores the modes of folders; other users of a factory cannot."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        child = os.fork()
        if child == 0:
            os.setgid(65534)
            os.setuid(65534)
            out = Path(folder) / "out"
            (out / "a" / "b").mkdir(parents=True)
            (out / "a" / "b" / "file").write_text("")
            for inner in (out / "a" / "b", out / "a", out):
                inner.chmod(0o000)
            remove_path(out)
            os._exit(0 if not os.path.lexists(out) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
