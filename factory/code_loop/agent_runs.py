"""Runs of agents that are language models: their endpoint, their budget, the books of all exchanges, and how each run continues and ends.

The person names the endpoint; otherwise ``llm.endpoint`` of the policy or ``OPENAI_BASE_URL`` does. After a kill or an error, the same command
continues the run of the same agent, live commit and target. It abandons the agent's other unfinished runs. A person's runs and the daemon's
(``IMPROVE``) do not affect each other.

Before a request is sent, its worst case is reserved in the ledger, in one transaction with the check of both budgets. If the process is
killed, the reserved amount counts in full. The exchange itself is stored in ``logs/exchanges/``. MLflow gets a trace of it, with tokens and
money (``factory.show``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa

from agents.core.proposal import Proposal
from agents.core.workbench import Workbench
from agents.llm.client import LlmClient
from agents.llm.exchange import BudgetError, Endpoint, Exchange, LlmError
from agents.llm.file_endpoint import FileEndpoint
from agents.llm.http_endpoint import HttpEndpoint
from agents.llm.policy import Budget, LlmPolicy
from agents.loop.checkpoints import SavedRunError
from agents.loop.graph import LoopRun, delete_run, run_agent
from agents.loop.role import Role, TargetError
from factory.core.errors import ConfigError, FactoryError, InputError
from factory.core.served_note import find_served_champion
from factory.core.workspace import Workspace
from factory.git.scope import AgentsPolicy
from factory.ledger.engine import DRIVER
from factory.ledger.ledger import agent_runs, exchanges, meta, record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow, Subject
from factory.ledger.writing import insert_row
from kernels.contract.files import write_atomically
from kernels.contract.message import Message

DAY = 86_400  # seconds
Work = Literal["proposal", "diagnosis"]  # the purpose of a run; each has a budget of its own


class LedgerBudgetAccount:
    """The books (``agents.llm.exchange.BudgetBooks``) of one run of an agent, in the ledger."""

    def __init__(self, plant: Plant, policy: LlmPolicy, run: int, work: Work = "proposal") -> None:
        self.workspace, self.ledger, self.policy, self.run, self.work = plant.workspace, plant.ledger, policy, run, work
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
            return insert_row(
                tx, exchanges, at=now, run=self.run, label=label, state="reserved", tokens=tokens, usd=usd
            )

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
                    "code_loop.budget_exhausted",
                    "The budget of {whose} does not cover the next request: {used:,.6g} of {limit:,.6g} {unit} are "
                    "spent, and the request may need {more:,.6g} {unit}. Raise llm.per_{work} or llm.per_day in "
                    "policies/agents.yaml.",
                    whose=which,
                    used=used,
                    limit=most,
                    unit=unit,
                    more=more,
                    work=self.work,
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
            "request": exchange.request.request_body(),
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
            "file": self.ledger.to_stored_path(path),
        }
        with self.ledger.begin() as tx:
            tx.execute(exchanges.update().where(exchanges.c.id == entry).values(**values))


FILES = "files:"
BEGAN = "agent_began"  # event: {"agent", "by"?}
CHAMPION = "champion"  # the endpoint that stands for our own newest release, as 'factory serve' serves it
NONE = "none"  # the endpoint that stands for no language model, whatever is configured
NO_PROFILE = 0  # the profile of a run that needs none
IMPROVE = "improve"  # the name under which the daemon begins runs


class ModelError(FactoryError):
    """The language model gave no reply. The same command continues the run, unless its budget is used up (``over``)."""

    exit_code = 7

    def __init__(self, code: str, template: str = "", /, *, over: bool = False, **data: Any) -> None:
        super().__init__(code, template, **data)
        self.over = over


@dataclass(frozen=True)
class AgentOptions:
    """A person's choices. An empty one is the policy's, or the agent's own."""

    endpoint: str = ""  # a base URL, ``files:FOLDER`` or ``none``
    model: str = ""
    target: str = ""  # an op, ``file:line``, a recipe's key
    person: Callable[[str], str] | None = None  # answers the agent's question between rounds


DEFAULTS = AgentOptions()  # the person chose nothing


@dataclass(frozen=True)
class AgentRun:
    """A run that was begun or is continued."""

    number: int
    client: LlmClient
    target: str
    profile: int  # the id of the line profile that it works from
    began: float  # seconds since 1970


