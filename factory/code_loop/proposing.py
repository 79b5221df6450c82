"""The code loop, once: live code → line profile → an agent's proposal → branch → gate → verdict.

The agent sees the world only through its workbench: it reads files in scope, has implementations measured in the sandbox, and asks what was
tried before. It returns edits as data. Killed at any instruction, the next call removes what was left and continues: a proposal is
'drafted' before its branch exists and becomes 'judged' in the transaction that records its verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from agents.core.proposal import Proposal
from agents.kernel_engineer.draft import AGENT as KERNEL_ENGINEER
from agents.loop.role import Role
from agents.recipe_scout import scout
from agents.recipe_scout.role import RecipeScout
from agents.search_proposer import search_proposer
from factory.code_loop import engineering, scouting
from factory.code_loop.agent_runs import DEFAULTS, NONE, AgentOptions, AgentRun, AgentRuns, wants_model
from factory.code_loop.profiling import QUICK, profile, read_profile
from factory.code_loop.revalidating import revalidate
from factory.code_loop.submitting import clear_stale, refuse_without_isolation, submit
from factory.code_loop.workbench import LiveWorkbench
from factory.core.devices import side_by_side
from factory.core.errors import InputError, nearest
from factory.gates.training_start import find_start
from factory.git import repository
from factory.ledger.plant import Plant


def propose(
    plant: Plant,
    *,
    agent: str = search_proposer.AGENT,
    options: AgentOptions = DEFAULTS,
    count: int = 1,
) -> list[int]:
    """Profile, let ``agent`` propose, judge; returns the proposals' numbers: at most ``count``, none (and a line says why) when there is
    nothing to propose. Several are drafted side by side; what is timed has its device alone (``factory.core.devices``).

    The caller holds the workspace's ``code-loop`` lock. Raises: InputError for an unknown agent, endpoint or target; ModelError;
    IsolationError without a sandbox; RepositoryError. Whatever it raises, no branch and no worktree is left. (After a kill, the next call
    removes them.) Of several, the others are judged to their end before an error of one is raised.
    """
    if agent not in AGENTS:
        raise InputError(f"no agent {agent!r}{nearest(agent, AGENTS)}")
    base = repository.live_commit(plant.workspace.repository)
    repository.require_settled(plant.workspace.repository)
    clear_stale(plant)
    start = find_start(plant.ledger)
    if start is None:
        plant.progress.line(
            "  nothing proposed: there is no trunk checkpoint to measure on yet; 'factory run' makes one"
        )
        return []
    refuse_without_isolation(plant.workspace)
    revalidate(plant, base)
    return AGENTS[agent](LiveWorkbench(plant.workspace, plant.ledger, base, start, plant.progress), options, count)


def _search(bench: LiveWorkbench, options: AgentOptions, count: int) -> list[int]:
    if options not in (DEFAULTS, AgentOptions(NONE)):
        raise InputError(
            "the agent 'search' takes no --endpoint, --model, --target or --interactive: they need a language model"
        )
    number = profile(Plant(bench.workspace, bench.ledger, bench.progress), QUICK)
    profiled = Path(bench.ledger.read("SELECT path FROM profiles WHERE id = :id", id=number)[0]["path"])
    drafts = search_proposer.propose(read_profile(profiled), replace(bench, count=count), count)
    if not drafts:
        bench.progress.line("  nothing proposed: no change was found that measures faster than what runs now")
    return side_by_side([partial(_submit, bench, drafted) for drafted in drafts])


def _engineer(bench: LiveWorkbench, options: AgentOptions, count: int) -> list[int]:
    runs = AgentRuns.open(Plant(bench.workspace, bench.ledger, bench.progress), KERNEL_ENGINEER, options, count)
    work_on = engineering.runs_to_work_on(runs, bench, bench.base, count)
    return _with_model(runs, work_on, bench, partial(engineering.role, bench.ledger))


def _scout(bench: LiveWorkbench, options: AgentOptions, count: int) -> list[int]:
    if count > 1:
        raise InputError(
            "--count above 1 cannot be used with the agent 'recipe-scout', which proposes one change at a time"
        )
    model = wants_model(bench.workspace, options)
    runs = AgentRuns.open(Plant(bench.workspace, bench.ledger, bench.progress), scout.AGENT, options) if model else None
    course = scouting.course(bench)
    if isinstance(course, str):
        bench.progress.line(f"  nothing proposed: {course}")
        return []
    if runs:
        work_on = runs.unfinished(bench.base, 1) or [runs.begin(bench.base, options.target)]
        return _with_model(runs, work_on, bench, lambda run, bench: RecipeScout(course, bench, run.target))
    drafted = scout.propose(course, bench)
    if drafted is None:
        bench.progress.line("  nothing proposed: every change of the recipe that is worth a try was rejected before")
        return []
    return [_submit(bench, drafted)]


def _with_model(
    runs: AgentRuns,
    work_on: Sequence[AgentRun],
    bench: LiveWorkbench,
    role: Callable[[AgentRun, LiveWorkbench], Role],
) -> list[int]:
    """What language models propose, side by side; each run has its own seconds for measuring."""

    def work(run: AgentRun) -> int | None:
        own = replace(bench)
        drafted = runs.draft(run, role(run, own), own)
        if drafted is None:
            return None
        number = runs.judged_before(run, drafted)
        if number is None:
            number = _submit(bench, drafted)
        runs.finish(run, number)
        return number

    return [number for number in side_by_side([partial(work, run) for run in work_on]) if number is not None]


def _submit(bench: LiveWorkbench, drafted: Proposal) -> int:
    return submit(Plant(bench.workspace, bench.ledger, bench.progress), drafted, bench.base)


# By name: a workbench, what the person asked for and how many proposals may be made → the numbers of the judged ones.
AGENTS: dict[str, Callable[[LiveWorkbench, AgentOptions, int], list[int]]] = {
    search_proposer.AGENT: _search,
    KERNEL_ENGINEER: _engineer,
    scout.AGENT: _scout,
}
