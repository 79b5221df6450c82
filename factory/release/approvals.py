"""A person's decision about a promoted candidate, and how it is asked for.

A decision binds to the hash of what was judged. It is given on the command line (``factory releases approve | reject``), or as the tag
``approval`` of the candidate's version in MLflow, which ``factory.show.mlflow.answering`` hears.
"""

from __future__ import annotations

from factory.core.errors import InputError
from factory.core.workspace import PATIENCE, Workspace
from factory.gates.release.policy import ReleasePolicy
from factory.ledger.decisions import (
    APPROVED,
    BY_POLICY,
    REJECTED,
    decision_on,
    rejected_before,
)
from factory.ledger.ledger import Ledger, record
from factory.ledger.plant import Plant
from factory.ledger.rows import ReleaseRow, Subject, VerdictRow
from factory.ledger.writing import record_once
from factory.release.checks import check_newest, promotion
from factory.release.serving import MODEL_NAME

APPROVAL_TAG = "approval"  # what a person sets to 'approved' in MLflow, on a candidate's version or a proposal's run
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
    with plant.workspace.lock("release", PATIENCE):
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
        f"or the tag {APPROVAL_TAG}=approved or rejected on its version of {MODEL_NAME} in MLflow"
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
