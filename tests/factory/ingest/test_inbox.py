"""What goes wrong with files in the inbox, and what a person reads then. Files, writers, the ledger and the tokenizer are real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from factory.core.faults import HANDLES, fault_of
from factory.core.workspace import Workspace
from factory.ingest import chain
from factory.ingest.inbox import take
from factory.ingest.reading import streams
from factory.ledger.files import held
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from tests.support.factory.command import command_here
from tests.support.factory.inbox import exactly, one_pass, put, rows, trained_on
from tests.support.factory.made_up_text import use_small_vocabulary
from tests.support.failing.limits import few_handles
from tests.support.said import Said

LONG_AGO = 3600.0


@pytest.fixture(autouse=True)
def small_vocabulary(workspace: Workspace) -> None:
    use_small_vocabulary(workspace)


def test_what_is_no_file_or_has_no_name_that_can_be_stored_is_said_once_and_never_opened(
    workspace: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    """Opening a pipe that nobody writes to would wait for ever."""
    odd = os.fsdecode(b"caf\xe9.jsonl")
    put(workspace, rows(0, 5), odd)
    (workspace.inbox / "folder").mkdir()
    (workspace.inbox / "link.jsonl").symlink_to(tmp_path / "far.jsonl")
    os.mkfifo(workspace.inbox / "pipe.jsonl")
    put(workspace, rows(0, 10), "good.jsonl")
    said = one_pass(workspace, ledger)
    waits = [line.partition(" waits in the inbox: ") for line in said.lines if " waits in the inbox: " in line]
    assert {name.strip(): why for name, _, why in waits} == {
        "caf\\xe9.jsonl": "a name that is not UTF-8 cannot be stored: rename it",
        "folder": "it is a folder: move its files into the inbox itself",
        "link.jsonl": "it is a link, and a link is not followed: copy the file here",
        "pipe.jsonl": "it is no regular file: remove it",
    }
    assert one_pass(workspace, ledger).lines == [] and trained_on(ledger) == exactly(10)
    done = command_here("ingest", str(workspace.inbox / odd), home=workspace)
    assert "caf\\xe9.jsonl: a name that is not UTF-8 cannot be stored: rename it" in str(done.exception)


def test_an_unexpected_error_refuses_one_file_once(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = put(workspace, rows(0, 10), "bad.jsonl"), put(workspace, rows(10, 10), "good.jsonl")
    tried: list[str] = []
    whole = chain._run

    def run(plant: Plant, path: Path, *more: object) -> object:
        tried.append(path.name)
        return 1 // 0 if path == bad else whole(plant, path, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(chain, "_run", run)
    said = one_pass(workspace, ledger)
    assert said.about("bad.jsonl stays in the inbox: an unexpected ZeroDivisionError") and not good.exists()
    log = (workspace.logs / "errors.log").read_text()
    assert "Traceback" in log and "1 // 0" in log
    one_pass(workspace, ledger)
    assert tried == ["bad.jsonl", "good.jsonl"] and len(trained_on(ledger)) == 10
    put(workspace, rows(0, 11), "bad.jsonl")  # its user changed it
    one_pass(workspace, ledger)
    assert tried == ["bad.jsonl", "good.jsonl", "bad.jsonl"]


def test_too_few_file_handles_are_not_the_files_fault(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(workspace, rows(0, 10), "good.jsonl")
    hashed = chain.file_sha256

    def with_none_left(path: Path) -> str:
        with few_handles():
            return hashed(path)

    monkeypatch.setattr(chain, "file_sha256", with_none_left)
    with pytest.raises(chain.InputError, match="Too many open files") as raised:
        one_pass(workspace, ledger)
    assert fault_of(raised.value) == HANDLES and path.exists() and not held(ledger)
    monkeypatch.undo()
    one_pass(workspace, ledger)
    assert len(trained_on(ledger)) == 10


def test_a_file_that_the_disk_cannot_read_waits_and_the_others_do_not(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each pass would end with it. It is not quarantined, either: nothing is known of what is in it."""
    bad, good = put(workspace, rows(0, 10), "bad.jsonl"), put(workspace, rows(10, 10), "good.jsonl")
    opened = open
    read = lambda path, *more, **how: opened("/proc/self/mem" if path == bad else path, *more, **how)
    monkeypatch.setattr(streams, "open", read, raising=False)
    said = one_pass(workspace, ledger)
    assert said.about("bad.jsonl stays in the inbox: bad.jsonl cannot be read: [Errno 5] Input/output error"), (
        said.lines
    )
    assert bad.exists() and not good.exists() and len(trained_on(ledger)) == 10, said.lines


