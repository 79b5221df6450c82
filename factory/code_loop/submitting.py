"""One proposal: from an agent's edits to a branch and a verdict."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from agents.core.proposal import Edit, Proposal, gain_words
from factory.code_loop.workbench import history
from factory.core import devices
from factory.core.errors import FactoryError, WorkspaceError
from factory.core.faults import fault_of
from factory.core.removal import remove
from factory.core.workspace import Workspace
from factory.gates.case import reasons_of
from factory.gates.patch.stages.gate import patch_gate
from factory.gates.recipe.gate import concerns, recipe_gate, tried_before
from factory.gates.release.judge import REJECT, Verdict
from factory.gates.staged_gate import StagedGate, gate_folder
from factory.git import repository
from factory.git.repository import Applied, RepositoryError, ScopeError
from factory.git.scope import AgentsPolicy
from factory.ledger.ledger import Ledger, proposals, record
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow, Subject
from factory.ledger.writing import insert, record_once, record_verdict
from factory.sandbox import sandbox
from factory.sandbox.sandbox import Limits

DRAFTED = "drafted"  # a process is at work on it
WRITTEN = "written"  # it is on its branch, for whichever process comes next
# Held while anything is drafted, judged, merged or undone. A judgement needs it to its end: whoever holds it takes what is DRAFTED, and each folder
# of a quick check, for the rest of a process that was killed, and judges what is WRITTEN.
LOCK = "code-loop"
REMIND_SECONDS = 86_400.0  # a lasting obstacle is reported again after a day
PROPOSED = "agent target title hypothesis predicted_gain"  # of a ``Proposal``, as its row has it
T = TypeVar("T")


def in_turn(
    plant: Plant, act: Callable[[], T], kind: str, subject: Subject | str, words: str, **detail: str
) -> T | None:
    """``act()`` under the code loop's lock, for the daemon; None where it was not done: another process proposes or decides now, and the next
    pass tries again; or an error kept it from being done, which is said once a day, after ``words``, and stops nothing else."""
    try:
        with plant.workspace.lock(LOCK):
            return act()
    except WorkspaceError:
        return None
    except FactoryError as error:
        if record_once(plant.ledger, kind, subject, {**detail, "why": str(error)}, REMIND_SECONDS):
            plant.say(f"  {words}: {error}")
        return None


def make_ready(plant: Plant) -> str:
    """The live commit, to propose and judge on, once what a killed process left is removed. The caller holds ``LOCK``.

    Raises: RepositoryError for a checkout that is not settled; IsolationError.
    """
    base = repository.live_commit(plant.workspace.repository)
    repository.require_settled(plant.workspace.repository)
    clear_stale(plant)
    refuse_without_isolation(plant.workspace)
    return base


def submit(plant: Plant, drafted: Proposal, base: str) -> int:
    """Turn an agent's proposal into a branch, judge it, record it; returns its number."""
    number = write(plant, drafted, base)
    if ProposalRow.get(plant.ledger, number).state == DRAFTED:
        judge(plant, number)
    return number


def write(plant: Plant, drafted: Proposal, base: str, state: str = DRAFTED) -> int:
    """The proposal as a commit on a branch of its own, in ``state``: DRAFTED for a caller that judges it now, WRITTEN for one that leaves it to
    a later pass. A patch out of scope is rejected here, without a branch. Returns its number.
    """
    agents = AgentsPolicy.load(plant.workspace.policy("agents.yaml"))
    number, branch = draft(plant, drafted, base)
    plant.say(f"  proposal {number}: {drafted.title}")
    edits = [(edit.path, edit.new_text) for edit in drafted.edits]
    try:
        applied = repository.apply_proposal(
            plant.workspace.repository,
            base,
            edits,
            policy=agents,
            branch=branch,
            message=_message(drafted, None, None),
            worktrees=plant.workspace.worktrees,
        )
        with plant.ledger.begin() as tx:
            values = {"patch_sha256": applied.patch_sha256, "state": state}
            tx.execute(proposals.update().where(proposals.c.number == number).values(**values))
    except ScopeError as error:
        _out_of_scope(plant, number, drafted, base, error)
    except BaseException as error:
        give_up(plant, number, f"{type(error).__name__}: {error}")
        raise
    return number


