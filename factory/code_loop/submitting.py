"""Submits a proposal: writes an agent's edits to a branch, has the gate judge the branch, and records the verdict."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from agents.core.proposal import Edit, Proposal, format_gain
from factory.code_loop.held_proposals import ProposalDescents
from factory.code_loop.workbench import list_judged_proposals
from factory.core import devices
from factory.core.errors import FactoryError, WorkspaceError
from factory.core.faults import find_fault_in
from factory.core.path_removal import remove_path
from factory.core.workspace import Workspace
from factory.gates.patch.stages.gate import make_patch_gate
from factory.gates.recipe.gate import count_tries_of_same_keys, is_recipe_patch, make_recipe_gate
from factory.gates.release.judge import HOLD, REJECT, Verdict
from factory.gates.stage_interface import read_reasons
from factory.gates.staged_gate import StagedGate, get_gate_folder
from factory.git import repository
from factory.git.repository import AppliedPatch, RepositoryError, ScopeError
from factory.git.scope import AgentsPolicy
from factory.ledger.ledger import Ledger, proposals, record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow, Subject
from factory.ledger.writing import insert_row, record_event_once, record_verdict
from factory.sandbox import sandbox
from factory.sandbox.sandbox import SandboxLimits
from kernels.contract.message import Message

DRAFTED = "drafted"  # a process works on the proposal
WRITTEN = "written"  # the proposal is on its branch, and the next process may judge it
# This lock is held while a proposal is drafted, judged, merged or undone. Therefore its holder may remove every DRAFTED proposal and each folder of
# a quick check: they are the remains of a process that was killed. The holder judges WRITTEN proposals.
LOCK = "code-loop"
REMIND_SECONDS = 86_400.0  # a lasting obstacle is reported again after a day
PROPOSED = " ".join(
    one.name for one in fields(Proposal) if one.name != "edits"
)  # the fields of a ``Proposal`` that its row stores
T = TypeVar("T")


def run_under_code_loop_lock(
    plant: Plant, action: Callable[[], T], kind: str, subject: Subject | str, prefix: str, **detail: str
) -> T | None:
    """Return ``action()``, called under the code loop's lock, for the daemon. Returns None if another process holds the lock, or after an error.

    The next pass tries again. An error is printed after ``prefix``, once a day, and is recorded as an event of this ``kind``.
    """
    try:
        with plant.workspace.hold_lock(LOCK):
            return action()
    except WorkspaceError:
        return None
    except FactoryError as error:
        if record_event_once(plant.ledger, kind, subject, {**detail, "why": str(error)}, REMIND_SECONDS):
            plant.print_line(Message("code_loop.prevented", "  {what}: {problem}", what=prefix, problem=error.message))
        return None


def remove_remains_and_get_live_commit(plant: Plant) -> str:
    """Remove the remains of killed processes, and return the live commit, on which to propose and judge. The caller holds ``LOCK``.

    Raises: RepositoryError for a checkout with uncommitted changes; IsolationError without a sandbox.
    """
    base = repository.get_live_commit(plant.workspace.repository)
    repository.check_nothing_uncommitted(plant.workspace.repository)
    mark_stale_proposals_as_failed(plant)
    require_isolation(plant.workspace)
    return base


def submit_proposal(plant: Plant, drafted: Proposal, base: str, descent: Mapping[str, Any] | None = None) -> int:
    """Write an agent's proposal to a branch, judge it, and record the verdict. Returns the proposal's number. ``descent``: as for
    ``record_drafted_proposal``."""
    number = write_branch(plant, drafted, base, descent=descent)
    if ProposalRow.get(plant.ledger, number).state == DRAFTED:
        judge_proposal(plant, number)
    return number


def write_branch(
    plant: Plant, drafted: Proposal, base: str, state: str = DRAFTED, descent: Mapping[str, Any] | None = None
) -> int:
    """Write a proposal as a commit on a new branch, and return the proposal's number. A patch out of scope is rejected without a branch.

    ``state``: DRAFTED if the caller judges the proposal now, WRITTEN if a later pass does. ``descent``: as for ``record_drafted_proposal``.
    """
    agents = AgentsPolicy.load(plant.workspace.policy_path("agents.yaml"))
    number, branch = record_drafted_proposal(plant, drafted, base, descent)
    plant.print_line(
        Message("code_loop.proposal", "  proposal {proposal}: {title}", proposal=number, title=drafted.title)
    )
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
        mark_as_failed(plant, number, f"{type(error).__name__}: {error}")
        raise
    return number


def judge_proposal(plant: Plant, number: int) -> None:
    """Judge a proposal that is on its branch, and record the verdict. After a kill, the call can be repeated.

    Raises: the errors of the gate's stages. The proposal is then marked as failed and its branch removed, unless a later pass can judge it.
    """
    row = ProposalRow.get(plant.ledger, number)
    code, base = plant.workspace.repository, row.base_commit
    try:
        commit = repository.get_branch_commit(code, row.branch)
        if commit is None or repository.hash_patch(code, base, commit) != row.patch_sha256:
            raise RepositoryError(
                "code_loop.branch_differs",
                "The branch {branch} does not contain the proposed patch.",
                branch=row.branch,
            )
        drafted, patch_id = _drafted(plant, row, commit)
        try:
            folder = repository.get_checkout_folder(plant.workspace.worktrees, commit)
            worktree = repository.checkout_commit(code, commit, folder)
            applied = AppliedPatch(row.branch, commit, base, row.patch_sha256, worktree)
            verdict_id, verdict, evidence = _decide(plant, number, drafted.target, patch_id, applied)
        finally:
            _remove_folders(
                plant.workspace, commit
            )  # before the branch moves: ``mark_as_failed`` finds the folders by the branch
        commit = repository.reword_commit(code, applied, _message(drafted, verdict, evidence))
        record_proposal_as_judged(plant.ledger, number, commit, applied.patch_sha256, verdict_id)
        plant.print_line(
            Message("code_loop.verdict", "  {outcome}: {why}", outcome=verdict.outcome.upper(), why=verdict.reasons[0])
        )
    except BaseException as error:
        later = row.state == WRITTEN and (not isinstance(error, Exception) or find_fault_in(error) is not None)
        if not later:  # after a kill or a fault of the machine, a later pass judges a WRITTEN proposal
            mark_as_failed(plant, number, f"{type(error).__name__}: {error}")
        raise


def _drafted(plant: Plant, row: ProposalRow, commit: str) -> tuple[Proposal, str]:
    """Return an agent's proposal, read from the ledger and the branch, and the id of its patch.

    The id is that of the agent's edits. They may contain a file that they do not change, which no commit shows.
    """
    which = "SELECT detail FROM events WHERE kind = 'drafted' AND subject = :subject ORDER BY id DESC LIMIT 1"
    noted = plant.ledger.read(which, subject=str(Subject("proposal", row.number)))[0]["detail"]
    changed = repository.read_file_changes(plant.workspace.repository, row.base_commit, commit)
    edits = tuple(Edit(change.path, (change.content or b"").decode()) for change in changed)
    return Proposal(**row.select_fields(PROPOSED), edits=edits), str(noted["patch_id"])


def _decide(
    plant: Plant, number: int, target: str, patch_id: str, applied: AppliedPatch
) -> tuple[int, Verdict, dict[str, Any]]:
    learns = is_recipe_patch(plant.workspace, applied)
    gate: StagedGate[Any] = make_recipe_gate(plant.workspace) if learns else make_patch_gate(plant.workspace)
    with devices.hold_device():
        tries = compute_tries(plant.ledger, number, target, patch_id)
        if learns:
            tries = max(tries, 1 + count_tries_of_same_keys(plant, applied))
        return gate.judge_proposal(plant, number, applied, tries=tries, patch_id=patch_id)


def compute_tries(ledger: Ledger, number: int, target: str, patch_id: str) -> int:
    """Return the number of tries among which the judge divides the confidence for a proposal (``number``) that it is about to judge.

    Each verdict on the same target, or on the same edits under another target, is one try. A sum has the targets of its parts, and counts as the one
    of them that was tried most. The number doubles with each time that the same patch was held, whatever held it: code may stall when its time looks
    bad. The k-th judgement of one patch then errs with at most 1 / (k · 2^(k−1)) of the allowed error, and all its judgements together, however many,
    with at most Σ 1 / (k · 2^(k−1)) = 2 ln 2 ≈ 1.39 times the allowed error (the union bound).
    """
    descents = ProposalDescents(ledger)
    judged = list_judged_proposals(ledger)
    target_of = {row.number: row.target for row in ProposalRow.select(ledger)} | {number: target}
    list_targets = lambda one: (
        {target_of[part] for part in descents.list_parts(one) if part in target_of} or {target_of[one]}
    )
    earlier = [(list_targets(row.number), known) for row, known in judged]
    tries = max(sum(own in targets or known == patch_id for targets, known in earlier) for own in list_targets(number))
    family = set(descents.list_family(descents.find_root(number)))
    held = sum(row.outcome == HOLD for row, _ in judged if row.number in family)
    return (1 + tries) * 2**held


def _remove_folders(workspace: Workspace, commit: str) -> None:
    """Remove the checkout of a judged commit, and the gate's folder beside the checkout."""
    worktree = repository.get_checkout_folder(workspace.worktrees, commit)
    repository.remove_worktree(workspace.repository, worktree)
    remove_path(get_gate_folder(worktree))


