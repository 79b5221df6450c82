"""Carries out decisions on judged proposals: approves, rejects or reverts a proposal, and moves the checked-out branch.

An approval is for one patch (by its hash) on one commit. It is refused if the proposal's branch contains another patch. If the live code has
changed, the same patch is first judged on top of the new code, as a new proposal. The decision is recorded before the branch moves, and the
proposal's new state after the move. After a kill in between, the same call finishes the decision.

A decision comes from the command line, or from MLflow (the tag ``approval`` of the proposal's run). With ``approval: automatic`` in
policies/gates/patch.yaml, the verdict alone decides.

The merge of a sum (``factory.code_loop.combining``) closes its parts: they are merged with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from factory.code_loop.held_proposals import MERGED_WITH, ProposalDescents
from factory.code_loop.judging_again import check_branch_contains_judged_patch, judge_patch_again
from factory.code_loop.revalidating import record_validated_conditions
from factory.code_loop.submitting import run_under_code_loop_lock
from factory.core.errors import InputError
from factory.gates.patch.policy import PatchPolicy
from factory.gates.training_start import find_training_start
from factory.git import repository
from factory.git.undo import make_revert_commit
from factory.ledger.ledger import Ledger, proposals, record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import UNDO_TARGET, ProposalRow, Subject
from factory.ledger.writing import record_event_once
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
        check_branch_contains_judged_patch(code, row)
        _check_no_part_was_rejected(plant.ledger, row)
        if live != row.base_commit:
            again = judge_patch_again(plant, row, live)
            promoted = ProposalRow.get(plant.ledger, again).outcome == "promote"
            return merge_promoted_proposal(plant, again, by) if promoted else None
        _record_decision(plant.ledger, "proposal_approved", row, by)
        repository.advance_branch(code, live, row.patch_commit)
    _become(plant.ledger, row, "approved", _list_open_parts(plant.ledger, row))
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
    if row.state == MERGED_WITH:
        return Message("code_loop.merged_with_sum", "merged as a part of a sum")
    return {"drafted": "being judged", "written": "not judged yet"}.get(row.state) or str(row.state)


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


def _record_decision(ledger: Ledger, kind: str, row: ProposalRow, by: str, why: str = "") -> None:
    """Record a decision once, with the hash of the patch."""
    detail = {"sha256": row.patch_sha256, "base": row.base_commit, "by": by}
    record_event_once(ledger, kind, Subject("proposal", row.number), detail | ({"why": why[:2000]} if why else {}))


def _list_open_parts(ledger: Ledger, row: ProposalRow) -> list[int]:
    """Return the proposals that a sum merges and that no one decided yet; [] for a proposal that is no sum."""
    descents = ProposalDescents(ledger)
    family = [number for part in descents.list_parts(row.number) for number in descents.list_family(part)]
    judged = {one.number for one in ProposalRow.select(ledger, "WHERE state = 'judged'")} if family else set()
    return [number for number in family if number in judged]


def _check_no_part_was_rejected(ledger: Ledger, row: ProposalRow) -> None:
    """Raises: InputError for a sum of which a person rejected a part since."""
    descents = ProposalDescents(ledger)
    for part in descents.list_parts(row.number):
        for number in descents.list_family(part):
            one = ProposalRow.find_first(ledger, "WHERE number = :number", number=number)
            if one is not None and one.state == "rejected":
                raise InputError(
                    "code_loop.part_rejected",
                    "Proposal {proposal} contains proposal {part}, which was rejected. Reject proposal {proposal} too, or combine the other parts: "
                    "'factory proposals combine'.",
                    proposal=row.number,
                    part=number,
                )


def _become(ledger: Ledger, row: ProposalRow, state: str, merged_parts: Sequence[int] = ()) -> None:
    """Record a proposal's new state. ``merged_parts``: the proposals that were merged as its parts."""
    with ledger.begin() as tx:
        tx.execute(proposals.update().where(proposals.c.number == row.number).values(state=state))
        for part in merged_parts:
            tx.execute(proposals.update().where(proposals.c.number == part).values(state=MERGED_WITH))
            record_event(tx, "proposal_merged_with", Subject("proposal", part), {"sum": row.number})