@dataclass(frozen=True)
class AgentRuns:
    """The runs of one agent in one workspace, with its endpoint and budget."""

    plant: Plant
    agent: str
    options: AgentOptions
    policy: LlmPolicy
    endpoint: Endpoint
    work: Work = "proposal"
    by: str = ""  # who begins them: IMPROVE, or '' for a person

    @classmethod
    def open(
        cls, plant: Plant, agent: str, options: AgentOptions, count: int = 1, work: Work = "proposal", by: str = ""
    ) -> AgentRuns:
        """Open up to ``count`` runs at once. Raises: InputError for options that exclude each other, before anything is measured; ConfigError."""
        if count > 1 and (options.target or options.person):
            raise InputError(
                "code_loop.count_and_target",
                "--count above 1 cannot be used with --target or --interactive: each run chooses its own target.",
            )
        policy = AgentsPolicy.load(plant.workspace.policy_path("agents.yaml")).llm
        policy = policy.model_copy(update={"model": options.model or policy.model})
        policy = policy.with_diagnosis_limits() if work == "diagnosis" else policy
        if endpoint_of(policy, options) == CHAMPION:
            policy, endpoint = _champion(plant.workspace, policy)
        else:
            endpoint = _endpoint(policy, options, plant.progress.line)
        checkpoint_place(plant.workspace)
        agent_runs.create(plant.ledger.engine, checkfirst=True)  # a ledger may be older than this table
        return cls(plant, agent, options, policy, endpoint, work, by)

    def find_unfinished(self, base: str, count: int) -> list[AgentRun]:
        """Up to ``count`` runs to continue. Unfinished runs of another commit or target are abandoned; those of another beginner are left alone."""
        found: list[AgentRun] = []
        mine = (agent_runs.c.state == "running") & (agent_runs.c.agent == self.agent)
        events = self.plant.ledger.read("SELECT subject, detail FROM events WHERE kind = :kind", kind=BEGAN)
        begun_by = {event["subject"]: event["detail"].get("by", "") for event in events}
        for row in self.plant.ledger.select_rows(sa.select(agent_runs).where(mine).order_by(agent_runs.c.id)):
            if begun_by.get(str(Subject("agent_run", row["id"])), "") != self.by:
                continue
            wanted = row["base_commit"] == base and (count > 1 or row["asked"] == self.options.target)
            if wanted and len(found) < count:
                found.append(self._run(row))
            else:
                why = Message("code_loop.other_target", "a later request names another commit or target")
                self.record_end(row["id"], "abandoned", why=str(why))
        return found

    def begin_run(self, base: str, target: str, profile: int = NO_PROFILE) -> AgentRun:
        """A new run, recorded in the ledger. ``target``: '' if the agent chooses; ``profile``: the id of its line profile."""
        values = {"agent": self.agent, "asked": target, "base_commit": base, "profile": profile, "state": "running"}
        with self.plant.ledger.begin() as tx:
            number = insert_row(tx, agent_runs, **values, created_at=time.time())
            by = {"by": self.by} if self.by else {}
            record_event(tx, BEGAN, Subject("agent_run", number), {"agent": self.agent, **by})
        return self._run(self.plant.ledger.read("SELECT * FROM agent_runs WHERE id = :id", id=number)[0])

    def draft_proposal(self, run: AgentRun, role: Role, bench: Workbench) -> Proposal | None:
        """The agent's proposal, or None after a line that says why. Raises: InputError for a target that does not exist; ModelError."""
        saved = checkpoint_place(self.plant.workspace)
        try:
            drafted, why = run_agent(
                LoopRun(run.number, role, bench, run.client, saved, self.options.person, self.plant.progress.line)
            )
        except TargetError as error:
            self.record_end(run.number, "abandoned", why=str(error))
            raise InputError(error.message) from None
        except BudgetError as error:
            if error.lasting:
                self.record_end(run.number, "nothing", why=str(error))
            raise ModelError(error.message, over=error.lasting) from None
        except LlmError as error:
            raise ModelError(
                "code_loop.run_saved",
                "{problem} Run {run} is saved. To continue the run, type the same command again.",
                problem=error.message,
                run=run.number,
            ) from None
        except SavedRunError as error:
            raise ModelError(error.message) from error
        if drafted is None:
            print_why_nothing_proposed(self.plant, why)
            self.record_end(run.number, "nothing", why=str(why))
        return drafted

    def find_judged_proposal(self, run: AgentRun, drafted: Proposal) -> int | None:
        """The number of this run's proposal, if it was judged before a kill."""
        which = "WHERE agent = :agent AND created_at >= :began AND verdict IS NOT NULL ORDER BY number"
        rows = ProposalRow.select(self.plant.ledger, which, agent=self.agent, began=run.began)
        return next(
            (row.number for row in rows if row.evidence(self.plant.ledger).get("patch_id") == drafted.patch_id), None
        )

    def _run(self, row: dict[str, Any]) -> AgentRun:
        books = LedgerBudgetAccount(self.plant, self.policy, row["id"], self.work)
        client = LlmClient(self.endpoint, self.policy, books, self.plant.progress.line)
        return AgentRun(row["id"], client, row["asked"], row["profile"], row["created_at"])

    def record_end(self, number: int, state: str, **values: Any) -> None:
        """Record how a run ended: 'proposed', 'worded', 'nothing' or 'abandoned'."""
        with self.plant.ledger.begin() as tx:
            tx.execute(agent_runs.update().where(agent_runs.c.id == number).values(state=state, **values))
            record_event(tx, f"agent_{state}", Subject("agent_run", number), values)
        with contextlib.suppress(sqlite3.DatabaseError, SavedRunError):  # nothing reads a finished run's checkpoints
            delete_run(checkpoint_place(self.plant.workspace), self.agent, number)


