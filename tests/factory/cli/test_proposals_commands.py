"""``factory proposals``: what a person and a program are shown of verdicts, repeats and sums, and which requests are refused."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import factory.cli  # noqa: F401 (registers every command)
from factory.cli.app import app
from factory.core.errors import FactoryError
from factory.gates.stage_interface import make_missing_evidence
from factory.ledger.ledger import verdicts
from tests.support.factory.approvals import PatchPlant, given_verdict
from tests.support.git import git

TRAINING = make_missing_evidence("unclear", undecided=True)


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PatchPlant:
    """Proposals 1 and 2, which noise held, and 3, which was rejected. The gate holds whatever it is handed."""
    made = PatchPlant(tmp_path)
    for number, outcome in ((1, "hold"), (2, "hold"), (3, "reject")):
        path = f"kernels/new{number}.py"
        row = made.judged(number, outcome, {path: "y = 1\n"}, f"kernel:op{number}")
        evidence = {"stages": {"training": TRAINING}, "patch_id": "", "files": [path]}
        with made.ledger.begin() as tx:
            tx.execute(verdicts.update().where(verdicts.c.id == row["verdict"]).values(evidence=evidence))
    given_verdict(monkeypatch, "hold")
    return made


def run(plant: PatchPlant, *words: str) -> str:
    """What a command prints. Raises: the command's error."""
    env = {"FACTORY_HOME": str(plant.workspace.root)}
    result = CliRunner().invoke(app, ["proposals", *words], prog_name="factory", env=env, catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["rejudge"], "code_loop.which_again"),
        (["rejudge", "1", "--all"], "code_loop.which_again"),
        (["rejudge", "1", "9"], "rows.unknown_key"),
        (["rejudge", "1", "3"], "code_loop.not_held"),
        (["combine", "1"], "code_loop.one_part"),
        (["combine", "1", "3"], "code_loop.not_held"),
    ],
)
def test_a_request_that_cannot_be_done_is_refused_and_judges_nothing(
    plant: PatchPlant, words: list[str], code: str
) -> None:
    with pytest.raises(FactoryError) as caught:
        run(plant, *words)
    assert caught.value.code == code and len(json.loads(run(plant, "list", "--json"))) == 3


def test_held_proposals_are_judged_again_at_a_persons_request(plant: PatchPlant) -> None:
    assert "repeats     proposal 1" in run(plant, "rejudge", "1")
    told = json.loads(run(plant, "rejudge", "--all", "--json"))
    assert told["refused"] == []
    assert [(one["proposal"], one["judged_as"], one["rebased"], one["outcome"]) for one in told["judged"]] == [
        (2, 5, False, "hold")
    ]  # the new verdict on proposal 4 is no longer one of noise alone
    plant.approve(plant.judged(6)["number"])
    (rebased,) = json.loads(run(plant, "rejudge", "5", "--json"))["judged"]
    assert (rebased["judged_as"], rebased["rebased"]) == (7, True)


def test_all_reports_each_refusal_and_judges_the_others(plant: PatchPlant) -> None:
    git(plant.target, "update-ref", "-d", "refs/heads/factory/search/1-x")
    told = json.loads(run(plant, "rejudge", "--all", "--json"))
    assert [one["proposal"] for one in told["judged"]] == [2]
    assert [(one["proposal"], one["why"]["code"]) for one in told["refused"]] == [(1, "code_loop.no_branch")]
    assert run(plant, "rejudge", "--all").count("factory/search/1-x") == 1


def test_held_proposals_are_combined_at_a_persons_request(plant: PatchPlant) -> None:
    told = json.loads(run(plant, "combine", "2", "1", "--json"))
    assert (told["sum_of"], told["number"], told["outcome"]) == ([1, 2], 4, "hold")
    assert json.loads(run(plant, "show", "4", "--json"))["sum_of"] == [1, 2]
    assert "sum of      proposals 1, 2" in run(plant, "show", "4")


def test_the_list_says_when_and_why_a_proposal_is_judged_again(plant: PatchPlant) -> None:
    first, second, third = json.loads(run(plant, "list", "--json"))
    assert third["judge_again"] is None and second["judge_again"]["cause"] == "noise"
    assert datetime.fromisoformat(first["judge_again"]["not_before"]).timestamp() > plant.row()["created_at"]
    lines = run(plant).splitlines()
    assert [line[:4].strip() for line in lines] == ["1", "", "2", "", "3"]


@pytest.mark.parametrize("reasons", [0, 1, 4, 9])
def test_a_shown_verdict_has_at_most_five_lines(plant: PatchPlant, reasons: int) -> None:
    said: list[Any] = [f"reason {number}, " + "at length " * 9 for number in range(reasons)]
    with plant.ledger.begin() as tx:
        tx.execute(verdicts.update().values(reasons=said))
    lines = run(plant, "show", "3").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("  verdict "))
    verdict = [lines[first], *(line for line in lines[first + 1 :] if line.startswith("    "))]
    assert len(verdict) == min(5, 1 + reasons) and [line[4:12] for line in verdict[1:4]] == [
        f"reason {number}" for number in range(min(3, reasons))
    ]
    assert ("factory proposals show 3 --json" in verdict[-1]) == (reasons > 4)
    assert len(json.loads(run(plant, "show", "3", "--json"))["reasons"]) == reasons
