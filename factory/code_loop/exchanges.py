"""The books of every exchange with a language model: what it may cost, what it did cost, what was said.

A request's worst case is set aside in the ledger, in one transaction with the check of both budgets, before it is sent. A
process killed at any instruction leaves an entry that counts in full. What was said lies in ``logs/exchanges/`` and, as a
trace with tokens and money, in MLflow; what MLflow could not be told is told with the next exchange.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from agents.llm.exchange import BudgetError, Exchange
from agents.llm.policy import Budget, LlmPolicy
from factory.core.errors import FactoryError
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, exchanges, meta
from factory.ledger.writing import insert
from factory.tracking.mlflow_store import check_writable
from factory.tracking.tracking import Tracking
from kernels.contract.files import write_atomically

DAY = 86_400  # seconds
AWAY_SECONDS = 60.0  # MLflow is left alone after it failed
PROPOSAL = "this proposal"


_telling = threading.Lock()  # agents work side by side, and each trace is made once


class ExchangeBooks:
    """``agents.llm.exchange.Books`` of one run of an agent."""

    def __init__(
        self, workspace: Workspace, ledger: Ledger, policy: LlmPolicy, run: int, say: Callable[[str], None]
    ) -> None:
        self.workspace, self.ledger, self.policy, self.run, self.say = workspace, ledger, policy, run, say
        self.tracking = Tracking.open(workspace, ledger)
        self.tell_after = 0.0  # by the monotonic clock: MLflow may take minutes to say that it is away
        exchanges.create(ledger.engine, checkfirst=True)  # a ledger may be older than this table

    def reserve(self, label: str, tokens: int, usd: float) -> int:
        """Raises: BudgetError."""
        now = time.time()
        with self.ledger.begin() as tx:
            tx.execute(
                sa.select(meta.c.value).where(meta.c.key == "schema").with_for_update()
            )  # one at a time, anywhere
            for which, budget, where in (
                (PROPOSAL, self.policy.per_proposal, exchanges.c.run == self.run),
                ("today (UTC)", self.policy.per_day, exchanges.c.at >= now - now % DAY),
            ):
                self._afford(tx, which, budget, where, tokens, usd)
            return insert(tx, exchanges, at=now, run=self.run, label=label, state="reserved", tokens=tokens, usd=usd)

    @staticmethod
    def _afford(
        tx: sa.Connection, which: str, budget: Budget, where: sa.ColumnElement[bool], tokens: int, usd: float
    ) -> None:
        total = sa.select(
            sa.func.coalesce(sa.func.sum(exchanges.c.tokens), 0), sa.func.coalesce(sa.func.sum(exchanges.c.usd), 0.0)
        )
        spent = tx.execute(total.where(where)).one()
        for unit, used, more, most in (("tokens", spent[0], tokens, budget.tokens), ("USD", spent[1], usd, budget.usd)):
            if used + more > most:
                raise BudgetError(
                    f"the budget of {which} is exhausted: {used:,.6g} of {most:,.6g} {unit} are spent and the next request may take "
                    f"{more:,.6g}; raise llm.per_proposal or llm.per_day in policies/agents.yaml",
                    lasting=which == PROPOSAL,
                )

    def settle(self, entry: int, exchange: Exchange) -> None:
        said = {"error": exchange.error} if exchange.reply is None else exchange.reply.message()
        kept: dict[str, Any] = {
            "label": exchange.request.label,
            "endpoint": exchange.endpoint,
            "began": exchange.began,
            "ended": exchange.ended,
            "input_tokens": exchange.usage.input_tokens,
            "output_tokens": exchange.usage.output_tokens,
            "usd": exchange.usd,
            "request": exchange.request.body(),
            "reply": said,
        }
        folder = self.workspace.logs / "exchanges"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{entry:06d}.json"
        write_atomically(path, json.dumps(kept, indent=1))
        values = {
            "state": "failed" if exchange.reply is None else "done",
            "tokens": exchange.usage.tokens,
            "usd": exchange.usd,
            "file": str(path),
        }
        with self.ledger.begin() as tx:
            tx.execute(exchanges.update().where(exchanges.c.id == entry).values(**values))
        self.tell()

    def tell(self) -> None:
        """Make the traces that MLflow lacks. Whatever MLflow does, it never raises."""
        with _telling:
            self._tell()

    def _tell(self) -> None:
        if time.monotonic() < self.tell_after:
            return
        untold = sa.select(exchanges).where(exchanges.c.trace.is_(None), exchanges.c.file.is_not(None))
        for row in self.ledger.rows(untold.order_by(exchanges.c.id)):
            try:
                check_writable(self.workspace)
                kept = json.loads(Path(row["file"]).read_text())
                trace = self.tracking.exchange_trace(
                    kept["label"], kept["request"], kept["reply"], (kept["input_tokens"], kept["output_tokens"]),
                    kept["usd"], kept["began"], kept["ended"],
                    {"run": str(row["run"]), "exchange": str(row["id"]), "endpoint": kept["endpoint"]},
                )  # fmt: skip
            except (FactoryError, OSError, ValueError) as error:
                self.tell_after = time.monotonic() + AWAY_SECONDS
                self.say(f"  MLflow was not told of exchange {row['id']} yet: {error}")
                return
            with self.ledger.begin() as tx:
                tx.execute(exchanges.update().where(exchanges.c.id == row["id"]).values(trace=trace))
