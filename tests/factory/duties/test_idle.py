"""A daemon that waits for data does not open token shards again, and reports the number of missing tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from factory.cli.config import write_key
from factory.core.workspace import Workspace, WorkspaceConfig
from factory.duties.runner import run_duty_pass
from factory.ingest.chain import ingest_shard
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.status.status import read_status_facts
from tests.support.factory.command import command_here
from tests.support.factory.made_up_text import prose, use_small_vocabulary

opened: list[str] = []
watching: list[Path] = []


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and watching and str(arguments[0]).startswith(str(watching[0])):
        opened.append(str(arguments[0]))


@pytest.fixture(scope="module", autouse=True)
def noted() -> None:
    sys.addaudithook(_note)  # for as long as this process lives; without a folder to watch it notes nothing


def ingest(workspace: Workspace, ledger: Ledger, first: int, count: int) -> None:
    path = workspace.root / f"{first}.jsonl"
    rows = ({"id": f"d{i}", "text": prose(i), "source": f"s{i}", "license": "MIT"} for i in range(first, first + count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ingest_shard(Plant(workspace, ledger), path)


@pytest.fixture
def waiting(tmp_path: Path, code_repository: Path) -> tuple[Workspace, Ledger]:
    """A workspace with too few documents to train on."""
    workspace = Workspace.create(tmp_path / "w", WorkspaceConfig(recipe="demo", repository=str(code_repository)))
    ledger = Ledger.create(workspace.ledger_url)
    use_small_vocabulary(workspace)
    write_key(workspace, "recipe", "model.vocab_size", "400")
    ingest(workspace, ledger, 0, 20)
    return workspace, ledger


def test_an_idle_pass_opens_no_token_shard(waiting: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = waiting
    watching[:] = [workspace.shards]
    try:
        assert run_duty_pass(Plant(workspace, ledger), endless=True) == 0
        first, events = len(opened), ledger.read("SELECT COUNT(*) AS n FROM events")
        assert first > 0, "the first look opens them"
        statements: list[str] = []
        sa.event.listen(ledger.engine, "before_cursor_execute", lambda *values: statements.append(values[2]))
        for _ in range(5):
            assert run_duty_pass(Plant(workspace, ledger), endless=True) == 0
        assert 0 < len(statements) <= 5 * 68, "a pass that finds nothing to do reads no more of the ledger than it did"
        assert opened[first:] == [] and ledger.read("SELECT COUNT(*) AS n FROM events") == events
        missing = read_status_facts(workspace)["data_ahead"]["missing_tokens"]
        assert missing > 0
        watching.clear()
        ingest(workspace, ledger, 20, 10)
        watching.append(workspace.shards)
        assert run_duty_pass(Plant(workspace, ledger), endless=True) == 0 and len(opened) > first, "something changed"
        assert 0 < read_status_facts(workspace)["data_ahead"]["missing_tokens"] < missing
    finally:
        watching.clear()


def test_a_run_that_can_train_nothing_says_how_many_tokens_are_missing(waiting: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = waiting
    ledger.engine.dispose()
    done = command_here("run", "--once", home=workspace)
    missing = read_status_facts(workspace)["data_ahead"]["missing_tokens"]
    assert done.exit_code == 0 and missing > 1000 and f"{missing:,} more tokens" in done.output
