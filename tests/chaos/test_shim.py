"""Tests of the shim: which effects it counts, and what it does at the Nth effect."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos import power
from tests.chaos.crashes import Crashes, copy, left_aside, used
from tests.chaos.folder import Folder
from tests.chaos.server import kill_marked
from tests.chaos.shim import ERRORS, KINDS, SPAWN, SYNCS, Effect, environment, read_log, unknown

PROGRAM = """
import os, shutil, subprocess
os.mkdir("d"); open("d/a", "w").write("12345678"); os.rename("d/a", "d/b"); os.link("d/b", "d/c"); os.symlink("b", "d/s")
shutil.copyfile("d/b", "d/copy"); os.truncate("d/copy", 2); os.unlink("d/c")
with open("d/b", "r+b", 0) as file: os.fsync(file.fileno()); os.pwrite(file.fileno(), b"abcdefgh", 0); os.fdatasync(file.fileno())
with open("d/b", "r+b", 0) as file: os.writev(file.fileno(), [b"xy", b"zw"])
subprocess.run(["/usr/bin/env", "-i", "mkdir", "made-without-environment"])
os.rmdir("made-without-environment")
folder = os.open("d", os.O_RDONLY); os.fsync(folder); os.rename("b", "e", src_dir_fd=folder, dst_dir_fd=folder)
"""
EFFECTS = [
    "mkdir d", "create d/a", "write d/a", "rename d/b", "link d/c", "symlink d/s", "create d/copy", "sendfile d/copy", "sendfile d/copy",
    "truncate d/copy", "unlink d/c", "fsync d/b", "pwrite d/b", "fdatasync d/b", "writev d/b",
    "spawn (spawn)/env", "mkdir made-without-environment",
    "rmdir made-without-environment", "fsync d", "rename d/e",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path)
    yield made
    kill_marked(made.control.path)


def test_all_effects_below_the_root_count_in_order_with_any_environment(folder: Folder) -> None:
    assert folder.run(PROGRAM) == (0, "")
    assert folder.named() == EFFECTS
    assert [e.number for e in folder.effects] == list(range(1, len(EFFECTS) + 1))
    assert {e.kind for e in folder.effects} <= KINDS and not any(e.error for e in folder.effects)


@pytest.mark.parametrize("number", [1, 4, 16, 17, 20])
def test_a_process_is_killed_before_or_after_an_effect(folder: Folder, number: int) -> None:
    code, _ = folder.run(PROGRAM, "kill after", number)
    assert folder.control.dead and len(folder.effects) == number
    after = folder.named()
    for path in sorted(folder.root.rglob("*"), reverse=True):
        path.unlink() if path.is_symlink() or path.is_file() else path.rmdir()
    folder.run(PROGRAM, "kill before", number)
    assert folder.control.dead and folder.named() == after == EFFECTS[:number]
    assert [e.error for e in folder.effects] == [0] * (number - 1) + [-errno.ECANCELED]
    assert code == -9 or number in (16, 17)  # the child died there, and the waiting parent was killed later


STORE = """
import sqlite3
db = sqlite3.connect("a.db", isolation_level=None)
db.execute("PRAGMA journal_mode=wal"); db.execute("CREATE TABLE t (a)")
for number in range(3):
    db.execute("BEGIN"); db.executemany("INSERT INTO t VALUES (?)", [(number, ), ("x" * 9000, )]); db.execute("COMMIT")
