"""Carries out decisions on judged proposals: approves, rejects or reverts a proposal, and moves the checked-out branch.

An approval is for one patch (by its hash) on one commit. It is refused if the proposal's branch contains another patch. If the live code has
changed, the same patch is first judged on top of the new code, as a new proposal. The decision is recorded before the branch moves, and the
proposal's new state after the move. After a kill in between, the same call finishes the decision.

A decision comes from the command line, or from MLflow (the tag ``approval`` of the proposal's run). With ``approval: automatic`` in
policies/gates/patch.yaml, the verdict alone decides.

If a patch was held only because of a time limit or a missing device, the daemon later has the patch judged again. The machine may be less busy
then, and its time limits follow from the time that approved code takes (``factory.gates.time_limits``). Another machine may have the device. A
patch that never ends is held each time. After a few times the patch waits for a person.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from agents.core.proposal import Edit, Proposal
from agents.core.yaml_edit import set_yaml_value
from factory.code_loop.revalidating import AUDIT, record_validated_conditions
from factory.code_loop.reverting import propose_revert_again
from factory.code_loop.submitting import (
    PROPOSED,
    remove_remains_and_get_live_commit,
    run_under_code_loop_lock,
    submit_proposal,
)
from factory.computing.tuned_kernels import KERNELS
from factory.core import devices
from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.gates.patch.policy import PatchPolicy
from factory.gates.time_limits import find_only_missing_stage, was_held_by_time_limit_only
from factory.gates.training_start import find_training_start
from factory.git import repository
from factory.git.scope import FileChange
from factory.git.undo import make_revert_commit
from factory.ledger.ledger import Ledger, proposals
from factory.ledger.plant import Plant
from factory.ledger.rows import UNDO_TARGET, ProposalRow, Subject, VerdictRow
from factory.ledger.writing import record_event_once
from kernels.contract.choice import read_device_section
from kernels.contract.message import Message


def merge_promoted_proposal(plant: Plant, number: int, by: str) -> str | None:
    """Merge a proposal that the gate promoted. Returns the live commit; None if the proposal had to be judged again and was not promoted.

    The caller holds the workspace's ``code-loop`` lock. Raises, before the branch moves: InputError if the proposal cannot be approved, or if
    its branch does not contain the judged patch; RepositoryError if the checkout has uncommitted changes.
    """
    row = _judged(plant.ledger, number)
    if row.outcome != "promote" or not row.commit:
        why = "; ".join(row.reasons or [])[:500]
        raise InputError(
            "code_loop.not_promoted",
            "Proposal {proposal} cannot be approved, because the gate's verdict is {outcome}: {why}",
            proposal=number,
            outcome=(row.outcome or "").upper(),
            why=why,
        )
    code = plant.workspace.repository
    live = repository.get_live_commit(code)
    if not repository.is_ancestor(code, live, row.patch_commit):
        _check_patch(plant.workspace, row)
        if live != row.base_commit:
            again = judge_patch_again(plant, row, live)
            promoted = ProposalRow.get(plant.ledger, again).outcome == "promote"
            return merge_promoted_proposal(plant, again, by) if promoted else None
        _record_decision(plant.ledger, "proposal_approved", row, by)
        repository.advance_branch(code, live, row.patch_commit)
    _become(plant.ledger, row, "approved")
    _after_merge(plant.ledger, row)
    plant.progress.line(
        Message(
            "code_loop.live",
            "  proposal {proposal} is live as commit {commit}. The next segment trains with this code, once the code "
            "is certified.",
            proposal=number,
            commit=row.patch_commit[:12],
        )
    )
    return row.patch_commit


def reject_judged_proposal(ledger: Ledger, number: int, by: str, why: str = "") -> int:
    """Reject a judged proposal, whatever its verdict, and return its number. Its branch is kept. Raises: InputError."""
    row = _judged(ledger, number)
    _record_decision(ledger, "proposal_rejected", row, by, why)
    _become(ledger, row, "rejected")
    return number


def revert_approved_proposal(plant: Plant, number: int, by: str, why: str = "") -> str:
    """Undo an approved proposal by a new commit, and return that commit. No gate judges it, because the old code was live before.

    Raises: InputError if the proposal is not approved; RepositoryError if the same lines changed since, or the files have uncommitted changes.
    """
    row = ProposalRow.get(plant.ledger, number)
    if row.state != "approved":
        raise InputError(
            "code_loop.not_approved",
            "Only an approved proposal can be reverted. Proposal {proposal} is {state}.",
            proposal=number,
            state=_state(row),
        )
    code = plant.workspace.repository
    live = repository.get_live_commit(code)
    reason = f"\n\n{why.strip()[:2000]}" if why.strip() else ""
    message = Message(
        "code_loop.revert_commit",
        "Revert proposal {proposal}: {title}{reason}\n\nThis reverts {commit}.\n",
        proposal=number,
        title=row.title[:80],
        reason=reason,
        commit=row.patch_commit,
    )
    undone = make_revert_commit(code, live, row.base_commit, row.patch_commit, message)
    _record_decision(plant.ledger, "proposal_reverted", row, by, why)
    repository.advance_branch(code, live, undone)
    _become(plant.ledger, row, "reverted")
    return undone


def settle_waiting_proposals(plant: Plant, find_decision: Callable[[int], str | None]) -> int:
    """Carry out the decisions of the policy or of a person about waiting proposals. Returns how many decisions were carried out.

    ``find_decision``: returns a person's decision about a proposal, 'approved' or 'rejected'; any other value means no decision. A proposal that
    cannot be merged is reported once, and does not stop the others.
    """
    waiting = _waiting(plant.ledger)
    automatic = (
        bool(waiting) and PatchPolicy.load(plant.workspace.policy_path("gates/patch.yaml")).approval == "automatic"
    )
    settled = 0
    for number in waiting:
        word, by = ("approved", "policy") if automatic else (find_decision(number), "mlflow")
        if word == "approved":
            act: Callable[[], object] = partial(merge_promoted_proposal, plant, number, by)
        elif word == "rejected":
            act = partial(reject_judged_proposal, plant.ledger, number, by)
        else:
            continue
        words = Message(
            "code_loop.cannot_decide",
            "proposal {proposal} cannot be {word} (requested by {by})",
            proposal=number,
            word=word,
            by=by,
        )
        settled += (
            run_under_code_loop_lock(
                plant, act, "decision_refused", Subject("proposal", number), words, word=word, by=by
            )
            is not None
        )
    return settled


def _waiting(ledger: Ledger) -> list[int]:
    """Return the numbers of promoted proposals that wait for a decision."""
    which = "WHERE state = 'judged' AND outcome = 'promote' ORDER BY number"
    return [row.number for row in ProposalRow.select(ledger, which)]


def _judged(ledger: Ledger, number: int) -> ProposalRow:
    row = ProposalRow.get(ledger, number)
    if row.state != "judged":
        raise InputError(
            "code_loop.nothing_to_decide",
            "Only a judged proposal can be approved or rejected. Proposal {proposal} is {state}.",
            proposal=number,
            state=_state(row),
        )
    return row


def _state(row: ProposalRow) -> str:
    if row.state == "failed":
        return Message("code_loop.failed", "marked as failed and was never judged")
    return {"drafted": "being judged", "written": "not judged yet"}.get(row.state) or str(row.state)


def _check_patch(workspace: Workspace, row: ProposalRow) -> None:
    """Check that the proposal's branch contains the judged patch. Raises: InputError."""
    code = workspace.repository
    commit = repository.get_branch_commit(code, row.branch)
    if commit is None:
        raise InputError(
            "code_loop.no_branch",
            "The branch {branch} no longer exists, so there is nothing to merge.",
            branch=row.branch,
        )
    judged = (row.patch_commit, row.judged_sha256)
    if (commit, repository.hash_patch(code, row.base_commit, commit)) != judged or row.patch_sha256 != judged[1]:
        raise InputError(
            "code_loop.other_patch",
            "The branch {branch} does not contain the judged patch: the judged commit is {judged}, but the branch is "
            "at {found}. Only the judged patch can be approved. Propose the new patch again.",
            branch=row.branch,
            judged=row.patch_commit[:12],
            found=commit[:12],
        )