def judge(plant: Plant, number: int) -> None:
    """Judge what was written, record it. Killed, it can be called again.

    Raises: as the gate's stages do; the proposal has failed then, and its branch is gone.
    """
    row = ProposalRow.get(plant.ledger, number)
    code, base = plant.workspace.repository, row.base_commit
    try:
        commit = repository.branch_commit(code, row.branch)
        if commit is None or repository.patch_sha256(code, base, commit) != row.patch_sha256:
            raise RepositoryError(f"the branch {row.branch} does not hold the patch that was proposed")
        drafted, patch_id = _drafted(plant, row, commit)
        try:
            folder = repository.checkout_folder(plant.workspace.worktrees, commit)
            worktree = repository.checkout(code, commit, folder)
            applied = Applied(row.branch, commit, base, row.patch_sha256, worktree)
            verdict_id, verdict, evidence = _decide(plant, number, drafted.target, patch_id, applied)
        finally:
            _remove_folders(plant.workspace, commit)  # before the branch moves on: give_up finds them by it
        commit = repository.reword(code, applied, _message(drafted, verdict, evidence))
        record_judged(plant.ledger, number, commit, applied.patch_sha256, verdict_id)
        plant.say(f"  {verdict.outcome.upper()}: {verdict.reasons[0]}")
    except BaseException as error:
        later = row.state == WRITTEN and (not isinstance(error, Exception) or fault_of(error) is not None)
        if not later:  # a kill and a fault of the machine say nothing of what is WRITTEN: a later pass judges it
            give_up(plant, number, f"{type(error).__name__}: {error}")
        raise


def _drafted(plant: Plant, row: ProposalRow, commit: str) -> tuple[Proposal, str]:
    """What an agent proposed, as the ledger and the branch have it, and the id of its patch.

    The id is the agent's own: its edits may have named a file that they left as it was, which no commit shows.
    """
    which = "SELECT detail FROM events WHERE kind = 'drafted' AND subject = :subject ORDER BY id DESC LIMIT 1"
    noted = plant.ledger.read(which, subject=str(Subject("proposal", row.number)))[0]["detail"]
    changed = repository.changes(plant.workspace.repository, row.base_commit, commit)
    edits = tuple(Edit(change.path, (change.content or b"").decode()) for change in changed)
    return Proposal(**row.only(PROPOSED), edits=edits), str(noted["patch_id"])


def _decide(
    plant: Plant, number: int, target: str, patch_id: str, applied: Applied
) -> tuple[int, Verdict, dict[str, Any]]:
    learns = concerns(plant.workspace, applied)
    gate: StagedGate[Any] = recipe_gate(plant.workspace) if learns else patch_gate(plant.workspace)
    with devices.one():
        # The same edits under another target are another try as well, and so is a recipe's key under any.
        tries = sum(row.target == target or earlier == patch_id for row, earlier in history(plant.ledger))
        tries = 1 + max(tries, tried_before(plant, applied) if learns else 0)
        return gate.decide(plant, number, applied, tries=tries, patch_id=patch_id)


def _remove_folders(workspace: Workspace, commit: str) -> None:
    """The checkout of a judged commit, and the gate's folder beside it."""
    worktree = repository.checkout_folder(workspace.worktrees, commit)
    repository.remove_worktree(workspace.repository, worktree)
    remove(gate_folder(worktree))


def clear_stale(plant: Plant) -> None:
    """Mark proposals that a killed process left 'drafted' as 'failed', and remove their branches and worktrees."""
    for leftover in (plant.workspace.root / "cache").glob("check-*"):  # of a quick check that was killed
        remove(leftover)
    for row in ProposalRow.select(plant.ledger, "WHERE state = 'drafted' ORDER BY number"):
        give_up(plant, row.number, "the factory was killed while the proposal was judged")
        plant.say(f"  proposal {row.number} was not judged, as its process was killed: removed")


def refuse_without_isolation(workspace: Workspace) -> None:
    """Raises: IsolationError, before time is spent on a proposal that could not be judged."""
    with tempfile.TemporaryDirectory(dir=workspace.worktrees) as folder:
        sandbox.run([sys.executable, "-c", ""], output=Path(folder), limits=Limits(wall_seconds=30))


