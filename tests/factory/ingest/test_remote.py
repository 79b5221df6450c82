"""Shards at addresses of a real S3 server (a moto process on this machine): fetches resume, files are ingested once and filed by name."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.ingest import remote
from factory.ingest.remote import fetch_files
from factory.ledger.ledger import Ledger, shards
from factory.ledger.plant import Plant
from tests.support.factory.command import command_here, factory
from tests.support.factory.inbox import exactly, rows, trained_on
from tests.support.factory.made_up_text import use_small_vocabulary
from tests.support.messages import refused
from tests.support.patience import PATIENCE_S
from tests.support.reading.formats import compress, zipped

pytest.importorskip("s3fs")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and process.poll() is None:
            try:
                httpx.get(address, timeout=5)
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """(file system, name of an empty bucket). The environment names the server, as a person's does."""
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    name = f"b{abs(hash(request.node.name))}"
    system.mkdir(name)
    yield system, name
    s3fs.S3FileSystem.clear_instance_cache()


def put_there(bucket: Any, files: dict[str, bytes]) -> str:
    system, name = bucket
    for path, data in files.items():
        system.pipe_file(f"{name}/{path}", data)
    return f"s3://{name}"


def names(ledger: Ledger) -> list[str]:
    return sorted(row["name"] for row in ledger.select_rows(sa.select(shards.c.name)))


def test_files_below_an_address_are_fetched_and_ingested_only_once(
    workspace: Workspace, ledger: Ledger, bucket: Any
) -> None:
    use_small_vocabulary(workspace)
    root = put_there(bucket, {
        "in/a.jsonl.gz": compress(rows(0, 20), "gz"), "in/deep/b.zip": zipped({"x.jsonl": rows(20, 10)}), "in/c.png": b"x",
        "out/d.jsonl": rows(90, 5),
    })  # fmt: skip
    done = command_here("ingest", f"{root}/in", home=workspace)
    assert done.exit_code == 0, done.output
    assert names(ledger) == ["a.jsonl.gz", "b.zip#1.jsonl.zst"] and trained_on(ledger) == exactly(30)
    raw = sorted(path.name[17:] for path in (workspace.root / "shards" / "raw").iterdir())
    assert raw == ["a.jsonl.gz", "b.zip#1.jsonl.zst"] and "not supported: .png 1" in done.output
    again = command_here("ingest", f"{root}/in/**/*.[jz]*", home=workspace)
    assert "2 files were ingested before" in again.output and again.exit_code == 0
    bucket[0].pipe_file(f"{bucket[1]}/in/a.jsonl.gz", compress(rows(0, 25), "gz"))  # another one under the name
    command_here("ingest", f"{root}/in/a.jsonl.gz", home=workspace)
    assert names(ledger) == ["a.jsonl.gz", "a.jsonl.gz", "b.zip#1.jsonl.zst"] and trained_on(ledger) == exactly(30)


def test_fetched_files_that_cannot_be_read_are_kept_in_quarantine(
    workspace: Workspace, ledger: Ledger, bucket: Any
) -> None:
    """Each such file is in quarantine/, where it can be tried again without another fetch."""
    use_small_vocabulary(workspace)
    made = {f"f{n:02d}.jsonl": rows(n, 1) if n % 3 == 0 else b"garbage %d\n" % n for n in range(36)}
    done = command_here("ingest", put_there(bucket, made), home=workspace)
    assert done.exit_code == 0, done.output
    assert trained_on(ledger) == Counter(f"d{n}" for n in range(0, 36, 3))
    assert len(list(workspace.quarantine.iterdir())) == 24 and not list((workspace.root / "fetched").rglob("*.jsonl"))


def test_an_interrupted_fetch_continues_by_range(
    workspace: Workspace, ledger: Ledger, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(300_000)
    root = put_there(bucket, {"a.jsonl": data})
    monkeypatch.setattr(remote, "_BLOCK", 50_000)
    monkeypatch.setattr(remote, "_TRIES", 1)
    asked: list[int] = []
    real = bucket[0].cat_file

    def cut(path: str, start: int, end: int) -> bytes:
        asked.append(start)
        if len(asked) == 4:
            raise ConnectionError("reset by peer")
        return bytes(real(path, start=start, end=end))

    monkeypatch.setattr(bucket[0], "cat_file", cut)
    with refused("ingest.fetch_stopped", InputError, kind="ConnectionError", error="reset by peer", at=150_000):
        fetch_files(Plant(workspace, ledger), f"{root}/a.jsonl")
    _, found, _ = fetch_files(Plant(workspace, ledger), f"{root}/a.jsonl")
    ((path, address),) = found.items()
    assert path.read_bytes() == data and asked == [0, 50_000, 100_000, 150_000, 150_000, 200_000, 250_000]
    assert path.name == "a.jsonl" and address == f"{root}/a.jsonl"
    asked[:] = [0, 0, 0]
    path.unlink()
    with pytest.raises(InputError):
        fetch_files(Plant(workspace, ledger), f"{root}/a.jsonl")
    other = os.urandom(300_000)  # of the same size, with another etag: from the beginning
    put_there(bucket, {"a.jsonl": other})
    _, found, _ = fetch_files(Plant(workspace, ledger), f"{root}/a.jsonl")
    assert next(iter(found)).read_bytes() == other


@pytest.mark.parametrize(
    ("address", "known"),
    [
        ("/nothing.jsonl", {"ingest.no_address", "ingest.no_remote_file"}),
        ("/*.csv", {"ingest.no_remote_file"}),
    ],
)
def test_an_address_without_files_gives_an_error_of_one_line(
    workspace: Workspace, ledger: Ledger, bucket: Any, address: str, known: set[str]
) -> None:
    with pytest.raises(InputError) as caught:
        fetch_files(Plant(workspace, ledger), f"s3://{bucket[1]}{address}")
    assert caught.value.code in known and "\n" not in str(caught.value)


def test_a_file_url_is_read_as_a_path(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    use_small_vocabulary(workspace)
    (tmp_path / "a.jsonl").write_bytes(rows(0, 20))
    assert command_here("ingest", f"file://{tmp_path}/*.jsonl", home=workspace).exit_code == 0
    assert names(ledger) == ["a.jsonl"] and (tmp_path / "a.jsonl").exists()


def test_the_error_for_a_missing_library_names_the_extra_to_install(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "s3", raising=False)
    with refused("ingest.remote_not_installed", InputError, scheme="s3"):
        fetch_files(Plant(workspace, ledger), "s3://bucket/a.jsonl")
    with refused("ingest.address", InputError, address="nothing://x"):
        fetch_files(Plant(workspace, ledger), "nothing://x")
    assert factory("ingest", "nothing://x", "-w", str(workspace.root)).returncode == 2