def _after_merge(ledger: Ledger, row: ProposalRow) -> None:
    """If a merged patch undoes a proposal, mark that proposal as reverted. Otherwise record the conditions under which the patch was judged."""
    kind, _, number = row.target.partition(":")
    undone = (
        ProposalRow.find_first(ledger, "WHERE number = :number", number=int(number)) if kind == UNDO_TARGET else None
    )
    if undone is not None and undone.state == "approved":
        _become(ledger, undone, "reverted")
    elif start := find_training_start(ledger):
        record_validated_conditions(ledger, row.number, start)


def judge_patch_again(plant: Plant, row: ProposalRow, live: str) -> int:
    """Have the same patch judged on top of newer code, as a new proposal. Returns the new proposal's number. Raises: InputError."""
    if row.gate == AUDIT:  # measured on a segment; the live code does not matter
        number = propose_revert_again(plant, row)
        _become(plant.ledger, row, "superseded")
        return number
    code = plant.workspace.repository
    changes = repository.read_file_changes(code, row.base_commit, row.patch_commit)
    moved = {change.path for change in repository.read_file_changes(code, row.base_commit, live)}
    if both := sorted(moved & {change.path for change in changes} - {KERNELS}):
        raise InputError(
            "code_loop.files_changed",
            "{files} changed since proposal {proposal} was judged. Propose the change again.",
            files=both,
            proposal=row.number,
        )
    plant.progress.line(
        Message(
            "code_loop.code_changed",
            "  the code changed to {commit} since proposal {proposal} was judged; the gate judges the proposal again",
            commit=live[:12],
            proposal=row.number,
        )
    )
    edits = tuple(Edit(change.path, _moved_on(code, row, change, live)) for change in changes)
    number = submit_proposal(plant, Proposal(**row.select_fields(PROPOSED), edits=edits), live)
    _become(plant.ledger, row, "superseded")
    return number


