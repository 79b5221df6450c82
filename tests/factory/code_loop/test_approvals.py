"""Decisions of people about judged proposals: only the judged patch is merged, and the checkout loses nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from factory.code_loop import approvals
from factory.core.errors import InputError
from factory.git import repository
from factory.git.repository import RepositoryError
from factory.ledger.ledger import tracked_runs, verdicts
from factory.release.approvals import APPROVAL_TAG
from factory.show.mlflow.approval_answers import carry_out_proposal_decisions
from factory.show.mlflow.runs import MlflowTracking
from factory.show.unshown_items import show_unshown_items
from tests.support.factory.approvals import FILES, NEW, PatchPlant, given_verdict
from tests.support.git import git
from tests.support.messages import codes, refused


@pytest.fixture
def plant(tmp_path: Path) -> PatchPlant:
    return PatchPlant(tmp_path)


def test_an_approved_patch_is_live_and_can_be_taken_back(plant: PatchPlant) -> None:
    row = plant.judged()
    assert plant.approve() == plant.head() == row["commit"]
    assert plant.files() == FILES | NEW and git(plant.target, "branch", "--show-current") == "main"
    assert plant.row()["state"] == "approved"
    undone = approvals.revert_approved_proposal(plant, 1, "bob", "slower at night")
    assert plant.head() == undone and plant.files() == FILES
    message = git(plant.target, "log", "-1", "--format=%B")
    assert "Revert proposal 1: Fuse" in message and "slower at night" in message and row["commit"] in message
    assert plant.row()["state"] == "reverted" and plant.words() == [("approved", "ada"), ("reverted", "bob")]
    for again in (plant.approve, lambda: approvals.revert_approved_proposal(plant, 1, "bob")):
        with pytest.raises(InputError) as refusal:
            again()
        assert (
            refusal.value.code in ("code_loop.nothing_to_decide", "code_loop.not_approved")
            and refusal.value.data["state"] == "reverted"
        )


@pytest.mark.parametrize("outcome", ["hold", "reject"])
def test_only_promoted_proposals_can_be_approved_and_all_can_be_rejected(plant: PatchPlant, outcome: str) -> None:
    plant.judged(outcome=outcome)
    with refused("code_loop.not_promoted", InputError, proposal=1, outcome=outcome.upper(), why="so it measured"):
        plant.approve()
    approvals.reject_judged_proposal(plant.ledger, 1, "ada", "no")
    assert plant.row()["state"] == "rejected" and plant.head() == plant.base
    with refused("code_loop.nothing_to_decide", InputError, state="rejected"):
        plant.approve()
    with pytest.raises(InputError, match="The ledger has: 1"):
        plant.approve(7)


def test_only_the_judged_patch_can_be_approved(plant: PatchPlant) -> None:
    """Replayed after the branch was changed, moved to another patch, or lost."""
    row = plant.judged()
    plant.judged(2)
    other = git(plant.target, "commit-tree", f"{plant.base}^{{tree}}", "-p", plant.base, "-m", "evil")
    same_tree = git(plant.target, "commit-tree", f"{row['commit']}^{{tree}}", "-p", other, "-m", "a second parent")
    for commit in (other, same_tree):
        git(plant.target, "update-ref", f"refs/heads/{row['branch']}", commit)
        with refused("code_loop.other_patch", InputError):
            plant.approve()
    git(plant.target, "update-ref", "-d", f"refs/heads/{row['branch']}")
    with refused("code_loop.no_branch", InputError):
        plant.approve()
    with plant.ledger.begin() as tx:  # another verdict's patch
        tx.execute(verdicts.update().where(verdicts.c.id == plant.row(2)["verdict"]).values(subject_sha256="0" * 64))
    with refused("code_loop.other_patch", InputError):
        plant.approve(2)
    assert plant.head() == plant.base and plant.files() == FILES and plant.words() == []


@pytest.mark.parametrize("way", ["edited", "staged", "in the way", "a link", "detached"])
def test_a_checkout_with_uncommitted_work_is_refused_and_unchanged(plant: PatchPlant, way: str) -> None:
    plant.judged()
    ops = plant.target / "kernels/ops.py"
    if way == "detached":
        git(plant.target, "checkout", "-q", "--detach")
    elif way == "in the way":
        (plant.target / "kernels/fused.py").write_text("mine\n")
    elif way == "a link":
        ops.unlink()
        ops.symlink_to("/etc/passwd")
    else:
        ops.write_text("mine\n")
        if way == "staged":
            git(plant.target, "add", "-A")
            ops.write_text(FILES["kernels/ops.py"])
    before = git(plant.target, "status", "--porcelain", "--branch")
    with pytest.raises(RepositoryError, match="HEAD is detached" if way == "detached" else "uncommitted changes"):
        plant.approve()
    assert git(plant.target, "status", "--porcelain", "--branch") == before
    assert plant.row()["state"] == "judged" and plant.head() == plant.base
    # what is elsewhere does not matter, and is kept
    git(plant.target, "checkout", "-q", "-f", "main")
    git(plant.target, "clean", "-fdq")
    (plant.target / "README.md").write_text("mine\n")
    assert plant.approve() == plant.head()
    assert (plant.target / "README.md").read_text() == "mine\n" and plant.words() == [("approved", "ada")]


@pytest.mark.parametrize("stop_after", ["the first file", "the files", "the branch"])
def test_an_approval_killed_during_the_merge_is_finished_by_the_same_call(
    plant: PatchPlant, stop_after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant.judged()
    real, calls = repository.run_git, 0

    def killed(folder: Path, *arguments: str, **named: Any) -> Any:
        nonlocal calls
        calls += arguments[:2] == ("update-index", "--add") and "environment" not in named
        if (stop_after, calls) == ("the first file", 2) or (stop_after == "the files" and arguments[0] == "update-ref"):
            raise KeyboardInterrupt
        done = real(folder, *arguments, **named)
        if stop_after == "the branch" and arguments[0] == "update-ref":
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(repository, "run_git", killed)
    with pytest.raises(KeyboardInterrupt):
        plant.approve()
    monkeypatch.undo()
    assert plant.row()["state"] == "judged"
    assert plant.approve() == plant.head() and plant.files() == FILES | NEW
    assert plant.row()["state"] == "approved" and plant.words() == [("approved", "ada")]


@pytest.mark.parametrize("outcome", ["promote", "reject"])
def test_an_approval_after_the_code_changed_runs_the_gate_again(
    plant: PatchPlant, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its verdict is given here: what it measures is its own tests' business."""
    first = plant.judged()
    (plant.target / "README.md").write_text("# newer\n")
    git(plant.target, "commit", "-q", "-a", "-m", "newer")
    live, judged = plant.head(), given_verdict(monkeypatch, outcome)
    merged = plant.approve()
    assert judged == [(2, live, first["patch_sha256"])]
    assert plant.row()["state"] == "superseded"
    if outcome == "reject":
        assert merged is None and plant.row(2)["state"] == "judged" and plant.head() == live and plant.words() == []
    else:
        assert merged == plant.head() and plant.files() == FILES | NEW | {"README.md": "# newer\n"}
        assert git(plant.target, "rev-parse", "HEAD~1") == live


