"""Sums of held proposals: which are combined, what the gate is asked to judge, and what becomes of the parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from factory.code_loop import approvals
from factory.code_loop.combining import (
    choose_separate_patches,
    combine_proposals,
    find_earlier_sum,
    find_parts_to_combine,
    write_sum,
)
from factory.code_loop.held_proposals import HeldPatch, JudgingAgainRules, ProposalDescents, list_held_patches
from factory.code_loop.judging_again import judge_proposals_again, list_due_judgements
from factory.code_loop.submitting import compute_tries
from factory.core.errors import InputError
from factory.gates.stage_interface import make_missing_evidence
from factory.git import repository
from factory.ledger.ledger import proposals, record_event, verdicts
from factory.ledger.rows import ProposalRow, Subject
from tests.support.factory.approvals import FILES, PatchPlant, given_verdict
from tests.support.git import git
from tests.support.messages import refused

RULES = JudgingAgainRules(judge_again_after_seconds=1e-6)


def noisy(files: list[str]) -> dict[str, Any]:
    training = make_missing_evidence("unclear", undecided=True)
    return {"stages": {"scope": {"state": "passed"}, "training": training}, "patch_id": "", "files": files}


def held(plant: PatchPlant, number: int, edits: dict[str, str], target: str = "") -> None:
    row = plant.judged(number, "hold", edits, target or f"kernel:op{number}")
    with plant.ledger.begin() as tx:
        tx.execute(verdicts.update().where(verdicts.c.id == row["verdict"]).values(evidence=noisy(sorted(edits))))


def hold_again(plant: PatchPlant, number: int) -> None:
    """Give a newly judged proposal a verdict that only noise explains."""
    with plant.ledger.begin() as tx:
        key = plant.row(number)["verdict"]
        tx.execute(verdicts.update().where(verdicts.c.id == key).values(evidence=noisy(["kernels/a.py"])))


@pytest.fixture
def plant(tmp_path: Path) -> PatchPlant:
    """Three proposals that noise held: two for files of their own, and one for a file of the first."""
    made = PatchPlant(tmp_path)
    held(made, 1, {"kernels/a.py": "a = 1\n", "kernels/ops.py": "x = 2\n"})
    held(made, 2, {"kernels/b.py": "b = 1\n"})
    held(made, 3, {"kernels/ops.py": "x = 3\n"})
    return made


def states(plant: PatchPlant) -> list[str]:
    return [row.state for row in ProposalRow.select(plant.ledger)]


def test_a_promoted_sum_is_merged_and_its_parts_are_closed_with_it(
    plant: PatchPlant, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = given_verdict(monkeypatch, "promote")
    assert combine_proposals(plant, [2, 1]) == 4
    row = ProposalRow.get(plant.ledger, 4)
    assert (row.agent, row.target, row.predicted_gain) == ("combiner", "sum:1+2", pytest.approx(1.21))
    assert [number for number, _, _ in judged] == [4] and judged[0][1] == plant.base
    changes = repository.read_file_changes(plant.target, plant.base, row.patch_commit)
    assert {change.path: (change.content or b"").decode() for change in changes} == {
        "kernels/a.py": "a = 1\n", "kernels/b.py": "b = 1\n", "kernels/ops.py": "x = 2\n",
    }  # fmt: skip
    assert states(plant) == ["judged"] * 4
    assert [(one.row.number, one.in_sum) for one in list_held_patches(plant.ledger, RULES)] == [
        (1, 4),
        (2, 4),
        (3, None),
    ]
    assert plant.approve(4) == plant.head() == row.commit
    assert states(plant) == ["merged-with", "merged-with", "judged", "approved"]
    assert plant.files() == FILES | {"kernels/a.py": "a = 1\n", "kernels/b.py": "b = 1\n", "kernels/ops.py": "x = 2\n"}
    for act, code in (
        (lambda: plant.approve(1), "code_loop.nothing_to_decide"),
        (lambda: judge_proposals_again(plant, [1]), "code_loop.already_merged"),
        (lambda: combine_proposals(plant, [1, 2]), "code_loop.already_merged"),
    ):
        with refused(code, InputError):
            act()
    assert approvals.revert_approved_proposal(plant, 4, "ada") == plant.head() and plant.files() == FILES


@pytest.mark.parametrize("outcome", ["hold", "reject"])
def test_a_sum_that_is_not_promoted_leaves_its_parts_and_is_not_judged_twice(
    plant: PatchPlant, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = given_verdict(monkeypatch, outcome)
    assert find_parts_to_combine(plant, plant.ledger) == (1, 2)
    assert combine_proposals(plant, [1, 2]) == 4
    assert states(plant) == ["judged"] * 4 and plant.head() == plant.base
    assert [(one.row.number, one.in_sum) for one in list_held_patches(plant.ledger, RULES)] == [
        (1, None),
        (2, None),
        (3, None),
    ]
    with refused("code_loop.sum_exists", InputError, sum=4, outcome=outcome.upper()):
        combine_proposals(plant, [2, 1])
    assert find_parts_to_combine(plant, plant.ledger) == () and len(judged) == 1
    given_verdict(monkeypatch, "hold")
    (again,) = judge_proposals_again(plant, [1])  # the part has another number now, and is the same patch
    hold_again(plant, again.judged_as)
    with refused("code_loop.sum_exists", InputError, sum=4):
        combine_proposals(plant, [2, again.judged_as])


def test_a_sum_that_noise_held_is_judged_again_and_still_merges_its_parts(
    plant: PatchPlant, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_verdict(monkeypatch, "hold")
    assert combine_proposals(plant, [1, 2]) == 4
    hold_again(plant, 4)
    (part,) = judge_proposals_again(plant, [1])
    hold_again(plant, part.judged_as)
    given_verdict(monkeypatch, "promote")
    (again,) = judge_proposals_again(plant, [4])
    descents = ProposalDescents(plant.ledger)
    assert (descents.list_parts(6), descents.find_repeated(6), again.judged_as) == ([1, 2], 4, 6)
    plant.approve(6)
    assert states(plant) == ["superseded", "merged-with", "judged", "superseded", "merged-with", "approved"]


def test_a_sum_of_which_a_part_was_decided_is_neither_judged_again_nor_merged(
    plant: PatchPlant, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_verdict(monkeypatch, "promote")
    assert combine_proposals(plant, [1, 2]) == 4
    assert [one.in_sum for one in list_held_patches(plant.ledger, RULES)] == [4, 4, None]
    approvals.reject_judged_proposal(plant.ledger, 1, "ada")
    assert [(one.row.number, one.in_sum) for one in list_held_patches(plant.ledger, RULES)] == [(2, None), (3, None)]
    with refused("code_loop.part_rejected", InputError, proposal=4, part=1):
        plant.approve(4)
    with plant.ledger.begin() as tx:
        tx.execute(verdicts.update().where(verdicts.c.id == plant.row(4)["verdict"]).values(outcome="hold"))
    hold_again(plant, 4)
    assert 4 not in [one.row.number for one in list_held_patches(plant.ledger, RULES)]
    assert plant.head() == plant.base and list_due_judgements(plant, plant.ledger) == []


def test_a_person_is_told_why_proposals_cannot_be_combined(plant: PatchPlant, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = given_verdict(monkeypatch, "hold")
    held(plant, 4, {"kernels/d.py": "d = 1\n"}, target="kernel:op2")
    plant.judged(5, "hold", {"kernels/e.py": "e = 1\n"}, "kernel:op5")  # not by noise
    plant.judged(6, "reject", {"kernels/f.py": "f = 1\n"}, "kernel:op6")
    for numbers, code in (
        ([1], "code_loop.one_part"),
        ([1, 1], "code_loop.one_part"),
        ([1, 9], "rows.unknown_key"),
        ([1, 3], "code_loop.same_file"),
        ([2, 4], "code_loop.same_target"),
        ([1, 5], "code_loop.no_part"),
        ([1, 6], "code_loop.not_held"),
    ):
        with refused(code, InputError):
            combine_proposals(plant, numbers)
    assert combine_proposals(plant, [1, 2]) == 7
    hold_again(plant, 7)
    with refused("code_loop.no_part", InputError, proposal=7):  # a sum of a sum
        combine_proposals(plant, [4, 7])
    (plant.target / "kernels/ops.py").write_text("x = 7\n")
    git(plant.target, "commit", "-q", "-a", "-m", "a person's")
    with refused("code_loop.files_changed", InputError, proposal=1):
        combine_proposals(plant, [1, 4])
    assert [number for number, _, _ in judged] == [7]


def test_the_daemon_writes_a_sum_once_and_not_one_that_does_not_apply(
    plant: PatchPlant, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_verdict(monkeypatch, "hold")
    assert write_sum(plant, (1, 2), plant.head()) == 4 and plant.row(4)["state"] == "written"
    assert find_parts_to_combine(plant, plant.ledger) == ()
    held(plant, 5, {"kernels/e.py": "e = 1\n"})
    assert find_parts_to_combine(plant, plant.ledger) == (3, 5)  # 1 and 2 wait for the decision on their sum
    (plant.target / "kernels/ops.py").write_text("x = 7\n")
    git(plant.target, "commit", "-q", "-a", "-m", "a person's")
    assert write_sum(plant, (3, 5), plant.head()) is None and find_parts_to_combine(plant, plant.ledger) == ()
    git(plant.target, "revert", "--no-edit", "HEAD")
    assert find_parts_to_combine(plant, plant.ledger) == (3, 5)
    assert find_earlier_sum(plant.ledger, [1, 2]) == 4
    with plant.ledger.begin() as tx:  # given up by the daemon
        tx.execute(proposals.update().where(proposals.c.number == 4).values(state="failed"))
    assert find_earlier_sum(plant.ledger, [2, 1]) == 4 and find_earlier_sum(plant.ledger, [1, 2], failed=False) is None


def test_a_sum_counts_as_a_try_of_each_targets_and_shares_their_confidence(
    plant: PatchPlant, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_verdict(monkeypatch, "hold")
    tries = lambda number, target: compute_tries(plant.ledger, number, target, "new")
    assert tries(90, "kernel:op1") == 2 and tries(90, "kernel:other") == 1
    (again,) = judge_proposals_again(plant, [1])
    assert tries(90, "kernel:op1") == 3
    hold_again(plant, again.judged_as)
    with plant.ledger.begin() as tx:
        record_event(tx, "drafted", Subject("proposal", 90), {"patch_id": "new", "sum_of": [2, again.judged_as]})
    assert tries(90, "sum:2+4") == 3  # as the part that was tried most
    with plant.ledger.begin() as tx:
        record_event(tx, "drafted", Subject("proposal", 90), {"patch_id": "other"})
    assert combine_proposals(plant, [2, again.judged_as]) == 5
    assert tries(91, "kernel:op1") == 4 and tries(91, "kernel:op2") == 3 and tries(91, "kernel:op3") == 2


def one(number: int, target: str, *files: str) -> HeldPatch:
    row = ProposalRow(*([None] * 18))  # type: ignore[arg-type]
    vars(row).update(number=number, target=target)
    return HeldPatch(row, "noise", 1, 0.0, files=files)


K = "policies/kernels.yaml"


@pytest.mark.parametrize(
    ("patches", "most", "chosen"),
    [
        ([one(1, "a", "x"), one(2, "b", "y"), one(3, "c", "z")], 8, [1, 2, 3]),
        ([one(1, "a", "x"), one(2, "b", "x", "y"), one(3, "c", "z")], 8, [1, 3]),
        ([one(1, "a", "x"), one(2, "a", "y")], 8, [1]),
        ([one(1, "a", "x", K), one(2, "b", "y", K)], 8, [1, 2]),  # each chooses for its own op
        ([one(1, "a", "x", "y"), one(2, "b", "z", "v"), one(3, "c", "w")], 3, [1, 3]),
        ([one(1, "a"), one(2, "b", "y"), one(3, "c", "z")], 8, [2, 3]),  # an old verdict does not name the files
        ([], 8, []),
    ],
)
def test_patches_of_separate_targets_and_files_are_combined(
    patches: list[HeldPatch], most: int, chosen: list[int]
) -> None:
    assert choose_separate_patches(patches, most) == chosen


def test_kernel_choices_for_different_ops_are_combined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, path = PatchPlant(tmp_path), K
    text = "# how ops run\ncpu:\n  attention: reference\n  swiglu: reference  # plain\n"
    (plant.target / "policies").mkdir()
    (plant.target / path).write_text(text)
    git(plant.target, "add", "-A")
    git(plant.target, "commit", "-q", "-m", "choices")
    held(plant, 1, {path: text.replace("attention: reference", "attention: native")})
    held(plant, 2, {path: text.replace("swiglu: reference", "swiglu: native"), "kernels/b.py": "b = 1\n"})
    held(plant, 3, {path: text.replace("attention: reference", "attention: folded")})
    given_verdict(monkeypatch, "promote")
    with refused("code_loop.choice_changed", InputError, op="attention"):
        combine_proposals(plant, [1, 3])
    plant.approve(combine_proposals(plant, [1, 2]))
    assert yaml.safe_load((plant.target / path).read_text()) == {"cpu": {"attention": "native", "swiglu": "native"}}
    assert "# plain" in (plant.target / path).read_text() and plant.files()["kernels/b.py"] == "b = 1\n"
