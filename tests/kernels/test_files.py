"""Atomic writes and finite JSON."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.contract.files import encode_finite_json, replace_non_finite, sync_tree, write_atomically

KILLED_WHILE_WRITING = """
import os, pathlib, sys
from kernels.contract import files
files.os.replace = lambda *names: os._exit(9)
files.write_atomically(pathlib.Path(sys.argv[1]), "new")
"""


def test_text_and_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "ä\r\n\n")
    assert path.read_bytes() == "ä\r\n\n".encode()
    write_atomically(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert os.listdir(tmp_path) == ["file"]


def test_the_umask_decides_the_mode(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", "")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_an_error_leaves_the_old_content_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "no folder" / "file", "new")


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "target").read_text() == "old" and not (tmp_path / "link").is_symlink()


def test_a_process_that_dies_before_the_rename_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    done = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, str(path)], timeout=60)
    assert done.returncode == 9 and path.read_text() == "old"
    (left,) = set(os.listdir(tmp_path)) - {"file"}
    assert left.startswith(".file.") and left.endswith(".part")


def test_non_finite_values_become_null_at_any_depth() -> None:
    value = {"a": math.nan, "b": [1.5, (math.inf, {"c": -math.inf})], "d": "NaN", "e": True, "f": 3}
    assert replace_non_finite(value) == {"a": None, "b": [1.5, [None, {"c": None}]], "d": "NaN", "e": True, "f": 3}
    assert json.loads(encode_finite_json(value)) == replace_non_finite(value)
    assert json.dumps(replace_non_finite({2: 0, 10: 0}), sort_keys=True) == '{"10": 0, "2": 0}', (
        "hashes of evidence depend on it"
    )
    assert encode_finite_json({"a": 1}, indent=1) == '{\n "a": 1\n}'


def test_a_tree_is_flushed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file and folder is flushed once, and a folder after its contents. A link is not followed."""
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    (tmp_path / "tree" / "a").write_text("a")
    (tmp_path / "tree" / "inner" / "b").write_text("b")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "elsewhere")
    flushed, fsync = [], os.fsync

    def noted(descriptor: int) -> None:
        flushed.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    sync_tree(tmp_path / "tree")
    assert sorted(flushed) == ["tree", "tree/a", "tree/inner", "tree/inner/b"]
    assert flushed[-1] == "tree" and flushed.index("tree/inner/b") < flushed.index("tree/inner")
