"""What people decide of judged proposals: what is merged is what was judged, and the checkout loses nothing."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml
from code_loop_case import git
from rich.console import Console

from factory import approvals, proposing, repository, revalidating
from factory.console import Terminal
from factory.errors import InputError
from factory.gates.judge import Verdict
from factory.gates.patch_scope import AgentsPolicy
from factory.gates.patch_training import Start
from factory.ledger import Ledger, events, proposals, tracked_runs, verdicts
from factory.progress import SILENT
from factory.repository import RepositoryError
from factory.tracking import APPROVAL_TAG, Tracking
from factory.workspace import Config, Workspace, code_root

FILES = {"kernels/ops.py": "x = 1\n", "kernels/new.txt.py": "z = 1\n", "README.md": "# target\n"}
NEW = {"kernels/ops.py": "x = 2\n", "kernels/fused.py": "y = 1\n"}


class Plant:
    """A repository of three files, a workspace, and a proposal that the gate judged."""

    def __init__(self, folder: Path, mlflow_uri: str = "") -> None:
        self.target = folder / "target"
        for path, text in FILES.items():
            (self.target / path).parent.mkdir(parents=True, exist_ok=True)
            (self.target / path).write_text(text)
        git(folder, "init", "-q", "-b", "main", str(self.target))
        git(self.target, "add", "-A")
        git(self.target, "commit", "-q", "-m", "base")
        self.workspace = Workspace.create(
            folder / "workspace", Config(repository=str(self.target), mlflow_uri=mlflow_uri)
        )
        self.ledger = Ledger.create(self.workspace.ledger_url)
        self.base = self.head()

    def head(self) -> str:
        return repository.live_commit(self.target)

    def judged(self, number: int = 1, outcome: str = "promote", edits: dict[str, str] | None = None) -> dict[str, Any]:
        """As the code loop leaves it, without the minutes of the gate."""
        agents = AgentsPolicy.load(code_root() / "policies" / "agents.yaml")
        branch, worktree = f"factory/search/{number}-x", self.workspace.worktrees / f"proposal-{number}"
        made = list((edits or NEW).items())
        applied = repository.apply_proposal(
            self.target, self.head(), made, policy=agents, branch=branch, message=f"m {number}", worktree=worktree
        )
        repository.remove_worktree(self.target, worktree)
        with self.ledger.begin() as tx:
            verdict = tx.execute(
                verdicts.insert().values(
                    gate="patch", subject=f"proposal:{number}", policy_sha256="", subject_sha256=applied.patch_sha256,
                    outcome=outcome, reasons=["so it measured"], evidence={}, created_at=time.time(),
                )
            ).inserted_primary_key  # fmt: skip
            assert verdict is not None
            tx.execute(
                proposals.insert().values(
                    number=number, agent="search", target="kernel:ops", title="Fuse", hypothesis="h", predicted_gain=1.1,
                    base_commit=applied.base, branch=branch, commit=applied.commit, patch_sha256=applied.patch_sha256,
                    state="judged", verdict=verdict[0], created_at=time.time(),
                )
            )  # fmt: skip
        return self.row(number)

    def row(self, number: int = 1) -> dict[str, Any]:
        row = self.ledger.one(sa.select(proposals).where(proposals.c.number == number))
        assert row is not None
        return row

    def words(self) -> list[tuple[str, str]]:
        kinds = ("proposal_approved", "proposal_rejected", "proposal_reverted")
        found = self.ledger.rows(sa.select(events).where(events.c.kind.in_(kinds)).order_by(events.c.id))
        return [(event["kind"].removeprefix("proposal_"), event["detail"]["by"]) for event in found]

    def approve(self, number: int = 1) -> str | None:
        return approvals.approve(self.workspace, self.ledger, number, "ada", SILENT)

    def files(self) -> dict[str, str]:
        """Of the checkout, as they are; git must agree that nothing differs from HEAD."""
        assert git(self.target, "status", "--porcelain") == ""
        return {p: (self.target / p).read_text() for p in git(self.target, "ls-files").split()}


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    return Plant(tmp_path)


def test_an_approved_patch_is_live_and_can_be_taken_back(plant: Plant) -> None:
    row = plant.judged()
    assert plant.approve() == plant.head() == row["commit"]
    assert plant.files() == FILES | NEW and git(plant.target, "branch", "--show-current") == "main"
    assert plant.row()["state"] == "approved"
    undone = approvals.revert(plant.workspace, plant.ledger, 1, "bob", "slower at night")
    assert plant.head() == undone and plant.files() == FILES
    message = git(plant.target, "log", "-1", "--format=%B")
    assert "Revert proposal 1: Fuse" in message and "slower at night" in message and row["commit"] in message
    assert plant.row()["state"] == "reverted" and plant.words() == [("approved", "ada"), ("reverted", "bob")]
    for again in (plant.approve, lambda: approvals.revert(plant.workspace, plant.ledger, 1, "bob")):
        with pytest.raises(InputError, match="reverted"):
            again()


@pytest.mark.parametrize("outcome", ["hold", "reject"])
def test_only_what_the_gate_promotes_can_be_approved_and_anything_rejected(plant: Plant, outcome: str) -> None:
    plant.judged(outcome=outcome)
    with pytest.raises(InputError, match=f"{outcome.upper()} of proposal 1: so it measured"):
        plant.approve()
    approvals.reject(plant.ledger, 1, "ada", "no")
    assert plant.row()["state"] == "rejected" and plant.head() == plant.base
    with pytest.raises(InputError, match="rejected"):
        plant.approve()
    with pytest.raises(InputError, match="there are: 1"):
        plant.approve(7)


def test_an_approval_is_of_what_was_judged(plant: Plant) -> None:
    """Replayed after the branch was changed, moved to another patch, or lost."""
    row = plant.judged()
    plant.judged(2)
    other = git(plant.target, "commit-tree", f"{plant.base}^{{tree}}", "-p", plant.base, "-m", "evil")
    same_tree = git(plant.target, "commit-tree", f"{row['commit']}^{{tree}}", "-p", other, "-m", "a second parent")
    for commit in (other, same_tree):
        git(plant.target, "update-ref", f"refs/heads/{row['branch']}", commit)
        with pytest.raises(InputError, match="does not hold the patch that was judged"):
            plant.approve()
    git(plant.target, "update-ref", "-d", f"refs/heads/{row['branch']}")
    with pytest.raises(InputError, match="is gone"):
        plant.approve()
    with plant.ledger.begin() as tx:  # another verdict's patch
        tx.execute(verdicts.update().where(verdicts.c.id == plant.row(2)["verdict"]).values(subject_sha256="0" * 64))
    with pytest.raises(InputError, match="does not hold"):
        plant.approve(2)
    assert plant.head() == plant.base and plant.files() == FILES and plant.words() == []


@pytest.mark.parametrize("way", ["edited", "staged", "in the way", "a link", "detached"])
def test_a_checkout_with_work_in_it_is_left_alone(plant: Plant, way: str) -> None:
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
    with pytest.raises(RepositoryError, match="check one out" if way == "detached" else "not committed"):
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
def test_killed_while_it_is_merged_the_same_call_finishes(
    plant: Plant, stop_after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant.judged()
    real, calls = repository.git, 0

    def killed(folder: Path, *arguments: str, **named: Any) -> Any:
        nonlocal calls
        calls += arguments[:2] == ("update-index", "--add") and "environment" not in named
        if (stop_after, calls) == ("the first file", 2) or (stop_after == "the files" and arguments[0] == "update-ref"):
            raise KeyboardInterrupt
        done = real(folder, *arguments, **named)
        if stop_after == "the branch" and arguments[0] == "update-ref":
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(repository, "git", killed)
    with pytest.raises(KeyboardInterrupt):
        plant.approve()
    monkeypatch.undo()
    assert plant.row()["state"] == "judged"
    assert plant.approve() == plant.head() and plant.files() == FILES | NEW
    assert plant.row()["state"] == "approved" and plant.words() == [("approved", "ada")]


def given_verdict(monkeypatch: pytest.MonkeyPatch, outcome: str) -> list[tuple[int, str, str]]:
    """Instead of the gate's minutes; what it was asked to judge is kept: (number, base, hash of the patch)."""
    judged = []

    def decide(workspace: Workspace, ledger: Ledger, number: int, applied: Any, *_: Any, **__: Any) -> Any:
        judged.append((number, applied.base, applied.patch_sha256))
        evidence = {"stages": {}}
        with ledger.begin() as tx:
            key = tx.execute(
                verdicts.insert().values(
                    gate="patch", subject=f"proposal:{number}", policy_sha256="", subject_sha256=applied.patch_sha256,
                    outcome=outcome, reasons=["now"], evidence=evidence, created_at=time.time(),
                )
            ).inserted_primary_key  # fmt: skip
        return key[0], Verdict(outcome, ("now",)), evidence  # type: ignore[index]

    monkeypatch.setattr(proposing, "decide", decide)
    return judged


