"""Lock files of a killed git command are removed. Lock files of a person's git stay."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest

from factory.core.path_removal import remove_path
from factory.git.git_store import MARK, RepositoryError, hold_repository_lock, list_lock_files
from factory.git.git_store import run_git as factory_git
from tests.support.git import git

LEFT = ("index.lock", "HEAD.lock", "refs/heads/main.lock", "worktrees/live-1/HEAD.lock", "worktrees/live-1/locked")


class Killed(BaseException):
    pass


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    git(tmp_path, "init", "-q", "-b", "main", str(folder))
    (folder / "a").write_text("a")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "base")
    (folder / ".git" / "worktrees" / "live-1").mkdir(parents=True)
    return folder


def move(target: Path) -> None:
    """Move a branch to HEAD, for which git takes the branch's lock file."""
    factory_git(target, "update-ref", "refs/heads/main", git(target, "rev-parse", "HEAD"))
    factory_git(target, "read-tree", "HEAD")


def killed(target: Path, *names: str) -> None:
    """Leave the state of a factory's command that was killed while it had these lock files."""
    with pytest.raises(Killed), hold_repository_lock(target):
        for name in names:
            (target / ".git" / name).write_text("initializing" if name.endswith("locked") else "")
        raise Killed


def test_the_next_command_removes_the_lock_files_of_a_killed_command(target: Path) -> None:
    killed(target, *LEFT)
    assert list_lock_files(target / ".git") == set(LEFT)
    move(target)
    assert not list_lock_files(target / ".git") and not (target / ".git" / MARK).exists()


def test_a_lock_file_older_than_the_killed_command_stays(target: Path) -> None:
    (target / ".git" / "index.lock").touch()
    killed(target, "refs/heads/main.lock")
    with pytest.raises(RepositoryError, match=r"index\.lock"):
        move(target)
    assert list_lock_files(target / ".git") == {"index.lock"}


def test_no_lock_file_is_removed_while_a_persons_git_runs(target: Path) -> None:
    killed(target, "refs/heads/main.lock")
    waiting = subprocess.Popen(["git", "cat-file", "--batch"], cwd=target, stdin=subprocess.PIPE)
    assert waiting.stdin is not None
    try:
        with pytest.raises(RepositoryError, match=r"main\.lock"):
            move(target)
    finally:
        waiting.stdin.close()
        waiting.wait()
    move(target)
    assert not list_lock_files(target / ".git")


def test_commands_of_several_threads_take_turns(target: Path) -> None:
    """Four threads make five branches each at once. All twenty are made."""
    head = git(target, "rev-parse", "HEAD")
    failed: list[Exception] = []

    def make(thread: int) -> None:
        try:
            for number in range(5):
                factory_git(target, "update-ref", f"refs/heads/made/{thread}-{number}", head)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(git(target, "for-each-ref", "refs/heads/made/").splitlines()) == 20


def test_a_cut_off_worktree_registration_is_removed_and_a_complete_one_stays(target: Path, tmp_path: Path) -> None:
    """The rest of the path names an existing folder: git itself would keep the registration for ever."""
    for name in ("whole", "torn"):
        git(target, "worktree", "add", "-q", "--detach", str(tmp_path / "trees" / name))
    whole, registered = (target / ".git" / "worktrees" / name / "gitdir" for name in ("whole", "torn"))
    path = registered.read_text()
    remove_path(tmp_path / "trees" / "torn")
    registered.write_text(path[: path.index("/torn")])
    factory_git(target, "worktree", "prune", "--expire", "now")
    assert registered.exists(), "no command of the factory was killed: the registration may be a person's"
    killed(target)
    move(target)
    assert not registered.exists() and whole.exists()
    whole.write_text(whole.read_text().rstrip())  # as a person's editor may leave the file; git still reads it
    killed(target)
    move(target)
    assert whole.exists()