WRITER = """
import sys, time
with open(sys.argv[1], "ab", buffering=0) as file:
    for part in sys.argv[2:]:
        file.write(open(part, "rb").read())
        print("written", flush=True)
        sys.stdin.readline()
print("closed", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def writer(workspace: Workspace, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a program that appends parts to a file, each when it is told, and keeps the file open."""
    running: list[subprocess.Popen[str]] = []

    def start(path: Path, *parts: bytes) -> subprocess.Popen[str]:
        names = []
        for number, part in enumerate(parts):
            (tmp_path / f"part{number}").write_bytes(part)
            names.append(str(tmp_path / f"part{number}"))
        command = [sys.executable, "-c", WRITER, str(path), *names]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout and process.stdout.readline() == "written\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def go_on(process: subprocess.Popen[str]) -> str:
    assert process.stdin and process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


def test_a_writer_that_pauses_loses_nothing(
    workspace: Workspace, ledger: Ledger, writer: Callable[..., subprocess.Popen[str]]
) -> None:
    data, path = rows(0, 40), workspace.inbox / "a.jsonl"
    process = writer(path, data[: len(data) // 2], data[len(data) // 2 :])
    os.utime(path, (time.time() - LONG_AGO,) * 2)  # it pauses for an hour
    said = one_pass(workspace, ledger)
    assert said.lines == [
        "  a.jsonl waits in the inbox: a process has it open for writing; it is taken once it is closed"
    ]
    assert one_pass(workspace, ledger).lines == []  # said once
    assert go_on(process) == "written\n"
    assert one_pass(workspace, ledger, settle=0).about("has it open for writing") and not trained_on(ledger)
    assert go_on(process) == "closed\n"
    one_pass(workspace, ledger, settle=0)
    assert trained_on(ledger) == exactly(40)


# -- while it is read --------------------------------------------------------------------------------------------------


def _rename(path: Path) -> None:
    path.rename(path.with_name("z.jsonl"))


def _truncate(path: Path) -> None:
    os.truncate(path, 500)


def _replace(path: Path) -> None:
    path.with_name(".z").write_bytes(rows(0, 25))
    path.with_name(".z").rename(path)


def _append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(rows(20, 5))


@pytest.mark.parametrize("harm", [_rename, _truncate, _replace, _append])
def test_what_changes_while_it_is_read_is_neither_lost_nor_doubled(
    workspace: Workspace, ledger: Ledger, harm: Callable[[Path], None], tmp_path: Path
) -> None:
    path = put(workspace, rows(0, 20))
    done: list[str] = []

    def once(title: str) -> None:
        if not done:
            done.append(title)
            harm(path)

    said = Said(once)
    take(Plant(workspace, ledger, said), path)
    assert done and not trained_on(ledger), "it was changed while it was read, and nothing of it is stored"
    (line,) = said.about("nothing of it was stored")
    assert ("was taken away" if harm is _rename else "changed while it was read") in line
    left = 25 if harm in (_replace, _append) else 20
    if harm is _truncate:
        path.write_bytes(rows(0, 20))
    one_pass(workspace, ledger, settle=0)
    assert trained_on(ledger) == exactly(left)
    assert not list(workspace.inbox.iterdir())
    shutil.copy(next((workspace.shards / "raw").iterdir()), workspace.inbox / "again.jsonl")
    one_pass(workspace, ledger, settle=0)
    assert trained_on(ledger) == exactly(left)