def judge_held_patches_again(plant: Plant) -> list[int]:
    """Have the held patches that are due judged again, as new proposals. Returns the new proposals' numbers."""
    made = []
    for row in find_proposals_to_judge_again(
        plant.ledger, PatchPolicy.load(plant.workspace.policy_path("gates/patch.yaml"))
    ):
        words = Message("code_loop.not_again", "proposal {proposal} cannot be judged again now", proposal=row.number)
        made.append(
            run_under_code_loop_lock(
                plant,
                partial(_judge_held_again, plant, row),
                "judging_again_waits",
                Subject("proposal", row.number),
                words,
            )
        )
    return [number for number in made if number is not None]


def _judge_held_again(plant: Plant, row: ProposalRow) -> int:
    live = remove_remains_and_get_live_commit(plant)
    held_by = (
        Message("code_loop.missing_device", "the machine that judged it lacked a device that this machine has")
        if was_held_for_missing_device(row.read_evidence(plant.ledger))
        else Message("code_loop.time_limit", "a time limit was reached")
    )
    plant.print_line(
        Message(
            "code_loop.judged_again",
            "  proposal {proposal} was held only because {held_by}; the gate judges the proposal again",
            held_by=held_by,
            proposal=row.number,
        )
    )
    return judge_patch_again(plant, row, live)


def find_proposals_to_judge_again(ledger: Ledger, policy: PatchPolicy) -> list[ProposalRow]:
    """Return the held proposals that the gate shall judge again now, oldest first."""
    held = [
        (row, evidence)
        for row in ProposalRow.select(ledger, "WHERE outcome = 'hold' ORDER BY number")
        if was_held_by_time_limit_only(evidence := row.read_evidence(ledger)) or was_held_for_missing_device(evidence)
    ]
    times: dict[str, int] = {}
    for _, evidence in held:
        times[evidence["patch_id"]] = times.get(evidence["patch_id"], 0) + 1
    since = time.time() - policy.judge_again_after_seconds
    return [
        row
        for row, evidence in held
        if row.state == "judged"
        and times[evidence["patch_id"]] <= policy.judge_again
        and row.verdict is not None
        and (was_held_for_missing_device(evidence) or VerdictRow.get(ledger, row.verdict).created_at <= since)
    ]


def was_held_for_missing_device(evidence: Mapping[str, Any]) -> bool:
    """Return whether a patch was held only because its judge lacked a device that this machine has."""
    return find_only_missing_stage(evidence).get("waits_for") == devices.get_device_kind()


def _moved_on(code: Path, row: ProposalRow, change: FileChange, live: str) -> str:
    """Return the text of a file that the patch changes, for the live code. In kernels.yaml, merged choices of other ops are kept.

    Raises: InputError if the patch and a merged patch chose for the same op, or if the patch changes more in kernels.yaml than choices.
    """
    text = (change.content or b"").decode()
    if change.path != KERNELS:
        return text
    base, now = (repository.read_file_text(code, commit, KERNELS) for commit in (row.base_commit, live))
    replayed = base
    for device in yaml.safe_load(text):
        old, new, held = (read_device_section(version, device) for version in (base, text, now))
        for op in (op for op in new if old.get(op) != new[op]):
            if held.get(op) != old.get(op):
                raise InputError(
                    "code_loop.choice_changed",
                    "{file}: the kernel chosen for {op} changed since proposal {proposal} was judged. Propose the "
                    "change again.",
                    file=KERNELS,
                    op=op,
                    proposal=row.number,
                )
            replayed, now = (set_yaml_value(version, (device, op), new[op]) for version in (replayed, now))
    if yaml.safe_load(replayed) != yaml.safe_load(text):
        raise InputError(
            "code_loop.more_than_choices",
            "{file} changed since proposal {proposal} was judged, and the patch changes more in this file than the "
            "choice of kernels. Propose the change again.",
            file=KERNELS,
            proposal=row.number,
        )
    return now


def _record_decision(ledger: Ledger, kind: str, row: ProposalRow, by: str, why: str = "") -> None:
    """Record a decision once, with the hash of the patch."""
    detail = {"sha256": row.patch_sha256, "base": row.base_commit, "by": by}
    record_event_once(ledger, kind, Subject("proposal", row.number), detail | ({"why": why[:2000]} if why else {}))


def _become(ledger: Ledger, row: ProposalRow, state: str) -> None:
    with ledger.begin() as tx:
        tx.execute(proposals.update().where(proposals.c.number == row.number).values(state=state))
