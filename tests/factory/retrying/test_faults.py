"""Real faults of the machine, made here, get their names; nothing else does."""

from __future__ import annotations

import errno
import resource
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from factory.core.errors import DiskFullError, WorkspaceError
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, record
from factory.retrying import faults
from factory.retrying.faults import Fault, fault_of
from tests.support.factory.command import factory
from tests.support.failing.nights import impatient


def test_a_full_disk() -> None:
    with pytest.raises(OSError) as raised, open("/dev/full", "w") as file:
        file.write("x" * 100_000)
    assert fault_of(raised.value) == faults.FULL
    assert fault_of(DiskFullError("segment 3: the disk is full")) == faults.FULL


def test_too_few_file_handles(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = []
    try:
        with pytest.raises(OSError) as raised:
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
            while True:
                files.append(open(tmp_path / "file", "w"))  # noqa: SIM115 - they are to stay open
    finally:
        for file in files:
            file.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    found = fault_of(raised.value)
    assert found and found.says == f"too few file handles are left ({tmp_path / 'file'})"


def test_a_locked_and_a_read_only_ledger(workspace: Workspace, ledger: Ledger) -> None:
    other = sqlite3.connect(workspace.root / "ledger.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(sa.exc.OperationalError) as raised, impatient(Ledger(workspace.ledger_url)).begin() as tx:
        record(tx, "never", "daemon")
    assert fault_of(raised.value) == faults.LOCKED
    other.close()
    path = workspace.root / "ledger.db"
    with pytest.raises(sqlite3.OperationalError) as refused:
        sqlite3.connect(f"file:{path}?mode=ro", uri=True).execute("INSERT INTO meta VALUES ('a', 'b')")
    assert fault_of(refused.value) == faults.READ_ONLY


def through(how: str) -> BaseException:
    try:
        try:
            raise OSError(errno.EROFS, "Read-only file system", "/data/x")
        except OSError as error:
            if how == "cause":
                raise WorkspaceError("cannot write") from error
            if how == "cut off":
                raise WorkspaceError("cannot write") from None
            raise WorkspaceError("cannot write")  # noqa: B904 - that is the point
    except WorkspaceError as error:
        return error


@pytest.mark.parametrize(("how", "known"), [("cause", True), ("context", True), ("cut off", False)])
def test_what_an_error_came_from_counts(how: str, known: bool) -> None:
    found = fault_of(through(how))
    assert (found and found.says) == ("there is no permission to write (/data/x)" if known else None)


@pytest.mark.parametrize(
    "error",
    [KeyError("x"), WorkspaceError("no workspace"), FileNotFoundError(errno.ENOENT, "no such file"), RuntimeError("x")],
)
def test_what_is_no_fault_of_the_machine(error: Exception) -> None:
    assert fault_of(error) is None


@pytest.mark.parametrize(
    ("error", "known"), [(MemoryError(), faults.MEMORY), (RuntimeError("can't start new thread"), faults.MEMORY)]
)
def test_memory(error: Exception, known: Fault) -> None:
    assert fault_of(error) == known


LIMITED = """
import resource, sys
from factory import __main__
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
sys.argv[1:] = ["ingest", sys.argv[1], "--workspace", sys.argv[2]]
__main__.main()
"""


def test_a_command_that_meets_one_says_what_to_do(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    """Files may not grow beyond 20 kB: as on a full disk."""
    shard = tmp_path / "shard.txt"
    shard.write_text("words " * 50_000)
    words = [sys.executable, "-c", LIMITED, str(shard), str(workspace.root)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 74 and "Traceback" not in done.stderr, done.stderr
    assert "nothing recorded was lost: free some space" in done.stderr and "run the same command again" in done.stderr
    assert factory("status", "--workspace", str(workspace.root)).returncode == 0


LOCKED = """
import sqlite3, sys
import sqlalchemy as sa
from factory.ledger import engine
made = engine.engine
def impatient(url):
    found = made(url)
    sa.event.listen(found, "connect", lambda connection, _: connection.execute("PRAGMA busy_timeout=100"))
    return found
from factory.ledger import ledger
ledger.engine = impatient
from factory import __main__
__main__.main()
"""


def test_a_command_whose_ledger_is_locked(workspace: Workspace, ledger: Ledger) -> None:
    other = sqlite3.connect(workspace.root / "ledger.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    words = [sys.executable, "-c", LOCKED, "pause", "--workspace", str(workspace.root)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        75,
        "factory: the ledger is locked by another process; nothing recorded was lost: end that process and run the same command again\n",
    )
