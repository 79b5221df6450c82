"""Plants that tests keep between runs are made once, whole or not at all, and each copy names its own paths."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.plants import kept as shelf
from tests.support.plants.kept import kept


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(shelf, "SHELF", tmp_path / "shelf")
    return []


def test_a_kept_plant_is_made_once_and_each_copy_names_its_own_paths(tmp_path: Path, made: list[Path]) -> None:
    def make(folder: Path) -> None:
        made.append(folder)
        folder.mkdir()
        (folder / "result.json").write_text(f'{{"checkpoint": "{folder}/step-1", "code": "{code}/trainer"}}')

    for number in range(2):
        code, copy = tmp_path / f"code-{number}", tmp_path / f"copy-{number}"
        kept("one", copy, make, {"code": code})
        assert (copy / "result.json").read_text() == f'{{"checkpoint": "{copy}/step-1", "code": "{code}/trainer"}}'
    assert len(made) == 1
    os.utime(next(path for path in made[0].parent.iterdir() if path.is_dir()), (0, 0))
    kept("one", tmp_path / "later", make, {"code": code})
    assert len(made) == 2, "an old one is made again"
    kept("another", tmp_path / "other", make, {"code": code})
    assert len(made) == 3


def test_a_plant_whose_making_failed_is_not_kept(tmp_path: Path, made: list[Path]) -> None:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        if not made:
            made.append(folder)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept("one", tmp_path / "copy", make, {})
    assert not (tmp_path / "copy").exists()
    kept("one", tmp_path / "copy", make, {})
    assert (tmp_path / "copy" / "half").exists()


def test_a_plant_that_names_its_folder_in_a_binary_file_is_refused(tmp_path: Path, made: list[Path]) -> None:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "ledger.db").write_bytes(b"\0" + str(folder).encode())

    with pytest.raises(AssertionError, match=r"a copy lies elsewhere: .*ledger.db"):
        kept("one", tmp_path / "copy", make, {})
