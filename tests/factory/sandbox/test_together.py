"""``make_linked_mounts`` shows thousands of paths in one sandbox. Other files stay invisible, and no link remains afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from factory.sandbox import live_sandbox, sandbox
from factory.sandbox.linked_mounts import MOST, make_linked_mounts, remove_unused_links

LOOK = """
import os, sys
folder = sys.argv[1]
files = [f"{where}/{name}" for where, _, names in os.walk(folder) for name in names]
print(len(os.listdir(folder)), sum(len(open(file).read()) for file in files))
try:
    open(files[0], "a")
except OSError as error:
    print(error.strerror)
"""
MANY = 3000  # one mount for each would be too many arguments of bubblewrap


def shown(tmp_path: Path, count: int) -> list[Path]:
    """Make folders and files of two bytes each in one folder, and others that must stay invisible."""
    (tmp_path / "shards" / "raw").mkdir(parents=True)
    (tmp_path / "shards" / "raw" / "held-out").write_text("secret")
    made = [tmp_path / "shards" / f"{number:04d}" for number in range(count)]
    for path in made[:20]:
        path.mkdir()
    for path in made:
        (path / "tokens" if path.is_dir() else path).write_text("12")
    return made


def test_the_sandbox_sees_thousands_of_shared_paths_and_no_other_files(tmp_path: Path) -> None:
    shards = shown(tmp_path, MANY)
    words = [sys.executable, "-c", LOOK, str(tmp_path / "shards")]
    done = sandbox.run_in_sandbox(words, output=tmp_path / "out", readonly=shards)
    assert (done.stdout, done.stderr) == (f"{MANY} {2 * MANY}\nRead-only file system\n", "")
    assert not list(tmp_path.glob("shards/.*"))


def test_live_code_sees_its_shared_paths_until_it_ends(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    shards = shown(tmp_path, MOST + 1)
    words = [sys.executable, "-c", LOOK, str(tmp_path / "shards")]
    running = live_sandbox.start_in_sandbox(
        words, writable=[tmp_path / "out"], readonly=shards, cwd=tmp_path / "out", cache=tmp_path / "cache",
        environment={}, nodes=(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert running.process.stdout is not None
    assert running.process.stdout.read() == f"{MOST + 1} {2 * MOST + 2}\nRead-only file system\n".encode()
    assert running.wait() == 0
    assert not list(tmp_path.glob("shards/.*"))


def test_a_path_that_cannot_be_hard_linked_gets_its_own_mount(tmp_path: Path) -> None:
    shards = shown(tmp_path, MOST + 1)
    away = shards[7].rename(tmp_path / "away")
    shards[7].symlink_to(away)
    words = [sys.executable, "-c", LOOK, str(tmp_path / "shards")]
    done = sandbox.run_in_sandbox(words, output=tmp_path / "out", readonly=[*shards, away])
    assert (done.stdout, done.stderr) == (f"{MOST + 1} {2 * MOST + 2}\nRead-only file system\n", "")


def test_links_left_by_a_killed_process_are_removed_but_links_in_use_stay(tmp_path: Path) -> None:
    shards = shown(tmp_path, MOST + 1)
    left = tmp_path / "shards" / ".seen-left"
    left.mkdir()
    (left / "tokens").hardlink_to(shards[0] / "tokens")
    with make_linked_mounts(shards) as mounts:
        assert len(mounts) == 1 and not left.exists()
        remove_unused_links(tmp_path / "shards")
        assert Path(mounts[0][0]).is_dir()
    assert (shards[0] / "tokens").stat().st_nlink == 1
