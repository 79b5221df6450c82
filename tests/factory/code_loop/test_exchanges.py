"""The record of the cost of language models: neither a kill nor a second process exceeds the budget, and every exchange gets a trace."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from agents.llm.client import LlmClient
from agents.llm.exchange import BudgetError, LlmError
from agents.llm.http_endpoint import HttpEndpoint
from agents.llm.policy import Budget, LlmPolicy
from factory.code_loop.agent_runs import DAY, LedgerBudgetAccount
from factory.core.errors import ConfigError
from factory.core.workspace import Workspace, find_checkout_root
from factory.git.scope import AgentsPolicy
from factory.ledger.ledger import Ledger, exchanges
from factory.ledger.plant import Plant
from factory.machine_check import _ledger
from factory.show.mlflow.runs import EXCHANGES, MlflowTracking
from factory.show.unshown_items import show_unshown_items
from tests.support.messages import refused
from tests.support.replay_server import RecordedSession, ReplayServer

POLICY = LlmPolicy(
    model="m", reply_tokens=100, attempts=1, usd_per_million_input_tokens=1000.0,
    per_proposal=Budget(tokens=1000, usd=1.0), per_day=Budget(tokens=2500, usd=1.5),
)  # fmt: skip


def books(workspace: Workspace, ledger: Ledger, run: int = 1, **changes: Any) -> LedgerBudgetAccount:
    return LedgerBudgetAccount(Plant(workspace, ledger), POLICY.model_copy(update=changes), run)


def test_a_reservation_of_a_killed_process_counts_in_full(workspace: Workspace, ledger: Ledger) -> None:
    books(workspace, ledger).reserve("a", 600, 0.0)
    again = Ledger.open(workspace.ledger_url)  # another process: nothing is held in memory
    with refused("code_loop.budget_exhausted", BudgetError, used=600, limit=1000, unit="tokens", more=401):
        books(workspace, again).reserve("b", 401, 0.0)
    books(workspace, again).reserve("b", 400, 0.0)
    with refused("code_loop.budget_exhausted", BudgetError, unit="USD"):
        books(workspace, again, run=2).reserve("c", 1, 1.01)
    assert len(ledger.select_rows(sa.select(exchanges))) == 2  # what was refused left nothing


def test_an_old_ledger_without_the_table_of_exchanges_gets_it(workspace: Workspace, ledger: Ledger) -> None:
    exchanges.drop(ledger.engine)
    row = _ledger(workspace)
    assert row[0] and "proposals" in row[1]  # the doctor needs none
    assert books(workspace, Ledger.open(workspace.ledger_url)).reserve("a", 1, 0.0) == 1


def test_the_budget_of_a_day_is_limited_and_renewed_after_the_day(workspace: Workspace, ledger: Ledger) -> None:
    for run in (1, 2):
        books(workspace, ledger, run).reserve("a", 1000, 0.0)
    with refused("code_loop.budget_exhausted", BudgetError, whose="today (UTC)"):
        books(workspace, ledger, 3).reserve("a", 501, 0.0)
    with ledger.begin() as tx:
        tx.execute(exchanges.update().values(at=time.time() - DAY))
    books(workspace, ledger, 3).reserve("a", 501, 0.0)


def test_parallel_reservations_never_exceed_the_budget_together(workspace: Workspace, ledger: Ledger) -> None:
    def one(number: int) -> bool:
        try:
            books(workspace, Ledger.open(workspace.ledger_url), run=number).reserve("x", 400, 0.0)
        except BudgetError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(one, range(12))) == 6  # of 2,500


def test_every_exchange_gets_a_trace_with_its_cost_even_after_an_mlflow_outage(
    workspace: Workspace, ledger: Ledger
) -> None:
    recorded = {
        "turns": [{"status": 400, "text": "no"}, {"text": "hi", "usage": {"prompt_tokens": 7, "completion_tokens": 2}}]
    }
    kept = books(workspace, ledger)
    messages = [{"role": "user", "content": "?"}]
    with ReplayServer(RecordedSession.model_validate(recorded)) as server:
        client = LlmClient(HttpEndpoint(server.url, "sk-secret", POLICY), POLICY, kept)
        store = workspace.root / "mlflow.db"
        store.write_text("no database")
        with refused("llm.no_reply", LlmError) as caught:
            client.ask("turn-0", messages)
        assert (caught.value.data["problem"].code, caught.value.data["problem"].data["status"]) == ("llm.refused", 400)
        show_unshown_items(Plant(workspace, ledger))
        store.unlink()
        assert [row["trace"] for row in ledger.select_rows(sa.select(exchanges))] == [None]
        client.ask("turn-1", [*messages, {"role": "assistant", "content": "x"}])
    show_unshown_items(Plant(workspace, ledger))
    rows = ledger.select_rows(sa.select(exchanges).order_by(exchanges.c.id))
    assert [(row["state"], row["tokens"]) for row in rows] == [("failed", 0), ("done", 9)] and rows[1]["usd"] == 0.007
    tracking = MlflowTracking.open(Plant(workspace, ledger))
    failed, done = (tracking.client.get_trace(row["trace"]) for row in rows)
    assert done.info.token_usage == {"input_tokens": 7, "output_tokens": 2, "total_tokens": 9}
    assert done.info.cost["total_cost"] == pytest.approx(0.007) and str(done.info.state) != str(failed.info.state)
    assert done.info.experiment_id == tracking._experiment(EXCHANGES)
    said = json.loads(Path(rows[1]["file"]).read_text())
    assert said["reply"]["content"] == "hi" and said["request"]["messages"][0] == messages[0]
    everything = "".join(path.read_text(errors="replace") for path in (workspace.logs / "exchanges").iterdir())
    assert "sk-secret" not in everything + done.to_json() + failed.to_json()


def test_the_shipped_policy_names_no_endpoint_and_a_misspelt_key_is_named(tmp_path: Path) -> None:
    shipped = find_checkout_root() / "policies" / "agents.yaml"
    assert AgentsPolicy.load(shipped).llm.endpoint == ""
    (tmp_path / "agents.yaml").write_text(shipped.read_text().replace("  model", "  modle"))
    with refused("strict.unknown_key", ConfigError, key="llm.modle"):
        AgentsPolicy.load(tmp_path / "agents.yaml")
