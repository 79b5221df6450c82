"""``factory tasks list | check | run``, with output for people and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import factory.cli  # noqa: F401 - its commands
from factory.cli.app import app, print_error_and_get_exit_code
from factory.core.progress import SILENT
from factory.tasks.policy import TasksPolicy
from factory.tasks.proving import TaskProof, prove_task
from factory.tasks.task_file import load_task
from tests.support.factory import published_files as published
from tests.support.factory.exports import FilledPlant
from tests.support.factory.task_files import choice_items, programs, write_lm_eval_task, write_policy, write_task
from tests.support.messages import codes, says


def load_proof(plant: FilledPlant, path: Path) -> TaskProof:
    return prove_task(plant.ledger, load_task(path, TasksPolicy()), TasksPolicy(), SILENT)


@pytest.fixture(scope="module")
def candidate(plant: FilledPlant, export: Path) -> int:
    return plant.add_candidate(export)


def ran(plant: FilledPlant, *words: str) -> str:
    found = CliRunner().invoke(app, ["tasks", *words, "--workspace", str(plant.workspace.root)])
    assert found.exception is None, found.exception
    return found.output


def as_json(plant: FilledPlant, *words: str) -> Any:
    return json.loads(ran(plant, *words, "--json"))


def error_of(plant: FilledPlant, *words: str) -> BaseException:
    found = CliRunner().invoke(app, ["tasks", *words, "--workspace", str(plant.workspace.root)])
    assert found.exception and print_error_and_get_exit_code(found.exception) == 2
    return found.exception


def test_tasks_are_listed_checked_and_run(plant: FilledPlant, candidate: int) -> None:
    assert "has no task file" in ran(plant, "list")
    asked = write_task(plant.workspace, "asked", choice_items(), format="letter")
    write_task(plant.workspace, "broken", choice_items()[:2])
    write_policy(plant.workspace, tasks={"asked": {"tier": "every", "every": 3}})
    listed = {row["task"]: row for row in as_json(plant, "list")}
    assert listed["asked"]["tier"] == "every" and "in letter format, 0 shots" in listed["asked"]["format"]
    assert "has 2 items, but at least 8" in str(listed["broken"]["problem"]) and "metrics" not in listed["asked"]
    said = ran(plant, "list")
    assert "asked  every 3." in said and "has 2 items, but at least 8" in " ".join(said.split())
    said = ran(plant, "check", str(asked))
    assert "asked is sound" in said and "12 items of 12 sources" in said
    found = as_json(plant, "check", str(asked))
    assert found["contaminated"] == 0 and found["proof"]["gold"] == 1.0 and found["proof"]["chance"] == 0.25
    proof = load_proof(plant, asked)
    assert codes(proof.describe())[:3] == ["proving.gold", "proving.chance", "proving.blind"]
    assert proof.describe()[0] in ran(plant, "check", str(asked))
    assert "--candidate" in str(error_of(plant, "run", "asked"))
    found = as_json(plant, "run", "asked", "--candidate", str(candidate))
    assert (found["candidate"], found["items"], found["held"]) == (candidate, 12, None)
    assert f"acc {found['metrics']['asked/acc']['value']:.3f} ± " in ran(
        plant, "run", "asked", "--candidate", str(candidate)
    )
    assert {row["task"]: row for row in as_json(plant, "list")}["asked"]["metrics"] == found["metrics"]


def test_published_files_are_listed_and_proven_and_unknown_files_are_named(plant: FilledPlant) -> None:
    folder = plant.workspace.root / "policies" / "tasks"
    asked = published.write(folder / "HumanEval.jsonl.gz", published.human_eval())
    published.write(folder / "unknown.jsonl", [{"prompt": "x"}])
    rows = as_json(plant, "list")
    [mine] = [row for row in rows if row.get("task") == "HumanEval"]
    assert (mine["tier"], mine["items"], mine["format"][:22]) == ("release", 9, "humaneval as published")
    [other] = [row for row in rows if row.get("file") == "unknown.jsonl"]
    assert "(prompt)" in str(other["problem"]) and "unknown.jsonl: This file" in ran(plant, "list")
    said = " ".join(ran(plant, "check", str(asked)).split())
    assert "HumanEval is sound" in said and "9 items of 9 sources" in said and "unknown.jsonl: " in said


def test_lm_evals_own_totals_are_shown(plant: FilledPlant, candidate: int) -> None:
    pytest.importorskip("lm_eval")
    write_lm_eval_task(plant.workspace, "theirs", choice_items())
    totals = as_json(plant, "run", "theirs", "--candidate", str(candidate))["totals"]
    shown = f"Totals that lm-eval computed: sample_len 12.0000, acc,none {totals['acc,none']:.4f}, acc_stderr,none {totals['acc_stderr,none']:.4f}"
    assert shown in " ".join(ran(plant, "run", "theirs", "--candidate", str(candidate)).split())


def test_a_changed_protocol_is_reported_until_it_becomes_the_baseline(plant: FilledPlant, candidate: int) -> None:
    write_task(plant.workspace, "fixed", choice_items())
    ran(plant, "run", "fixed", "--candidate", str(candidate), "--baseline")
    write_task(plant.workspace, "fixed", choice_items(), format="letter")
    said = ran(plant, "run", "fixed", "--candidate", str(candidate))
    assert "cloze format, 0 shots → multiple " in " ".join(said.split())
    assert as_json(plant, "run", "fixed", "--candidate", str(candidate), "--baseline")["held"] is None


def test_tasks_check_refuses_a_solution_that_fails_its_tests(plant: FilledPlant) -> None:
    good = write_task(plant.workspace, "code", programs(), kind="code")
    assert "sound" in ran(plant, "check", str(good))
    wrong = [*programs()[:7], {**programs()[7], "solution": "    return x\n"}]
    bad = write_task(plant.workspace, "code", wrong, kind="code")
    error = error_of(plant, "check", str(bad))
    assert says(error.message, ("verifiers.solution_fails", {"item": "add7"})) and "\n" not in str(error)  # type: ignore[attr-defined]
