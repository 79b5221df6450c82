"""A person's decision about a promoted candidate, and how it is asked for.

A decision binds to the hash of what was judged. It is given on the command line (``factory releases approve | reject``), or as the tag
``approval`` of the candidate's version in MLflow, which ``factory.release.answering`` hears.
"""

from __future__ import annotations

from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.gates.release.policy import ReleasePolicy
from factory.ledger.decisions import (
    APPROVED,
    BY_POLICY,
    OVERRIDDEN,
    REJECTED,
    decision_on,
    override_on,
    rejected_before,
)
from factory.ledger.ledger import Ledger, record
from factory.ledger.plant import Plant
from factory.ledger.rows import ReleaseRow, Subject, VerdictRow
from factory.ledger.writing import record_once
from factory.release.checks import check_newest, promotion
from factory.release.registry import MODEL, find_version, mark_whole, newest_verdict, register
from factory.tracking.mlflow_store import mlflow_errors, waiting_lock
from factory.tracking.tracking import APPROVAL_TAG, Tracking, short

ANSWER_TAG, REASON_TAG = "approval_answer", "approval_reason"  # what became of a person's word; the person's reason
PENDING = "pending"
LONGEST_REASON = 2000


class ApprovalNeeded(InputError):
    """The policy requires a person's approval before this release."""


def automatic(workspace: Workspace) -> bool:
    """Is a verdict enough to release? Raises: ConfigError."""
    return ReleasePolicy.load(workspace.policy("gates/release.yaml")).approval == "automatic"


def approve(ledger: Ledger, verdict_id: int, by: str) -> None:
    """Record a person's approval of exactly what this verdict judged.

    Raises: InputError for a verdict that is no promotion, or was rejected.
    """
    verdict = promotion(ledger, verdict_id)
    _refuse_rejected(ledger, verdict)
    with ledger.begin() as tx:
        record(tx, APPROVED, Subject("verdict", verdict_id), {"sha256": verdict.subject_sha256, "by": by})


def reject(plant: Plant, verdict_id: int, by: str, why: str) -> None:
    """Record that a person does not want what this verdict promotes released: no approval of this verdict counts any more.

    Safe to repeat. Raises: InputError for a verdict that is no promotion or is out of date, and for what is released already.
    """
    verdict = promotion(plant.ledger, verdict_id)
    with waiting_lock(plant.workspace, "release"):
        check_newest(plant.ledger, verdict)
        if released := ReleaseRow.first(plant.ledger, "WHERE candidate = :candidate", candidate=verdict.number):
            raise InputError(
                f"candidate {verdict.number} is release {released.number} already: 'factory releases rollback N' makes an older one champion"
            )
        known = decision_on(plant.ledger, verdict)
        if known is None or known.word != REJECTED:
            detail = {"sha256": verdict.subject_sha256, "by": by, "why": why[:LONGEST_REASON]}
            record_once(plant.ledger, REJECTED, Subject("verdict", verdict_id), detail)


def approver(plant: Plant, verdict: VerdictRow) -> str:
    """Who approved: ``policy``, or the person. Raises: ApprovalNeeded; InputError when it was rejected."""
    _refuse_rejected(plant.ledger, verdict)
    if decision := decision_on(plant.ledger, verdict):
        return decision.by
    if automatic(plant.workspace) and not rejected_before(plant.ledger, verdict):
        return BY_POLICY
    raise ApprovalNeeded(how_to_answer(verdict.number))


def how_to_answer(candidate: int) -> str:
    """A line for a person about a candidate that waits."""
    return (
        f"candidate {candidate} waits for approval: 'factory releases approve {candidate}', 'factory releases reject {candidate} --why …', "
        f"or the tag {APPROVAL_TAG}=approved or rejected on its version of {MODEL} in MLflow"
    )


def waits(plant: Plant, verdict: VerdictRow) -> bool:
    """Must a person decide before what a verdict promotes is released?"""
    return verdict.outcome == "promote" and (not automatic(plant.workspace) or rejected_before(plant.ledger, verdict))


def _refuse_rejected(ledger: Ledger, verdict: VerdictRow) -> None:
    decision = decision_on(ledger, verdict)
    if decision and decision.word == REJECTED:
        raise InputError(
            f"verdict {verdict.id} on {verdict.subject} was {decision}; it is not released by that verdict: a new one needs other data, "
            "another champion or another policy"
        )


# -- in MLflow ----------------------------------------------------------------------------------------------------------
def register_candidate(plant: Plant, candidate_id: int) -> str:
    """Show a judged candidate in MLflow, whatever its verdict: a version with tags, alias ``candidate``, its report; ask for approval.

    Returns the version. A word that a person gave about an older verdict is taken away.

    Raises: InputError when it was not judged or its export changed; TrackingError.
    """
    tracking = Tracking.open(plant)
    verdict = newest_verdict(plant.ledger, candidate_id)
    with mlflow_errors("finding a version"):
        before = find_version(tracking.client, candidate_id, verdict.subject_sha256)
    version = register(plant, tracking, candidate_id)
    _ask(plant, tracking, verdict, version, dict(before.tags) if before else {})
    mark_whole(tracking.client, version)
    return version


def _ask(plant: Plant, tracking: Tracking, verdict: VerdictRow, version: str, given: dict[str, str]) -> None:
    """Show on a version that it waits for a person, or what became of that; ``given``: its tags before."""
    known = decided(plant.ledger, verdict)
    if known is None and (waits(plant, verdict) or APPROVAL_TAG in given):
        if given.get(APPROVAL_TAG, OVERRIDDEN) != OVERRIDDEN and given.get("verdict_id") == str(verdict.id):
            return  # asked already, or a word that is to be answered
        asked = waits(plant, verdict)
        known = (
            PENDING if asked else "",
            how_to_answer(verdict.number) if asked else f"verdict {verdict.id}: nothing to approve",
        )
    if known is not None:
        set_tags(tracking, version, given, *known)


def decided(ledger: Ledger, verdict: VerdictRow) -> tuple[str, str] | None:
    """(tag ``approval``, tag ``approval_answer``) of a candidate about which a person decided; None: nobody did."""
    release = ReleaseRow.first(ledger, "WHERE candidate = :candidate", candidate=verdict.number)
    if release:
        by = release.approved_by or BY_POLICY
        if over := override_on(ledger, VerdictRow.get(ledger, release.verdict)):
            return OVERRIDDEN, f"released as {release.number}, though it was held, by {over['by']}: {over['why']}"
        return None if by == BY_POLICY else (APPROVED, f"released as {release.number}, approved by {by}")
    decision = decision_on(ledger, verdict)
    return (REJECTED, str(decision)) if decision and decision.word == REJECTED else None


def set_tags(tracking: Tracking, version: str, before: dict[str, str], word: str, answer: str) -> None:
    """Show on a version what became of a person's word. Raises: TrackingError."""
    with mlflow_errors("answering about an approval"):
        for key, value in ((ANSWER_TAG, short([answer])), (APPROVAL_TAG, word)):
            if before.get(key) != value:
                tracking.client.set_model_version_tag(MODEL, version, key, value)
