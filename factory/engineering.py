"""The kernel engineer's plant side: its endpoint, its budget, its profile, and the run that goes on after a kill.

A run is a row of ``agent_runs`` from before the first word to the model until its proposal is judged, or there is none. The
same command, given again after a kill or a mended error, goes on with the run of the same live commit and target; any other
run is abandoned then.
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

from agents.kernel_engineer.checkpoints import CheckpointError
from agents.kernel_engineer.draft import AGENT
from agents.kernel_engineer.graph import Run, forget, work
from agents.kernel_engineer.targets import TargetError, targets, worthwhile
from agents.llm.client import Client
from agents.llm.exchange import BudgetError, Endpoint, LlmError
from agents.llm.file_endpoint import FileEndpoint
from agents.llm.http_endpoint import HttpEndpoint
from agents.llm.policy import LlmPolicy
from agents.proposal import Proposal
from agents.workbench import Workbench
from factory.errors import FactoryError, InputError
from factory.exchanges import ExchangeBooks
from factory.gates.patch_scope import AgentsPolicy
from factory.ledger import Ledger, agent_runs, profiles, proposals, record, verdicts
from factory.ledger_engine import DRIVER
from factory.profiling import Options, profile, read_profile
from factory.progress import Progress
from factory.workspace import Workspace

FILES = "files:"
QUICK = Options(isolation_s=0)


class ModelError(FactoryError):
    """The language model could not be asked; the run is kept, and goes on with the same command."""

    exit_code = 7


@dataclass(frozen=True)
class Hire:
    """What a person may say: a base URL or ``files:FOLDER``, a model, a target (an op or ``file:line``); empty: the policy's, or the
    engineer's own choice. ``person`` is asked between rounds."""

    endpoint: str = ""
    model: str = ""
    target: str = ""
    person: Callable[[str], str] | None = None


NOBODY = Hire()  # nothing was said


@dataclass(frozen=True)
class Job:
    """A run that was begun or taken up again."""

    run: int
    client: Client
    hire: Hire
    profile: dict[str, Any]
    began: float


def endpoint_of(policy: LlmPolicy, hire: Hire) -> str:
    """Where the model is: said by the person, the policy or ``OPENAI_BASE_URL``; empty when nobody says."""
    return hire.endpoint or policy.endpoint or os.environ.get("OPENAI_BASE_URL", "")


def configured(workspace: Workspace, hire: Hire) -> bool:
    """Is there an endpoint? Raises: ConfigError."""
    return bool(endpoint_of(AgentsPolicy.load(workspace.policy("agents.yaml")).llm, hire))


def take_up(
    workspace: Workspace, ledger: Ledger, progress: Progress, bench: Workbench, base: str, hire: Hire, count: int = 1
) -> list[Job]:
    """Go on with this target's run on this commit, or profile and begin one. More than one: a target each, the most promising.

    Raises: InputError for an endpoint that cannot be, before anything is measured; ConfigError; ProfileError.
    """
    if count > 1 and (hire.target or hire.person):
        raise InputError("several proposals at once choose their own targets, and ask nobody")
    policy = AgentsPolicy.load(workspace.policy("agents.yaml")).llm
    policy = policy.model_copy(update={"model": hire.model or policy.model})
    endpoint = _endpoint(policy, hire, progress.line)
    saved_at(workspace)
    agent_runs.create(ledger.engine, checkfirst=True)  # a ledger may be older than this table
    rows = _running(workspace, ledger, base, hire.target, count)
    if len(rows) < count:
        number = profile(workspace, ledger, progress, QUICK)
        aims = [hire.target]
        if count > 1:
            found = targets(_read_profile(ledger, number), set(bench.files(patchable=True)))
            names = [target.name for target in worthwhile(found, bench.history)]
            taken = {
                row["asked"] or next(iter(names), "") for row in rows
            }  # a run that chose for itself took the first
            aims = [name for name in names if name not in taken] or ([] if rows else aims)
        rows += [_begin(ledger, asked, base, number) for asked in aims[: count - len(rows)]]
    jobs = []
    for row in rows:
        books = ExchangeBooks(workspace, ledger, policy, row["id"], progress.line)
        client = Client(endpoint, policy, books, progress.line)
        own = replace(hire, target=row["asked"])
        jobs.append(Job(row["id"], client, own, _read_profile(ledger, row["profile"]), row["created_at"]))
    return jobs


def _read_profile(ledger: Ledger, number: int) -> dict[str, Any]:
    row = ledger.one(sa.select(profiles.c.path).where(profiles.c.id == number))
    assert row is not None
    return read_profile(Path(row["path"]))


