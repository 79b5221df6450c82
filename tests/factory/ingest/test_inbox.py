"""Faults of files in the inbox, and the messages about them. Files, writers, the ledger and the tokenizer are real."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from factory.core.faults import NO_FILE_HANDLES, find_fault_in
from factory.core.workspace import Workspace
from factory.ingest import chain
from factory.ingest.inbox import ingest_inbox_file
from factory.ingest.reading import streams
from factory.ledger.file_events import read_waiting_inbox_files
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from tests.support.factory.command import factory
from tests.support.factory.inbox import exactly, one_pass, put, rows, trained_on
from tests.support.factory.made_up_text import use_small_vocabulary
from tests.support.failing.limits import few_handles
from tests.support.messages import codes, the
from tests.support.reading.formats import compress, tarred, zipped
from tests.support.said import Said

LONG_AGO = 3600.0


@pytest.fixture(autouse=True)
def small_vocabulary(workspace: Workspace) -> None:
    use_small_vocabulary(workspace)


def waits(said: Said) -> dict[str, Any]:
    """By file, why it waits in the inbox."""
    lines = [line for line in said.lines if codes([line]) == ["ingest.waits"]]
    return {line.data["file"]: line.data["why"] for line in lines}


def test_a_file_whose_name_is_not_utf8_is_ingested_under_an_escaped_name(workspace: Workspace, ledger: Ledger) -> None:
    path = Path(os.fsdecode(os.fsencode(workspace.inbox) + b"/caf\xe9.jsonl"))
    path.write_bytes(rows(0, 20))
    said = one_pass(workspace, ledger, settle=0)
    assert the(said.lines, "ingest.renamed").data["name"] == "caf\\xe9.jsonl"
    assert trained_on(ledger) == exactly(20) and not list(workspace.inbox.iterdir())
    (workspace.root / "quarantine" / os.fsdecode(b"\xff")).write_bytes(b"not read")
    assert one_pass(workspace, ledger, settle=0).about("QUARANTINED")  # put there by hand: tried, and quarantined again


def test_a_long_name_that_is_not_utf8_is_shortened(workspace: Workspace, ledger: Ledger) -> None:
    for number in (0, 10):
        path = Path(os.fsdecode(os.fsencode(workspace.inbox) + b"/" + b"\xe9" * (240 - number) + b".jsonl"))
        path.write_bytes(rows(number, 10))
    said = one_pass(workspace, ledger, settle=0)
    assert codes(said.lines).count("ingest.renamed") == 2 and trained_on(ledger) == exactly(20)
    assert not list(workspace.inbox.iterdir()), said.lines


def test_a_pipe_or_socket_is_named_and_never_opened(workspace: Workspace, ledger: Ledger) -> None:
    """Opening a pipe that nobody writes to would wait for ever."""
    os.mkfifo(workspace.inbox / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(workspace.inbox / "socket.jsonl")) if len(str(workspace.inbox)) < 90 else None
        put(workspace, rows(0, 10), "good.jsonl")
        said = one_pass(workspace, ledger, settle=0)
    assert waits(said)["pipe.jsonl"].code == "ingest.special_file"
    assert trained_on(ledger) == exactly(10)


def test_an_unexpected_error_refuses_one_file_and_other_files_are_ingested(
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
    stays = the(said.lines, "ingest.stays").data
    assert stays["file"] == "bad.jsonl" and not good.exists()
    assert (stays["why"].code, stays["why"].data["kind"]) == ("ingest.unexpected", "ZeroDivisionError")
    log = (workspace.logs / "errors.log").read_text()
    assert "Traceback" in log and "1 // 0" in log
    one_pass(workspace, ledger)
    assert tried == ["bad.jsonl", "good.jsonl"] and len(trained_on(ledger)) == 10
    put(workspace, rows(0, 11), "bad.jsonl")  # its user changed it
    one_pass(workspace, ledger)
    assert tried == ["bad.jsonl", "good.jsonl", "bad.jsonl"]


def test_too_few_file_handles_do_not_count_as_a_fault_of_the_file(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(workspace, rows(0, 10), "good.jsonl")
    hashed = chain.hash_file

    def with_none_left(path: Path) -> str:
        with few_handles():
            return hashed(path)

    monkeypatch.setattr(chain, "hash_file", with_none_left)
    with pytest.raises(chain.InputError, match="Too many open files") as raised:
        one_pass(workspace, ledger)
    assert find_fault_in(raised.value) == NO_FILE_HANDLES and path.exists() and not read_waiting_inbox_files(ledger)
    monkeypatch.undo()
    one_pass(workspace, ledger)
    assert len(trained_on(ledger)) == 10


def test_a_file_that_the_disk_cannot_read_waits_and_other_files_are_ingested(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault ends no pass, and the file is not quarantined, since its content is not known."""
    bad, good = put(workspace, rows(0, 10), "bad.jsonl"), put(workspace, rows(10, 10), "good.jsonl")
    opened = open
    read = lambda path, *more, **how: opened("/proc/self/mem" if path == bad else path, *more, **how)
    monkeypatch.setattr(streams, "open", read, raising=False)
    said = one_pass(workspace, ledger)
    stays = the(said.lines, "ingest.stays").data
    assert stays["file"] == "bad.jsonl" and stays["why"].code == "reading.machine_fault"
    assert "[Errno 5]" in str(stays["why"].data["error"])
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
    """Starts a program that appends parts to a file on request, and keeps the file open."""
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


