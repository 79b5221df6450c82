"""Runs of agents that are language models: their endpoint, their budget, the record of all exchanges, and how each run continues and ends.

The endpoint is the person's choice, else ``llm.endpoint`` of agents.yaml, else ``OPENAI_BASE_URL``. After a kill or an error, the same command
continues the run of the same agent, live commit and target. It abandons the agent's other unfinished runs. A person's runs and the daemon's
runs (``IMPROVE``) do not affect each other.

Before a request is sent, its largest possible cost is reserved in the ledger, in the transaction that checks both budgets. If the process is
killed, the reserved cost counts in full. Each exchange is stored in ``logs/exchanges/``. MLflow gets a trace of the exchange, with its tokens and
cost (``factory.show``).
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
from agents.loop.graph import AgentLoopRun, delete_run_checkpoints, run_agent
from agents.loop.role import Role, TargetError
from factory.code_loop.try_record import LESSON
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
    """The budget account (``agents.llm.exchange.BudgetAccount``) of one run of an agent, kept in the ledger."""

    def __init__(self, plant: Plant, policy: LlmPolicy, run: int, work: Work = "proposal") -> None:
        self.workspace, self.ledger, self.policy, self.run, self.work = plant.workspace, plant.ledger, policy, run, work
        exchanges.create(plant.ledger.engine, checkfirst=True)  # a ledger may be older than this table

    def reserve(self, label: str, tokens: int, usd: float) -> int:
        """Reserve the largest cost of a request, and return the entry's number. Raises: BudgetError if a budget does not cover the cost."""
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
        """Store an exchange in a file, and replace the reserved cost of its entry by the actual cost."""
        stored: dict[str, Any] = {
            "label": exchange.request.label,
            "endpoint": exchange.endpoint,
            "began": exchange.began,
            "ended": exchange.ended,
            "input_tokens": exchange.usage.input_tokens,
            "output_tokens": exchange.usage.output_tokens,
            "usd": exchange.usd,
            "request": exchange.request.make_request_body(),
            "reply": {"error": exchange.error} if exchange.reply is None else exchange.reply.make_assistant_message(),
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
BEGAN = "agent_began"  # event: {"agent"}, and "by" for the daemon
CHAMPION = "champion"  # this endpoint stands for our own champion, as 'factory serve' serves it
NONE = "none"  # this endpoint stands for no language model, whatever is configured
NO_PROFILE = 0  # stands for the profile of a run that needs no profile
IMPROVE = "improve"  # the name under which the daemon begins runs


class NoModelReplyError(FactoryError):
    """The language model gave no reply. The same command continues the run, unless the run's budget is used up (``over``)."""

    exit_code = 7

    def __init__(self, code: str, template: str = "", /, *, over: bool = False, **data: Any) -> None:
        super().__init__(code, template, **data)
        self.over = over


@dataclass(frozen=True)
class AgentOptions:
    """A person's choices. An empty field means the policy's choice, or the agent's."""

    endpoint: str = ""  # a base URL, ``files:FOLDER`` or ``none``
    model: str = ""
    target: str = ""  # an op, ``file:line``, a recipe's key
    person: Callable[[str], str] | None = None  # answers the agent's question between rounds


DEFAULTS = AgentOptions()  # the person chose nothing


@dataclass(frozen=True)
class AgentRun:
    """A new or a continued run of an agent."""

    number: int
    client: LlmClient
    target: str
    profile: int  # the id of the line profile that the agent works from
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
    by: str = ""  # who begins the runs: IMPROVE, or '' for a person

    @classmethod
    def open(
        cls, plant: Plant, agent: str, options: AgentOptions, count: int = 1, work: Work = "proposal", by: str = ""
    ) -> AgentRuns:
        """Prepare up to ``count`` runs at the same time. Nothing is measured. Raises: InputError for options that exclude each other; ConfigError."""
        if count > 1 and (options.target or options.person):
            raise InputError(
                "code_loop.count_and_target",
                "--count above 1 cannot be used with --target or --interactive: each run chooses its own target.",
            )
        policy = AgentsPolicy.load(plant.workspace.policy_path("agents.yaml")).llm
        policy = policy.model_copy(update={"model": options.model or policy.model})
        policy = policy.with_diagnosis_limits() if work == "diagnosis" else policy
        if work == "proposal":
            refuse_zero_budget(policy)
        if choose_endpoint(policy, options) == CHAMPION:
            policy, endpoint = _champion(plant.workspace, policy)
        else:
            endpoint = _endpoint(policy, options, plant.progress.line)
        find_agent_checkpoint_database(plant.workspace)
        agent_runs.create(plant.ledger.engine, checkfirst=True)  # a ledger may be older than this table
        return cls(plant, agent, options, policy, endpoint, work, by)

    def find_unfinished(self, base: str, count: int) -> list[AgentRun]:
        """Return up to ``count`` runs to continue. Abandons unfinished runs of another commit or target, except runs that another ``by`` began."""
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
                why = Message(
                    "code_loop.other_target",
                    "the run was ended, because a later request names another commit or target",
                )
                self.record_run_end(row["id"], "abandoned", why=str(why))
        return found

    def begin_run(self, base: str, target: str, profile: int = NO_PROFILE) -> AgentRun:
        """Record a new run in the ledger, and return the run. ``target``: '' if the agent chooses. ``profile``: the id of its line profile."""
        values = {"agent": self.agent, "asked": target, "base_commit": base, "profile": profile, "state": "running"}
        with self.plant.ledger.begin() as tx:
            number = insert_row(tx, agent_runs, **values, created_at=time.time())
            by = {"by": self.by} if self.by else {}
            record_event(tx, BEGAN, Subject("agent_run", number), {"agent": self.agent, **by})
        return self._run(self.plant.ledger.read("SELECT * FROM agent_runs WHERE id = :id", id=number)[0])

    def draft_proposal(self, run: AgentRun, role: Role, bench: Workbench) -> Proposal | None:
        """Run the agent and return its proposal. Without a proposal, print the reason and return None.

        Raises: InputError for a target that does not exist; NoModelReplyError.
        """
        saved = find_agent_checkpoint_database(self.plant.workspace)
        try:
            drafted, why = run_agent(
                AgentLoopRun(run.number, role, bench, run.client, saved, self.options.person, self.plant.progress.line)
            )
        except TargetError as error:
            self.record_run_end(run.number, "abandoned", why=str(error))
            raise InputError(error.message) from None
        except BudgetError as error:
            if error.lasting:
                self.record_run_end(run.number, "nothing", why=str(error))
            raise NoModelReplyError(error.message, over=error.lasting) from None
        except LlmError as error:
            raise NoModelReplyError(
                "code_loop.run_saved",
                "{problem} Run {run} is saved. To continue the run, type the same command again.",
                problem=error.message,
                run=run.number,
            ) from None
        except SavedRunError as error:
            raise NoModelReplyError(error.message) from error
        if drafted is None:
            print_why_nothing_proposed(self.plant, why)
            ended = Message.from_json(why)
            if ended.code == "loop.declined":
                self.record_run_end(
                    run.number, "declined", {key: ended.data[key] for key in ("target", "reason")}, why=str(why)
                )
            else:
                self.record_run_end(run.number, "nothing", why=str(why))
        return drafted

    def find_judged_proposal(self, run: AgentRun, draft: Proposal) -> int | None:
        """Return the number of this run's proposal if it was already judged before a kill, else None."""
        which = "WHERE agent = :agent AND created_at >= :began AND verdict IS NOT NULL ORDER BY number"
        rows = ProposalRow.select(self.plant.ledger, which, agent=self.agent, began=run.began)
        return next(
            (row.number for row in rows if row.read_evidence(self.plant.ledger).get("patch_id") == draft.patch_id), None
        )

    def _run(self, row: dict[str, Any]) -> AgentRun:
        books = LedgerBudgetAccount(self.plant, self.policy, row["id"], self.work)
        client = LlmClient(self.endpoint, self.policy, books, self.plant.progress.line)
        return AgentRun(row["id"], client, row["asked"], row["profile"], row["created_at"])

    def record_run_end(self, number: int, state: str, lesson: dict[str, Any] | None = None, **values: Any) -> None:
        """Record how a run ended. ``state``: 'proposed', 'worded', 'declined', 'nothing' or 'abandoned'. ``lesson``: for later runs on the target."""
        with self.plant.ledger.begin() as tx:
            tx.execute(agent_runs.update().where(agent_runs.c.id == number).values(state=state, **values))
            record_event(tx, f"agent_{state}", Subject("agent_run", number), values)
            if lesson is not None:
                record_event(tx, LESSON, Subject("agent_run", number), lesson)
        with contextlib.suppress(sqlite3.DatabaseError, SavedRunError):  # nothing reads a finished run's checkpoints
            delete_run_checkpoints(find_agent_checkpoint_database(self.plant.workspace), self.agent, number)


def refuse_zero_budget(policy: LlmPolicy) -> None:
    """Raises: InputError if a budget of 0 USD covers no request at the policy's prices. Then nothing needs to be measured first."""
    if policy.compute_cost_in_usd(1, 1) > 0 and min(policy.per_proposal.usd, policy.per_day.usd) == 0:
        raise InputError(
            "code_loop.zero_budget",
            "The budget of the language model is 0 USD, so no request can be sent. Raise llm.per_proposal.usd and llm.per_day.usd in "
            "policies/agents.yaml, or set the prices to 0 if the endpoint costs nothing.",
        )


def print_why_nothing_proposed(plant: Plant, why: str) -> None:
    """Tell the person why an agent made no proposal."""
    plant.print_line(Message("code_loop.nothing_proposed", "  nothing proposed: {why}", why=why))


def choose_endpoint(policy: LlmPolicy, options: AgentOptions) -> str:
    """Return the address of the model: the person's choice, else the policy's, else ``OPENAI_BASE_URL``; '' if none of them is set."""
    return options.endpoint or policy.endpoint or os.environ.get("OPENAI_BASE_URL", "")


def has_llm_endpoint(workspace: Workspace) -> bool:
    """Return whether the policy or ``OPENAI_BASE_URL`` names a language model. Also true if the policy cannot be read; its use reports the error."""
    try:
        policy = AgentsPolicy.load(workspace.policy_path("agents.yaml")).llm
    except ConfigError:
        return True
    return choose_endpoint(policy, DEFAULTS) not in ("", NONE)


def needs_language_model(workspace: Workspace, options: AgentOptions) -> bool:
    """Return whether an endpoint is configured, or the person chose an option that only a language model needs. Raises: InputError, ConfigError."""
    if options.endpoint == NONE:
        if options != AgentOptions(NONE):
            raise InputError(
                "code_loop.none_with_options",
                "--endpoint none cannot be used with --model, --target or --interactive: these options need a language model.",
            )
        return False
    policy = AgentsPolicy.load(workspace.policy_path("agents.yaml")).llm
    return options != DEFAULTS or bool(choose_endpoint(policy, options))


def find_agent_checkpoint_database(workspace: Workspace) -> Path | str:
    """Return where the runs' checkpoints are stored: a file in the workspace, or the URL of the ledger's database. Raises: InputError."""
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
    """Return the policy with the served champion's model name, and the champion's endpoint. Raises: InputError."""
    key = os.environ.get("FACTORY_SERVE_KEY", "")
    url, model, release = find_served_champion(workspace, key)
    policy = policy.model_copy(update={"model": model})
    endpoint = HttpEndpoint(url, key or "none", policy)
    endpoint.name = f"champion, release {release}"  # the name that is stored with the exchanges
    return policy, endpoint


def _endpoint(policy: LlmPolicy, options: AgentOptions, say: Callable[[str], None]) -> Endpoint:
    where = choose_endpoint(policy, options)
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
