"""The books of all exchanges with language models: what each may cost, what it did cost, and its text.

Before a request is sent, its worst case is reserved in the ledger, in one transaction with the check of both budgets. A process killed at
any instruction leaves an entry that counts in full. The exchange itself is stored in ``logs/exchanges/``; MLflow gets a trace of it, with tokens
and money (``factory.show``).
"""

from __future__ import annotations

import json
import time
from typing import Any, Literal

import sqlalchemy as sa

from agents.llm.exchange import BudgetError, Exchange
from agents.llm.policy import Budget, LlmPolicy
from factory.ledger.ledger import exchanges, meta
from factory.ledger.plant import Plant
from factory.ledger.writing import insert
from kernels.contract.files import write_atomically

DAY = 86_400  # seconds
Work = Literal["proposal", "diagnosis"]  # what a run is for, which has a budget of its own


class ExchangeBooks:
    """``agents.llm.exchange.Books`` of one run of an agent."""

    def __init__(self, plant: Plant, policy: LlmPolicy, run: int, work: Work = "proposal") -> None:
        self.workspace, self.ledger, self.policy, self.run, self.work = plant.workspace, plant.ledger, policy, run, work

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
