"""The code loop of the daemon: its next stage, the end of each round, its budget, and kills, after which nothing is lost or done twice."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

from agents.core.improvement_policy import AGENTS as NAMES
from agents.core.improvement_policy import ImprovementBudget, ImprovementPolicy
from agents.core.proposal import Edit, Proposal
from factory.code_loop import improving, submitting
from factory.code_loop.agent_runs import AgentOptions
from factory.code_loop.improvements import (
    BEGAN,
    ENDED,
    BudgetUse,
    format_improvement_facts,
    read_improvement_facts,
    read_newest_stages,
    read_unchecked_improve_policy,
    sum_budget_use,
)
from factory.code_loop.improving import (
    COMBINE,
    JUDGE,
    MERGE,
    PROFILE,
    PROPOSE,
    LoopStage,
    LoopState,
    choose_next_stage,
    choose_next_stages,
)
from factory.code_loop.proposing import AGENTS
from factory.code_loop.workbench import LiveWorkbench
from factory.core.errors import ConfigError
from factory.core.workspace import Workspace, find_checkout_root
from factory.ledger.ledger import (
    Ledger,
    agent_runs,
    checkpoints,
    events,
    exchanges,
    profiles,
    proposals,
    segments,
    verdicts,
)
from factory.ledger.plant import Plant
from factory.ledger.writing import insert_row
from factory.show.notifications.notifications import make_notification_of_event
from kernels.contract.message import Message
from tests.support.factory.approvals import PatchPlant, given_verdict
from tests.support.git import git
from tests.support.messages import codes
from tests.support.plants.release_scene import add_segment, with_store
from tests.support.said import Said
from trainer.contract.recipe import Recipe

IDLE = ImprovementPolicy(when="when-idle")
READY = LoopState(IDLE, 720, ("search", "kernel-engineer"), profile=7)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (replace(READY, policy=ImprovementPolicy()), "code_loop.off"),
        (replace(READY, profile=None), LoopStage(PROFILE)),
        (READY, LoopStage(PROPOSE, "search")),
        (replace(READY, written=(4, "search")), LoopStage(JUDGE, "search", 4)),
        (replace(READY, written=(4, "search"), promoted=3), LoopStage(MERGE, proposal=3)),
        (replace(READY, finished=frozenset({"search"})), LoopStage(PROPOSE, "kernel-engineer")),
        (replace(READY, finished=frozenset({"search", "kernel-engineer"})), "code_loop.all_tried"),
        (replace(READY, agents=()), "code_loop.no_agent"),
        (replace(READY, agents=("recipe-scout",), profile=None), LoopStage(PROPOSE, "recipe-scout")),
        (replace(READY, killed={"propose by search": 2}), LoopStage(PROPOSE, "search")),
        (replace(READY, killed={"propose by search": 3}), LoopStage(PROPOSE, "kernel-engineer")),
        (replace(READY, profile=None, killed={"profile": 3}), "code_loop.all_tried"),
        (replace(READY, parts=(1, 4)), LoopStage(COMBINE, parts=(1, 4))),
        (replace(READY, parts=(1, 4), agents=()), LoopStage(COMBINE, parts=(1, 4))),
        (replace(READY, parts=(1, 4), written=(5, "search")), LoopStage(JUDGE, "search", 5)),
        (replace(READY, parts=(1, 4), used=BudgetUse(14_400.0)), ("device-seconds", 14_400.0, 14_400)),
        (replace(READY, parts=(1, 4), killed={"combine proposals 1 and 4": 3}), LoopStage(PROPOSE, "search")),
        (replace(READY, used=BudgetUse(14_399.0)), LoopStage(PROPOSE, "search")),
        (replace(READY, used=BudgetUse(14_400.0)), ("device-seconds", 14_400.0, 14_400)),
        (replace(READY, used=BudgetUse(14_400.0), begun=True), LoopStage(PROPOSE, "search")),
        (replace(READY, used=BudgetUse(0.0, 2_000_000)), ("tokens", 2_000_000, 2_000_000)),
        (replace(READY, used=BudgetUse(0.0, 0, 5.0)), ("USD", 5.0, 5)),
        (replace(READY, used=BudgetUse(14_400.0), written=(4, "search")), LoopStage(JUDGE, "search", 4)),
        (
            replace(READY, policy=IDLE.model_copy(update={"per_day": ImprovementBudget(usd=0.0)})),
            LoopStage(PROPOSE, "search"),
        ),
        (replace(READY, policy=ImprovementPolicy(when="nightly")), "code_loop.waits_for_night"),
        (replace(READY, policy=ImprovementPolicy(when="nightly"), minute=5 * 60 + 59), LoopStage(PROPOSE, "search")),
        (replace(READY, policy=ImprovementPolicy(when="nightly"), minute=6 * 60), "code_loop.waits_for_night"),
        (replace(READY, policy=ImprovementPolicy(when="nightly", night="12:00-12:01")), LoopStage(PROPOSE, "search")),
    ],
)
def test_next_stage_returns_a_stage_or_the_reason_why_there_is_none(
    seen: LoopState, expected: LoopStage | str | tuple[Any, ...]
) -> None:
    found = choose_next_stage(seen)
    if isinstance(expected, LoopStage):
        assert found == expected
    elif isinstance(expected, str):
        assert isinstance(found, Message) and found.code == expected
    else:
        assert isinstance(found, Message) and found.code == "code_loop.waits_for_budget"
        assert tuple(found.data["problem"].data[name] for name in ("unit", "used", "limit")) == expected


@pytest.mark.parametrize(
    ("improve", "code", "key", "problem"),
    [
        ({"agents": ["serch"]}, "strict.wrong_value", "improve.agents.0", "agents.no_agent"),
        ({"agents": ["oracle"]}, "strict.wrong_value", "improve.agents.0", "agents.no_agent"),
        ({"agents": []}, "strict.wrong_value", "improve.agents", None),
        ({"when": "daily"}, "strict.wrong_value", "improve.when", None),
        ({"night": "25:00-06:00"}, "strict.wrong_value", "improve.night", "agents.not_hours"),
        ({"per_day": {"device_second": 1.0}}, "strict.unknown_key", "improve.per_day.device_second", None),
    ],
)
def test_a_wrong_key_of_the_improve_policy_is_an_error_of_one_line(
    improve: dict[str, Any], code: str, key: str, problem: str | None, workspace: Workspace, ledger: Ledger
) -> None:
    allow(workspace, **improve)
    with pytest.raises(ConfigError) as caught:
        improving.list_due_stages(Plant(workspace, ledger), ledger)
    assert (caught.value.code, caught.value.data["key"]) == (code, key) and "\n" not in str(caught.value)
    assert problem is None or caught.value.data["problem"].code == problem


def test_the_policy_allows_exactly_the_existing_agents() -> None:
    assert set(NAMES) == set(AGENTS)


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PatchPlant:
    """Three files of code and a trunk; profiles and drafts take no time, and the gate holds what it is handed."""
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    made = PatchPlant(tmp_path)
    with_store(made.workspace)
    segment = add_segment(made.workspace, made.ledger, "trunk")
    recipe = Recipe.load(find_checkout_root() / "policies" / "recipes" / "tiny.yaml").model_dump(mode="json")
    with made.ledger.begin() as tx:
        tx.execute(segments.update().values(recipe_json=recipe))
        values = {"id": "c", "segment": segment.id, "step": 100, "path": "c", "created_at": 0.0}
        tx.execute(checkpoints.insert().values(**values))
    allow(made.workspace, when="when-idle")
    monkeypatch.setattr(improving, "profile_live_code", profiled)
    drafts(monkeypatch)
    given_verdict(monkeypatch, "hold")
    return made


def profiled(plant: Plant, *_: object) -> int:
    with plant.ledger.begin() as tx:
        return insert_row(tx, profiles, code_commit="c", path="p", summary={}, created_at=time.time())


def drafts(
    monkeypatch: pytest.MonkeyPatch, targets: tuple[str, ...] = ("kernel:a",), before: Callable[[], None] = lambda: None
) -> None:
    """The search proposer tries these targets, each while it is not closed."""

    def search(bench: LiveWorkbench, options: AgentOptions, count: int, submit: Any) -> list[int]:
        before()
        left = [one for one in targets if not any(attempt.closed for attempt in bench.list_earlier_proposals(one))]
        text = f"x = {left[0] if left else ''!r}\n"
        return [
            submit(
                bench.plant, Proposal("search", one, "Try it", "Why.", 1.1, (Edit("kernels/ops.py", text),)), bench.base
            )
            for one in left[:1]
        ]

    monkeypatch.setitem(AGENTS, "search", search)


def allow(workspace: Workspace, **improve: Any) -> None:
    raw = yaml.safe_load((find_checkout_root() / "policies" / "agents.yaml").read_text())
    path = workspace.root / "policies" / "agents.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(raw | {"improve": raw["improve"] | improve}))


def improve_waits(said: Said) -> Message:
    """The last line, which says why no stage is done."""
    last = said.lines[-1]
    assert isinstance(last, Message) and last.code == "code_loop.improve_waits"
    return last


def the(plant: PatchPlant, said: Said | None = None) -> Plant:
    return Plant(plant.workspace, plant.ledger, *([said] if said else []))


def rounds(plant: PatchPlant, said: Said | None = None, most: int = 12) -> list[str]:
    """Let the daemon do what is due until nothing is: the stages, as text."""
    done = []
    while (stages := improving.list_due_stages(the(plant), plant.ledger)) and len(done) < most:
        improving.do_stage(the(plant, said), stages[0])
        done.append(str(stages[0]))
    return done


def test_a_round_goes_from_the_profile_to_the_verdict_and_each_target_is_tried_once(
    plant: PatchPlant, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts(monkeypatch, ("kernel:a", "kernel:b"))
    said = Said()
    propose = "propose by search"
    expected = ["profile", propose, "judge proposal 1", propose, "judge proposal 2", propose]
    assert rounds(plant, said) == expected  # what was held is not proposed again
    assert [row["outcome_of"] for row in judged(plant)] == ["kernel:a", "kernel:b"]
    assert codes(said.lines)[0] == "code_loop.agent_left_out" and "kernel-engineer" in said.lines[0]
    assert codes(said.lines).count("code_loop.agent_left_out") == 1
    assert improve_waits(said).data["why"].code == "code_loop.all_tried"
    assert rounds(plant) == []
    allow(plant.workspace, when="when-idle", night="21:00-06:00")  # the policy changed: all of it may be tried again
    assert rounds(plant)[:3] == ["profile", propose, "judge proposal 3"]
    before = len(judged(plant))
    (plant.target / "README.md").write_text("# moved\n")
    git(plant.target, "commit", "-q", "-a", "-m", "a person's")
    assert rounds(plant, most=3)[0] == "profile" and len(judged(plant)) == before + 1


def test_patches_that_noise_held_are_combined_once_and_judged_as_one(
    plant: PatchPlant, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts(monkeypatch, ())
    for number, path in ((1, "kernels/a.py"), (2, "kernels/b.py")):
        row = plant.judged(number, "hold", {path: "y = 1\n"}, f"kernel:op{number}")
        training = {"state": "missing", "undecided": True}
        evidence = {"stages": {"training": training}, "patch_id": "", "files": [path]}
        with plant.ledger.begin() as tx:
            tx.execute(verdicts.update().where(verdicts.c.id == row["verdict"]).values(evidence=evidence))
    assert rounds(plant) == ["combine proposals 1 and 2", "judge proposal 3", "profile", "propose by search"]
    assert (plant.row(3)["state"], plant.row(3)["target"]) == ("judged", "sum:1+2") and rounds(plant) == []
    (combined,) = [one for one in read_newest_stages(plant.ledger, time.time()) if one.began["stage"] == "combine"]
    assert (combined.began["parts"], (combined.left or {})["proposal"]) == ([1, 2], 3)
    (plant.target / "README.md").write_text("# moved\n")
    git(plant.target, "commit", "-q", "-a", "-m", "a person's")
    assert "combine proposals 1 and 2" not in rounds(plant)  # the same sum is not judged twice


def judged(plant: PatchPlant) -> list[dict[str, Any]]:
    rows = plant.ledger.select_rows(
        sa.select(proposals).where(proposals.c.state == "judged").order_by(proposals.c.number)
    )
    return [row | {"outcome_of": row["target"]} for row in rows]


def test_the_loop_does_nothing_by_default_without_a_trunk_or_while_its_lock_is_held(
    plant: PatchPlant, tmp_path: Path
) -> None:
    look = lambda: improving.list_due_stages(the(plant), plant.ledger)
    assert look() == [LoopStage(PROFILE)]
    with plant.workspace.hold_lock("code-loop"):
        assert look() == []
    allow(plant.workspace)
    assert look() == []
    (tmp_path / "new").mkdir()
    new = PatchPlant(tmp_path / "new")
    allow(new.workspace, when="when-idle")
    assert improving.list_due_stages(the(new), new.ledger) == []


def test_a_promoted_patch_waits_for_a_person_or_is_merged_by_an_automatic_policy(
    plant: PatchPlant, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_verdict(monkeypatch, "promote")
    assert rounds(plant)[2:] == ["judge proposal 1", "propose by search"] and plant.row(1)["state"] == "judged"
    gate = plant.workspace.root / "policies" / "gates" / "patch.yaml"
    gate.parent.mkdir(parents=True)
    gate.write_text("approval: automatic\n")
    before = plant.head()
    assert rounds(plant)[0] == "merge proposal 1"
    assert plant.row(1)["state"] == "approved" and plant.head() != before
    assert plant.words() == [("approved", "policy")]


def test_the_budget_covers_the_last_24_hours_and_stops_no_judgement(plant: PatchPlant) -> None:
    allow(plant.workspace, when="when-idle", per_day={"device_seconds": 10.0})
    assert rounds(plant, most=1) == ["profile"]
    ended(plant, seconds=11.0)
    assert rounds(plant, most=1) == ["propose by search"]
    ended(plant, seconds=5.0, devices=2)
    said = Said()
    assert rounds(plant, said) == ["judge proposal 1"]
    beyond = improve_waits(said).data["why"].data["problem"].data
    assert beyond["used"] > 21 and (beyond["limit"], beyond["unit"]) == (10, "device-seconds")
    with plant.ledger.begin() as tx:
        tx.execute(events.update().where(events.c.kind == ENDED).values(at=time.time() - 86_401))
    assert rounds(plant, most=1) == ["propose by search"]


def ended(plant: PatchPlant, **cost: Any) -> None:
    """The newest stage took as much."""
    row = plant.ledger.select_first(
        sa.select(events).where(events.c.kind == ENDED).order_by(events.c.id.desc()).limit(1)
    )
    assert row is not None
    with plant.ledger.begin() as tx:
        tx.execute(events.update().where(events.c.id == row["id"]).values(detail=row["detail"] | cost))


def test_tokens_count_from_the_start_of_a_stage_even_if_it_was_killed(plant: PatchPlant) -> None:
    now = time.time()
    run = {
        "agent": "kernel-engineer",
        "asked": "",
        "base_commit": "b",
        "profile": 0,
        "state": "running",
        "created_at": now,
    }
    began = {"stage": PROPOSE, "agent": "kernel-engineer", "situation": "s", "model": True}
    with plant.ledger.begin() as tx:
        number = insert_row(tx, agent_runs, **run)
        other = insert_row(tx, agent_runs, **(run | {"agent": "loss-doctor"}))
        insert_row(tx, events, at=now - 100, kind=BEGAN, subject="code_loop", detail=began)
        spent = {"label": "l", "state": "done", "usd": 0.25}
        for at, who, tokens in (
            (now - 200, number, 1),
            (now - 50, number, 40),
            (now - 40, other, 2),
            (now - 1, number, 60),
        ):
            insert_row(tx, exchanges, at=at, run=who, tokens=tokens, **spent)
    found = sum_budget_use(plant.ledger, read_newest_stages(plant.ledger, now), now)
    assert found == BudgetUse(0.0, 100, 0.5)


def test_a_failed_judgement_closes_its_target_and_a_full_disk_does_not(
    plant: PatchPlant, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts(monkeypatch, ("kernel:a", "kernel:b"))
    assert rounds(plant, most=2) == ["profile", "propose by search"]
    for error, state in ((OSError(errno.ENOSPC, "No space left on device"), "written"), (ConfigError("no"), "failed")):
        monkeypatch.setattr(submitting, "_decide", partial(_raises, error))
        (stage, *_) = improving.list_due_stages(the(plant), plant.ledger)
        with pytest.raises(type(error)):
            improving.do_stage(the(plant), stage)
        assert plant.row()["state"] == state
    assert rounds(plant, most=1) == ["propose by search"]
    assert plant.row(2)["target"] == "kernel:b"


def _raises(error: Exception, *_: Any) -> None:
    raise error


def test_next_stages_has_one_proposal_for_each_unfinished_agent() -> None:
    seen = LoopState(ImprovementPolicy(when="when-idle"), 0, ("search", "recipe-scout"), profile=1)
    assert choose_next_stages(seen) == [LoopStage(PROPOSE, "search"), LoopStage(PROPOSE, "recipe-scout")]
    assert choose_next_stages(replace(seen, written=(3, "search"))) == [LoopStage(JUDGE, "search", 3)]
    assert choose_next_stages(replace(seen, finished=frozenset(seen.agents))) == []


KILL = lambda: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("point", ["profile", "draft", "written", "gate", "verdict"])
@pytest.mark.slow("a round of the code loop for each stage")
def test_a_stage_that_was_killed_is_done_again_by_the_next_pass(
    point: str, plant: PatchPlant, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages_before = {"profile": 0, "draft": 1, "written": 1, "gate": 2, "verdict": 2}[point]
    assert len(rounds(plant, most=stages_before)) == stages_before
    stage = improving.list_due_stages(the(plant), plant.ledger)[0]
    child = os.fork()
    if child == 0:
        try:
            place, name = {
                "profile": (improving, "profile_live_code"),
                "draft": (submitting.repository, "apply_proposal"),
                "written": (improving, "write_branch"),
                "gate": (submitting, "_decide"),
                "verdict": (submitting, "record_proposal_as_judged"),
            }[point]
            real = getattr(place, name)

            def killed(*arguments: Any, **named: Any) -> None:
                if point == "written":
                    real(*arguments, **named)
                KILL()

            setattr(place, name, killed)
            own = Ledger.open(plant.workspace.ledger_url, plant.workspace.root)
            improving.do_stage(Plant(plant.workspace, own), stage)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    again = rounds(plant)
    expected = stage if point != "written" else LoopStage(JUDGE, "search", 1)
    assert again[0] == str(expected), again
    assert [row["target"] for row in judged(plant)] == ["kernel:a"]
    assert {row["state"] for row in plant.ledger.select_rows(sa.select(proposals))} <= {"judged", "failed"}
    assert sorted(path.name for path in plant.workspace.worktrees.iterdir()) == []
    branches = git(plant.target, "branch", "--list", "factory/*").split()
    assert branches == [judged(plant)[0]["branch"]]


def test_a_patch_that_kills_the_daemon_at_each_judging_is_given_up(plant: PatchPlant) -> None:
    rounds(plant, most=2)
    killed_in(plant, LoopStage(JUDGE, "search", 1), 3)
    said = Said()
    assert rounds(plant, said) == ["judge proposal 1"] and plant.row(1)["state"] == "failed"
    assert codes(said.lines)[1] == "code_loop.given_up" and git(plant.target, "branch", "--list", "factory/*") == ""


def killed_in(plant: PatchPlant, stage: LoopStage, times: int) -> None:
    situation = read_newest_stages(plant.ledger, time.time())[-1].began["situation"]
    with plant.ledger.begin() as tx:
        for _ in range(times):
            insert_row(
                tx,
                events,
                at=time.time(),
                kind=BEGAN,
                subject="code_loop",
                detail=stage.to_event_detail() | {"situation": situation},
            )


def test_a_failure_of_a_stage_is_raised_recorded_and_retried(
    plant: PatchPlant, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds(plant, most=1)

    def fails() -> None:
        raise ConfigError("no such thing")

    drafts(monkeypatch, before=fails)
    with pytest.raises(ConfigError, match="no such thing"):
        rounds(plant)
    assert read_newest_stages(plant.ledger, time.time())[-1].left["failed"] == "ConfigError: no such thing"  # type: ignore[index]
    drafts(monkeypatch)
    assert rounds(plant)[0] == "propose by search"


def test_a_stage_that_is_no_longer_due_is_not_begun(plant: PatchPlant) -> None:
    stage = improving.list_due_stages(the(plant), plant.ledger)[0]
    allow(plant.workspace)
    improving.do_stage(the(plant), stage)
    assert read_newest_stages(plant.ledger, time.time()) == []


def test_status_shows_the_present_stage_the_last_one_and_the_cost(plant: PatchPlant) -> None:
    told = lambda running=True: format_improvement_facts(
        read_improvement_facts(plant.ledger, read_unchecked_improve_policy(plant.workspace), time.time()), running
    )
    assert told() == ["improve   when-idle"]
    rounds(plant, most=1)
    ended(plant, seconds=0.0)
    rounds(plant, most=1)
    ended(plant, seconds=90.0, devices=4)
    assert "propose by search (" in told()[1] and told()[1].endswith(", proposal 1")
    assert " 360 device-seconds" in told()[2]
    killed_in(plant, LoopStage(JUDGE, "search", 1), 1)
    assert "now: judge proposal 1" in told()[0] and told(running=False)[0] == "improve   when-idle"
    rounds(plant)
    assert ", nothing found; " in told()[1]
    json.dumps(read_improvement_facts(plant.ledger, read_unchecked_improve_policy(plant.workspace), time.time()))
    allow(plant.workspace)
    assert told()[0] == "improve   off" and "have tried everything" not in told()[1]


@pytest.mark.parametrize(
    ("outcome", "approval", "kinds", "title"),
    [
        (
            "promote",
            "manual",
            ("verdict", "approval"),
            "proposal 1 has the verdict promote and waits for your approval",
        ),
        ("promote", "automatic", ("verdict",), "proposal 1 has the verdict promote"),
        ("hold", "manual", ("verdict",), "proposal 1 has the verdict hold"),
    ],
)
def test_receivers_are_notified_of_verdicts_and_merges_of_proposals(
    outcome: str, approval: str, kinds: tuple[str, ...], title: str, tmp_path: Path
) -> None:
    plant = PatchPlant(tmp_path)
    gate = plant.workspace.root / "policies" / "gates" / "patch.yaml"
    gate.parent.mkdir(parents=True)
    gate.write_text(f"approval: {approval}\n")
    row = plant.judged(outcome=outcome)
    event = {"id": 1, "at": 0.0, "subject": "proposal:1"}
    told = make_notification_of_event(
        plant, event | {"kind": "judged", "detail": {"outcome": outcome, "verdict": row["verdict"]}}
    )
    assert told is not None and (told.kinds, told.title) == (kinds, title) and "so it measured" in told.text
    assert ("factory proposals approve 1" in told.text) is ("approval" in kinds)
    merged = make_notification_of_event(plant, event | {"kind": "proposal_approved", "detail": {"by": "policy"}})
    assert merged is not None and (merged.title, merged.text) == (
        "proposal 1 is merged",
        "policy approved the proposal.",
    )