@pytest.mark.parametrize("outcome", ["promote", "reject"])
def test_when_the_code_moved_on_the_gate_runs_again(
    plant: Plant, outcome: str, monkeypatch: pytest.MonkeyPatch
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


def test_what_changed_again_since_is_not_overwritten(plant: Plant) -> None:
    plant.judged()
    plant.judged(2)
    plant.approve()
    (plant.target / "kernels/ops.py").write_text("x = 3\n")
    git(plant.target, "commit", "-q", "-a", "-m", "mine")
    with pytest.raises(RepositoryError, match="kernels/ops.py changed again since"):
        approvals.revert(plant.workspace, plant.ledger, 1, "ada")
    with pytest.raises(InputError, match="kernels/fused.py, kernels/ops.py changed since proposal 2 was judged"):
        plant.approve(2)
    assert plant.row()["state"] == "approved" and (plant.target / "kernels/ops.py").read_text() == "x = 3\n"


def test_people_decide_in_mlflow_and_the_policy_may_decide_alone(plant: Plant) -> None:
    plant.judged()
    tracking = Tracking.open(plant.workspace, plant.ledger)
    run = tracking.proposal_run(1)
    settle = lambda: approvals.follow(plant.workspace, plant.ledger, SILENT)
    assert tracking.proposal_word(1) == "pending" and settle() == 0 and plant.head() == plant.base
    tracking.client.set_tag(run, APPROVAL_TAG, "Approved")
    assert settle() == 1 and plant.files() == FILES | NEW and plant.words() == [("approved", "mlflow")]
    assert tracking.client.get_run(run).data.tags["state"] == "approved" and settle() == 0
    approvals.revert(plant.workspace, plant.ledger, 1, "ada")
    plant.judged(2)
    tracking.client.set_tag(tracking.proposal_run(2), APPROVAL_TAG, "rejected")
    assert settle() == 1 and plant.row(2)["state"] == "rejected" and plant.files() == FILES
    plant.judged(3)
    policy = plant.workspace.root / "policies" / "gates" / "patch.yaml"
    policy.parent.mkdir(parents=True, exist_ok=True)
    policy.write_text("approval: automatic\n")
    assert settle() == 1 and plant.files() == FILES | NEW and plant.words()[-1] == ("approved", "policy")


def test_a_word_on_another_workspaces_proposal_is_none_on_this_ones(plant: Plant, tmp_path: Path) -> None:
    """Both show their proposal 1 at one MLflow."""
    plant.judged()
    tracking = Tracking.open(plant.workspace, plant.ledger)
    theirs = tracking.proposal_run(1)
    tracking.client.set_tag(theirs, APPROVAL_TAG, "approved")
    (tmp_path / "other").mkdir()
    other = Plant(tmp_path / "other", plant.workspace.mlflow_uri)
    other.judged(edits={"kernels/ops.py": "x = 666\n"})
    assert approvals.follow(other.workspace, other.ledger, SILENT) == 0 and other.files() == FILES
    ours = Tracking.open(other.workspace, other.ledger).proposal_run(1)
    assert ours != theirs and tracking.proposal_run(1) == theirs
    tracking.client.set_tag(ours, APPROVAL_TAG, "approved")
    assert approvals.follow(other.workspace, other.ledger, SILENT) == 1 and other.words() == [("approved", "mlflow")]


def test_a_run_that_mlflow_lost_is_shown_anew_and_stops_nothing(plant: Plant) -> None:
    plant.judged()
    tracking = Tracking.open(plant.workspace, plant.ledger)
    lost = tracking.proposal_run(1)
    with plant.ledger.begin() as tx:  # as after 'mlflow gc'
        tx.execute(tracked_runs.update().values(run_id="0" * 32))
    tracking.client.delete_run(lost)
    assert approvals.follow(plant.workspace, plant.ledger, SILENT) == 0 and tracking.proposal_word(1) == "pending"
    assert tracking.proposal_run(1) not in (lost, "0" * 32)


def test_choices_for_other_ops_are_merged_one_after_the_other(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(InputError, match="in its choice of attention: it has to be proposed anew"):
        plant.approve(3)
    with pytest.raises(InputError, match="more there than choices"):
        plant.approve(4)


def test_a_benchmark_that_falls_has_the_daemon_judge_merged_patches_again(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = {"model": {}, "batch": {}, "precision": "fp32", "compile": False}
    for module in (approvals, revalidating):
        monkeypatch.setattr(module, "find_start", lambda ledger: Start(plant.target, 0, recipe, {}))
    judged = given_verdict(monkeypatch, "promote")
    plant.judged()
    plant.approve()
    suite = tmp_path / "test_speed.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.conftest", "-c", os.devnull, str(suite)]
    environment = os.environ | {"FACTORY_HOME": str(plant.workspace.root), "PYTHONPATH": str(code_root())}
    bench = lambda: subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True).stdout
    daemon = lambda: revalidating.follow(plant.workspace, plant.ledger, SILENT)
    suite.write_text("def test_stays(): pass\n")
    assert "told" not in bench() and daemon() == []
    suite.write_text("def test_stays(): pass\ndef test_falls(): assert 0\n")
    assert "1 told to the factory" in bench()
    assert daemon() == [2] and len(judged) == 1 and "benchmarks changed since" in plant.row(2)["hypothesis"]
    assert daemon() == []
    environment["FACTORY_HOME"] = str(tmp_path)
    assert "could not be told" in bench()


def test_without_a_sandbox_the_daemon_proposes_nothing_and_says_so_once(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = {"model": {"d_model": 8}, "batch": {}, "precision": "fp32", "compile": False}
    for module in (approvals, revalidating):
        monkeypatch.setattr(module, "find_start", lambda ledger: Start(plant.target, 0, recipe, {}))
    plant.judged()
    plant.approve()
    recipe["model"] = {"d_model": 16}
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FACTORY_SANDBOX", "bubblewrap")
    said = io.StringIO()
    for _ in range(3):
        assert revalidating.follow(plant.workspace, plant.ledger, Terminal(Console(file=said, width=300))) == []
    assert said.getvalue().count("waits to be judged again: no sandbox") == 1
    assert len(plant.ledger.rows(sa.select(proposals))) == 1


@pytest.mark.parametrize("outcome", ["promote", "reject"])
def test_a_merged_patch_is_judged_again_once_when_its_surroundings_change(
    plant: Plant, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {"model": {"d_model": 8}, "batch": {}, "precision": "fp32", "compile": False}
    start = Start(plant.target, 0, recipe, {})
    for module in (approvals, revalidating):
        monkeypatch.setattr(module, "find_start", lambda ledger: start)
    judged = given_verdict(monkeypatch, outcome)
    again = lambda: revalidating.revalidate(plant.workspace, plant.ledger, SILENT, plant.head())
    plant.judged()
    live = plant.approve()
    assert again() == [] and judged == []
    recipe["model"] = {"d_model": 16}
    assert again() == [2] and judged[0][:2] == (2, live)
    undo = plant.row(2)
    assert undo["target"] == "undo:1" and "recipe changed since" in undo["hypothesis"]
    assert repository.file_text(plant.target, undo["commit"], "kernels/ops.py") == FILES["kernels/ops.py"]
    assert again() == [] and plant.row()["state"] == "approved" and plant.head() == live
    with plant.ledger.begin() as tx:
        release = {"gate": "release", "subject": "candidate:7", "outcome": "reject", "against": "", "policy_sha256": ""}
        tx.execute(verdicts.insert().values(**release, subject_sha256="", reasons=[], evidence={}, created_at=1.0))
    if outcome == "reject":  # the daemon by itself, and once
        daemon = lambda: revalidating.follow(plant.workspace, plant.ledger, SILENT)
        stray = plant.target / "kernels" / "ops.py"
        text = stray.read_text()
        stray.write_text(text + "# mine")
        assert daemon() == []  # work that is not committed waits for nobody, and nobody for it
        stray.write_text(text)
        assert daemon() == [3] and "evals changed since" in plant.row(3)["hypothesis"] and daemon() == []
    if outcome == "promote":
        plant.approve(2)
        assert plant.files() == FILES | {"kernels/fused.py": NEW["kernels/fused.py"]}  # a file that nobody reads stays
        assert plant.row()["state"] == "reverted" and again() == []