def mark_stale_proposals_as_failed(plant: Plant) -> None:
    """Mark proposals that a killed process left 'drafted' as 'failed', and remove their branches and worktrees."""
    for leftover in (plant.workspace.root / "cache").glob("check-*"):  # of a quick check that was killed
        remove_path(leftover)
    for row in ProposalRow.select(plant.ledger, "WHERE state = 'drafted' ORDER BY number"):
        killed = Message("code_loop.killed", "the factory was killed while the proposal was judged")
        mark_as_failed(plant, row.number, killed)
        plant.print_line(
            Message(
                "code_loop.removed",
                "  proposal {proposal} failed, because the process that judged it was killed. The proposal's branch "
                "was removed.",
                proposal=row.number,
            )
        )


def require_isolation(workspace: Workspace) -> None:
    """Start the sandbox once. Raises: IsolationError if it cannot start, before time is spent on a proposal that could not be judged."""
    with tempfile.TemporaryDirectory(dir=workspace.worktrees) as folder:
        sandbox.run_in_sandbox([sys.executable, "-c", ""], output=Path(folder), limits=SandboxLimits(wall_seconds=30))


def record_drafted_proposal(
    plant: Plant, drafted: Proposal, base: str, descent: Mapping[str, Any] | None = None
) -> tuple[int, str]:
    """Record a draft under the next number that neither the ledger nor a branch uses. Returns (number, name of the branch).

    ``descent``: ``{"again_of": N}`` if the same patch was judged before as proposal N; ``{"sum_of": [N, M, …]}`` if the patch combines those
    proposals (``factory.code_loop.held_proposals.ProposalDescents``).
    """
    with plant.ledger.begin() as tx:
        taken = {
            row[0] for row in tx.execute(sa.select(proposals.c.number))
        } | repository.list_numbers_of_proposal_branches(plant.workspace.repository)
        number = max(taken, default=0) + 1
        branch = repository.make_branch_name(drafted.agent, number, drafted.title)
        said = {name: getattr(drafted, name) for name in PROPOSED.split()}
        own = {"number": number, "base_commit": base, "branch": branch, "state": DRAFTED, "created_at": time.time()}
        insert_row(tx, proposals, **said, **own)
        detail = {"branch": branch, "patch_id": drafted.patch_id, **(descent or {})}
        record_event(tx, "drafted", Subject("proposal", number), detail)
    return number, branch


