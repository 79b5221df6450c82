"""The books of all exchanges with language models: what each may cost, what it did cost, and its text.

Before a request is sent, its worst case is reserved in the ledger, in one transaction with the check of both budgets. A process killed at
any instruction leaves an entry that counts in full. The exchange itself is stored in ``logs/exchanges/`` and, as a trace with tokens
and money, in MLflow; a trace that failed is made with the next exchange.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa

from agents.llm.exchange import BudgetError, Exchange
from agents.llm.policy import Budget, LlmPolicy
from factory.core.errors import FactoryError
from factory.ledger.ledger import exchanges, meta
from factory.ledger.plant import Plant
from factory.ledger.writing import insert
from factory.tracking.mlflow_store import check_writable, waiting_lock
from factory.tracking.tracking import Tracking
from kernels.contract.files import write_atomically

DAY = 86_400  # seconds
RETRY_SECONDS = 60.0  # after MLflow failed: it may take minutes to fail
Work = Literal["proposal", "diagnosis"]  # what a run is for, which has a budget of its own


class ExchangeBooks:
    """``agents.llm.exchange.Books`` of one run of an agent."""

    def __init__(
        self,
        plant: Plant,
        policy: LlmPolicy,
        run: int,
        say: Callable[[str], None],
        work: Work = "proposal",
    ) -> None:
        self.workspace, self.ledger, self.policy, self.run, self.say = plant.workspace, plant.ledger, policy, run, say
        self.work = work
        self.tracking = Tracking.open(plant)
        self.retry_at = 0.0  # by the monotonic clock
        exchanges.create(plant.ledger.engine, checkfirst=True)  # a ledger may be older than this table

    def reserve(self, label: str, tokens: int, usd: float) -> int:
        """Raises: BudgetError."""
        now = time.time()
        own = self.policy.per_diagnosis if self.work == "diagnosis" else self.policy.per_proposal
        with self.ledger.begin() as tx:
            tx.execute(
                sa.select(meta.c.value).where(meta.c.key == "schema").with_for_update()
            )  # one at a time, anywhere
            for which, budget, where in (
                (f"this {self.work}", own, exchanges.c.run == self.run),
                ("today (UTC)", self.policy.per_day, exchanges.c.at >= now - now % DAY),
            ):
                self._afford(tx, which, budget, where, tokens, usd)
            return insert(tx, exchanges, at=now, run=self.run, label=label, state="reserved", tokens=tokens, usd=usd)

    def _afford(
        self, tx: sa.Connection, which: str, budget: Budget, where: sa.ColumnElement[bool], tokens: int, usd: float
    ) -> None:
        total = sa.select(
            sa.func.coalesce(sa.func.sum(exchanges.c.tokens), 0), sa.func.coalesce(sa.func.sum(exchanges.c.usd), 0.0)
        )
        spent = tx.execute(total.where(where)).one()
        for unit, used, more, most in (("tokens", spent[0], tokens, budget.tokens), ("USD", spent[1], usd, budget.usd)):
            if used + more > most:
                raise BudgetError(
                    f"the budget of {which} is exhausted: {used:,.6g} of {most:,.6g} {unit} are spent and the next request may take "
                    f"{more:,.6g}; raise llm.per_{self.work} or llm.per_day in policies/agents.yaml",
                    lasting=which == f"this {self.work}",
                )

    def settle(self, entry: int, exchange: Exchange) -> None:
        stored: dict[str, Any] = {
            "label": exchange.request.label,
            "endpoint": exchange.endpoint,
            "began": exchange.began,
            "ended": exchange.ended,
            "input_tokens": exchange.usage.input_tokens,
            "output_tokens": exchange.usage.output_tokens,
            "usd": exchange.usd,
            "request": exchange.request.body(),
            "reply": {"error": exchange.error} if exchange.reply is None else exchange.reply.message(),
        }
        folder = self.workspace.logs / "exchanges"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{entry:06d}.json"
        write_atomically(path, json.dumps(stored, indent=1))
        values = {
            "state": "failed" if exchange.reply is None else "done",
            "tokens": exchange.usage.tokens,
            "usd": exchange.usd,
            "file": self.ledger.inside(path),
        }
        with self.ledger.begin() as tx:
            tx.execute(exchanges.update().where(exchanges.c.id == entry).values(**values))
        self.make_traces()

    def make_traces(self) -> None:
        """Make the traces that MLflow lacks, each once. An error of MLflow's is a line for a person, and is not raised."""
        if time.monotonic() < self.retry_at:
            return
        without = sa.select(exchanges).where(exchanges.c.trace.is_(None), exchanges.c.file.is_not(None))
        try:
            with waiting_lock(self.workspace, "tracking"):
                for row in self.ledger.rows(without.order_by(exchanges.c.id)):
                    self._make_trace(row)
        except (FactoryError, OSError, ValueError) as error:
            self.retry_at = time.monotonic() + RETRY_SECONDS
            self.say(f"  MLflow has no trace of the newest exchange yet, and is tried again later: {error}")

    def _make_trace(self, row: dict[str, Any]) -> None:
        check_writable(self.workspace)
        stored = json.loads(Path(row["file"]).read_text())
        trace = self.tracking.exchange_trace(
            stored["label"], stored["request"], stored["reply"], (stored["input_tokens"], stored["output_tokens"]),
            stored["usd"], stored["began"], stored["ended"],
            {"run": str(row["run"]), "exchange": str(row["id"]), "endpoint": stored["endpoint"]},
        )  # fmt: skip
        with self.ledger.begin() as tx:
            tx.execute(exchanges.update().where(exchanges.c.id == row["id"]).values(trace=trace))
