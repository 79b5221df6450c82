"""Real faults of the machine, caused here, are recognised; other errors are not."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from factory.backups.backups import find_database_damage
from factory.core import faults
from factory.core.errors import ConfigError, DiskFullError, SegmentError, WorkspaceError
from factory.core.faults import Fault, find_fault_in, is_machine_fault, is_machine_fault_unrelated_to_files
from factory.core.untrusted_trainer_files import open_regular_file
from factory.core.workspace import Workspace, load_yaml
from factory.duties import back_off
from factory.duties.back_off import make_fault_message
from factory.git.git_store import RepositoryError
from factory.git.git_store import run_git as factory_git
from factory.ledger.ledger import Ledger, record_event
from factory.ledger.reader import LedgerReader
from factory.machine_check import run_checks
from factory.runs.untrusted_files import UntrustedFileError, read_bytes
from tests.support.factory.command import factory
from tests.support.failing.limits import few_handles
from tests.support.failing.nights import impatient
from tests.support.git import git


def test_a_full_disk_is_recognised() -> None:
    with pytest.raises(OSError) as raised, open("/dev/full", "w") as file:
        file.write("x" * 100_000)
    assert find_fault_in(raised.value) == find_fault_in(DiskFullError("segment 3: the disk is full")) == faults.FULL


def test_a_lack_of_file_handles_is_recognised(tmp_path: Path) -> None:
    with few_handles(), pytest.raises(OSError) as raised, open(tmp_path / "file"):
        pass
    found = find_fault_in(raised.value)
    assert found == faults.NO_FILE_HANDLES and found.description.data == {
        "what": faults.NO_FILE_HANDLES.problem,
        "path": str(tmp_path / "file"),
    }


def test_a_locked_and_a_read_only_ledger_are_recognised(workspace: Workspace, ledger: Ledger) -> None:
    other = sqlite3.connect(workspace.root / "ledger.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(sa.exc.OperationalError) as raised, impatient(Ledger(workspace.ledger_url)).begin() as tx:
        record_event(tx, "never", "daemon")
    assert find_fault_in(raised.value) == faults.LOCKED
    other.close()
    path = workspace.root / "ledger.db"
    with pytest.raises(sqlite3.OperationalError) as refused:
        sqlite3.connect(f"file:{path}?mode=ro", uri=True).execute("INSERT INTO meta VALUES ('a', 'b')")
    assert find_fault_in(refused.value) == faults.NO_WRITE_PERMISSION


def test_a_ledger_that_cannot_be_opened_now_is_not_called_damaged(workspace: Workspace, ledger: Ledger) -> None:
    """Without file handles each way to open the ledger, and ``check``, reports the machine's fault. None advises to restore the ledger."""
    file = workspace.root / "ledger.db"
    gc.collect()  # what earlier tests left open would be closed meanwhile, and give handles back
    opened = [
        lambda: Ledger.open(workspace.ledger_url, workspace.root),
        lambda: LedgerReader(workspace),
        lambda: find_database_damage(file),
    ]
    for one in opened:
        with pytest.raises((sqlite3.OperationalError, sa.exc.OperationalError)) as raised, few_handles():
            one()
        assert find_fault_in(raised.value) == faults.LEDGER_NOT_OPENED
    importlib.import_module("factory.repairs.workspace_examination")  # the import needs a handle, too
    with few_handles():
        rows = {row["check"]: row for row in run_checks(workspace)}
    detail = f"{faults.LEDGER_NOT_OPENED.description}: {faults.LEDGER_NOT_OPENED.remedy}"
    assert rows["ledger"] == {"check": "ledger", "ok": False, "detail": detail, "messages": [detail]}
    assert not [row for row in rows.values() if "restore" in row["detail"] or "damaged" in row["detail"]]
    assert not find_database_damage(file)


