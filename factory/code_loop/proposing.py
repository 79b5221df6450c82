"""Runs the code loop once: live code → line profile → an agent's proposal → branch → gate → verdict.

The agent works only through its workbench: it reads files in scope, has implementations measured in the sandbox, and asks for earlier
attempts. It returns edits as data. After a kill at any moment, the next call removes the remains and continues: a proposal is 'drafted'
before its branch exists, and becomes 'judged' in the transaction that records its verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from agents.core.proposal import Proposal
from agents.kernel_engineer.draft import AGENT as KERNEL_ENGINEER
from agents.kernel_engineer.role import KernelEngineer
from agents.kernel_engineer.targets import select_worthwhile_targets
from agents.loop.role import Role
from agents.recipe_scout import scout
from agents.recipe_scout.role import RecipeScout
from agents.recipe_scout.training_record import TrainingRecord, make_training_record
from agents.search_proposer import search_proposer
from factory.code_loop.agent_runs import (
    DEFAULTS,
    NONE,
    AgentOptions,
    AgentRun,
    AgentRuns,
    needs_language_model,
    print_why_nothing_proposed,
)
from factory.code_loop.profiling import (
    QUICK,
    QUICKEST,
    ProfileOptions,
    find_least_gain,
    find_offered_targets,
    profile_live_code,
    read_profile,
    read_recent_profiles,
)
from factory.code_loop.revalidating import revalidate_merged_patches
from factory.code_loop.submitting import WRITTEN, judge_proposal, remove_remains_and_get_live_commit, submit_proposal
from factory.code_loop.workbench import LiveWorkbench
from factory.core.devices import run_in_parallel
from factory.core.errors import InputError, suggest_name
from factory.gates.patch.held_out_scores import read_held_out_texts
from factory.gates.recipe.policy import RecipePolicy
from factory.gates.recipe_changes import find_unused_recipes, get_used_recipe_path
from factory.gates.stage_interface import NOTHING_HELD_OUT
from factory.gates.training_start import find_training_start
from factory.ledger.ledger import Ledger, anomalies
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow, SegmentRow
from kernels.contract.message import Message
from kernels.contract.strict_yaml import read_yaml
from trainer.contract.errors import RecipeError, TrainerError
from trainer.contract.json_lines import read_json_lines
from trainer.contract.recipe import Recipe

SEGMENTS = 4  # the recipe scout reads the metrics of so many newest segments of the trunk

Submit = Callable[[Plant, Proposal, str], int]  # takes a drafted proposal and its base commit → the proposal's number


def make_proposals(
    plant: Plant, *, agent: str = search_proposer.AGENT, options: AgentOptions = DEFAULTS, count: int = 1
) -> list[int]:
    """Profile the live code, let ``agent`` propose patches, and judge them. Returns the numbers of at most ``count`` proposals.

    If there is nothing to propose, print the reason and return []. Several proposals are drafted in parallel; each timing runs alone on its
    device (``factory.core.devices``). Proposals that the daemon wrote but did not judge are judged first, and count.

    The caller holds the workspace's ``code-loop`` lock. Raises: InputError for an unknown agent, endpoint or target; NoModelReplyError;
    IsolationError without a sandbox; RepositoryError. After an error, no branch and no worktree is left. After a kill, the next call removes
    them. If one of several proposals fails, the error is raised after the others are judged.
    """
    if agent not in AGENTS:
        raise InputError(
            "code_loop.unknown_agent",
            "No agent is named {agent!r}{near}",
            agent=agent,
            near=suggest_name(agent, AGENTS),
        )
    bench = make_workbench(plant)
    if bench is None:
        why = Message(
            "code_loop.no_checkpoint",
            "there is no trunk checkpoint to measure on yet. To make a checkpoint, run 'factory run'",
        )
        print_why_nothing_proposed(plant, why)
        return []
    revalidate_merged_patches(plant, bench.base)
    left = [row.number for row in ProposalRow.select(plant.ledger, f"WHERE state = '{WRITTEN}' ORDER BY number")]
    for number in left:
        judge_proposal(plant, number)
    if len(left) >= count:
        return left
    return left + AGENTS[agent](bench, options, count - len(left), submit_proposal)


def make_workbench(plant: Plant) -> LiveWorkbench | None:
    """Return a workbench on the live commit; None without a checkpoint to measure on. Raises: as ``remove_remains_and_get_live_commit``."""
    base, start = remove_remains_and_get_live_commit(plant), find_training_start(plant.ledger)
    return LiveWorkbench(plant, base, start) if start else None


def _search(bench: LiveWorkbench, options: AgentOptions, count: int, submit: Submit) -> list[int]:
    if options not in (DEFAULTS, AgentOptions(NONE)):
        raise InputError(
            "code_loop.search_options",
            "The agent 'search' takes no --endpoint, --model, --target or --interactive: these options need a language model.",
        )
    profiled = _read(bench.plant.ledger, _profile(bench, QUICKEST))
    drafts = search_proposer.propose_implementations(profiled, replace(bench, count=count), count)
    if not drafts:
        why = Message(
            "code_loop.nothing_faster", "the search measured no change that is faster than the present choice"
        )
        print_why_nothing_proposed(bench.plant, why)
    return run_in_parallel([partial(submit, bench.plant, drafted, bench.base) for drafted in drafts])


def _engineer(bench: LiveWorkbench, options: AgentOptions, count: int, submit: Submit) -> list[int]:
    runs = AgentRuns.open(bench.plant, KERNEL_ENGINEER, options, count, by=bench.by)
    work_on = begin_or_continue_runs(runs, bench, bench.base, count)
    return _with_model(runs, work_on, bench, partial(make_kernel_engineer, bench.plant), submit)


def begin_or_continue_runs(runs: AgentRuns, bench: LiveWorkbench, base: str, count: int) -> list[AgentRun]:
    """Return ``count`` runs of the kernel engineer on this commit: first the unfinished runs, then new runs on a profile.

    With ``count`` above 1, each run has its own target, the most promising target first. There may be fewer targets than ``count``.
    Raises: ProfileError.
    """
    found = runs.find_unfinished(base, count)
    if len(found) < count:
        number = _profile(bench)
        aims = [runs.options.target]
        if count > 1:
            promising, _ = find_offered_targets(runs.plant, number)
            least = find_least_gain(runs.plant)
            names = [one.name for one in select_worthwhile_targets(promising, bench.list_earlier_proposals, least)]
            # A run without a target works on the first target.
            taken = {run.target or next(iter(names), "") for run in found}
            aims = [name for name in names if name not in taken] or ([] if found else aims)
        found += [runs.begin_run(base, target, number) for target in aims[: count - len(found)]]
    return found


def make_kernel_engineer(plant: Plant, run: AgentRun, bench: LiveWorkbench) -> KernelEngineer:
    """Return the role of the kernel engineer for a run. Raises: ProfileError if the run's profile can no longer be read; ConfigError."""
    profile, *earlier = read_recent_profiles(plant.ledger, run.profile)
    return KernelEngineer(profile, bench, run.target, earlier, find_least_gain(plant))


