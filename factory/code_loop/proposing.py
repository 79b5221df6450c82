"""The code loop, once: live code → line profile → an agent's proposal → branch → patch gate → verdict.

The agent sees the world only through the workbench it is handed: it reads files in scope, has implementations measured in the sandbox, and
asks what was tried before. It returns edits as data. Killed at any instruction, the next call clears away what was left and
goes on: a proposal is 'drafted' before its branch exists and 'judged' in the transaction that knows its verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from agents.kernel_engineer.draft import AGENT as KERNEL_ENGINEER
from agents.loop.role import Role
from agents.recipe_scout import scout
from agents.recipe_scout.role import RecipeScout
from agents.search_proposer import search_proposer
from factory.code_loop import agent_runs, engineering, scouting
from factory.code_loop.agent_runs import NOBODY, Hire, Job
from factory.code_loop.profiling import QUICK, profile, read_profile
from factory.code_loop.revalidating import revalidate
from factory.code_loop.submitting import clear_stale, refuse_without_isolation, submit
from factory.code_loop.workbench import Bench
from factory.core.devices import side_by_side
from factory.core.errors import InputError, nearest
from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.gates.training_start import find_start
from factory.git import repository
from factory.ledger.ledger import Ledger


def propose(
    workspace: Workspace,
    ledger: Ledger,
    progress: Progress,
    *,
    agent: str = search_proposer.AGENT,
    hire: Hire = NOBODY,
    count: int = 1,
) -> list[int]:
    """Profile, let ``agent`` propose, judge; returns the proposals' numbers: at most ``count``, none (and says why) when there is
    nothing to propose. Several are drafted side by side; what is timed has its device alone (``factory.core.devices``).

    The caller holds the workspace's ``code-loop`` lock. Raises: InputError for an unknown agent, endpoint or target; ModelError;
    IsolationError without a sandbox; RepositoryError; whatever it raises, no branch and no worktree is left behind. (Killed or
    interrupted, the next call clears away.) Of several, the others are judged to their end before an error of one is raised.
    """
    if agent not in AGENTS:
        raise InputError(f"no agent {agent!r}{nearest(agent, AGENTS)}")
    base = repository.live_commit(workspace.repository)
    repository.require_settled(workspace.repository)
    clear_stale(workspace, ledger, progress)
    start = find_start(ledger)
    if start is None:
        progress.line("  nothing proposed: there is no trunk checkpoint to measure on yet; run 'factory train' first")
        return []
    refuse_without_isolation(workspace)
    revalidate(workspace, ledger, progress, base)
    bench = Bench(workspace, ledger, base, start, progress)
    return AGENTS[agent](workspace, ledger, progress, bench, hire, count)


def _search(
    workspace: Workspace, ledger: Ledger, progress: Progress, bench: Bench, hire: Hire, count: int
) -> list[int]:
    if replace(hire, endpoint="") != NOBODY or hire.endpoint not in ("", agent_runs.NONE):
        raise InputError("an endpoint, a model, a target and a person are for a language model, not for 'search'")
    number = profile(workspace, ledger, progress, QUICK)
    profiled = Path(ledger.read("SELECT path FROM profiles WHERE id = :id", id=number)[0]["path"])
    drafts = search_proposer.propose(read_profile(profiled), replace(bench, count=count), count)
    if not drafts:
        progress.line("  nothing proposed: no change was found that measures faster than what runs now")
    return side_by_side([partial(submit, workspace, ledger, progress, drafted, bench.base) for drafted in drafts])


def _engineer(
    workspace: Workspace, ledger: Ledger, progress: Progress, bench: Bench, hire: Hire, count: int
) -> list[int]:
    desk = agent_runs.open_desk(workspace, ledger, progress, KERNEL_ENGINEER, hire, count)
    jobs = engineering.take_up(desk, bench, bench.base, count)
    return _with_model(jobs, workspace, ledger, progress, bench, partial(engineering.role, ledger))


def _with_model(
    jobs: Sequence[Job],
    workspace: Workspace,
    ledger: Ledger,
    progress: Progress,
    bench: Bench,
    role: Callable[[Job, Bench], Role],
) -> list[int]:
    """What language models propose, side by side, each with seconds of its own for measuring."""

    def work(job: Job) -> int | None:
        own = replace(bench)
        drafted = agent_runs.draft(workspace, ledger, progress, job, role(job, own), own)
        if drafted is None:
            return None
        number = agent_runs.judged_already(ledger, job, drafted)
        if number is None:
            number = submit(workspace, ledger, progress, drafted, bench.base)
        agent_runs.finish(workspace, ledger, job, number)
        return number

    return [number for number in side_by_side([partial(work, job) for job in jobs]) if number is not None]


def _scout(workspace: Workspace, ledger: Ledger, progress: Progress, bench: Bench, hire: Hire, count: int) -> list[int]:
    if count > 1:
        raise InputError("the recipe-scout proposes one change at a time: what is learnt is the sum of them")
    called = agent_runs.called(workspace, hire)
    desk = agent_runs.open_desk(workspace, ledger, progress, scout.AGENT, hire) if called else None
    course = scouting.course(workspace, ledger, bench)
    if isinstance(course, str):
        progress.line(f"  nothing proposed: {course}")
        return []
    if desk:
        jobs = desk.running(bench.base, 1) or [desk.begin(bench.base, hire.target)]
        role = lambda job, bench: RecipeScout(course, bench, job.hire.target)
        return _with_model(jobs, workspace, ledger, progress, bench, role)
    drafted = scout.propose(course, bench)
    if drafted is None:
        progress.line("  nothing proposed: every change of the recipe that is worth a try was rejected before")
        return []
    return [submit(workspace, ledger, progress, drafted, bench.base)]


# What an agent is: a workbench and how many proposals may be made in, the numbers of judged ones out.
AGENTS: dict[str, Callable[[Workspace, Ledger, Progress, Bench, Hire, int], list[int]]] = {
    search_proposer.AGENT: _search,
    KERNEL_ENGINEER: _engineer,
    scout.AGENT: _scout,
}
