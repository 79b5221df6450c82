from __future__ import annotations

import multiprocessing
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import sqlalchemy as sa

from factory.core.errors import WorkspaceError
from factory.core.workspace import Workspace, WorkspaceConfig
from factory.ledger.ledger import Ledger, events, meta, record_event
from factory.ledger.reader import LedgerReader
from factory.ledger.version import GONE, SERVER_ADVICE
from tests.support.messages import refused
from tests.support.patience import PATIENCE_S
from tests.support.plants import kept_ledger


@pytest.fixture(params=["sqlite", "postgresql"])
def workspace(request: pytest.FixtureRequest, tmp_path: Path) -> Workspace:
    """Every test once with each database."""
    url = "" if request.param == "sqlite" else request.getfixturevalue("postgres")()
    return Workspace.create(tmp_path / "workspace", WorkspaceConfig(ledger_url=url))


def test_a_transaction_is_all_or_nothing(ledger: Ledger) -> None:
    with pytest.raises(RuntimeError), ledger.begin() as tx:
        record_event(tx, "ingested", "shard:1")
        raise RuntimeError
    assert ledger.select_rows(sa.select(events)) == []


def _append(url: str, name: str, count: int, together: Barrier) -> None:
    ledger = Ledger.open(url)
    together.wait(PATIENCE_S)
    for number in range(count):
        with ledger.begin() as tx:
            seen = tx.execute(sa.select(sa.func.count()).select_from(events)).scalar()
            tx.execute(events.insert().values(at=time.time(), kind=name, subject=str(number), detail={"seen": seen}))


def test_writers_in_several_processes_are_serial(ledger: Ledger) -> None:
    """Each writer reads the count and appends it: with serial transactions the counts are 0, 1, 2, … without a gap or a repeat."""
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(2)
    writers = [context.Process(target=_append, args=(ledger.url, name, 25, together)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(PATIENCE_S)
        assert writer.exitcode == 0
    found = ledger.select_rows(sa.select(events).order_by(events.c.id))
    assert [row["detail"]["seen"] for row in found] == list(range(50))


def test_a_snapshot_does_not_see_later_writes(ledger: Ledger) -> None:
    count = "SELECT COUNT(*) AS n FROM events"
    with ledger.snapshot() as db:
        before = db.read(count)
        with ledger.begin() as tx:
            record_event(tx, "tested", "shard:1")
        assert db.read(count) == before
    assert ledger.read(count) == [{"n": before[0]["n"] + 1}]


def test_a_missing_ledger_is_an_error_with_the_remedy(workspace: Workspace) -> None:
    """The advice depends on the workspace: empty, or with work. Backups of a server's ledger are not the factory's."""
    here = workspace.ledger_url.startswith("sqlite")
    code = "engine.no_ledger" if here else "ledger.unreadable"
    with refused(code, WorkspaceError) as raised:
        Ledger.open(workspace.ledger_url)
    assert raised.value.data["advice"].code == ("engine.run_init" if here else SERVER_ADVICE.code)
    (workspace.segments / "00001-trunk").mkdir()
    with refused(code, WorkspaceError, advice=GONE if here else SERVER_ADVICE):
        Ledger.open(workspace.ledger_url)
    assert not (workspace.root / "ledger.db").exists()
    with refused("reader.no_file" if here else "ledger.unreadable", WorkspaceError):
        LedgerReader(workspace).read("SELECT * FROM shards")


def test_a_reader_decodes_json_and_cannot_write(workspace: Workspace, ledger: Ledger) -> None:
    with ledger.begin() as tx:
        record_event(tx, "ingested", "shard:1", {"kept": 3})
    assert LedgerReader(workspace).read("SELECT kind, detail FROM events WHERE subject = :s", s="shard:1") == [
        {"kind": "ingested", "detail": {"kept": 3}}
    ]
    with pytest.raises((WorkspaceError, sqlite3.OperationalError), match="readonly|read-only"):
        LedgerReader(workspace).read("DELETE FROM events")


def test_sqlite_and_postgresql_store_and_find_a_name_with_a_nul_character(ledger: Ledger) -> None:
    with ledger.begin() as tx:
        record_event(tx, "ingested", "a\0b", {"from": "a\0b"})
    assert ledger.select_rows(sa.select(events.c.subject, events.c.detail).where(events.c.subject == "a\0b")) == [
        {"subject": "a\ufffdb", "detail": {"from": "a\0b"}}
    ]


def test_simultaneous_creations_make_one_ledger(workspace: Workspace) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(kept_ledger.create, [workspace.ledger_url] * 4))
    assert sorted(row["key"] for row in Ledger.open(workspace.ledger_url).select_rows(sa.select(meta))) == [
        "identity",
        "schema",
    ]


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("nowhere", "engine.bad_address"),
        ("oracel://here", "engine.bad_address"),
        ("postgresql+psycopg2cffi://here", "engine.no_driver"),
    ],
)
def test_an_unusable_ledger_address_is_an_error_with_the_reason(url: str, code: str) -> None:
    with refused(code, WorkspaceError):
        Ledger.create(url)


def test_no_error_message_contains_the_ledgers_password(postgres: Callable[[], str]) -> None:
    url = postgres().replace("factory@", "factory:secret@").replace("factory_", "nowhere_")
    with pytest.raises(WorkspaceError, match="nowhere_") as caught:
        Ledger.open(url)
    assert "secret" not in str(caught.value)