def test_a_ledger_with_an_interrupted_transaction_is_not_called_damaged(workspace: Workspace, ledger: Ledger) -> None:
    """The database is as after a power cut, with a rollback journal."""
    ledger.engine.dispose()
    file, journal = workspace.root / "ledger.db", workspace.root / "ledger.db-journal"
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode=DELETE")
        other.execute("PRAGMA cache_size=1")
        other.execute("BEGIN IMMEDIATE")
        other.execute(
            "CREATE TABLE half AS SELECT hex(randomblob(5000)) AS made FROM meta, meta AS again, meta AS more"
        )
        kept = {path: path.read_bytes() for path in (file, journal)}
        other.execute("ROLLBACK")
    for path, content in kept.items():
        path.write_bytes(content)
    assert journal.stat().st_size > 0 and not find_database_damage(file)
    with contextlib.closing(sqlite3.connect(file)) as other:
        assert not other.execute("SELECT 1 FROM sqlite_master WHERE name = 'half'").fetchall()


def raised_through(how: str) -> BaseException:
    try:
        try:
            raise OSError(errno.EROFS, "Read-only file system", "/data/x")
        except OSError as error:
            if how == "cause":
                raise WorkspaceError("cannot write") from error
            if how == "cut off":
                raise WorkspaceError("cannot write") from None
            raise WorkspaceError("cannot write")  # noqa: B904 - the test is about the context
    except WorkspaceError as error:
        return error


@pytest.mark.parametrize(("how", "known"), [("cause", True), ("context", True), ("cut off", False)])
def test_a_fault_is_found_in_the_causes_of_an_error(how: str, known: bool) -> None:
    found = find_fault_in(raised_through(how))
    assert (found and found.path) == ("/data/x" if known else None)
    assert found == (faults.NO_WRITE_PERMISSION if known else None)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (MemoryError(), faults.MEMORY),
        (RuntimeError("can't start new thread"), faults.MEMORY),
        (KeyError("x"), None),
        (WorkspaceError("no workspace"), None),
        (FileNotFoundError(errno.ENOENT, "no such file"), None),
        (SegmentError("result.json names (sqlite3.) database is locked"), None),
        (RuntimeError("database or disk is full"), None),
        (ValueError("x: Too many open files"), None),
    ],
)
def test_only_the_machines_own_errors_are_its_faults(error: Exception, fault: Fault | None) -> None:
    """An error may quote a trainer's result, a folder's name or a log. A quotation from untrusted code does not count."""
    assert find_fault_in(error) == fault


@pytest.mark.parametrize(
    ("number", "of_no_file"),
    [(errno.EMFILE, True), (errno.EIO, True), (errno.ENOSPC, True), (errno.EACCES, False), (errno.ENOTDIR, False)],
)
def test_errors_that_a_folders_contents_can_cause_are_not_blamed_on_the_machine(number: int, of_no_file: bool) -> None:
    error = OSError(number, os.strerror(number), "checkpoints")
    assert is_machine_fault(error) and is_machine_fault_unrelated_to_files(error) == of_no_file
    assert not is_machine_fault_unrelated_to_files(FileNotFoundError(errno.ENOENT, "no such file"))


