"""Making proposals: their numbers, branches and records. Nothing is left behind, whatever happens."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from agents.core.proposal import Edit, Proposal
from agents.core.workbench import MeasurementError
from factory.code_loop import proposing, submitting
from factory.code_loop.workbench import LiveWorkbench
from factory.core.errors import InputError, IsolationError
from factory.core.progress import SILENT
from factory.core.workspace import Workspace, WorkspaceConfig, find_checkout_root
from factory.gates.training_start import find_training_start
from factory.git import repository
from factory.git.repository import RepositoryError
from factory.ledger.ledger import Ledger, profiles, proposals
from factory.ledger.plant import Plant
from factory.runs.live_code import decide_live_code_isolation
from factory.show.unshown_items import show_unshown_items
from kernels.contract.machine import describe_this_machine
from tests.support.factory.code_loop import Made, make
from tests.support.git import git
from tests.support.messages import codes, refused, the


@pytest.fixture
def made() -> Made:
    return make()


def drafted(path: str = "trainer/optim/schedule.py", text: str = "x = 1\n", title: str = "Try <b>it</b>") -> Proposal:
    return Proposal("search", f"file:{path}", title, "Because & why.", 1.1, (Edit(path, text),))


def row_of(made: Made, number: int) -> dict[str, Any]:
    row = made.ledger.select_first(sa.select(proposals).where(proposals.c.number == number))
    assert row is not None
    return row


def branches(made: Made) -> str:
    return git(made.target, "branch", "--list", "factory/*")


def test_an_unknown_agent_is_named_with_the_nearest(made: Made) -> None:
    with refused("code_loop.unknown_agent", InputError, agent="serch") as caught:
        proposing.make_proposals(Plant(made.workspace, made.ledger), agent="serch")
    assert "'search'" in caught.value.data["near"]


def test_without_a_checkpoint_nothing_is_proposed_and_the_reason_is_printed(made: Made, tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path / "w", WorkspaceConfig(recipe="tiny", repository=str(made.target)))
    ledger = Ledger.create(workspace.ledger_url)
    said: list[str] = []

    class Heard(type(SILENT)):  # type: ignore[misc]
        def line(self, text: str) -> None:
            said.append(text)

    assert proposing.make_proposals(Plant(workspace, ledger, Heard())) == []
    assert (
        the(said[-1:], "code_loop.nothing_proposed").data["why"].code == "code_loop.no_checkpoint"
        and ledger.select_rows(sa.select(proposals)) == []
    )


def test_an_archive_instead_of_a_repository_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    workspace = Workspace.create(tmp_path / "w", WorkspaceConfig(repository=str(tmp_path / "code")))
    with pytest.raises(RepositoryError, match="[Cc]lone the repository"):
        proposing.make_proposals(Plant(workspace, Ledger.create(workspace.ledger_url)))


def test_a_patch_out_of_scope_is_rejected_without_a_branch(made: Made) -> None:
    before = branches(made)
    number = submitting.submit_proposal(
        Plant(made.workspace, made.ledger), drafted("factory/gates/release/judge.py"), made.base
    )
    show_unshown_items(Plant(made.workspace, made.ledger))
    row = row_of(made, number)
    verdict = made.verdict_on(number)
    assert row["commit"] is None and branches(made) == before
    assert verdict["outcome"] == "reject" and codes(verdict["reasons"])[0] == "code_loop.out_of_scope"
    page = Path(row["report"]).read_text()
    assert "&lt;b&gt;it" in page and "<b>it" not in page and '<span class="pill bad">reject</span>' in page
    assert made.left_behind() == []


def test_a_patch_with_a_forbidden_import_is_rejected_and_keeps_its_branch(made: Made) -> None:
    git(made.target, "branch", "factory/somebody/400-theirs")  # numbers are free in the ledger and among branches
    number = submitting.submit_proposal(Plant(made.workspace, made.ledger), drafted(text="import socket\n"), made.base)
    git(made.target, "branch", "-D", "factory/somebody/400-theirs")
    row = row_of(made, number)
    assert number == 401
    assert git(made.target, "rev-parse", row["branch"]) == row["commit"]
    message = git(made.target, "log", "-1", "--format=%B", row["branch"])
    assert "Verdict: reject" in message and "imports socket" in message
    assert row["branch"] == f"factory/search/{number}-try-b-it-b" and made.left_behind() == []
    known = LiveWorkbench(
        Plant(made.workspace, made.ledger), made.base, find_training_start(made.ledger)
    ).list_earlier_proposals(row["target"])  # type: ignore[arg-type]
    assert known[-1].outcome == "reject" and known[-1].patch_id == drafted(text="import socket\n").patch_id


def test_a_proposal_without_a_sandbox_fails_and_leaves_no_branch(
    made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = branches(made)
    monkeypatch.setenv("FACTORY_BWRAP", str(tmp_path / "bwrap"))
    text = (
        (made.target / "policies" / "kernels.yaml")
        .read_text()
        .replace("attention: reference", "attention: recompute", 1)
    )
    with pytest.raises(IsolationError):
        submitting.submit_proposal(
            Plant(made.workspace, made.ledger), drafted("policies/kernels.yaml", text), made.base
        )
    monkeypatch.undo()
    last = made.ledger.select_first(sa.select(proposals).order_by(proposals.c.number.desc()))
    assert last and last["state"] == "failed" and last["verdict"] is None
    assert branches(made) == before and made.left_behind() == []


def test_remains_of_a_killed_process_are_removed(made: Made) -> None:
    before = branches(made)
    number, branch = submitting.record_drafted_proposal(Plant(made.workspace, made.ledger), drafted(), made.base)
    commit = git(made.target, "commit-tree", "HEAD^{tree}", "-p", "HEAD", "-m", "killed")
    worktree = repository.get_checkout_folder(made.workspace.worktrees, commit)
    git(made.target, "worktree", "add", "-q", "-b", branch, str(worktree), commit)
    (worktree.with_name(worktree.name + "-gate") / "baseline").mkdir(parents=True)
    submitting.mark_stale_proposals_as_failed(Plant(made.workspace, made.ledger))
    submitting.mark_stale_proposals_as_failed(Plant(made.workspace, made.ledger))
    assert row_of(made, number)["state"] == "failed" and branches(made) == before and made.left_behind() == []


def test_the_workbench_shows_files_in_scope_only_and_has_a_budget(made: Made) -> None:
    start = find_training_start(made.ledger)
    assert start is not None
    bench = LiveWorkbench(Plant(made.workspace, made.ledger), made.base, start)
    assert "attention" in bench.read("policies/kernels.yaml")
    for path in (
        "agents/core/workbench.py",
        "../workspace/ledger.db",
        "/etc/passwd",
        "trainer/none.py",
        "policies/agents.yaml",
    ):
        with pytest.raises(InputError):
            bench.read(path)
    misspelt = bench.read("policies/kernels.yaml").replace("swiglu:", "swigul:", 1)
    checked = bench.check([Edit("policies/kernels.yaml", misspelt)])
    assert checked.stage == "static" and "'swigul'" in checked.problems[0] and "'swiglu'" in checked.problems[0]
    bench.spent = 1e9
    with refused("code_loop.no_seconds_left", MeasurementError):
        bench.measure("attention", "recompute", "reference")


@pytest.mark.slow("a profile, timings of ops, and a whole gate run")
def test_propose_makes_a_profile_and_judges_at_most_one_proposal(made: Made) -> None:
    began = time.time()
    assert decide_live_code_isolation(Plant(made.workspace, made.ledger)) == (True, "")
    policy = made.workspace.policy_path("gates/patch.yaml")
    text = policy.read_text()
    policy.write_text(text.replace("pairs: 2, max_noise", "pairs: 2, wall_seconds: 1, max_noise"))  # any verdict
    agents = made.workspace.root / "policies" / "agents.yaml"
    measures = (find_checkout_root() / "policies" / "agents.yaml").read_text()
    agents.write_text(f"{measures}\nmeasure_seconds: 10.0\n")  # one or two ops
    try:
        numbers = proposing.make_proposals(Plant(made.workspace, made.ledger))
    finally:
        policy.write_text(text)
        agents.unlink()
    found = made.ledger.select_first(sa.select(profiles).order_by(profiles.c.id.desc()))
    assert found and found["created_at"] > began
    files = {path.name for path in Path(found["path"]).parent.iterdir()}
    assert files == {"profile.json", "profile.html", "trace.json"}
    assert found["summary"]["machine"] == str(describe_this_machine()), (
        "the next profile looks for this machine's rates"
    )
    assert len(numbers) <= 1 and all(row_of(made, number)["verdict"] is not None for number in numbers)
    assert made.left_behind() == [] and repository.get_live_commit(made.target) == made.base