def test_files_that_changed_again_are_not_overwritten(plant: PatchPlant) -> None:
    plant.judged()
    plant.judged(2)
    plant.approve()
    (plant.target / "kernels/ops.py").write_text("x = 3\n")
    git(plant.target, "commit", "-q", "-a", "-m", "mine")
    with refused("git.undo_conflict", RepositoryError) as conflict:
        approvals.revert_approved_proposal(plant, 1, "ada")
    assert codes(conflict.value.data["places"]) == ["git.lines_edited"]
    with refused("code_loop.files_changed", InputError, proposal=2) as changed:
        plant.approve(2)
    assert list(changed.value.data["files"]) == ["kernels/fused.py", "kernels/ops.py"]
    assert plant.row()["state"] == "approved" and (plant.target / "kernels/ops.py").read_text() == "x = 3\n"


def test_a_proposal_is_decided_by_a_person_in_mlflow_or_by_the_policy(plant: PatchPlant) -> None:
    plant.judged()
    tracking = MlflowTracking.open(plant)
    run = tracking.update_proposal_run(1)

    def settle() -> int:
        settled = carry_out_proposal_decisions(plant)
        show_unshown_items(plant)
        return settled

    assert tracking.read_proposal_decision(1) == "pending" and settle() == 0 and plant.head() == plant.base
    tracking.client.set_tag(run, APPROVAL_TAG, "Approved")
    assert settle() == 1 and plant.files() == FILES | NEW and plant.words() == [("approved", "mlflow")]
    assert tracking.client.get_run(run).data.tags["state"] == "approved" and settle() == 0
    approvals.revert_approved_proposal(plant, 1, "ada")
    plant.judged(2)
    tracking.client.set_tag(tracking.update_proposal_run(2), APPROVAL_TAG, "rejected")
    assert settle() == 1 and plant.row(2)["state"] == "rejected" and plant.files() == FILES
    plant.judged(3)
    policy = plant.workspace.root / "policies" / "gates" / "patch.yaml"
    policy.parent.mkdir(parents=True, exist_ok=True)
    policy.write_text("approval: automatic\n")
    assert settle() == 1 and plant.files() == FILES | NEW and plant.words()[-1] == ("approved", "policy")