db.close()
"""


@pytest.mark.parametrize("program", [PROGRAM, STORE])
def test_a_crash_state_equals_the_disk_after_a_kill(folder: Folder, tmp_path: Path, program: str) -> None:
    """This is checked at each effect, for files, links and a database with uncommitted transactions."""
    crashes = Crashes(tmp_path / "crashes")
    assert folder.run(program, "hold", look=lambda number: crashes.look(folder.root, number)) == (0, "")
    effects = folder.effects
    crashes.look(folder.root, len(effects) + 1)
    of_effect = {number: state for state in crashes.states.values() for number in state.effects}
    assert sorted(of_effect) == list(range(1, len(effects) + 2))
    same = [e.number for e in effects if of_effect[e.number] is of_effect[e.number + 1]]
    assert {e.number for e in effects if e.kind in SYNCS | {SPAWN}} <= set(same) < {e.number for e in effects}
    for effect in effects:
        shutil.rmtree(folder.root)
        folder.root.mkdir()
        folder.run(program, "kill before", effect.number)
        assert folder.control.dead
        state = of_effect[effect.number]
        assert crashes.digest(folder.root) == state.digest == crashes.digest(crashes.folder / str(state.number)), effect


def test_a_new_crash_state_needs_committed_rows(folder: Folder, tmp_path: Path) -> None:
    crashes = Crashes(tmp_path / "crashes")
    folder.run(STORE, "hold", look=lambda number: crashes.look(folder.root, number))
    rows = []
    for state in crashes.states.values():
        copy(crashes.folder / str(state.number), tmp_path / str(state.number))
        if (path := tmp_path / str(state.number) / "a.db").exists():
            with contextlib.closing(sqlite3.connect(path)) as db, contextlib.suppress(sqlite3.OperationalError):
                rows.append(db.execute("SELECT COUNT(*) FROM t").fetchone()[0])
    assert rows == [0, 2, 4, 6]


REMOVED = """
os.listdir(".w"); os.close(os.open(".w", os.O_RDONLY))
os.rename(".w/a", ".w/b"); os.unlink(".w/b"); open(".w/a", "w").write("b"); open(".w/a").read(); os.rename(".w/a", "a")
"""


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("open('.w/a').read()", "open"),
        ("os.rename('.w', 'w')", "rename"),
        ("os.link('.w/a', 'a')", "link"),
        (REMOVED, ""),
    ],
)
def test_a_crash_state_ignores_unfinished_files_and_reports_their_opening(
    folder: Folder, tmp_path: Path, program: str, how: str
) -> None:
    aside, crashes = folder.root / "plant" / ".w" / "a", Crashes(tmp_path / "crashes")
    aside.parent.mkdir(parents=True)
    digests = set()
    for text in ("a quarter", "a half"):
        aside.write_text(text)
        digests.add(crashes.digest(folder.root))
    assert len(digests) == 1
    (folder.root / "plant" / "b").write_text("whole")
    assert crashes.digest(folder.root) not in digests
    left = left_aside(folder.root)
    assert left == {str(aside)}
    assert folder.run(f"import os; os.chdir('plant'); {program}") == (0, "")
    found = used(left, read_log(folder.log, opened=True), folder.root)
    assert found == ([f"{how} of what another process left aside: {aside}"] if how else [])


def test_a_torn_write_leaves_its_first_half(folder: Folder) -> None:
    folder.run(PROGRAM, "tear", 3)
    assert (folder.root / "d" / "a").read_text() == "1234" and folder.control.dead


@pytest.mark.parametrize("mode", ERRORS)
def test_an_error_occurs_once_or_at_all_later_effects(folder: Folder, mode: str) -> None:
    two = "import os\nfor name in 'ab':\n try: open(name, 'w').close()\n except OSError as error: print(error.errno, end=' ')"
    three = f"{two}\ntry: os.unlink('b')\nexcept OSError as error: print('unlink')"
    words = [sys.executable, "-S", "-c", three]
    folder.control.arm(folder.root, folder.log, mode, 1)
    done = subprocess.run(
        words, cwd=folder.root, env=os.environ | environment(folder.control.path), stdout=subprocess.PIPE, text=True
    )
    number = {"E": "5", "N": "28"}[mode[0] if mode[1] == "I" else "N"]
    again = f"{number} unlink\n" if mode.endswith("for good") else ""
    assert done.stdout == f"{number} {again}"


def test_a_program_start_can_fail(folder: Folder) -> None:
    program = (
        "import subprocess, sys\ntry: subprocess.run(['/bin/true'])\nexcept OSError as error: sys.exit(error.errno)"
    )
    assert folder.run(program, "EIO", 1) == (11, "") and folder.named() == ["spawn (spawn)/true"]


def test_an_effect_of_an_unknown_kind_or_place_is_reported(tmp_path: Path) -> None:
    known = Effect(1, "write", 0, 8, 1, 1, 0, str(tmp_path / "plant/segments/0001-trunk/metrics.jsonl"), "", "trainer")
    odd = replace(known, kind="mmap"), replace(known, path=str(tmp_path / "plant/segments/0001-trunk/new.bin"))
    assert unknown([known], tmp_path) == []
    assert unknown([known, *odd], tmp_path) == [
        "mmap plant/segments/#-trunk/metrics.jsonl", "write plant/segments/#-trunk/new.bin",
    ]  # fmt: skip


def test_a_power_cut_loses_what_was_not_flushed(folder: Folder, tmp_path: Path) -> None:
    """One of two files is flushed, and the folder of one of two names."""
    start = tmp_path / "start"
    (start / "kept").mkdir(parents=True)
    (start / "old").write_text("old")
    for path in ("kept",):
        (folder.root / path).mkdir()
    (folder.root / "old").write_text("old")
    program = """
import os
for name in ("kept/flushed", "kept/not", "lost"):
    with open(name, "w") as file:
        file.write("content"); file.flush()
        if name != "kept/not": os.fsync(file.fileno())
        file.write(" and more")
for name in ("kept",):
    handle = os.open(name, os.O_RDONLY); os.fsync(handle)
os.rename("old", "renamed")
"""
    assert folder.run(program) == (0, "")
    for loss, want in zip(
        power.LOSSES,
        (
            {"kept/flushed": "content", "kept/not": "", "lost": "content", "renamed": "old"},
            {"kept/flushed": "content", "kept/not": "", "old": "old"},
        ),
        strict=True,
    ):
        power.cut(start, folder.root, folder.effects, folder.store, loss)
        found = {str(p.relative_to(folder.root)): p.read_text() for p in folder.root.rglob("*") if p.is_file()}
        assert found == want, loss