def print_why_nothing_proposed(plant: Plant, why: str) -> None:
    """Tell the person why an agent made no proposal."""
    plant.print_line(Message("code_loop.nothing_proposed", "  nothing proposed: {why}", why=why))


def endpoint_of(policy: LlmPolicy, options: AgentOptions) -> str:
    """The address of the model, by the person's choice, the policy or ``OPENAI_BASE_URL``; '' if none names one."""
    return options.endpoint or policy.endpoint or os.environ.get("OPENAI_BASE_URL", "")


def has_endpoint(workspace: Workspace) -> bool:
    """True if the policy or ``OPENAI_BASE_URL`` names a language model, or if the policy cannot be read (its use then reports the error)."""
    try:
        policy = AgentsPolicy.load(workspace.policy_path("agents.yaml")).llm
    except ConfigError:
        return True
    return endpoint_of(policy, DEFAULTS) not in ("", NONE)


def needs_model(workspace: Workspace, options: AgentOptions) -> bool:
    """True if an endpoint is configured, or if the person chose an option that only a language model needs. Raises: InputError; ConfigError."""
    if options.endpoint == NONE:
        if options != AgentOptions(NONE):
            raise InputError(
                "code_loop.none_with_options",
                "--endpoint none cannot be used with --model, --target or --interactive: these options need a language model.",
            )
        return False
    policy = AgentsPolicy.load(workspace.policy_path("agents.yaml")).llm
    return options != DEFAULTS or bool(endpoint_of(policy, options))


def checkpoint_place(workspace: Workspace) -> Path | str:
    """The place of the runs' checkpoints: a file in the workspace, or the ledger's database. Raises: InputError."""
    url = sa.make_url(workspace.ledger_url)
    if url.get_backend_name() == "sqlite":
        return workspace.root / "agents.db"
    if importlib.util.find_spec("langgraph.checkpoint.postgres") is None:
        raise InputError(
            "code_loop.no_driver",
            "The ledger and the agents' checkpoints are in the database {url}. {driver}",
            url=repr(url),
            driver=DRIVER,
        )
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


def _champion(workspace: Workspace, policy: LlmPolicy) -> tuple[LlmPolicy, Endpoint]:
    """The policy with the name under which our release is served, and the endpoint of the release. Raises: InputError."""
    key = os.environ.get("FACTORY_SERVE_KEY", "")
    url, model, release = find_served_champion(workspace, key)
    policy = policy.model_copy(update={"model": model})
    endpoint = HttpEndpoint(url, key or "none", policy)
    endpoint.name = f"champion, release {release}"  # the name that is stored with the exchanges
    return policy, endpoint


def _endpoint(policy: LlmPolicy, options: AgentOptions, say: Callable[[str], None]) -> Endpoint:
    where = endpoint_of(policy, options)
    if where in ("", NONE):
        raise InputError(
            "code_loop.no_endpoint",
            "No endpoint is named. Give --endpoint URL, --endpoint champion or --endpoint files:FOLDER, set OPENAI_BASE_URL, or set "
            "llm.endpoint in policies/agents.yaml. The agents 'search' and 'recipe-scout' need no endpoint.",
        )
    try:
        if where.startswith(FILES):
            if not where.removeprefix(FILES):
                raise LlmError(
                    "code_loop.no_folder",
                    "The endpoint 'files:' names no folder. Write the folder after the colon: 'files:FOLDER'",
                )
            return FileEndpoint(Path(where.removeprefix(FILES)).expanduser().resolve(), policy, say)
        return HttpEndpoint(where, os.environ.get("OPENAI_API_KEY", ""), policy)
    except LlmError as error:
        raise InputError(error.message) from None
