"""Records and finds a person's decision about a promoted candidate.

A decision is valid only for the export that the gate judged, by its hash. A person decides with ``factory releases approve | reject``, or with the
tag ``approval`` on the candidate's version in MLflow, which ``factory.show.mlflow.approval_answers`` reads.
"""

from __future__ import annotations

from factory.core.errors import InputError
from factory.core.workspace import PATIENCE, Workspace
from factory.gates.release.policy import ReleasePolicy
from factory.ledger.decisions import (
    APPROVED,
    APPROVED_BY_POLICY,
    REJECTED,
    find_decision,
    was_export_rejected,
)
from factory.ledger.ledger import Ledger, record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import ReleaseRow, Subject, VerdictRow
from factory.ledger.writing import record_event_once
from factory.release.checks import check_verdict_newest, get_promoting_verdict
from factory.release.published_link import MODEL_NAME
from kernels.contract.message import Message

APPROVAL_TAG = "approval"  # a person sets it to 'approved' in MLflow, on a candidate's version or a proposal's run
LONGEST_REASON = 2000  # characters


class ApprovalNeededError(InputError):
    """The policy requires a person's approval before this release."""


def is_release_automatic(workspace: Workspace) -> bool:
    """Return whether the policy releases a promoted candidate without a person. Raises: ConfigError."""
    return ReleasePolicy.load(workspace.policy_path("gates/release.yaml")).approval == "automatic"


def record_approval(ledger: Ledger, verdict_id: int, by: str) -> None:
    """Record a person's approval of the export that this verdict judged.

    Raises: InputError for a verdict that does not promote, or that a person rejected.
    """
    verdict = get_promoting_verdict(ledger, verdict_id)
    _refuse_rejected(ledger, verdict)
    with ledger.begin() as tx:
        record_event(tx, APPROVED, Subject("verdict", verdict_id), {"sha256": verdict.subject_sha256, "by": by})


def record_rejection(plant: Plant, verdict_id: int, by: str, why: str) -> None:
    """Record that a person rejects the candidate of this verdict. Later approvals of this verdict do not count. Safe to repeat.

    Raises: InputError for a verdict that does not promote or is out of date, and for a candidate that is released already.
    """
    verdict = get_promoting_verdict(plant.ledger, verdict_id)
    with plant.workspace.hold_lock("release", PATIENCE):
        check_verdict_newest(plant.ledger, verdict)
        if released := ReleaseRow.find_first(
            plant.ledger, "WHERE candidate = :candidate", candidate=verdict.subject_number
        ):
            raise InputError(
                "approvals.already_released",
                "candidate {candidate} was already released as release {release}. "
                "To make an older release champion, run 'factory releases rollback N'",
                candidate=verdict.subject_number,
                release=released.number,
            )
        known = find_decision(plant.ledger, verdict)
        if known is None or known.word != REJECTED:
            detail = {"sha256": verdict.subject_sha256, "by": by, "why": why[:LONGEST_REASON]}
            record_event_once(plant.ledger, REJECTED, Subject("verdict", verdict_id), detail)


def find_approver(plant: Plant, verdict: VerdictRow) -> str:
    """Return who approved: 'policy' or a person's name. Raises: ApprovalNeededError if nobody did; InputError if a person rejected the export."""
    _refuse_rejected(plant.ledger, verdict)
    if decision := find_decision(plant.ledger, verdict):
        return decision.by
    if is_release_automatic(plant.workspace) and not was_export_rejected(plant.ledger, verdict):
        return APPROVED_BY_POLICY
    raise ApprovalNeededError(describe_waiting_candidate(verdict.subject_number))


def describe_waiting_candidate(candidate: int) -> Message:
    """Return a line for a person about a candidate that waits for approval."""
    return Message(
        "approvals.waits",
        "candidate {candidate} waits for approval. Run 'factory releases approve {candidate}' or 'factory releases reject {candidate} --why …'. "
        "Or set the tag {tag} on the candidate's version of {model} in MLflow to 'approved' or 'rejected'",
        candidate=candidate,
        tag=APPROVAL_TAG,
        model=MODEL_NAME,
    )


def is_decision_by_person_needed(plant: Plant, verdict: VerdictRow) -> bool:
    """Return whether a person must decide before the candidate of a verdict is released."""
    return verdict.outcome == "promote" and (
        not is_release_automatic(plant.workspace) or was_export_rejected(plant.ledger, verdict)
    )


def _refuse_rejected(ledger: Ledger, verdict: VerdictRow) -> None:
    decision = find_decision(ledger, verdict)
    if decision and decision.word == REJECTED:
        raise InputError(
            "approvals.rejected",
            "verdict {verdict} on {subject} cannot release the candidate, because the candidate was {decision}. A new verdict is possible only "
            "with other data, another champion or another policy",
            verdict=verdict.id,
            subject=verdict.subject,
            decision=str(decision),
        )