def test_a_file_with_a_paused_writer_waits_and_loses_no_rows(
    workspace: Workspace, ledger: Ledger, writer: Callable[..., subprocess.Popen[str]]
) -> None:
    data, path = rows(0, 40), workspace.inbox / "a.jsonl"
    process = writer(path, data[: len(data) // 2], data[len(data) // 2 :])
    os.utime(path, (time.time() - LONG_AGO,) * 2)  # it pauses for an hour
    said = one_pass(workspace, ledger)
    assert len(said.lines) == 1 and waits(said)["a.jsonl"].code == "ingest.open_for_writing"
    assert waits(said)["a.jsonl"].data["writer"].startswith(f"process {process.pid} (python")
    assert one_pass(workspace, ledger).lines == []  # said once
    assert go_on(process) == "written\n"
    assert waits(one_pass(workspace, ledger, settle=0))["a.jsonl"].code == "ingest.open_for_writing"
    assert not trained_on(ledger)
    assert go_on(process) == "closed\n"
    one_pass(workspace, ledger, settle=0)
    assert trained_on(ledger) == exactly(40)


@pytest.mark.parametrize(
    "name",
    [
        "a.jsonl",
        "a.jsonl.gz",
        "a.jsonl.zst",
        "a.jsonl.bz2",
        "a.jsonl.xz",
        "a.parquet",
        "a.arrow",
        "a.json",
        "a.zip",
        "a.tar.gz",
    ],
)
def test_an_incomplete_upload_waits_until_it_is_complete_or_long_unchanged(
    workspace: Workspace, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    import pyarrow as pa
    import pyarrow.feather as feather
    import pyarrow.parquet as pq

    data = rows(0, 30)
    documents = [json.loads(line) for line in data.splitlines()]
    if name.endswith((".parquet", ".arrow")):
        write = pq.write_table if name.endswith(".parquet") else feather.write_feather
        write(pa.Table.from_pylist(documents), str(tmp_path / name))
        data = (tmp_path / name).read_bytes()
    elif name.endswith(".json"):
        data = json.dumps(documents).encode()
    elif name.endswith(".zip"):
        data = zipped({"a.jsonl": data})
    elif name != "a.jsonl":
        data = compress(tarred({"a.jsonl": data}) if ".tar" in name else data, name.rpartition(".")[2])
    put(workspace, data[: len(data) * 2 // 3], name)
    why = waits(one_pass(workspace, ledger))
    assert list(why) == [name] and (why[name].code, why[name].data["minutes"]) == ("ingest.incomplete", 10)
    put(workspace, data, name)
    one_pass(workspace, ledger)
    assert trained_on(ledger) == exactly(30)
    put(workspace, data[: len(data) * 2 // 3], f"again-{name}", age=LONG_AGO)
    assert one_pass(workspace, ledger).about(f"again-{name}: ") and not list(workspace.inbox.iterdir())


def test_a_command_names_a_file_whose_name_is_not_utf8(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    odd = os.path.join(os.fsencode(tmp_path), b"\xff.jsonl")
    with open(odd, "wb") as file:
        file.write(rows(0, 20))
    home = ("--workspace", str(workspace.root))
    done = factory("ingest", os.fsdecode(odd), *home)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "\\xff.jsonl: the name is not UTF-8" in done.stderr
    inside = os.path.join(os.fsencode(workspace.inbox), b"\xff.jsonl")
    os.rename(odd, inside)
    done = factory("ingest", os.fsdecode(inside), "--json", *home)
    assert done.returncode == 0 and json.loads(done.stdout)[0]["name"] == "\\xff.jsonl", done.stderr


def test_folders_links_and_pipes_are_reported_once(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    (workspace.inbox / "folder").mkdir()
    (tmp_path / "far.jsonl").write_bytes(rows(0, 5))
    (workspace.inbox / "link.jsonl").symlink_to(tmp_path / "far.jsonl")
    os.mkfifo(workspace.inbox / "pipe.jsonl")
    said = one_pass(workspace, ledger)
    assert {name: why.code for name, why in waits(said).items()} == {
        "folder": "ingest.inbox_folder",
        "link.jsonl": "ingest.link",
        "pipe.jsonl": "ingest.special_file",
    }
    assert one_pass(workspace, ledger).lines == [] and not trained_on(ledger)


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
def test_a_file_that_changes_during_its_ingest_is_neither_lost_nor_doubled(
    workspace: Workspace, ledger: Ledger, harm: Callable[[Path], None], tmp_path: Path
) -> None:
    path = put(workspace, rows(0, 20))
    done: list[str] = []

    def once(title: str) -> None:
        if not done:
            done.append(title)
            harm(path)

    said = Said(once)
    ingest_inbox_file(Plant(workspace, ledger, said), path)
    assert done and not trained_on(ledger), "it was changed while it was read, and nothing of it is stored"
    (line,) = said.about("nothing of the file was stored")
    assert ("was removed from the inbox" if harm is _rename else "changed during the ingest") in line
    left = 25 if harm in (_replace, _append) else 20
    if harm is _truncate:
        one_pass(workspace, ledger, settle=2.0)
        assert not trained_on(ledger)  # its last row is cut off
        path.write_bytes(rows(0, 20))
    one_pass(workspace, ledger, settle=0)
    assert trained_on(ledger) == exactly(left)
    assert not list(workspace.inbox.iterdir())
    shutil.copy(next((workspace.shards / "raw").iterdir()), workspace.inbox / "again.jsonl")
    one_pass(workspace, ledger, settle=0)
    assert trained_on(ledger) == exactly(left)