def _profile(bench: LiveWorkbench, options: ProfileOptions = QUICK) -> int:
    return profile_live_code(bench.plant, options) if bench.profile is None else bench.profile


def _read(ledger: Ledger, number: int) -> dict[str, Any]:
    return read_profile(Path(ledger.read("SELECT path FROM profiles WHERE id = :id", id=number)[0]["path"]))


def _scout(bench: LiveWorkbench, options: AgentOptions, count: int, submit: Submit) -> list[int]:
    if count > 1:
        raise InputError(
            "code_loop.scout_count",
            "--count above 1 cannot be used with the agent 'recipe-scout', which proposes one change at a time.",
        )
    model = needs_language_model(bench.plant.workspace, options)
    runs = AgentRuns.open(bench.plant, scout.AGENT, options, by=bench.by) if model else None
    found = read_scout_input(bench)
    if isinstance(found, str):
        print_why_nothing_proposed(bench.plant, found)
        return []
    if runs:
        work_on = runs.find_unfinished(bench.base, 1) or [runs.begin_run(bench.base, options.target)]
        return _with_model(runs, work_on, bench, lambda run, bench: RecipeScout(found, bench, run.target), submit)
    drafted = scout.propose_change(found, bench)
    if drafted is None:
        why = Message(
            "code_loop.all_rejected", "the gate has already rejected every change of the recipe that is worth a try"
        )
        print_why_nothing_proposed(bench.plant, why)
        return []
    return [submit(bench.plant, drafted, bench.base)]