def draft(plant: Plant, drafted: Proposal, base: str) -> tuple[int, str]:
    """(number, name of its branch): take the next number that neither the ledger nor a branch has, and record the draft."""
    with plant.ledger.begin() as tx:
        taken = {row[0] for row in tx.execute(sa.select(proposals.c.number))} | repository.branch_numbers(
            plant.workspace.repository
        )
        number = max(taken, default=0) + 1
        branch = repository.branch_name(drafted.agent, number, drafted.title)
        said = {name: getattr(drafted, name) for name in PROPOSED.split()}
        own = {"number": number, "base_commit": base, "branch": branch, "state": DRAFTED, "created_at": time.time()}
        insert(tx, proposals, **said, **own)
        record(tx, "drafted", Subject("proposal", number), {"branch": branch, "patch_id": drafted.patch_id})
    return number, branch


def record_given(
    plant: Plant,
    number: int,
    commit: str | None,
    gate: str,
    reasons: Sequence[str],
    evidence: dict[str, Any],
    **values: str,
) -> None:
    """Write down the verdict on a drafted proposal that no stage has to be run for. ``values``: of ``record_verdict``."""
    with plant.ledger.begin() as tx:
        verdict = record_verdict(
            tx, gate, Subject("proposal", number), reasons=reasons, evidence=evidence | {"tries": 1}, against=evidence["base"], **values
        )  # fmt: skip
    record_judged(plant.ledger, number, commit, values["subject_sha256"], verdict)


def record_judged(ledger: Ledger, number: int, commit: str | None, patch_sha256: str, verdict: int) -> None:
    """Write down that a drafted proposal has its verdict (its id)."""
    with ledger.begin() as tx:
        values = {"state": "judged", "commit": commit, "patch_sha256": patch_sha256, "verdict": verdict}
        tx.execute(proposals.update().where(proposals.c.number == number).values(**values))


def give_up(plant: Plant, number: int, why: str) -> None:
    """A proposal without a verdict has failed: remove its branch and worktree, and record why."""
    row, code = ProposalRow.get(plant.ledger, number), plant.workspace.repository
    if commit := repository.branch_commit(code, row.branch):
        _remove_folders(plant.workspace, commit)
    repository.remove_branch(code, row.branch)
    with plant.ledger.begin() as tx:
        tx.execute(proposals.update().where(proposals.c.number == number).values(state="failed"))
        record(tx, "proposal_failed", Subject("proposal", number), {"why": why[:2000]})


def _out_of_scope(plant: Plant, number: int, drafted: Proposal, base: str, error: ScopeError) -> None:
    """A patch that is out of scope is never written: it is rejected without a branch."""
    reasons = [f"out of scope: {problem}" for problem in error.problems]
    stages = {"scope": {"state": "failed", "reasons": reasons}}
    evidence = {"base": base, "patch_id": drafted.patch_id, "stages": stages}
    record_given(
        plant, number, None, "patch", reasons, evidence, outcome=REJECT, policy_sha256="", subject_sha256=drafted.patch_id
    )  # fmt: skip
    plant.say(f"  REJECT: {reasons[0]}")


def _message(drafted: Proposal, verdict: Verdict | None, evidence: dict[str, Any] | None) -> str:
    """The commit's message: hypothesis, prediction; once judged, evidence and verdict."""
    lines = [drafted.title.splitlines()[0][:100] if drafted.title else "A proposal", "", drafted.hypothesis.strip(), ""]
    if drafted.predicted_gain:
        lines.append(f"Predicted: {gain_words(drafted.target, drafted.predicted_gain)}.")
    for name, stage in ((evidence or {}).get("stages") or {}).items():
        lines.append(f"{name.capitalize()}: {stage['state']}; {' '.join(map(str, reasons_of(stage)))[:300]}")
    if verdict:
        lines += [f"Verdict: {verdict.outcome}; {'; '.join(verdict.reasons)[:600]}"]
    return "\n".join([*lines, "", f"Agent: {drafted.agent}", f"Target: {drafted.target}", ""])
