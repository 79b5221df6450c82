"""Runs the code loop in the daemon: if the daemon has nothing else to do, it improves the training code, one stage at a time.

    profile ─► propose (one agent, one proposal) ─► judge ─► merge, where ``approval: automatic`` lets the verdict decide
               combine (held proposals into one)  ─┘

The next stage follows from the ledger and the policy alone (``choose_next_stage``, a pure function). After a kill in a stage, the next call begins
that stage again; an agent that is a language model continues from its checkpoint. A *situation* is the live commit, the recipe, the machine and
agents.yaml. Each agent works until it finds nothing more in the present situation. It does not return to a target that was judged there.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from agents.core.improvement_policy import OFF, ImprovementPolicy
from agents.core.proposal import Proposal
from agents.kernel_engineer.draft import AGENT as KERNEL_ENGINEER
from agents.search_proposer.search_proposer import AGENT as SEARCH
from factory.code_loop.agent_runs import DEFAULTS, FILES, IMPROVE, NONE, NoModelReplyError, choose_endpoint
from factory.code_loop.approvals import settle_waiting_proposals
from factory.code_loop.combining import find_parts_to_combine, write_sum
from factory.code_loop.improvements import (
    ALONE,
    BEGAN,
    ENDED,
    SUBJECT,
    WAITS,
    BegunStage,
    BudgetUse,
    format_stage_name,
    read_newest_stages,
    sum_budget_use,
)
from factory.code_loop.profiling import QUICK, profile_live_code
from factory.code_loop.proposing import AGENTS, make_workbench
from factory.code_loop.submitting import (
    LOCK,
    WRITTEN,
    judge_proposal,
    mark_as_failed,
    mark_stale_proposals_as_failed,
    remove_remains_and_get_live_commit,
    require_isolation,
    write_branch,
)
from factory.core.errors import WorkspaceError
from factory.core.policy_file import hash_policy
from factory.gates.patch.policy import PatchPolicy
from factory.git import repository
from factory.git.scope import AgentsPolicy
from factory.ledger.ledger import agent_runs, events, exchanges, record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow, SegmentRow, SqlReader, Subject
from factory.ledger.writing import insert_row, record_event_once
from kernels.contract.machine import describe_this_machine
from kernels.contract.message import Message

PROFILE, PROPOSE, COMBINE, JUDGE, MERGE = "profile", "propose", "combine", "judge", "merge"
PROFILED = (SEARCH, KERNEL_ENGINEER)  # agents that work from a line profile
MOST_CUT = 3  # after so many kills, a stage is given up in this situation


@dataclass(frozen=True)
class LoopStage:
    """A stage to do. Its text is, for example, 'judge proposal 3'."""

    name: str
    agent: str = ""
    proposal: int | None = None
    parts: tuple[int, ...] = ()  # of COMBINE: the held proposals

    def to_event_detail(self) -> dict[str, Any]:
        """Return the stage in the form in which events record it."""
        named = {"stage": self.name, "agent": self.agent, "proposal": self.proposal, "parts": list(self.parts)}
        return {key: value for key, value in named.items() if value}

    def __str__(self) -> str:
        return format_stage_name(self.to_event_detail())


@dataclass(frozen=True)
class LoopState:
    """The facts by which ``choose_next_stage`` decides."""

    policy: ImprovementPolicy
    minute: int  # of the day, local
    agents: tuple[str, ...] = ()  # the policy's agents that can work here
    finished: frozenset[str] = frozenset()  # agents that found nothing more in this situation
    profile: int | None = None  # id of the profile of this situation
    written: tuple[int, str] | None = None  # a proposal that waits for its judgement, and its agent
    promoted: int | None = None  # a proposal that the policy allows to merge
    killed: Mapping[str, int] = field(default_factory=dict)  # stage, as text → number of its kills in this situation
    begun: bool = False  # the last stage made a profile, for a proposal that is begun with it
    used: BudgetUse = BudgetUse()
    parts: tuple[int, ...] = ()  # held proposals whose sum was not tried yet


def choose_next_stage(state: LoopState) -> LoopStage | str:
    """Return the stage to do now, or the reason why there is no stage. Pure. A proposal that was begun is finished first, even beyond the budget."""
    if state.policy.when == OFF:
        return Message("code_loop.off", "improve is off in agents.yaml")
    if not state.policy.allows_stage_at_minute_of_day(state.minute):
        return Message(
            "code_loop.waits_for_night", "the code loop waits for the night ({hours})", hours=state.policy.night
        )
    if state.promoted is not None:
        return LoopStage(MERGE, proposal=state.promoted)
    if state.written is not None:
        return LoopStage(JUDGE, agent=state.written[1], proposal=state.written[0])
    if not state.begun and (beyond := state.used.find_exceeded_limit(state.policy.per_day.model_dump())):
        return Message("code_loop.waits_for_budget", "the code loop waits, because {problem}", problem=beyond)
    combine = LoopStage(COMBINE, parts=state.parts)
    if state.parts and state.killed.get(str(combine), 0) < MOST_CUT:
        return combine
    if not state.agents:
        return Message("code_loop.no_agent", "no LLM endpoint is configured, and all agents of agents.yaml need one")
    for agent in state.agents:
        stage = LoopStage(PROFILE) if agent in PROFILED and state.profile is None else LoopStage(PROPOSE, agent)
        if agent not in state.finished and state.killed.get(str(stage), 0) < MOST_CUT:
            return stage
    return Message(
        "code_loop.all_tried", "the agents have tried everything for the present code, recipe, machine and agents.yaml"
    )


def choose_next_stages(state: LoopState) -> list[LoopStage]:
    """Return ``choose_next_stage``, then the stage of each further agent. So an agent that rests after a failure does not hold up the others."""
    found: list[LoopStage] = []
    while isinstance(stage := choose_next_stage(state), LoopStage):
        found.append(stage)
        if not stage.agent or stage.name != PROPOSE:
            break
        state = replace(state, finished=state.finished | {stage.agent})
    return found


@dataclass(frozen=True)
class CodeLoopSituation:
    """The state of a workspace at one moment, as the code loop reads it."""

    plant: Plant
    db: SqlReader
    agents: AgentsPolicy

    @classmethod
    def read_situation(cls, plant: Plant, db: SqlReader) -> CodeLoopSituation:
        """Read the situation of a workspace. Raises: ConfigError that names an unknown agent."""
        return cls(plant, db, AgentsPolicy.load(plant.workspace.policy_path("agents.yaml")))

    @cached_property
    def base_commit(self) -> str:
        return repository.get_live_commit(self.plant.workspace.repository)

    @cached_property
    def situation_hash(self) -> str:
        """A hash of everything that the result of an agent's attempt depends on."""
        recipe = hashlib.sha256(self.plant.workspace.recipe_path().read_bytes()).hexdigest()
        parts = [self.base_commit, recipe, describe_this_machine().to_json(), hash_policy(self.agents)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def past_stages(self) -> list[BegunStage]:
        return read_newest_stages(self.db, time.time())

    @property
    def past_stages_in_situation(self) -> list[BegunStage]:
        """The past stages that belong to this situation."""
        return [one for one in self.past_stages if one.began["situation"] == self.situation_hash]

    @property
    def closed_proposals(self) -> frozenset[int]:
        """The proposals whose targets agents leave alone: those of this situation, and those on this commit that wait for a person."""
        told = [
            one.began | (one.left or {}) for one in self.past_stages_in_situation
        ]  # if the stage that proposed was killed, the stage that judged names the proposal
        mine = {one["proposal"] for one in told if "proposal" in one}
        which = "WHERE base_commit = :base AND state = 'judged' AND outcome = 'promote'"
        return frozenset(mine | {row.number for row in ProposalRow.select(self.db, which, base=self.base_commit)})

    def read_loop_state(self) -> LoopState:
        ended = [(one.began, one.left) for one in self.past_stages_in_situation if one.left]
        killed = Counter(format_stage_name(one.began) for one in self.past_stages_in_situation if one.left is None)
        written = ProposalRow.find_first(self.db, "WHERE state = 'written' ORDER BY number")
        now = time.time()
        clock = time.localtime(now)
        return LoopState(
            self.agents.improve,
            clock.tm_hour * 60 + clock.tm_min,
            tuple(agent for agent in self.agents.improve.agents if agent != KERNEL_ENGINEER or self.has_language_model),
            frozenset(began["agent"] for began, left in ended if left.get("nothing")),
            next((left["profile"] for _, left in reversed(ended) if "profile" in left), None),
            (written.number, written.agent) if written else None,
            self._promoted(),
            killed,
            bool(ended) and "profile" in ended[-1][1],
            sum_budget_use(self.db, self.past_stages, now),
            find_parts_to_combine(self.plant, self.db),
        )

    @cached_property
    def has_language_model(self) -> bool:
        """Whether a language model is configured that answers without a person."""
        where = choose_endpoint(self.agents.llm, DEFAULTS)
        return where not in ("", NONE) and not where.startswith(FILES)

    def _promoted(self) -> int | None:
        """Return the first proposal that only has to be merged. A proposal whose merge failed is left out: ``approvals`` tries it once a day."""
        if PatchPolicy.load(self.plant.workspace.policy_path("gates/patch.yaml")).approval != "automatic":
            return None
        for row in ProposalRow.select(self.db, "WHERE state = 'judged' AND outcome = 'promote' ORDER BY number"):
            refused = "SELECT id FROM events WHERE kind = 'decision_refused' AND subject = :subject LIMIT 1"
            if not self.db.read(refused, subject=str(Subject("proposal", row.number))):
                return row.number
        return None


def list_due_stages(plant: Plant, db: SqlReader) -> list[LoopStage]:
    """Return the stages to do now, one for each agent with work. The caller does the first stage that does not rest. Raises: ConfigError."""
    situation = CodeLoopSituation.read_situation(plant, db)
    policy = situation.agents.improve
    if policy.when == OFF or not SegmentRow.find_first(db, "WHERE kind = 'trunk' AND state = 'done'"):
        return []
    found = choose_next_stages(situation.read_loop_state())
    if not found:
        return []
    try:
        with plant.workspace.hold_lock(LOCK):
            return found
    except WorkspaceError:  # 'factory propose' runs
        return []


def do_stage(plant: Plant, stage: LoopStage) -> None:
    """Do one stage, and record its result and cost. Raises: the errors of ``propose`` and of the gates."""
    situation = CodeLoopSituation.read_situation(plant, plant.ledger)
    seen = situation.read_loop_state()
    if stage not in choose_next_stages(seen):
        return  # the situation changed since
    for table in (agent_runs, exchanges):
        table.create(plant.ledger.engine, checkfirst=True)  # a ledger may be older than these tables
    _introduce(plant, situation, stage)
    model = situation.has_language_model and stage.name == PROPOSE and stage.agent != SEARCH
    with plant.ledger.begin() as tx:
        began = {**stage.to_event_detail(), "situation": situation.situation_hash, "model": model}
        number = insert_row(tx, events, at=time.time(), kind=BEGAN, subject=SUBJECT, detail=began)
    started = time.monotonic()
    left: dict[str, Any] = {}
    try:
        left = _stage(plant, situation, seen, stage)
    except BaseException as error:
        left = {"failed": f"{type(error).__name__}: {error}"[:500]}
        raise
    finally:
        cost = {"seconds": round(time.monotonic() - started, 3), "devices": _devices()}
        with plant.ledger.begin() as tx:
            record_event(tx, ENDED, SUBJECT, {"began": number, **left, **cost})
    after = choose_next_stage(CodeLoopSituation.read_situation(plant, plant.ledger).read_loop_state())
    if isinstance(after, str):
        with plant.ledger.begin() as tx:
            record_event(tx, WAITS, SUBJECT, {"why": str(after)})
        plant.print_line(Message("code_loop.improve_waits", "  improve: {why}", why=after))


def _introduce(plant: Plant, situation: CodeLoopSituation, stage: LoopStage) -> None:
    """Tell the person which stage begins and, once, which agents are left out because no language model is configured."""
    if KERNEL_ENGINEER in situation.agents.improve.agents and not situation.has_language_model:
        if record_event_once(plant.ledger, ALONE, SUBJECT, {"left_out": [KERNEL_ENGINEER]}):
            plant.print_line(
                Message(
                    "code_loop.agent_left_out",
                    "  improve: agent {agent} is left out, because no LLM endpoint is configured. Set llm.endpoint in "
                    "agents.yaml, or OPENAI_BASE_URL.",
                    agent=KERNEL_ENGINEER,
                )
            )
    elif situation.has_language_model:
        record_event_once(plant.ledger, ALONE, SUBJECT, {"left_out": []})
    plant.print_line(
        Message(
            "code_loop.stage_begins",
            "  improve: {stage}, on commit {commit}",
            stage=str(stage),
            commit=situation.base_commit[:12],
        )
    )


def _stage(plant: Plant, situation: CodeLoopSituation, seen: LoopState, stage: LoopStage) -> dict[str, Any]:
    """Do the stage, and return its result in the form in which the event records it."""
    if stage.name == MERGE:
        settle_waiting_proposals(plant, lambda number: None)  # takes the lock itself
        return {"outcome": ProposalRow.get(plant.ledger, stage.proposal or 0).state}
    with plant.workspace.hold_lock(LOCK):
        if stage.name == PROFILE:
            return {"profile": profile_live_code(plant, QUICK)}
        if stage.name == COMBINE:
            number = write_sum(plant, stage.parts, remove_remains_and_get_live_commit(plant))
            return {"outcome": "refused"} if number is None else {"proposal": number}
        return _judge(plant, seen, stage) if stage.name == JUDGE else _propose(plant, situation, seen, stage)


def _propose(plant: Plant, situation: CodeLoopSituation, seen: LoopState, stage: LoopStage) -> dict[str, Any]:
    bench = make_workbench(plant)
    assert bench is not None, "due without a checkpoint"
    bench = replace(bench, profile=seen.profile, closed=situation.closed_proposals, by=IMPROVE)
    try:
        numbers = AGENTS[stage.agent](bench, DEFAULTS, 1, _write)
    except NoModelReplyError as error:
        if not error.over:
            raise  # the run is saved, and a later pass continues it
        numbers = []
    return {"proposal": numbers[0]} if numbers else {"nothing": True}


def _write(plant: Plant, drafted: Proposal, base: str) -> int:
    return write_branch(plant, drafted, base, WRITTEN)


def _judge(plant: Plant, seen: LoopState, stage: LoopStage) -> dict[str, Any]:
    assert stage.proposal is not None
    killed = seen.killed.get(str(stage), 0)
    if killed >= MOST_CUT:
        why = Message(
            "code_loop.killed_often",
            "the process that judged the proposal was killed {times:,|time|times}",
            times=killed,
        )
        mark_as_failed(plant, stage.proposal, why)
        plant.print_line(
            Message(
                "code_loop.given_up",
                "  the factory gave up proposal {proposal}: {why}",
                proposal=stage.proposal,
                why=why,
            )
        )
        return {"nothing": True}
    mark_stale_proposals_as_failed(plant)
    require_isolation(plant.workspace)
    judge_proposal(plant, stage.proposal)
    return {"outcome": ProposalRow.get(plant.ledger, stage.proposal).outcome}


def _devices() -> int:
    """Return the number of this machine's devices: its GPUs, or 1 for the CPU."""
    import torch

    return torch.cuda.device_count() or 1