def read_scout_input(bench: LiveWorkbench) -> TrainingRecord | str:
    """Return the recipe scout's input: the live recipe and the metrics of the trunk. Without such input, return the reason.

    Raises: ConfigError.
    """
    plant, workspace = bench.plant, bench.plant.workspace
    path = get_used_recipe_path(workspace)
    if unused := find_unused_recipes(workspace, [path]):
        return unused[0]
    if path not in bench.files(patchable=True):
        return Message(
            "code_loop.recipe_not_patchable",
            "{path} is not in the repository, or agents may not patch it",
            path=path,
        )
    try:
        recipe = Recipe.parse(read_yaml(bench.read(path), path, RecipeError), path)
    except TrainerError as error:
        return error.message
    policy = RecipePolicy.load(workspace.policy_path("gates/recipe.yaml"))
    texts, _ = read_held_out_texts(policy.runs.held_out_documents, policy.runs.held_out_bytes, plant)
    if not texts:
        return Message.from_json(NOTHING_HELD_OUT["reasons"][0])
    which = f"WHERE kind = 'trunk' AND state = 'done' ORDER BY id DESC LIMIT {SEGMENTS}"
    trunk = SegmentRow.select(plant.ledger, which)[::-1]
    records = [file for one in trunk if (file := Path(one.folder) / "metrics.jsonl").is_file()]
    lines = [line for file in records for line in read_json_lines(file)]
    if not lines:
        return Message("code_loop.no_metrics", "the trunk segments have no metrics for the agent to use")
    found = sa.select(anomalies.c.kind).where(anomalies.c.segment.in_([one.id for one in trunk]))
    kinds = Counter(row["kind"] for row in plant.ledger.select_rows(found))
    tokens_bytes = sum(text.bytes for text in texts) / sum(int(text.scored.sum()) for text in texts)
    steps = policy.runs.steps + policy.runs.tail_steps
    return make_training_record(
        recipe, path, lines, dict(kinds), tokens_bytes, steps, policy.runs.min_gain, policy.allows_change_of_key
    )


def _with_model(
    runs: AgentRuns,
    work_on: Sequence[AgentRun],
    bench: LiveWorkbench,
    role: Callable[[AgentRun, LiveWorkbench], Role],
    submit: Submit,
) -> list[int]:
    """Run language models in parallel, submit their proposals, and return the proposals' numbers. Each run has its own seconds for measuring."""

    def work(run: AgentRun) -> int | None:
        own = replace(bench, run=run.number)
        drafted = runs.draft_proposal(run, role(run, own), own)
        if drafted is None:
            return None
        number = runs.find_judged_proposal(run, drafted)
        if number is None:
            number = submit(bench.plant, drafted, bench.base)
        runs.record_run_end(run.number, "proposed", proposal=number)
        return number

    return [number for number in run_in_parallel([partial(work, run) for run in work_on]) if number is not None]


# Agent → function of (workbench, the person's options, most proposals, the function that takes each proposal) → their numbers.
AGENTS: dict[str, Callable[[LiveWorkbench, AgentOptions, int, Submit], list[int]]] = {
    search_proposer.AGENT: _search,
    KERNEL_ENGINEER: _engineer,
    scout.AGENT: _scout,
}