def test_a_lease_on_a_file_is_not_a_lack_of_memory(tmp_path: Path) -> None:
    """Code in a sandbox may hold a lease on a file that it wrote."""
    (tmp_path / "left").write_text("{}")
    words = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.fcntl(f, 1024, 1); print('held', flush=True); input()"
    )
    ignoring = f"import signal; signal.signal(signal.SIGIO, signal.SIG_IGN); {words}"
    holder = subprocess.Popen(
        [sys.executable, "-c", ignoring, str(tmp_path / "left")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout
        if holder.stdout.readline() != "held\n":
            pytest.skip("this file system has no leases")
        with pytest.raises(FileNotFoundError) as raised:
            open_regular_file(tmp_path / "left")
        assert find_fault_in(raised.value) is None
        folder = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(UntrustedFileError) as refused:
            read_bytes(folder, ["left"], 100)
        os.close(folder)
        assert find_fault_in(refused.value) is None
        # The error of subprocess when no process can start.
        no_process = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable", "/usr/bin/env")
        assert find_fault_in(no_process) == faults.MEMORY
    finally:
        holder.kill()
        holder.communicate()


def test_a_full_disk_that_git_reports_is_a_fault(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", str(tmp_path))
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "base")
    with pytest.raises(RepositoryError) as raised:
        factory_git(tmp_path, "archive", "--output=/dev/full", "HEAD", check=False)
    assert find_fault_in(raised.value) == faults.FULL, raised.value
    with pytest.raises(RepositoryError) as other:
        factory_git(tmp_path, "cat-file", "blob", "none")
    assert find_fault_in(other.value) is None


LIMITED = """
import resource, sys
from factory import __main__
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
sys.argv[1:] = ["ingest", sys.argv[1], "--workspace", sys.argv[2]]
__main__.main()
"""


def test_a_command_on_a_full_disk_prints_the_remedy(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    """Files may not grow beyond 20 kB, which is like a full disk."""
    shard = tmp_path / "shard.txt"
    shard.write_text("words " * 50_000)
    words = [sys.executable, "-c", LIMITED, str(shard), str(workspace.root)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 74 and "Traceback" not in done.stderr, done.stderr
    assert "error[cli.machine_fault]" in done.stderr and "free some disk space" in done.stderr
    assert factory("status", "--workspace", str(workspace.root)).returncode == 0


LOCKED = """
import sqlite3, sys
import sqlalchemy as sa
from factory.ledger import engine
made = engine.make_engine
def impatient(url):
    found = made(url)
    sa.event.listen(found, "connect", lambda connection, _: connection.execute("PRAGMA busy_timeout=100"))
    return found
from factory.ledger import ledger
ledger.make_engine = impatient
connect = sqlite3.connect
sqlite3.connect = sqlite3.dbapi2.connect = lambda *words, **given: connect(*words, **{**given, "timeout": 0.1})
from factory import __main__
__main__.main()
"""


@contextmanager
def locked(workspace: Workspace, how: str) -> Iterator[None]:
    """Another process's transaction locks the ledger. With ``how`` "exclusive" the ledger cannot be read either."""
    with contextlib.closing(sqlite3.connect(workspace.root / "ledger.db", isolation_level=None)) as other:
        other.execute(f"PRAGMA locking_mode={how}")
        other.execute("BEGIN EXCLUSIVE")
        yield


@pytest.mark.parametrize(("how", "command"), [("normal", "pause"), ("exclusive", "status")])
def test_a_command_prints_that_the_ledger_is_locked(
    workspace: Workspace, ledger: Ledger, how: str, command: str
) -> None:
    ledger.engine.dispose()
    with locked(workspace, how):
        words = [sys.executable, "-c", LOCKED, command, "--workspace", str(workspace.root)]
        done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 75 and done.stderr.startswith("factory: error[cli.machine_fault]: ")
    assert "locks the ledger and run" in done.stderr and done.stderr.count("\n") == 1


def test_the_start_of_the_daemon_waits_for_a_fault_but_not_for_a_mistake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A fault of the machine is printed and retried. A port that only root may use is a mistake in factory.yaml and ends the start."""
    monkeypatch.setattr(back_off, "START_SECONDS", 0.0)
    said: list[str] = []
    left = [
        WorkspaceError("ledger at host a cannot"),
        WorkspaceError("ledger at host a cannot"),
    ]

    def start() -> str:
        if left:
            raise left.pop() from OSError(errno.EIO, "Input/output error")
        return "began"

    assert back_off.retry_during_faults(start, said.append) == "began"
    assert said == ["  ledger at host a cannot", f"  {make_fault_message(faults.BROKEN)}"]

    def unread() -> object:
        with few_handles() if not said[2:] else contextlib.nullcontext():
            return load_yaml(tmp_path / "factory.yaml")

    (tmp_path / "factory.yaml").write_text("recipe: tiny\n")
    assert back_off.retry_during_faults(unread, said.append) == {"recipe": "tiny"}
    assert said[2].endswith(f"{tmp_path / 'factory.yaml'}'") and "The factory waits" in said[3] and not said[4:]

    def mistaken() -> None:
        raise ConfigError("metrics_port: 80 cannot be listened on") from PermissionError(
            errno.EACCES, "Permission denied"
        )

    with pytest.raises(ConfigError):
        back_off.retry_during_faults(mistaken, said.append)
