"""Tasks in the release gate: when each is measured, when it holds a candidate, and which protocol measures a line of releases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
import torch

from factory.gates.release.gate import judge_candidate
from factory.ledger.ledger import eval_items, evaluations, record_event, releases
from factory.ledger.rows import VerdictRow
from factory.tasks.policy import TaskSettings, TasksPolicy
from factory.tasks.task_file import load_task_by_name
from factory.tasks.tiers import measure_due_tasks, measure_new_baseline, read_baseline
from tests.support.factory.exports import FilledPlant, measured_alone, save_export, tiny_model, trained
from tests.support.factory.task_files import choice_items, write_policy, write_task
from tests.support.messages import says


@pytest.fixture(scope="module")
def line(plant: FilledPlant) -> tuple[int, int]:
    """(the champion, a better candidate)."""
    weak, better = (
        measured_alone(
            plant,
            plant.add_candidate(
                save_export(trained(tiny_model(), plant.shard, steps), plant.workspace.exports / name, plant.tokenizer)
            ),
        )
        for name, steps in (("weak", 15), ("better", 60))
    )
    first = judge_candidate(plant, weak)
    with plant.ledger.begin() as tx:
        tx.execute(releases.insert().values(number=1, candidate=weak, verdict=first, state="published", created_at=0.0))
        record_event(tx, "promoted", "release:1")
    return weak, better


@pytest.fixture(autouse=True)
def no_tasks(plant: FilledPlant) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny matrices
    yield
    torch.set_num_threads(threads)
    for path in (plant.workspace.root / "policies" / "tasks").glob("*"):
        path.unlink()
    write_policy(plant.workspace)
    with plant.ledger.begin() as tx:
        own = sa.select(evaluations.c.id).where(evaluations.c.suite_sha256.startswith("task:"))
        tx.execute(eval_items.delete().where(eval_items.c.evaluation.in_(own)))
        tx.execute(evaluations.delete().where(evaluations.c.suite_sha256.startswith("task:")))


def measured(plant: FilledPlant) -> list[tuple[int, str]]:
    rows = plant.ledger.select_rows(sa.select(evaluations).where(evaluations.c.suite_sha256.startswith("task:")))
    return sorted((row["candidate"], row["summary"]["task"]) for row in rows)


def verdict(plant: FilledPlant, candidate: int) -> VerdictRow:
    return VerdictRow.get(plant.ledger, judge_candidate(plant, candidate))


def sources(count: int) -> list[dict[str, Any]]:
    return [{**item, "source": f"s{number}"} for number, item in enumerate(choice_items(count))]


def test_a_tier_determines_which_candidates_are_measured() -> None:
    due = lambda tier, candidate, would: TaskSettings(**tier).is_due(candidate, would)
    assert [due({"tier": "each"}, 3, w) for w in (False, True)] == [True, True]
    assert [due({"tier": "release"}, 3, w) for w in (False, True)] == [False, True]
    assert [due({"tier": "never"}, 3, w) for w in (False, True)] == [False, False]
    assert [due({"tier": "every", "every": 3}, n, False) for n in range(1, 7)] == [
        False,
        False,
        True,
        False,
        False,
        True,
    ]


def test_tasks_of_tier_release_are_measured_only_before_a_promotion(plant: FilledPlant, line: tuple[int, int]) -> None:
    weak, better = line
    for name in ("cheap", "dear", "by_hand"):
        write_task(plant.workspace, name, sources(24))
    tiers = {"cheap": {"tier": "each", "margin": 1.0}, "dear": {"margin": 1.0}, "by_hand": {"tier": "never"}}
    write_policy(plant.workspace, tasks=tiers | {"blocking": {"tier": "each"}})
    blocking = write_task(plant.workspace, "blocking", sources(2))
    assert verdict(plant, better).outcome == "hold"
    assert measured(plant) == [(weak, "cheap"), (better, "cheap")]
    blocking.unlink()
    write_policy(plant.workspace, tasks=tiers)
    promoted = verdict(plant, better)
    assert promoted.outcome == "promote", promoted.reasons
    assert measured(plant) == [(c, name) for c in (weak, better) for name in ("cheap", "dear")]
    assert any(reason.startswith("Task dear/acc_norm: ") for reason in promoted.reasons)
    tasks = promoted.read_evidence(plant.ledger)["tasks"]
    assert set(tasks["gains"]) == {f"{name}/{metric}" for name in ("cheap", "dear") for metric in ("acc", "acc_norm")}
    write_policy(plant.workspace, tasks=tiers | {"dear": {"margin": 0.0}})
    informed = verdict(plant, better)
    assert informed.outcome in ("promote", "reject")
    assert any(
        says(one, ("comparing.no_guard", {"items": 24})) and says(one, ("comparing.no_size", {}))
        for one in informed.reasons
    )


def test_a_task_that_cannot_be_measured_holds_the_release_and_is_named(
    plant: FilledPlant, line: tuple[int, int]
) -> None:
    path = write_task(plant.workspace, "broken", sources(24)[:1])
    held = verdict(plant, line[1])
    assert held.outcome == "hold"
    assert f"'factory evaluate {line[1]}'" in held.reasons[0] and "tasks.broken.tier never" in held.reasons[0]
    assert held.reasons[1].startswith(f"Task broken could not be measured: {path.with_suffix('.jsonl')} has 1 item")
    path.unlink()
    write_policy(plant.workspace, tasks={"gone": {}})
    held = verdict(plant, line[1])
    assert held.outcome == "hold" and "names task gone" in held.reasons[1]
    assert measured(plant) == []


def test_a_changed_protocol_holds_releases_until_a_person_takes_a_new_baseline(
    plant: FilledPlant, line: tuple[int, int]
) -> None:
    weak, better = line
    write_policy(plant.workspace, others={"margin": 1.0})
    policy = TasksPolicy.load(plant.workspace.policy_path("tasks.yaml"))
    write_task(plant.workspace, "asked", sources(24))
    assert read_baseline(plant.ledger, "asked") is None
    assert verdict(plant, better).outcome == "promote"
    write_task(plant.workspace, "asked", sources(20))  # other items alone: both are measured on them
    assert verdict(plant, better).outcome == "promote"
    write_task(plant.workspace, "asked", sources(20), format="letter")
    held = verdict(plant, better)
    assert held.outcome == "hold"
    assert "cloze format, 0 shots → " in held.reasons[1]
    assert "factory tasks run asked --baseline" in held.reasons[0]
    task = load_task_by_name(plant.workspace, "asked", policy)
    assert measure_new_baseline(plant, task, policy, "ann")
    promoted = verdict(plant, better)
    assert promoted.outcome == "promote" and any("asked/acc:" in reason for reason in promoted.reasons)
    write_task(plant.workspace, "asked", sources(20), format="letter", prompt="{question} {choices} The answer is")
    assert "or another key of the task's file" in verdict(plant, better).reasons[1]
    with plant.ledger.begin() as tx:
        tx.execute(sa.text("DELETE FROM events WHERE kind = 'task_baseline'"))


def test_without_a_champion_a_task_is_measured_but_not_compared(plant: FilledPlant, line: tuple[int, int]) -> None:
    write_task(plant.workspace, "asked", sources(12))
    with plant.ledger.begin() as tx:
        tx.execute(sa.text("UPDATE events SET kind = 'was' WHERE kind = 'promoted'"))
    try:
        found = measure_due_tasks(plant, line[1], would_promote=True)
    finally:
        with plant.ledger.begin() as tx:
            tx.execute(sa.text("UPDATE events SET kind = 'promoted' WHERE kind = 'was'"))
    assert found.gains == {} and found.problems == () and 0 <= found.values["asked/acc"] <= 1