def _begin(ledger: Ledger, asked: str, base: str, profile: int) -> dict[str, Any]:
    """A run's row."""
    values = {"agent": AGENT, "asked": asked, "base_commit": base, "profile": profile, "state": "running"}
    with ledger.begin() as tx:
        made = tx.execute(agent_runs.insert().values(**values, created_at=time.time()))
        assert made.inserted_primary_key is not None
        number = made.inserted_primary_key[0]
        record(tx, "agent_began", f"agent_run:{number}", {"agent": AGENT})
    row = ledger.one(sa.select(agent_runs).where(agent_runs.c.id == number))
    assert row is not None
    return row


def saved_at(workspace: Workspace) -> Path | str:
    """Where runs keep their checkpoints: in the workspace, or in the ledger's database. Raises: InputError."""
    url = sa.make_url(workspace.ledger_url)
    if url.get_backend_name() == "sqlite":
        return workspace.root / "agents.db"
    if importlib.util.find_spec("langgraph.checkpoint.postgres") is None:
        raise InputError(f"the ledger is at {url!r}, and so are the agents' checkpoints: {DRIVER}")
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


def draft(workspace: Workspace, ledger: Ledger, progress: Progress, job: Job, bench: Workbench) -> Proposal | None:
    """The engineer's proposal, or None (and why). Raises: InputError for a target that is not there; ModelError."""
    hire = job.hire
    run = Run(job.run, job.profile, bench, job.client, saved_at(workspace), hire.target, hire.person, progress.line)
    try:
        drafted, why = work(run)
    except TargetError as error:
        _end(workspace, ledger, job.run, "abandoned", why=str(error))
        raise InputError(str(error)) from None
    except BudgetError as error:
        if error.lasting:
            _end(workspace, ledger, job.run, "nothing", why=str(error))
        raise ModelError(str(error)) from None
    except LlmError as error:
        raise ModelError(f"{error}. Run {job.run} is kept: the same command goes on with it") from None
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    if drafted is None:
        progress.line(f"  nothing proposed: {why}")
        _end(workspace, ledger, job.run, "nothing", why=why)
    return drafted


def judged_already(ledger: Ledger, job: Job, drafted: Proposal) -> int | None:
    """The number under which this run's proposal was judged before a kill, if it was."""
    rows = ledger.rows(
        sa.select(proposals.c.number, verdicts.c.evidence)
        .join(verdicts, verdicts.c.id == proposals.c.verdict)
        .where(proposals.c.agent == AGENT, proposals.c.created_at >= job.began)
    )
    return next((row["number"] for row in rows if row["evidence"].get("patch_id") == drafted.patch_id), None)


def finish(workspace: Workspace, ledger: Ledger, job: Job, number: int) -> None:
    """The run's proposal is judged."""
    _end(workspace, ledger, job.run, "proposed", proposal=number)


def _end(workspace: Workspace, ledger: Ledger, run: int, state: str, **values: Any) -> None:
    with ledger.begin() as tx:
        tx.execute(agent_runs.update().where(agent_runs.c.id == run).values(state=state, **values))
        record(tx, f"agent_{state}", f"agent_run:{run}", values)
    with contextlib.suppress(
        sqlite3.DatabaseError, CheckpointError
    ):  # the checkpoints of a run that is over are but ballast
        forget(saved_at(workspace), run)


def _running(workspace: Workspace, ledger: Ledger, base: str, asked: str, count: int) -> list[dict[str, Any]]:
    """The runs to go on with; all others that are unfinished are abandoned: their commit or their target is not asked for."""
    found: list[dict[str, Any]] = []
    for row in ledger.rows(sa.select(agent_runs).where(agent_runs.c.state == "running").order_by(agent_runs.c.id)):
        wanted = row["base_commit"] == base and (count > 1 or row["asked"] == asked)
        if wanted and len(found) < count:
            found.append(row)
        else:
            _end(workspace, ledger, row["id"], "abandoned", why="another commit or target was asked for")
    return found


def _endpoint(policy: LlmPolicy, hire: Hire, say: Callable[[str], None]) -> Endpoint:
    where = endpoint_of(policy, hire)
    if not where:
        raise InputError(
            "no endpoint: give --endpoint URL or --endpoint files:FOLDER, set OPENAI_BASE_URL, or llm.endpoint in "
            "policies/agents.yaml; 'factory propose --agent search' needs none"
        )
    try:
        if where.startswith(FILES):
            if not where.removeprefix(FILES):
                raise LlmError("endpoint 'files:': name a folder behind it")
            return FileEndpoint(Path(where.removeprefix(FILES)).expanduser().resolve(), policy, say)
        return HttpEndpoint(where, os.environ.get("OPENAI_API_KEY", ""), policy)
    except LlmError as error:
        raise InputError(str(error)) from None
