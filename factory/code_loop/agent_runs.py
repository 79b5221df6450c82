"""Runs of agents that are language models: which endpoint, which budget, which run to go on with, and how each ends.

An endpoint is what the person said, or ``llm.endpoint`` of the policy, or ``OPENAI_BASE_URL``. The same command, given again after a kill
or a mended error, goes on with the run of the same agent, live commit and target; any other run of that agent is abandoned then.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from agents.core.proposal import Proposal
from agents.core.workbench import Workbench
from agents.llm.client import Client
from agents.llm.exchange import BudgetError, Endpoint, LlmError
from agents.llm.file_endpoint import FileEndpoint
from agents.llm.http_endpoint import HttpEndpoint
from agents.llm.policy import LlmPolicy
from agents.loop.checkpoints import CheckpointError
from agents.loop.graph import Run, forget, work
from agents.loop.role import Role, TargetError
from factory.code_loop.exchanges import ExchangeBooks
from factory.core.errors import FactoryError, InputError
from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.git.scope import AgentsPolicy
from factory.ledger.engine import DRIVER
from factory.ledger.ledger import Ledger, agent_runs, record
from factory.ledger.rows import ProposalRow, Subject
from factory.ledger.writing import insert

FILES = "files:"
NONE = "none"  # an endpoint that says: no language model, whatever is configured
NO_PROFILE = 0  # of a run that needs none


class ModelError(FactoryError):
    """The language model could not be asked; the run is kept, and goes on with the same command."""

    exit_code = 7


@dataclass(frozen=True)
class Hire:
    """What a person may say: a base URL or ``files:FOLDER``, a model, a target (an op, ``file:line``, a recipe's key); empty: the policy's,
    or the agent's own choice. ``person`` is asked between rounds."""

    endpoint: str = ""
    model: str = ""
    target: str = ""
    person: Callable[[str], str] | None = None


NOBODY = Hire()  # nothing was said


@dataclass(frozen=True)
class Job:
    """A run that was begun or taken up again. ``profile``: the number of the line profile that it works from."""

    run: int
    agent: str
    client: Client
    hire: Hire
    profile: int
    began: float


@dataclass(frozen=True)
class Desk:
    """Where one agent's runs are taken up: its endpoint and what it may spend."""

    workspace: Workspace
    ledger: Ledger
    progress: Progress
    agent: str
    hire: Hire
    policy: LlmPolicy
    endpoint: Endpoint

    def running(self, base: str, count: int) -> list[Job]:
        """The runs to go on with; all others that are unfinished are abandoned: their commit or their target is not asked for."""
        found: list[Job] = []
        unfinished = (agent_runs.c.state == "running") & (agent_runs.c.agent == self.agent)
        for row in self.ledger.rows(sa.select(agent_runs).where(unfinished).order_by(agent_runs.c.id)):
            wanted = row["base_commit"] == base and (count > 1 or row["asked"] == self.hire.target)
            if wanted and len(found) < count:
                found.append(self._job(row))
            else:
                why = "another commit or target was asked for"
                _end(self.workspace, self.ledger, self.agent, row["id"], "abandoned", why=why)
        return found

    def begin(self, base: str, asked: str, profile: int = NO_PROFILE) -> Job:
        """A new run."""
        values = {"agent": self.agent, "asked": asked, "base_commit": base, "profile": profile, "state": "running"}
        with self.ledger.begin() as tx:
            number = insert(tx, agent_runs, **values, created_at=time.time())
            record(tx, "agent_began", Subject("agent_run", number), {"agent": self.agent})
        return self._job(self.ledger.read("SELECT * FROM agent_runs WHERE id = :id", id=number)[0])

    def _job(self, row: dict[str, Any]) -> Job:
        books = ExchangeBooks(self.workspace, self.ledger, self.policy, row["id"], self.progress.line)
        client = Client(self.endpoint, self.policy, books, self.progress.line)
        own = replace(self.hire, target=row["asked"])
        return Job(row["id"], self.agent, client, own, row["profile"], row["created_at"])


def open_desk(workspace: Workspace, ledger: Ledger, progress: Progress, agent: str, hire: Hire, count: int = 1) -> Desk:
    """Raises: InputError for an endpoint that cannot be, before anything is measured; ConfigError."""
    if count > 1 and (hire.target or hire.person):
        raise InputError("several proposals at once choose their own targets, and ask nobody")
    policy = AgentsPolicy.load(workspace.policy("agents.yaml")).llm
    policy = policy.model_copy(update={"model": hire.model or policy.model})
    endpoint = _endpoint(policy, hire, progress.line)
    saved_at(workspace)
    agent_runs.create(ledger.engine, checkfirst=True)  # a ledger may be older than this table
    return Desk(workspace, ledger, progress, agent, hire, policy, endpoint)


def endpoint_of(policy: LlmPolicy, hire: Hire) -> str:
    """Where the model is: said by the person, the policy or ``OPENAI_BASE_URL``; empty when nobody says."""
    return hire.endpoint or policy.endpoint or os.environ.get("OPENAI_BASE_URL", "")


def configured(workspace: Workspace, hire: Hire) -> bool:
    """Is there an endpoint? Raises: ConfigError."""
    return bool(endpoint_of(AgentsPolicy.load(workspace.policy("agents.yaml")).llm, hire))


def called(workspace: Workspace, hire: Hire) -> bool:
    """Is a language model wanted: was anything said that only one needs, or is one configured? Raises: InputError; ConfigError."""
    if hire.endpoint != NONE:
        return hire != NOBODY or configured(workspace, hire)
    if hire != Hire(NONE):
        raise InputError("a model, a target and a person are for a language model, and the endpoint is none")
    return False


def saved_at(workspace: Workspace) -> Path | str:
    """Where runs keep their checkpoints: in the workspace, or in the ledger's database. Raises: InputError."""
    url = sa.make_url(workspace.ledger_url)
    if url.get_backend_name() == "sqlite":
        return workspace.root / "agents.db"
    if importlib.util.find_spec("langgraph.checkpoint.postgres") is None:
        raise InputError(f"the ledger is at {url!r}, and so are the agents' checkpoints: {DRIVER}")
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


def draft(
    workspace: Workspace, ledger: Ledger, progress: Progress, job: Job, role: Role, bench: Workbench
) -> Proposal | None:
    """The agent's proposal, or None (and why). Raises: InputError for a target that is not there; ModelError."""
    run = Run(job.run, role, bench, job.client, saved_at(workspace), job.hire.person, progress.line)
    end = lambda state, why: _end(workspace, ledger, job.agent, job.run, state, why=why)
    try:
        drafted, why = work(run)
    except TargetError as error:
        end("abandoned", str(error))
        raise InputError(str(error)) from None
    except BudgetError as error:
        if error.lasting:
            end("nothing", str(error))
        raise ModelError(str(error)) from None
    except LlmError as error:
        raise ModelError(f"{error}. Run {job.run} is kept: the same command goes on with it") from None
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    if drafted is None:
        progress.line(f"  nothing proposed: {why}")
        end("nothing", why)
    return drafted


def judged_already(ledger: Ledger, job: Job, drafted: Proposal) -> int | None:
    """The number under which this run's proposal was judged before a kill, if it was."""
    which = "WHERE agent = :agent AND created_at >= :began AND verdict IS NOT NULL ORDER BY number"
    for row in ProposalRow.select(ledger, which, agent=job.agent, began=job.began):
        if row.evidence(ledger).get("patch_id") == drafted.patch_id:
            return row.number
    return None


def finish(workspace: Workspace, ledger: Ledger, job: Job, number: int) -> None:
    """The run's proposal is judged."""
    _end(workspace, ledger, job.agent, job.run, "proposed", proposal=number)


def _end(workspace: Workspace, ledger: Ledger, agent: str, run: int, state: str, **values: Any) -> None:
    with ledger.begin() as tx:
        tx.execute(agent_runs.update().where(agent_runs.c.id == run).values(state=state, **values))
        record(tx, f"agent_{state}", Subject("agent_run", run), values)
    # The checkpoints of a run that is over are but ballast.
    with contextlib.suppress(sqlite3.DatabaseError, CheckpointError):
        forget(saved_at(workspace), agent, run)


def _endpoint(policy: LlmPolicy, hire: Hire, say: Callable[[str], None]) -> Endpoint:
    where = endpoint_of(policy, hire)
    if where in ("", NONE):
        raise InputError(
            "no endpoint: give --endpoint URL or --endpoint files:FOLDER, set OPENAI_BASE_URL, or llm.endpoint in "
            "policies/agents.yaml; the agents 'search' and 'recipe-scout' need none"
        )
    try:
        if where.startswith(FILES):
            if not where.removeprefix(FILES):
                raise LlmError("endpoint 'files:': name a folder behind it")
            return FileEndpoint(Path(where.removeprefix(FILES)).expanduser().resolve(), policy, say)
        return HttpEndpoint(where, os.environ.get("OPENAI_API_KEY", ""), policy)
    except LlmError as error:
        raise InputError(str(error)) from None