def record_verdict_without_stages(
    plant: Plant,
    number: int,
    commit: str | None,
    gate: str,
    reasons: Sequence[str],
    evidence: dict[str, Any],
    **values: str,
) -> None:
    """Record the verdict on a drafted proposal for which no stage has to run. ``values``: further arguments of ``record_verdict``."""
    with plant.ledger.begin() as tx:
        verdict = record_verdict(
            tx, gate, Subject("proposal", number), reasons=reasons, evidence=evidence | {"tries": 1}, against=evidence["base"], **values
        )  # fmt: skip
    record_proposal_as_judged(plant.ledger, number, commit, values["subject_sha256"], verdict)


def record_proposal_as_judged(ledger: Ledger, number: int, commit: str | None, patch_sha256: str, verdict: int) -> None:
    """Record that a proposal is judged. ``verdict``: the id of its verdict."""
    with ledger.begin() as tx:
        values = {"state": "judged", "commit": commit, "patch_sha256": patch_sha256, "verdict": verdict}
        tx.execute(proposals.update().where(proposals.c.number == number).values(**values))


def mark_as_failed(plant: Plant, number: int, why: str) -> None:
    """Mark a proposal without a verdict as failed, remove its branch and worktree, and record the reason."""
    row, code = ProposalRow.get(plant.ledger, number), plant.workspace.repository
    if commit := repository.get_branch_commit(code, row.branch):
        _remove_folders(plant.workspace, commit)
    repository.remove_branch(code, row.branch)
    with plant.ledger.begin() as tx:
        tx.execute(proposals.update().where(proposals.c.number == number).values(state="failed"))
        record_event(tx, "proposal_failed", Subject("proposal", number), {"why": why[:2000]})


def _out_of_scope(plant: Plant, number: int, drafted: Proposal, base: str, error: ScopeError) -> None:
    """Reject a patch that is out of scope. Such a patch is never written to a branch."""
    reasons = [
        Message("code_loop.out_of_scope", "out of scope: {problem}", problem=problem) for problem in error.problems
    ]
    stages = {"scope": {"state": "failed", "reasons": reasons}}
    evidence = {"base": base, "patch_id": drafted.patch_id, "stages": stages}
    record_verdict_without_stages(
        plant, number, None, "patch", reasons, evidence, outcome=REJECT, policy_sha256="", subject_sha256=drafted.patch_id
    )  # fmt: skip
    plant.print_line(Message("code_loop.rejected", "  REJECT: {why}", why=reasons[0]))


def _message(drafted: Proposal, verdict: Verdict | None, evidence: dict[str, Any] | None) -> str:
    """Return the commit's message: hypothesis and prediction; after the judgement, also evidence and verdict."""
    lines = [drafted.title.splitlines()[0][:100] if drafted.title else "A proposal", "", drafted.hypothesis.strip(), ""]
    if drafted.predicted_gain:
        lines.append(f"Predicted: {format_gain(drafted.target, drafted.predicted_gain)}.")
    for name, stage in ((evidence or {}).get("stages") or {}).items():
        lines.append(f"{name.capitalize()}: {stage['state']}; {' '.join(map(str, read_reasons(stage)))[:300]}")
    if verdict:
        lines += [f"Verdict: {verdict.outcome}; {'; '.join(verdict.reasons)[:600]}"]
    return "\n".join([*lines, "", f"Agent: {drafted.agent}", f"Target: {drafted.target}", ""])