def test_a_decision_in_another_workspace_does_not_count(plant: PatchPlant, tmp_path: Path) -> None:
    """Both show their proposal 1 at one MLflow."""
    plant.judged()
    tracking = MlflowTracking.open(plant)
    theirs = tracking.update_proposal_run(1)
    tracking.client.set_tag(theirs, APPROVAL_TAG, "approved")
    (tmp_path / "other").mkdir()
    other = PatchPlant(tmp_path / "other", plant.workspace.mlflow_uri)
    other.judged(edits={"kernels/ops.py": "x = 666\n"})
    assert carry_out_proposal_decisions(other) == 0 and other.files() == FILES
    ours = MlflowTracking.open(other).update_proposal_run(1)
    assert ours != theirs and tracking.update_proposal_run(1) == theirs
    tracking.client.set_tag(ours, APPROVAL_TAG, "approved")
    assert carry_out_proposal_decisions(other) == 1 and other.words() == [("approved", "mlflow")]


def test_a_run_that_mlflow_lost_is_made_again_and_stops_no_decision(plant: PatchPlant) -> None:
    plant.judged()
    tracking = MlflowTracking.open(plant)
    lost = tracking.update_proposal_run(1)
    with plant.ledger.begin() as tx:  # as after 'mlflow gc'
        tx.execute(tracked_runs.update().values(run_id="0" * 32))
    tracking.client.delete_run(lost)
    assert carry_out_proposal_decisions(plant) == 0 and tracking.read_proposal_decision(1) == "pending"
    assert tracking.update_proposal_run(1) not in (lost, "0" * 32)


def test_kernel_choices_for_different_ops_are_merged_one_after_another(
    plant: PatchPlant, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "policies/kernels.yaml"
    text = "# how ops run\ncpu:\n  attention: reference\n  swiglu: reference  # plain\n"
    (plant.target / "policies").mkdir()
    (plant.target / path).write_text(text)
    git(plant.target, "add", "-A")
    git(plant.target, "commit", "-q", "-m", "choices")
    attention, swiglu = ("attention: reference", "attention: native"), ("swiglu: reference  # plain", "swiglu: native")
    plant.judged(1, edits={path: text.replace(*attention)})
    plant.judged(2, edits={path: text.replace(*swiglu)})
    plant.judged(3, edits={path: text.replace("attention: reference", "attention: folded")})
    plant.judged(4, edits={path: text.replace("cpu:", "on_failure: fail\ncpu:")})
    judged = given_verdict(monkeypatch, "promote")
    plant.approve(1)
    plant.approve(2)  # judged again on what is live, as number 5, and merged
    assert judged[0][0] == 5 and plant.row(2)["state"] == "superseded" and plant.row(5)["state"] == "approved"
    assert yaml.safe_load((plant.target / path).read_text()) == {"cpu": {"attention": "native", "swiglu": "native"}}
    with refused("code_loop.choice_changed", InputError, op="attention"):
        plant.approve(3)
    with refused("code_loop.more_than_choices", InputError):
        plant.approve(4)
